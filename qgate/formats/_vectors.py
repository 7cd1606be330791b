"""Rows of a codebook, and those nearest to ratios by the readable definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from qgate.formats._block import BlockFormat
from qgate.formats._codebook import Codebook
from qgate.formats.floats import FloatFormat
from qgate.formats.options import Floats
from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate.formats import vector_books as vector_books
else:
    vector_books = LateModule("qgate.formats.vector_books")

HALF = FloatFormat("fp16", 5, 10, "ieee", bias=15)

STEPS = 256.0
"""Ratios are whole numbers of such parts of 1, so that sums of squares are exact in any order."""


class ElementLevels(Codebook):
    """Numbers that elements of rows can be; some codes of that many bits have none."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class VectorRows(BlockFormat):
    """Rows of a book, and scales of tiles that are parts of one scale of a block."""

    book: str
    size: int
    tile: int
    factors: tuple[float, ...]
    stored_bits: int
    signs: Literal["", "free", "even"] = ""
    shifted: int = 0
    share: float = 1.0

    options: ClassVar[frozenset[str]] = frozenset({"axis", "inf"})
    stored_dtype: ClassVar[str] = "float32"
    scale: ClassVar[str] = "FP16 and its parts"
    notes = "rows of a book of GGUF"

    @property
    def bits(self) -> int:
        return self.stored_bits

    @property
    def block(self) -> int:
        return self.size

    @property
    def effort(self) -> int:
        return 16 * len(self.factors) * (2 if self.shifted else 1)

    @property
    def stored(self) -> dict[str, int]:
        tiles = self.size // self.tile
        return {"scales": 1} | ({} if tiles == 1 else {"micro": tiles})

    @property
    def reach(self) -> float:
        """The largest magnitude of an element."""
        return float(np.abs(self.element.sorted_values).max())

    def rows(self) -> Floats:
        """Return the rows that codes name, in units of elements."""
        if not self.book:
            return self.element.sorted_values[:, None]
        table = vector_books.code_book(self.book).numpy().astype(np.float64)
        return np.asarray(table * (vector_books.DELTA if self.shifted else 1))

    @property
    def is_whole(self) -> bool:
        """True if a block is one tile, so that its scale has no parts."""
        return self.tile == self.size

    @property
    def shift(self) -> int:
        """The distance of elements from rows, above or below."""
        return 1 if self.shifted else 0

    def tried(self) -> list[int]:
        """Return the codes of factors, those of the largest first."""
        return sorted(range(len(self.factors)), key=lambda code: -abs(self.factors[code]))


def define_tile(fmt: VectorRows, x: Floats, s: Floats, d: Floats) -> tuple[Floats, Floats]:
    """Return the values of tiles at one scale each, and what it costs."""
    unit = np.where(s == 0, d, s)
    unit = np.where(unit == 0, 1.0, unit)
    with np.errstate(over="ignore"):
        ratios = x / unit
    end = 2 * fmt.reach
    r = np.rint(np.clip(ratios, -end, end) * STEPS)
    elements, errors = _define_rows(fmt, r)
    error = np.where(s == 0, np.square(r), errors).sum(axis=1)
    is_beyond = (np.abs(ratios) > end).any(axis=1)
    return elements * s, np.where(is_beyond, np.inf, error * unit[:, 0] ** 2)


def _define_rows(fmt: VectorRows, r: Floats) -> tuple[Floats, Floats]:
    """Return the nearest elements to ratios, and the squares of their errors."""
    above = _unshifted(fmt, r - fmt.shift * STEPS)
    elements, errors = above[0] + fmt.shift, above[1]
    if fmt.shift:
        below = _unshifted(fmt, r + fmt.shift * STEPS)
        sums = [part.reshape(-1, fmt.shifted).sum(axis=1) for part in (errors, below[1])]
        is_below = np.repeat(sums[1] < sums[0], fmt.shifted).reshape(r.shape)
        elements = np.where(is_below, below[0] - fmt.shift, elements)
        errors = np.where(is_below, below[1], errors)
    return elements, errors


def _unshifted(fmt: VectorRows, r: Floats) -> tuple[Floats, Floats]:
    rows = fmt.rows()
    signs = np.where((r < 0) & (fmt.signs != ""), -1.0, 1.0)
    if fmt.signs == "even":
        eights, sizes = signs.reshape(-1, 8), np.abs(r).reshape(-1, 8)
        eights[np.arange(len(sizes)), sizes.argmin(axis=1)] *= eights.prod(axis=1)
    target = (r * signs).reshape(-1, rows.shape[1])
    # The square of the distance less that of the target.
    scores = np.square(rows).sum(axis=1) * STEPS - 2 * target @ rows.T
    nearest = rows[scores.argmin(axis=1)]
    errors = np.square(target - nearest * STEPS)
    return nearest.reshape(r.shape) * signs, errors.reshape(r.shape)
