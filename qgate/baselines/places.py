"""Where the files of a baseline lie: a folder of this machine, or objects of a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.baselines import _journal
from qgate.baselines._files import Files, Stat, is_wanted
from qgate.baselines._journal import Contents
from qgate.baselines._locking import NAME as LOCK
from qgate.baselines._locking import locked
from qgate.baselines._object_store import check_store, folder_names
from qgate.baselines._objects import Objects
from qgate.errors import QgateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qgate.storage.places import Place


def files_of(folder: Place, model: str) -> Files:
    """What reads and changes the baseline in a folder; nothing is asked of a store yet."""
    if isinstance(folder, Path):
        return LocalFiles(folder)
    return Objects(folder, model)


class LocalFiles:
    """Files of this machine."""

    remedy = "make room or the folder writable"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, wanted: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
        return _journal.read_files(self.folder, lambda name: is_wanted(name, wanted))

    def stats(self) -> Mapping[str, Stat]:
        names = self.read(())[1]
        found = {name: (self.folder / name).stat() for name in names}
        return {
            name: Stat(stat.st_size, datetime.fromtimestamp(stat.st_mtime))
            for name, stat in found.items()
        }

    def leftovers(self) -> list[str]:
        return _journal.leftovers(self.folder)

    @contextmanager
    def changing(self, timeout_s: float) -> Iterator[None]:
        _journal.make_folder(self.folder)
        with locked(self.folder, timeout_s):
            _journal.recover(self.folder)
            yield

    def replace(self, contents: Contents) -> None:
        _journal.replace_files(self.folder, contents)

    def is_promised(self) -> bool:
        return (self.folder / _journal.NAME).exists()

    def is_unfinished(self) -> bool:
        held = any((self.folder / name).exists() for name in (_journal.NAME, LOCK))
        return held or bool(self.leftovers())

    def unlock(self) -> str:
        raise QgateError(
            f"{str(self.folder)!r} needs no unlocking: the system lets go of a lock when its "
            "process ends."
        )


def folders(root: Place) -> list[Place]:
    """The folders below a root, whatever is in them; none where there is no root."""
    if isinstance(root, Path):
        return [each for each in sorted(root.iterdir()) if each.is_dir()] if root.is_dir() else []

    return [root / name for name in folder_names(root)]


def check_root(root: Place, writing: bool) -> None:
    """Reach a store before anything is computed; for an update, see that one could be written."""
    if isinstance(root, Path):
        return

    check_store(root, writing)
