"""A dump that grows: what has arrived since one last looked."""

from __future__ import annotations

from qgate.dumps.index import EVENT, Index
from qgate.dumps.known_files import KnownDump, Unreadable, read_known
from qgate.dumps.layout import About, ranks_in, read_about
from qgate.dumps.records import Record
from qgate.storage import places
from qgate.storage.folders import Folder, Stamp, files_in
from qgate.storage.opening import folder_of


class Follower:
    """Looks at a folder, which may not be there yet, and reads only what is new."""

    def __init__(self, folder: places.Place | str) -> None:
        self._files = folder_of(folder)
        self.folder: places.Place = self._files.place
        self.pause_s = self._files.pause_s
        self._about: About | None = None
        self._read_to: dict[int, dict[str, int]] = {}
        self._closed: dict[int, bool] = {}
        self._tried: dict[str, Stamp | None] = {}
        self._unreadable: dict[str, str] = {}

    def poll(self) -> list[Record]:
        """The records since the last time, in the order of their ranks."""
        files = self._files.fresh()
        if files.kind() != "folder":
            return []
        self._about = self._about or read_about(files)
        if self._about is not None:
            return self._poll_dump(files)
        return self._poll_files(files) if KnownDump.is_one(files) else []

    @property
    def ended(self) -> bool:
        """Whether all ranks have said that nothing will follow."""
        if self._about is None or len(self._closed) < self._about.world_size:
            return False
        return all(self._closed.values())

    @property
    def unreadable(self) -> list[str]:
        """Files that could not be read so far."""
        return [f"{name}: {why}" for name, why in self._unreadable.items()]

    def _poll_dump(self, files: Folder) -> list[Record]:
        assert self._about is not None
        found: list[Record] = []
        for rank, name in ranks_in(files).items():
            lines = Index(files.inside(name)).read(self._read_to.get(rank))
            if not lines.is_of(self._about.run):
                continue
            self._read_to[rank] = lines.ends
            found += lines.records
            if lines.events:
                self._closed[rank] = lines.events[-1].get(EVENT) == "close"
        return found

    def _poll_files(self, files: Folder) -> list[Record]:
        """Files of the known collector are torn while they are written: they are tried again."""
        found = []
        for name in files_in(files):
            now = files.stamp(name)
            if not name.endswith(".pt") or (name in self._tried and self._tried[name] == now):
                continue
            self._tried[name] = now
            try:
                found.append(read_known(files, name))
                self._unreadable.pop(name, None)
            except (Unreadable, OSError) as error:
                self._unreadable[name] = str(error)
        return [each.record for each in sorted(found, key=lambda file: file.place)]
