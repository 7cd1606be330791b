"""Load modules when they are first used, and large data without a look at all of it each time.

What is beyond torch, numpy, pytest and msgspec is in extras: where it is missing, an error of one
line has the command that installs it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from qgate.errors import QgateError

EXTRAS = {
    "safetensors": "gate",
    "tabulate": "gate",
    "tqdm": "gate",
    "yaml": "gate",
    "pandas": "report",
    "matplotlib": "report",
    "jinja2": "report",
    "xxhash": "dumps",
    "fsspec": "dumps",
    "upath": "dumps",
}
"""The extra that brings a module which qgate imports."""


class LateModule:
    """A module by its full name, imported when one of its names is first used.

    A file binds it once, and names the real module under TYPE_CHECKING. From its first use on, the
    file has the real module in its place.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._file = sys._getframe(1).f_globals

    def __getattr__(self, name: str) -> Any:
        if self._name not in sys.modules:
            with without_collector(), explained_imports():
                importlib.import_module(self._name)
        module = sys.modules[self._name]
        for own, value in [*self._file.items()]:
            if value is self:
                self._file[own] = module
        return getattr(module, name)


@contextlib.contextmanager
def explained_imports() -> Iterator[None]:
    """Turn the import of a module that an extra brings into an error with what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise QgateError(
            f"{module} is not installed: pip install 'pytest-qgate[{EXTRAS[module]}]'."
        ) from None


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Pause the collector of cycles while objects are made that stay: it would visit all of them.

    Records of 50,000 gates take half the time.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
