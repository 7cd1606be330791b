"""Absolute bounds: one metric, one side, one number."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from qgate.errors import QgateError
from qgate.gate.measured import is_finite
from qgate.metrics import METRICS

Side = Literal["<=", ">=", "=="]
_BOUND = re.compile(r"\s*([A-Za-z_]\w*(?:@\w+)?)\s*(<=?|>=?)\s*(\S+)\s*")


@dataclass(frozen=True)
class Bound:
    """`side` and `value` hold a metric, or with `magnitude` its absolute value; equal is allowed.

    `source` says where the bound was set, `reason` why.
    """

    metric: str
    side: Side
    value: float
    magnitude: bool = False
    source: str = ""
    reason: str = ""

    def holds(self, value: float | None) -> bool:
        """Only a finite value within the bound; NaN, infinity and no value do not hold."""
        if value is None:
            return False
        return within(abs(value) if self.magnitude else value, self.side, self.value)

    def __str__(self) -> str:
        return f"{self.metric} {self.side} {self.value:g}"


def within(value: float | None, side: Side, bound: float) -> bool:
    if value is None or not (math.isfinite(value) and math.isfinite(bound)):
        return False
    if side == "==":
        return value == bound
    return value <= bound if side == "<=" else value >= bound


def times_over(metric: str, value: float | None, side: Side, bound: float) -> float:
    """How many times the bound a value is, above 1 where it is worse; infinite if not finite.

    For what is better the higher, the distance to perfect counts: 0.98 is twice as bad as 0.99.
    Of logarithms it is the factor. What has to be equal is 0 times over where it is, and infinitely
    often where it is not.
    """
    if value is None or not (is_finite(value) and is_finite(bound)):
        return math.inf
    if side == "==":
        return 0.0 if value == bound else math.inf
    known = METRICS.find(metric)
    if known.logarithm == "log2" or (known.logarithm and side == ">="):
        return known.factor(value - bound if side == "<=" else bound - value)
    if side == "<=":
        return _ratio(value, bound)
    if known.bounded:
        return _ratio(1 - value, 1 - bound)
    return _ratio(bound, value)


def _ratio(value: float, bound: float) -> float:
    if value <= bound:
        return value / bound if bound > 0 else 0.0
    return value / bound if bound > 0 else math.inf


def parse_bound(text: str, *, source: str = "", reason: str = "") -> Bound:
    """The bound in `relative_mse<1e-3` or `correlation>0.999`; `<` and `<=` mean the same."""
    found = _BOUND.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise QgateError(
            f"limit {text!r} cannot be read. Write a metric, < or >, and a number: "
            "'relative_mse<1e-3' or 'correlation>0.999'."
        )
    metric, sign, number = found.groups()
    side: Side = "<=" if sign[0] == "<" else ">="
    known = METRICS.get(metric)
    direction = known.direction
    if direction == "equal":
        raise QgateError(
            f"limit {text!r} has no meaning: {metric} is held against its accepted value, and none "
            "is better than another."
        )
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise QgateError(f"limit {text!r} has {number!r} where a finite number has to be.")
    wanted: Side = ">=" if direction == "higher" else "<="
    if side != wanted:
        raise QgateError(
            f"limit {text!r} would pass bad values and fail good ones: {metric} is better the "
            f"{'higher' if direction == 'higher' else 'lower'}. Write '{metric}{wanted}{number}'."
        )
    if known.signed and value < 0:
        raise QgateError(
            f"limit {text!r} is about the magnitude of {metric}, which is never below 0."
        )
    return Bound(metric, side, value, known.signed, source, reason)
