"""Load modules when they are first used, and large data without a look at all of it each time."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from typing import Any


class LateModule:
    """A module by its full name, imported when one of its names is first used.

    A file binds it once, and names the real module under TYPE_CHECKING.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if self._name not in sys.modules:
            with without_collector():
                importlib.import_module(self._name)
        return getattr(sys.modules[self._name], name)


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
