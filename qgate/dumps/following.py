"""Follow a dump that grows: read the records that arrived since the last poll."""

from __future__ import annotations

from qgate.dumps.index import EVENT, Index
from qgate.dumps.layout import DumpManifest, ranks_in, read_manifest
from qgate.dumps.record import Record
from qgate.dumps.tensor_saver_files import TensorSaverDump, UnreadableFileError, read_saved
from qgate.storage import locations
from qgate.storage.access import folder_of
from qgate.storage.folders import Folder, Stamp, files_in


class Follower:
    """Reader of new records in a folder, which may not exist yet."""

    def __init__(self, folder: locations.Location | str) -> None:
        self._files = folder_of(folder)
        self.folder: locations.Location = self._files.location
        self.pause_s = self._files.pause_s
        self._manifest: DumpManifest | None = None
        self._read_to: dict[int, dict[str, int]] = {}
        self._closed: dict[int, bool] = {}
        self._tried: dict[str, Stamp | None] = {}
        self._unreadable: dict[str, str] = {}

    def poll(self) -> list[Record]:
        """Return the records since the last poll, in the order of their ranks."""
        files = self._files.fresh()
        if files.kind() != "folder":
            return []
        self._manifest = self._manifest or read_manifest(files)
        if self._manifest is not None:
            return self._poll_dump(files, self._manifest.run)
        return self._poll_files(files) if TensorSaverDump.is_one(files) else []

    @property
    def ended(self) -> bool:
        """Tell whether all ranks are closed, so that nothing will follow."""
        if self._manifest is None or len(self._closed) < self._manifest.world_size:
            return False
        return all(self._closed.values())

    @property
    def unreadable(self) -> list[str]:
        """List the files that could not be read so far, with the reasons."""
        return [f"{name}: {why}" for name, why in self._unreadable.items()]

    def _poll_dump(self, files: Folder, run: str) -> list[Record]:
        records: list[Record] = []
        for rank, name in ranks_in(files).items():
            lines = Index(files.inside(name)).read(self._read_to.get(rank))
            if not lines.is_of(run):
                continue
            self._read_to[rank] = lines.ends
            records += lines.records
            if lines.events:
                self._closed[rank] = lines.events[-1].get(EVENT) == "close"
        return records

    def _poll_files(self, files: Folder) -> list[Record]:
        """Read .pt files; those that are torn, as while being written, are tried again."""
        saved = []
        for name in files_in(files):
            now = files.stamp(name)
            if not name.endswith(".pt") or (name in self._tried and self._tried[name] == now):
                continue
            self._tried[name] = now
            try:
                saved += read_saved(files, name)
                self._unreadable.pop(name, None)
            except (UnreadableFileError, OSError) as error:
                self._unreadable[name] = str(error)
        return [tensor.record for tensor in sorted(saved, key=lambda tensor: tensor.moment)]
