"""Weights that types of tensors or heads of files describe, not the names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qgate.checkpoints.stored import Checkpoint, StoredEntry

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.checkpoints.grids import QuantizedWeight


class TensorParts(Protocol):
    """The tensors of one weight, or some rows of them, to be decoded.

    rows    how many rows the weight has, where `tensors` are some of them; else 0
    start   the first of these rows
    """

    @property
    def name(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def rows(self) -> int: ...
    @property
    def start(self) -> int: ...
    def fit_tile(
        self, ending: str, values: Tensor, shape: tuple[int, int]
    ) -> tuple[Tensor, tuple[int, int]]: ...


CountRows = Callable[[Checkpoint, Mapping[str, StoredEntry]], int]
"""Counts the rows of a weight whose tensors have other shapes; 0 if it has to be decoded whole."""


@dataclass(frozen=True)
class DescribedWeight:
    """A weight with its tensors by part, and how they are decoded.

    by_rows      parts whose rows are those of the weight, as of a packing
    count_rows   for parts whose shapes do not tell rows
    """

    name: str
    packing: str
    parts: Mapping[str, StoredEntry]
    decode: Callable[[TensorParts], QuantizedWeight]
    by_rows: tuple[str, ...] = ()
    count_rows: CountRows | None = None
