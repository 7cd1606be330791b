"""Counts of what a format loses of a tensor: the one definition behind every share.

Elements are counted by kind: NaN, +Inf, -Inf, zero, finite nonzero. A share is one of the finite
elements; those that are not finite are a figure of their own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qgate.formats.options import Floats
from qgate.records.plain_data import add_fields

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Losses:
    """Counts of elements; `a + b` has the counts of both tensors.

    nan, posinf, neginf, zeros, nonzero  the elements by kind, `nonzero` being finite
    upper, lower  saturated, by sign: finite, and above the largest value when rounded without a
                  bound, in a block format after the block's scale
    flushed       finite and not zero before, zero after
    underflow     finite, not zero, and below the smallest normal number at its scale before
                  rounding
    poisoned      finite, but NaN after, because the scale of its group is NaN
    beyond_range  beyond the largest value before rounding, infinities among them; None for a format
                  with scales, because only a cast has a range
    """

    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    nonzero: int = 0
    upper: int = 0
    lower: int = 0
    flushed: int = 0
    underflow: int = 0
    poisoned: int = 0
    beyond_range: int | None = 0

    def __add__(self, other: Losses) -> Losses:
        if not isinstance(other, Losses):
            return NotImplemented
        return add_fields(Losses, self, other)

    def times(self, factor: float) -> Losses:
        """Return the counts of so many times the elements, as whole numbers."""
        scaled = copy.copy(self)
        for name, count in vars(self).items():
            if count is not None:
                object.__setattr__(scaled, name, round(count * factor))
        return scaled

    def before_rounding(
        self, posinf: int, neginf: int, vanished: int = 0, *, lost: bool = True
    ) -> Losses:
        """Correct counts of values whose rounding before the count made some Inf or zero.

        The tensor itself has `posinf` and `neginf` infinities; `vanished` values were counted as
        zero but are not zero. A format loses what that rounding lost, unless `lost` is False.
        """
        up, down = max(self.posinf - posinf, 0), max(self.neginf - neginf, 0)
        corrected = replace(
            self,
            posinf=self.posinf - up,
            neginf=self.neginf - down,
            zeros=self.zeros - vanished,
            nonzero=self.nonzero + up + down + vanished,
        )
        if not lost:
            return corrected
        return replace(
            corrected,
            upper=self.upper + up,
            lower=self.lower + down,
            flushed=self.flushed + vanished,
            underflow=self.underflow + vanished,
        )

    @property
    def inf(self) -> int:
        return self.posinf + self.neginf

    @property
    def finite(self) -> int:
        return self.zeros + self.nonzero

    @property
    def elements(self) -> int:
        return self.finite + self.nan + self.inf

    @property
    def saturated(self) -> int:
        return self.upper + self.lower

    @property
    def saturated_share(self) -> float:
        return self.share("saturated")

    @property
    def flushed_share(self) -> float:
        return self.share("flushed")

    @property
    def beyond_range_share(self) -> float | None:
        """The share of all elements that lie beyond: the overflow ratio of a cast."""
        if self.beyond_range is None:
            return None
        return self.beyond_range / self.elements if self.elements else 0.0

    def share(self, kind: str) -> float:
        """Return the share of the finite elements, 0 to 1."""
        return float(getattr(self, kind)) / self.finite if self.finite else 0.0


class Ends(Protocol):
    """The ends of the range of an element format, or of a wide dtype."""

    @property
    def signed(self) -> bool: ...
    @property
    def max(self) -> float: ...
    @property
    def min_normal(self) -> float: ...
    def saturates_from(self) -> float: ...
    def survives_from(self) -> float: ...


def saturates(fmt: Ends, values: Floats) -> npt.NDArray[np.bool_]:
    """Find finite values that a plain cast saturates: of an unsigned format, negative ones too."""
    sizes = np.abs(values)
    beyond = sizes >= fmt.saturates_from()
    if not fmt.signed:
        beyond = np.where(values < 0, sizes >= fmt.survives_from(), beyond)
    return np.asarray(np.isfinite(values) & beyond)


def losses_of_values(fmt: Ends, values: Floats, weights: Ints | None = None) -> Losses:
    """Count what a plain cast loses of values that occur `weights` times each, or once."""
    sizes = np.abs(values)
    finite, negative = np.isfinite(values), np.signbit(values)
    nonzero = finite & (sizes > 0)
    saturated = saturates(fmt, values)
    below = (values < 0) & (not fmt.signed)

    def count(hits: npt.NDArray[np.bool_]) -> int:
        return int(np.count_nonzero(hits) if weights is None else weights[hits].sum())

    nan, infinite = np.isnan(values), np.isinf(values)
    lower, neginf = count(saturated & negative), count(infinite & negative)
    return Losses(
        nan=count(nan),
        posinf=count(infinite) - neginf,
        neginf=neginf,
        zeros=count(sizes == 0),
        nonzero=count(nonzero),
        upper=count(saturated) - lower,
        lower=lower,
        flushed=count(nonzero & ((sizes < fmt.survives_from()) | below)),
        underflow=count(nonzero & (sizes < fmt.min_normal)),
        beyond_range=count((sizes > fmt.max) | below),
    )
