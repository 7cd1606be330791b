"""Let Python itself import qgate: pytest would parse and rewrite hundreds of files in every run.

pytest rewrites the asserts of all that an installed plugin brings. Those of qgate are no tests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PACKAGE = "qgate."


class PlainFinder(MetaPathFinder):
    """Finder of qgate's own modules that comes before the one of pytest."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of qgate as Python does; leave all others to the other finders."""
        if path is None or not fullname.startswith(_PACKAGE):
            return None
        return PathFinder.find_spec(fullname, path, target)


def install() -> None:
    """Put the finder before all others, once."""
    if not any(isinstance(finder, PlainFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PlainFinder())


install()
