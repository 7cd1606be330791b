"""The limits that hold at one site, and absolute bounds: one metric, one side, one number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qgate.errors import QgateError
from qgate.gate.measured import is_finite
from qgate.metrics import METRICS, Metric
from qgate.results.tasks import MARGINS
from qgate.settings import check_values, setting, settings_of

Side = Literal["<=", ">=", "=="]
# Elements that other arithmetic moves across a threshold, and the share of them that other weights
# move: of 420 shares of tiny-llama none moved by more than 0.007 in 100 steps of tuning.
_ELEMENTS, _SHARE = 2, 0.01
# Codes that tip over on other threads moved carried errors of blocks by less than 1 % over 5,120
# tokens, by 2.8 % over 1,024, and those of their worst channel by 5.9 % there.
_MANY_TOKENS, _MOST_ROOM = 5_120, 5.0
# By how much a metric of the user's own may differ from that of other weights, on both sides.
_TASK_ACROSS_WEIGHTS = 0.25
_BOUND = re.compile(r"\s*([A-Za-z_]\w*(?:@\w+)?)\s*(<=?|>=?)\s*(\S+)\s*")


@dataclass(frozen=True)
class Bound:
    """Bound of a metric, or with `magnitude` of its absolute value; equal is allowed.

    `source` says where the bound was set, `reason` why.
    """

    metric: str
    side: Side
    value: float
    magnitude: bool = False
    source: str = ""
    reason: str = ""

    def holds(self, value: float | None) -> bool:
        """Tell if a value is finite and within the bound: NaN, infinity and no value are not."""
        if value is None:
            return False
        return within(abs(value) if self.magnitude else value, self.side, self.value)

    def __str__(self) -> str:
        return f"{self.metric} {self.side} {self.value:g}"


def room_for_few_tokens(tokens: int, *, is_part: bool = False) -> float:
    """Return how many times the tolerance of a carried error is that of 5,120 tokens or more.

    It grows by the root of how many fewer there are; of a part of the tensor, which few codes
    decide, by how many fewer. Where no tokens are counted it stays.
    """
    if not 0 < tokens < _MANY_TOKENS:
        return 1.0
    fewer = _MANY_TOKENS / tokens
    return min(fewer if is_part else math.sqrt(fewer), _MOST_ROOM)


def within(value: float | None, side: Side, bound: float) -> bool:
    if value is None or not (math.isfinite(value) and math.isfinite(bound)):
        return False
    if side == "==":
        return value == bound
    return value <= bound if side == "<=" else value >= bound


def times_over(metric: str, value: float | None, side: Side, bound: float) -> float:
    """Return how many times the bound a value is: above 1 is worse, infinite is not finite.

    For what is better the higher, the distance to perfect counts: 0.98 is twice as bad as 0.99.
    Of logarithms it is the factor. What has to be equal is 0 times over where it is, and infinitely
    often where it is not.
    """
    if value is None or not (is_finite(value) and is_finite(bound)):
        return math.inf
    if side == "==":
        return 0.0 if value == bound else math.inf
    about = METRICS.find(metric)
    if about.logarithm:
        return about.factor(value - bound if side == "<=" else bound - value)
    if side == "<=":
        return _ratio(value, bound)
    if about.bounded:
        return _ratio(1 - value, 1 - bound)
    return _ratio(bound, value)


def _ratio(value: float, bound: float) -> float:
    if value <= bound:
        return value / bound if bound > 0 else 0.0
    return value / bound if bound > 0 else math.inf


def parse_bound(text: str, *, source: str = "", reason: str = "") -> Bound:
    """Read the bound in `relative_mse<1e-3` or `correlation>0.999`; `<` and `<=` are the same.

    `mlperf-99` and `mlperf-99.9` are bounds of the accuracy that a mode keeps.
    """
    if text in MARGINS:
        text = f"accuracy_kept>{MARGINS[text]}"
    match = _BOUND.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise QgateError(
            f"limit {text!r} cannot be read. Write a metric, < or >, and a number: "
            "'relative_mse<1e-3' or 'correlation>0.999'."
        )
    metric, sign, number = match.groups()
    side: Side = "<=" if sign[0] == "<" else ">="
    about = METRICS.get(metric)
    direction = about.direction
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
    good: Side = ">=" if direction == "higher" else "<="
    if side != good and not about.task:
        raise QgateError(
            f"limit {text!r} would pass bad values and fail good ones: {metric} is better the "
            f"{'higher' if direction == 'higher' else 'lower'}. Write '{metric}{good}{number}'."
        )
    if about.signed and value < 0:
        raise QgateError(
            f"limit {text!r} is about the magnitude of {metric}, which is never below 0."
        )
    return Bound(metric, side, value, about.signed, source, reason)


def _share(default: float, help: str, high: float = 1) -> float:
    allowed = f"a share ({default:g} is {100 * default:g} %)"
    return setting(default, help, low=0, high=high, allowed_as=allowed)


@dataclass(frozen=True)
class Limits:
    """Limits that hold at one site; its settings are the numbers of a table of limits.

    absolute  bounds by metric
    missing   what a missing accepted value means: always "fail"
    sources   where each of them was set; "default" where it is not listed
    """

    budget_db: float = setting(
        0.5,
        "dB that a local error may exceed that of an ideal quantizer",
        low=0,
        high=100,
        allowed_as="decibels",
    )
    regression: float = _share(
        0.02, "share by which an error may exceed the accepted one, made on the same device"
    )
    regression_other_device: float = _share(
        0.05,
        "the same where other arithmetic made it: another device, instructions or torch",
        high=10,
    )
    # Tuning moved carried errors of blocks by up to 0.12, by 0.4 where one element decides; a
    # quantizer that truncates makes 20 times the error (docs/limits.md). Others than local errors
    # have more room (`Scope.limits`).
    regression_across_weights: float = _share(
        0.25, "the same where it is of other weights; local errors have twice this room", high=10
    )
    task_margin: float = _share(
        0.005,
        "share of the accepted bits per byte or task metric that its mean change stays within, "
        "with all of its 95 % interval, on both sides; one number for all has no interval",
    )
    task_margin_other_device: float = _share(0.02, "the same where other arithmetic made it")
    atol: float = setting(
        1e-14,
        "added to accepted errors beside the measured noise floor: what float32 rounding alone can "
        "do to a relative MSE, (2^-24)^2 thrice",
        low=0,
    )
    absolute: Mapping[str, Bound] = field(default_factory=dict)
    missing: Literal["fail"] = "fail"
    sources: Mapping[str, str] = field(default_factory=dict)
    other_weights: bool = False

    def __post_init__(self) -> None:
        check_values(self, "limit {} = ")
        if self.missing != "fail":
            raise QgateError(
                f"missing {self.missing!r} is not allowed, only 'fail': a gate without a baseline "
                "must not pass. Record one with --update-baselines."
            )

    def tolerance(
        self, device_matches: bool, metric: Metric | None = None, carried_tokens: int = 0
    ) -> float:
        """Return the share a metric may be worse by; a single channel averages over little.

        An error that blocks carry along is a mean over tokens, if they are counted.
        """
        if metric is not None and metric.tolerance:
            return metric.tolerance
        if metric is not None and metric.task:
            margin: float = getattr(self, self.task_limit(device_matches))
            return max(margin, _TASK_ACROSS_WEIGHTS) if self.other_weights else margin
        share: float = getattr(self, self.regression_limit(device_matches))
        room = 1.0 if metric is None else metric.room
        if not device_matches or self.other_weights:
            share = max(share, min(1.0, room * share))
        if self.other_weights or not carried_tokens:
            return share
        is_part = metric is not None and bool(metric.part)
        return share * room_for_few_tokens(carried_tokens, is_part=is_part)

    def task_limit(self, device_matches: bool) -> str:
        """Name the limit that a task is held by."""
        return "task_margin" if device_matches else "task_margin_other_device"

    def regression_limit(self, device_matches: bool) -> str:
        """Name the limit that regressions are held by: the wider one where two are meant."""
        names = {
            "regression_other_device": not device_matches,
            "regression_across_weights": self.other_weights,
        }
        meant = [name for name, is_meant in names.items() if is_meant]
        return max(meant, key=lambda name: float(getattr(self, name)), default="regression")

    def counted_slack(self, device_matches: bool, grain: float) -> float:
        """Return by how much a share of elements may differ beside its tolerance.

        A few elements fall to the other side of a threshold by other arithmetic, many by other
        weights.
        """
        if self.other_weights:
            return _SHARE
        return 0.0 if device_matches else _ELEMENTS * grain

    def source(self, name: str) -> str:
        return self.sources.get(name, "default")

    def to_dict(self) -> dict[str, object]:
        plain = {name: getattr(self, name) for name in (*NUMBERS, "missing")}
        bounds = {metric: str(bound) for metric, bound in sorted(self.absolute.items())}
        return {**plain, "absolute": bounds, "sources": dict(self.sources)}


NUMBERS = tuple(settings_of(Limits))


# From where on a limit holds nothing back, and why.
SWITCHED_OFF: Mapping[str, tuple[float, str]] = {
    "budget_db": (14.0, "a tensor of zeros is 14 dB over an ideal INT4 quantizer, and passes"),
    "regression": (1.0, "an error twice the accepted one passes"),
    "regression_other_device": (1.0, "an error twice the accepted one passes"),
    "regression_across_weights": (1.0, "an error twice the accepted one passes"),
    "task_margin": (0.5, "half as many bits per byte again pass"),
    "task_margin_other_device": (0.5, "half as many bits per byte again pass"),
    "atol": (
        1.0,
        "it is added to accepted values: a tensor of zeros, whose relative MSE is 1, passes, and a "
        "logarithm of a dump may grow by a factor of two",
    ),
}


def check_reason(name: str, value: float, reason: str) -> None:
    """Refuse a number that switches a kind of limit off and does not say why."""
    least, effect = SWITCHED_OFF[name]
    if value >= least and not reason.strip():
        raise QgateError(
            f"limit {name} = {value!r} switches that kind of limit off: {effect}. Set it below "
            f'{least:g}, or add the reason: reason = "…".'
        )
