"""Word of each call of a kernel, for who waits for it in another process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

TELLING: ContextVar[Callable[[str], None] | None] = ContextVar("TELLING", default=None)
"""Called with the name of an input before the kernel is, and with nothing after."""
HUNG: ContextVar[Mapping[str, str]] = ContextVar("HUNG", default=MappingProxyType({}))
"""Inputs for which the kernel gave no answer in an earlier process, with the words for that."""


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Tell that the kernel is called for an input, and that it came back."""
    tell = TELLING.get()
    if tell is None:
        yield
        return
    tell(name)
    try:
        yield
    except Exception:  # an exit of the process is none that it came back from
        tell("")
        raise
    tell("")
