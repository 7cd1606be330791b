"""Codebooks with a second stage: signs of a projection of what the levels leave, as TurboQuant."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qgate.errors import QgateError
from qgate.formats._block import BlockFormat, poisoned
from qgate.formats._work import DOUBLE, CastContext, ScaledChunk, widen
from qgate.formats.codebook import CodebookFormat
from qgate.formats.options import CastOptions, Floats

if TYPE_CHECKING:
    from torch import Tensor

_STEPS, _PARTS = 2.0**16, 2.0**20
_NORMAL = statistics.NormalDist()


class Projection:
    """A square matrix of normal numbers, each a multiple of 2^-20; other than itself even if equal.

    Sums of its numbers, and of their products with multiples of 2^-16, are exact in any order.
    """

    def __init__(self, matrix: Floats) -> None:
        listed = np.asarray(matrix, dtype=np.float64)
        if listed.ndim != 2 or listed.shape[0] != listed.shape[1] or not (np.abs(listed) < 8).all():
            raise QgateError(
                f"a projection of shape {listed.shape} is not allowed; it is a square matrix of "
                "normal numbers, below 8."
            )
        self.matrix: Floats = np.rint(listed * _PARTS) / _PARTS

    @classmethod
    @functools.cache
    def drawn(cls, seed: int, size: int) -> Projection:
        """Return normal numbers for the words of NumPy's Philox with this key."""
        words = np.random.Philox(key=seed).random_raw(size * size) >> 11
        shares = ((words.astype(np.float64) + 0.5) * 2.0**-53).tolist()
        return cls(np.array([_NORMAL.inv_cdf(share) for share in shares]).reshape(size, size))


@dataclass(frozen=True)
class ResidualFormat(BlockFormat):
    """Levels of a codebook, and one bit more: TurboQuant for inner products (arXiv 2504.19874).

    u  x / s - e of the first stage, whose scale is s and whose level is e
    t  the root of the mean of squares of u, as a float32 number
    z  1 where P u >= 0, else -1: u / t as a multiple of 2^-16, and P as large as the block
    x  ~ (e + t * sqrt(pi / 2 / n) * (P^T z)) * s, n the elements of the block

    Over all normal P, inner products with x are right on average (QJL, arXiv 2406.03482).
    """

    first: CodebookFormat
    projection: Projection

    options: ClassVar[frozenset[str]] = frozenset({"axis", "inf"})
    scale: ClassVar[str] = "2 FP32"
    stored_dtype: ClassVar[str] = "float32"
    notes = "scaled by the RMS, and signs"
    takes_tiles = False

    @property
    def bits(self) -> int:
        return self.element.bits + 1

    @property
    def block(self) -> int:
        return len(self.projection.matrix)

    @property
    def stored(self) -> dict[str, int]:
        return {"scales": 2, "micro": self.block // 8}

    def with_share(self, share: float) -> ResidualFormat:
        return replace(self, first=self.first.with_share(share))

    def split(self, x: Tensor, context: CastContext) -> ScaledChunk:
        first = self.first.split(x, context)
        u = first.ratios - first.elements
        t = self.first.with_share(1.0).scales(u, u.abs().amax(2, keepdim=True))
        shares = (u / t.where(t > 0, 1.0)).mul_(_STEPS).round_()
        is_up = (self._matrix(x) @ shares.movedim(2, -2)).movedim(-2, 2) >= 0
        scales = first.scale.new_empty(*t.shape[:2], 2, t.shape[3])
        scales[:, :, :1], scales[:, :, 1:] = first.scale, t
        stored = {"scales": scales, "micro": _packed(is_up, self.block)}
        elements = first.elements + self._correction(is_up, t)
        return ScaledChunk(elements, first.scale, first.ratios, stored)

    def _matrix(self, x: Tensor) -> Tensor:
        """Return as much of the projection as a block has elements."""
        count = x.shape[2]
        values = DOUBLE.table(
            (self.projection, count),
            lambda: self.projection.matrix[:count, :count].ravel().tolist(),
            x.device,
        )
        return values.view(count, count)

    def _correction(self, is_up: Tensor, t: Tensor) -> Tensor:
        signs = is_up.double() * 2 - 1
        sums = (self._matrix(is_up).T @ signs.movedim(2, -2)).movedim(-2, 2)
        return t * math.sqrt(math.pi / 2 / is_up.shape[2]) * sums

    def unscale(self, stored: dict[str, Tensor], context: CastContext) -> Tensor:
        del context
        return widen(stored["scales"][:, :, :1])

    def to_codes(self, parts: ScaledChunk) -> Tensor:
        levels = self.element.cast(parts.ratios, DOUBLE, rounding=self.rounding)
        return self.element.to_codes(levels, DOUBLE)

    def from_codes(self, codes: Tensor, stored: dict[str, Tensor]) -> Tensor:
        bits = (stored["micro"].unsqueeze(3) >> _places(stored["micro"])) & 1
        is_up = bits.flatten(2, 3)[:, :, : codes.shape[2]] > 0
        levels = self.element.from_codes(codes, DOUBLE)
        return levels + self._correction(is_up, widen(stored["scales"][:, :, 1:]))

    def define(self, x: Floats, q: CastOptions, state: float | None, double: bool) -> Floats:
        del state, double
        bad = poisoned(x, q)[:, None]
        e, s, ratios = self.first.define_parts(np.where(bad, 0.0, x), q)
        u = ratios - e
        t = self.first.with_share(1.0).define_scales(u)
        shares = np.rint(u / np.where(t > 0, t, 1.0) * _STEPS)
        p = self.projection.matrix[: x.shape[1], : x.shape[1]]
        signs = np.where(shares @ p.T >= 0, 1.0, -1.0)
        y = (e + t * math.sqrt(math.pi / 2 / x.shape[1]) * (signs @ p)) * s
        return np.where(bad, np.nan, y)


def _places(bits: Tensor) -> Tensor:
    return bits.new_tensor(list(range(8)))[:, None]


def _packed(is_up: Tensor, size: int) -> Tensor:
    """Pack bits along the third axis into bytes, the first lowest."""
    bits = is_up.new_zeros(*is_up.shape[:2], size, is_up.shape[3])
    bits[:, :, : is_up.shape[2]] = is_up
    octets = bits.unflatten(2, (-1, 8)).byte()
    packed: Tensor = (octets << _places(octets)).sum(3).byte()
    return packed
