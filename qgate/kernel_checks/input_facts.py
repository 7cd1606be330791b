"""Facts about one list of arguments, found once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qgate.expected.narrow_floats import shares_memory


class ReferenceResult(ValueError):
    """A result of a kernel that is the memory of a result of the reference."""


@dataclass(frozen=True)
class EntriesOf:
    """Entries of another list of arguments, along one dimension of results."""

    whole: Sequence[Any]
    dim: int
    entries: Tensor


@dataclass
class InputFacts:
    """Facts about one list of arguments, found once.

    cut             of which others they are entries; of themselves, if others are entries of them
    unquantized     what the reference gave for them
    is_independent  True if results are those of the same rows among others
    """

    arguments: Sequence[Any]
    cut: EntriesOf | None = None
    is_finite: bool | None = None
    unquantized: Tensor | None = None
    is_independent: bool = False

    def gave(self, result: Any, exact: Tensor | None, tensors: Sequence[Tensor]) -> bool:
        """Tell if a result lies in memory that the reference returned, and in no argument's."""
        returned = [value for value in (exact, self.unquantized) if value is not None]
        return any(shares_memory(result, value) for value in returned) and not any(
            shares_memory(result, value) for value in tensors
        )
