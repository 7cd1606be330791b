"""Elements that are levels of a list, which is given or trained."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from qgate.errors import QgateError
from qgate.formats._element import ElementFormat, drawn
from qgate.formats._work import DOUBLE, WorkType
from qgate.formats.options import Floats, Rounding

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from qgate.formats._work import ChunkDraws

_ROUNDS = 1000

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""NormalFloat of QLoRA (arXiv 2305.14314), as bitsandbytes has it."""
BNB_FP4 = (
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
    0.1666666716337204, 0.25, -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
    -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
)  # fmt: skip
"""FP4 of bitsandbytes, which is not E2M1: twelfths of 1/16, 2, 3, 4, 6, 8 and 12."""
IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
"""IQ4_NL and IQ4_XS of GGUF."""
IQ2, TERNARY = (8.0, 25.0, 43.0), (-1.0, 0.0, 1.0)
IQ3 = (4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0)
IQ3_ODD = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
"""Magnitudes of GGUF's IQ2 and IQ3 types, and elements of IQ1: vectors of them have codes."""


def mirrored(*magnitudes: float) -> tuple[float, ...]:
    return (*(-magnitude for magnitude in reversed(magnitudes)), *magnitudes)


LLOYD = {
    1: mirrored(0.7978845834732056),
    2: mirrored(
        0.4527800381183624, 1.5104175806045532,
    ),
    3: mirrored(
        0.2450941801071167, 0.7560052871704102, 1.3439092636108398, 2.1519455909729004,
    ),
    4: mirrored(
        0.12839503586292267, 0.38804829120635986, 0.6567591428756714, 0.9423404335975647,
        1.2562311887741089, 1.6180464029312134, 2.069017171859741, 2.7325894832611084,
    ),
}  # fmt: skip
"""Levels with the least squared error for a normal distribution of variance 1, by bits.

Each is the mean of the numbers that are nearest to it (Lloyd, Max), rounded to float32. TurboQuant
(arXiv 2504.19874) rounds rotated vectors to them.
"""


@dataclass(frozen=True)
class Codebook(ElementFormat):
    """Levels by their codes; a number becomes the nearest one, of two as near the lower."""

    levels: tuple[float, ...]

    is_codebook: ClassVar[bool] = True
    mantissa = 0

    def __post_init__(self) -> None:
        count = len(self.levels)
        if count < 2 or count & (count - 1) or not np.isfinite(self.levels).all():
            raise QgateError(
                f"a codebook of {count} levels is not allowed; it has a power of two of finite "
                "numbers, one for each code."
            )

    @classmethod
    def trained(cls, name: str, samples: Floats, bits: int, weights: Floats | None = None) -> Self:
        """Return levels that are the weighted means of the samples nearest to them (Lloyd)."""
        listed = np.asarray(samples, dtype=np.float64).reshape(-1)
        if not len(listed) or not np.isfinite(listed).all():
            raise QgateError(f"{len(listed)} samples train no codebook; pass finite numbers.")
        order = listed.argsort(kind="stable")
        listed = listed[order]
        shares = np.ones(len(listed)) if weights is None else np.asarray(weights).reshape(-1)[order]
        levels = np.quantile(listed, (np.arange(2**bits) + 0.5) / 2**bits)
        sums, totals = (np.cumsum([0.0, *part]) for part in (listed * shares, shares))
        for _ in range(_ROUNDS):
            ends = listed.searchsorted((levels[1:] + levels[:-1]) / 2, side="right")
            ends = np.concatenate([[0], ends, [len(listed)]])
            counts = np.diff(totals[ends])
            means = np.where(counts > 0, np.diff(sums[ends]) / np.maximum(counts, 1e-300), levels)
            if np.array_equal(means, levels):
                break
            levels = means
        return cls(name, tuple(levels.astype(np.float32).astype(np.float64).tolist()))

    @property
    def bits(self) -> int:
        return (len(self.levels) - 1).bit_length()

    @property
    def layout(self) -> str:
        return f"{len(self.levels)} levels"

    @property
    def min_normal(self) -> float:
        return self.min_subnormal

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.max)[1] - 1

    def code_values(self) -> Floats:
        return np.array(self.levels)

    def bounds(self, *, narrow: bool = True) -> tuple[float, float]:
        del narrow
        return float(self.sorted_values[0]), float(self.sorted_values[-1])

    def saturates_from(
        self, rounding: Rounding | None = None, largest: float | None = None
    ) -> float:
        """Return where a list that goes on with its last step has the next level."""
        steps = np.diff(self.sorted_values)
        is_low = largest is not None and largest == -self.sorted_values[0] != self.max
        step, end = (steps[0], -self.sorted_values[0]) if is_low else (steps[-1], self.max)
        return float(end + step / (1 if rounding == "zero" else 2))

    def survives_from(self, rounding: Rounding | None = None) -> float:
        return super().survives_from(rounding) if 0.0 in self.levels else 0.0

    def inverse_quantum(self, x: Tensor, work: WorkType) -> Tensor:
        below, above = self._beside(x)
        return (1.0 / (above - below)).to(work.dtype)

    def _beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the levels below and above each number."""
        import torch

        values = DOUBLE.table((self, "values"), self.sorted_values.tolist, x.device)
        last = torch.searchsorted(values, x.double().contiguous(), right=True) - 1
        last = last.clamp_(0, len(values) - 2)
        return values[last], values[last + 1]

    def at_random(self, x: Tensor, draws: Tensor) -> Tensor:
        """Round up in size where a draw is below the share of the way to the level there."""
        x = x.clamp(*self.bounds())
        below, above = self._beside(x)
        near, far = below.where(x >= 0, above), above.where(x >= 0, below)
        return far.where(draws < (x - near) / (far - near), near)

    def cast(
        self,
        x: Tensor,
        work: WorkType,
        *,
        rounding: Rounding,
        saturate: bool = True,
        narrow: bool = True,
        generator: Generator | ChunkDraws | None = None,
    ) -> Tensor:
        """Return the level of each number; NaN stays NaN."""
        import torch

        del saturate, narrow
        wide = x.double().contiguous()
        if rounding == "stochastic":
            y = self.at_random(wide, drawn(wide, generator))
        else:
            values = DOUBLE.table((self, "values"), self.sorted_values.tolist, x.device)
            edges = DOUBLE.table((self, rounding), lambda: self._edges(rounding), x.device)
            places = torch.bucketize(wide, edges, out_int32=True)
            y = values.index_select(0, places.view(-1)).view(x.shape)
        if self.negative_zero is not None:
            y = y.where(y != 0, torch.zeros_like(y).copysign_(wide))
        return y.masked_fill_(wide.isnan(), float("nan")).to(work.dtype)

    def _edges(self, rounding: Rounding) -> list[float]:
        """Return the largest number that becomes the lower of each two levels."""
        edges = []
        for low, high in itertools.pairwise(self.sorted_values.tolist()):
            edge = float(np.float32((low + high) / 2))
            if rounding == "zero" and abs(low) != abs(high):
                edge = high if abs(high) > abs(low) else low
            takes_tie = rounding in ("away", "zero") and abs(high) > abs(low)
            edges.append(math.nextafter(edge, -math.inf) if takes_tie else edge)
        return edges
