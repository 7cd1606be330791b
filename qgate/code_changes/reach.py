"""Names that code can reach: those it has, and those of the functions that these may be.

A function is taken to be reached if its name occurs anywhere in code that is, in whatever file:
more than is run, and never less, as long as nothing finds code by another way than its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from qgate.code_changes.sources import SourceFile
from qgate.errors import QgateError


class ProjectCode:
    """The files of a project that a run imports, or may import later.

    `folders` are those of the project that Python imports from. What keeps the code from being
    traced is an error.
    """

    def __init__(self, loaded: Iterable[Path], folders: Iterable[Path]) -> None:
        self._folders = [*folders]
        self.files: dict[Path, SourceFile] = {}
        pending = [*loaded]
        while pending:
            path = pending.pop()
            if path in self.files:
                continue
            file = self.files[path] = SourceFile.parse(_read(path), str(path))
            if reason := file.untraceable():
                raise QgateError(f"{path.name} may run code that it does not name: {reason}")
            pending += self._imported(path, file)
        # Reads all units, and with them the modes.
        self.at_import = frozenset(
            name for file in self.files.values() for name in file.import_names
        )
        self._units: dict[str, set[str]] = {}
        for file in self.files.values():
            for name, unit in file.units.items():
                self._units.setdefault(name, set()).update(unit.names)
            for name, originals in file.aliases.items():
                self._units.setdefault(name, set()).update(originals)

    @property
    def modes(self) -> Mapping[str, set[str]]:
        """Return the names that each mode of a model refers to."""
        modes: dict[str, set[str]] = {}
        for file in self.files.values():
            for name, names in file.modes.items():
                modes.setdefault(name, set()).update(names)
        return modes

    def reached(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names that can be reached from some, and from what runs at import."""
        reached: set[str] = set()
        pending = {*names, *self.at_import}
        while pending:
            reached |= pending
            pending = {
                name for one in pending for name in self._units.get(one, ()) if name not in reached
            }
        return frozenset(reached)

    def _imported(self, path: Path, file: SourceFile) -> Iterable[Path]:
        for name, level in file.imports():
            folders = [path.parents[level - 1]] if level else self._folders
            for folder in folders:
                target = folder.joinpath(*name.split(".")) if name else folder
                for candidate in (target.with_suffix(".py"), target / "__init__.py"):
                    if candidate.is_file():
                        yield candidate


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise QgateError(f"{path.name} cannot be read: {error}") from None
