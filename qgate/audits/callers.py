"""The line of a test that a comparison belongs to, found on the stack."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib")}
)
_INSTALLED = ("site-packages", "dist-packages")
_COMPARING = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "numpy"))
_TRACING = f"{os.sep}torch{os.sep}jit{os.sep}_trace"
_OWN = (f"{Path(__file__).parent}{os.sep}", f"{Path(__file__).parent.with_name('audit.py')}")


@dataclass
class ProjectFiles:
    """Files of the project under test, by the folder that pytest calls its root."""

    root: str
    _known: dict[str, bool] = field(default_factory=dict)

    def contains(self, file: str) -> bool:
        """Tell if a file is the project's own, not an installed one."""
        if file not in self._known:
            inside = file.startswith(f"{self.root}{os.sep}") and not file.startswith(_LIBRARIES)
            self._known[file] = inside and not any(part in _INSTALLED for part in Path(file).parts)
        return self._known[file]

    def shown(self, file: str) -> str:
        """Return the path below the root, with slashes."""
        relative = os.path.relpath(file, self.root) if file.startswith(self.root) else file
        return Path(relative).as_posix()

    def holds_tests(self, file: str, test_files: frozenset[str]) -> bool:
        """Tell if a file is one of tests or of their helpers, by its name."""
        return file in test_files or "test" in self.shown(file).lower()


@dataclass(frozen=True)
class Caller:
    """The spot at which a comparison was called.

    frame     the innermost frame outside the libraries that compare
    library   the function of such a library that this frame called, or the empty text
    file      the test's file and the line in it
    line
    through   file and line of the project's helper that compared, if it is not that line
    """

    frame: FrameType
    library: str
    file: str
    line: int
    through: str


def caller_of(files: ProjectFiles, test_files: frozenset[str]) -> Caller | None:
    """Find the innermost line of the test's file, or else of the project."""
    frame: FrameType | None = sys._getframe(1)
    direct: FrameType | None = None
    helper: FrameType | None = None
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if direct is None and not file.startswith(_OWN):
            if _TRACING in file:
                return None  # torch.jit.trace compares its runs, and warns where they differ
            if _compares(file):
                library = frame.f_code.co_name
            else:
                direct = frame
        if direct is not None:
            if file in test_files:
                through = ""
                if helper is not None:
                    through = f"{files.shown(helper.f_code.co_filename)}:{helper.f_lineno}"
                return Caller(direct, library, files.shown(file), frame.f_lineno, through)
            if helper is None and files.contains(file):
                helper = frame
        frame = frame.f_back
    if direct is None or helper is None:
        return None
    file = helper.f_code.co_filename
    return Caller(direct, library, files.shown(file), helper.f_lineno, "")


def _compares(file: str) -> bool:
    return any(part in file for part in _COMPARING) and any(name in file for name in _INSTALLED)
