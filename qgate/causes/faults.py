"""Faults that are tried as causes: the words of each, and the wrong alternative that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from qgate.errors import QgateError

if TYPE_CHECKING:
    from qgate.formats.options import Floats

Change = TypeVar("Change")
Function = Callable[..., Any]
Cast = Callable[["Floats"], "Floats"]


@dataclass(frozen=True)
class Fault(Generic[Change]):
    """A fault in words, and what has it: a function, arguments, or a change of values or codes."""

    words: str
    change: Change


@dataclass(frozen=True)
class WrongCast(Fault[Cast]):
    """A faulty cast; `change` makes its values of a source.

    alternatives   the same fault under other conventions, for a dtype of the source
    is_same_kind   the format is the right one: other conventions may differ by more
    is_factor      all scales are the right ones times a number
    """

    alternatives: Callable[[str], Iterable[Cast]] | None = None
    is_same_kind: bool = False
    is_factor: bool = False

    def apply(self, x: Floats) -> Floats | None:
        """Return what the fault makes of a source, None where it cannot occur."""
        try:
            with np.errstate(all="ignore"):
                return self.change(x)
        except (QgateError, IndexError, ValueError):
            return None


@dataclass(frozen=True)
class WrongCall(Fault[Function]):
    """A fault of a call; `change` is the function that has it, called with these arguments.

    alternatives   lists arguments with the same fault under other conventions
    """

    arguments: list[Any]
    alternatives: Callable[[], Iterable[list[Any]]] | None = None
