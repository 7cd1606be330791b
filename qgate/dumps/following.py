"""A dump that grows: what has arrived since one last looked."""

from __future__ import annotations

from pathlib import Path

from qgate.dumps.index import EVENT, Index
from qgate.dumps.known_files import KnownDump, Unreadable, read_known
from qgate.dumps.layout import About, ranks_in, read_about
from qgate.dumps.records import Record


class Follower:
    """Looks at a folder, which may not be there yet, and reads only what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about: About | None = None
        self._read_to: dict[int, int] = {}
        self._closed: dict[int, bool] = {}
        self._tried: dict[Path, tuple[int, int]] = {}
        self._unreadable: dict[Path, str] = {}

    def poll(self) -> list[Record]:
        """The records since the last time, in the order of their ranks."""
        if not self.folder.is_dir():
            return []
        self._about = self._about or read_about(self.folder)
        if self._about is not None:
            return self._poll_dump()
        return self._poll_files() if KnownDump.is_one(self.folder) else []

    @property
    def ended(self) -> bool:
        """Whether all ranks have said that nothing will follow."""
        if self._about is None or len(self._closed) < self._about.world_size:
            return False
        return all(self._closed.values())

    @property
    def unreadable(self) -> list[str]:
        """Files that could not be read so far."""
        return [f"{path.name}: {why}" for path, why in self._unreadable.items()]

    def _poll_dump(self) -> list[Record]:
        assert self._about is not None
        found: list[Record] = []
        for rank, home in ranks_in(self.folder).items():
            lines = Index(home).read(self._read_to.get(rank, 0))
            if not lines.is_of(self._about.run):
                continue
            self._read_to[rank] = lines.end
            found += lines.records
            if lines.events:
                self._closed[rank] = lines.events[-1].get(EVENT) == "close"
        return found

    def _poll_files(self) -> list[Record]:
        """Files of the known collector are torn while they are written: they are tried again."""
        found = []
        for path in sorted(self.folder.glob("*.pt")):
            stat = path.stat()
            now = (stat.st_size, stat.st_mtime_ns)
            if self._tried.get(path) == now:
                continue
            self._tried[path] = now
            try:
                found.append(read_known(path))
                self._unreadable.pop(path, None)
            except (Unreadable, OSError) as error:
                self._unreadable[path] = str(error)
        return [each.record for each in sorted(found, key=lambda file: file.place)]
