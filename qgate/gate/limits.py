"""The limits that hold at one site."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qgate.errors import QgateError
from qgate.gate.bounds import Bound
from qgate.metrics import Metric


@dataclass(frozen=True)
class Limits:
    """What a site has to keep.

    budget_db                 dB that a local error may exceed that of an ideal quantizer
    regression                share by which an error may exceed the accepted one, same device
    regression_other_device   the same where the accepted errors were made with other arithmetic:
                              another device, other instructions, another torch
    atol                      added to accepted errors beside the measured noise floor: what
                              float32 rounding alone can do to a relative MSE, (2^-24)^2 thrice
    absolute                  bounds by metric
    missing                   what a missing accepted value means: always "fail"
    sources                   where each of them was set; "default" where it is not listed
    """

    budget_db: float = 0.5
    regression: float = 0.02
    regression_other_device: float = 0.05
    atol: float = 1e-14
    absolute: Mapping[str, Bound] = field(default_factory=dict)
    missing: Literal["fail"] = "fail"
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in NUMBERS:
            check_number(name, getattr(self, name))
        if self.missing != "fail":
            raise QgateError(
                f"missing {self.missing!r} is not allowed, only 'fail': a gate without a baseline "
                "must not pass. Record one with --update-baselines."
            )

    def tolerance(self, device_matches: bool, metric: Metric | None = None) -> float:
        """Return the share a metric may be worse by; a single channel averages over little."""
        if device_matches:
            return self.regression
        room = 1.0 if metric is None else metric.room
        return min(1.0, room * self.regression_other_device)

    def source(self, name: str) -> str:
        return self.sources.get(name, "default")

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in (*NUMBERS, "missing")}
        bounds = {metric: str(bound) for metric, bound in sorted(self.absolute.items())}
        return {**plain, "absolute": bounds, "sources": dict(self.sources)}


# What a number may be: the most, and what to say beyond it.
NUMBERS: Mapping[str, tuple[float, str]] = {
    "budget_db": (100.0, "decibels from 0 to 100"),
    "regression": (1.0, "a share from 0 to 1: 0.02 is 2 %"),
    "regression_other_device": (1.0, "a share from 0 to 1: 0.05 is 5 %"),
    "atol": (math.inf, "a finite number from 0"),
}


def check_number(name: str, value: object) -> None:
    most, allowed = NUMBERS[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(float(str(value))) and 0 <= float(str(value)) <= most):
        raise QgateError(f"limit {name} = {value!r} is not allowed; it is {allowed}.")
