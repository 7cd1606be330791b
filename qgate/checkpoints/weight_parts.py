"""Weights by the tensors that they are stored in, and how these are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.tiles import Tile, fit_tile
from qgate.errors import QgateError

CountRows = Callable[[Checkpoint, Mapping[str, StoredEntry]], int]
"""Counts the rows of a weight whose tensors have other shapes; 0 if it has to be decoded whole."""


class MisfitError(QgateError):
    """Tensors that can be read do not fit together as one weight, or not with the parent's."""


@dataclass(frozen=True)
class Parts:
    """The tensors of one weight by ending, its name, and the bits that the recipe declares.

    shapes  the shapes of its tensors in the file, of which `tensors` may be a part
    rows    how many rows the weight has, where `tensors` are some of them
    start   the first of these rows
    zero_offset  by how much GPTQ stores zero points too low
    tile    the rows and columns that share a scale, where it is declared or was found out
    """

    name: str
    tensors: Mapping[str, Tensor]
    bits: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: int = 0
    start: int = 0
    zero_offset: int = 1
    tile: Tile | None = None

    def __getitem__(self, ending: str) -> Tensor:
        return self.tensors[ending]

    def get(self, *endings: str) -> Tensor | None:
        """Return the first of these tensors that there is."""
        return next((self.tensors[e] for e in endings if e in self.tensors), None)

    def fit_tile(self, ending: str, values: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tile]:
        """Find the tile of these scales of elements of this shape, as `tiles.fit_tile` does."""
        rows, columns = shape
        whole = tuple(self.shapes.get(ending, ()))
        return fit_tile(values, self.rows or rows, columns, self.name, whole, self.tile)


@dataclass(frozen=True)
class Packing:
    """One way to store a weight.

    decode      from the parts by ending, and facts of the configuration
    parts       ending → dtypes it may have; the first is the tensor that names the weight; none
                where graphs, types of tensors or heads of files describe the weight
    optional    endings that may be missing
    by_rows     endings of tensors whose rows are those of the weight, or share them out; the first
                has as many. Only such packings are decoded a few rows at a time
    by_columns  the same for tensors whose last axis stands for the rows of the weight
    scattered   endings of by_rows whose words have the codes of rows that lie a share of all apart
    count_rows  for tensors whose shapes do not tell the rows of the weight
    """

    name: str
    decode: Callable[[Parts], QuantizedWeight]
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    by_rows: tuple[str, ...] = ()
    by_columns: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    count_rows: CountRows | None = None


@dataclass(frozen=True)
class StoredWeight:
    """One logical weight: its name in the parent's manner, its packing, and its tensors.

    missing  endings of tensors that its packing has, and that are not there
    """

    name: str
    packing: Packing | None
    parts: Mapping[str, StoredEntry]
    missing: tuple[str, ...] = ()

    def check_complete(self) -> None:
        """Refuse a weight of which a tensor is missing."""
        if self.missing:
            stored = " and ".join(
                f"{ending} ({entry.dtype})" for ending, entry in self.parts.items()
            )
            is_one = len(self.missing) == 1
            raise MisfitError(
                f"its {' and '.join(self.missing)} {'is' if is_one else 'are'} missing: "
                f"{stored} alone cannot be decoded"
            )

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.parts.values())
