"""What was measured at one site, and which of its numbers are compared with accepted ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from qgate.errors import QgateError, unknown
from qgate.metrics import METRICS, PARTS, Metric

Scope = Literal["local", "carried", "forward", "backward", "task", "sweep"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

_PART_ORDER = {part.name: place for place, part in enumerate(PARTS)}
_TENSOR_METRICS = ("relative_mse", "one_minus_correlation")
_GATED: Mapping[Scope, tuple[str, ...]] = {
    "local": _TENSOR_METRICS,
    "carried": _TENSOR_METRICS,
    "forward": _TENSOR_METRICS,
    "backward": _TENSOR_METRICS,
    "task": tuple(each.name for each in METRICS.of("task")),
    "sweep": ("relative_mse",),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The numbers of one comparison.

    values               metric → value; None where it is not defined
    order                place of the site in the order of execution
    nonfinite            NaN and infinities of actual; nonfinite_reference those of the reference
    ideal                relative_mse of an ideal quantizer of the declared format on this tensor;
                         None where nothing is quantized here
    quantizer            name of that format
    floor                measured noise floor, a relative MSE
    grain                what one element is of a share that counts elements
    accepted             the accepted errors, by metric; None where there are none yet
    texts                metrics that are a text, such as what quantizes the site
    accepted_texts       the accepted texts, by metric
    worst_channel        values of the worst channel, named `metric@worst_channel` in `accepted`
    without_massive      values without massive activations, named `metric@without_massive`; those
                         of the whole where there are none
    gated                metrics that need an accepted value; None means those of the scope
    why                  metric → in words, what its value comes from
    pictures             plain data to draw it from (qgate.results.pictures), which nothing judges
    """

    site: str
    layer: str
    scope: Scope
    values: Mapping[str, float | None]
    order: int
    nonfinite: int
    nonfinite_reference: int = 0
    ideal: Mapping[str, float] | None = None
    quantizer: str = ""
    floor: float = 0.0
    grain: float = 0.0
    accepted: Mapping[str, float] | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    accepted_texts: Mapping[str, str] = field(default_factory=dict)
    worst_channel: Mapping[str, float | None] | None = None
    without_massive: Mapping[str, float | None] | None = None
    gated: tuple[str, ...] | None = None
    why: Mapping[str, str] | None = None
    pictures: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise unknown(f"scope of {self.site}", self.scope, SCOPES)
        if not (math.isfinite(self.floor) and self.floor >= 0):
            raise QgateError(
                f"noise floor {self.floor} at {self.site} is not allowed: it is finite, from 0."
            )
        if not 0 <= self.grain <= 1:
            raise QgateError(f"grain {self.grain} at {self.site} is no share: it is from 0 to 1.")
        for name in ("nonfinite", "nonfinite_reference"):
            if getattr(self, name) < 0:
                raise QgateError(f"{name} {getattr(self, name)} at {self.site} is no count.")

    @property
    def key(self) -> tuple[str, str]:
        return self.site, self.scope

    @property
    def compared(self) -> tuple[str, ...]:
        """Metrics to hold against accepted values: those that must, and all that were accepted."""
        must = _GATED[self.scope] if self.gated is None else self.gated
        return tuple(
            dict.fromkeys([*must, *sorted(self.accepted or {}), *sorted(self.accepted_texts)])
        )

    def value(self, metric: str) -> float | None:
        """A value by name, also of a part; 1 - correlation is derived where it is not given."""
        known = METRICS.find(metric)
        values = (getattr(self, known.part) or {}) if known.part else self.values
        name = known.base or known.name
        if known.complement_of and name not in values:
            whole = values.get(known.complement_of)
            return None if whole is None else 1.0 - whole
        return values.get(name)

    def part_metrics(self) -> list[str]:
        """The metrics of the parts that could be accepted: those of the scope.

        A part without massive activations that is the whole needs no entry of its own.
        """
        must = _GATED[self.scope] if self.gated is None else self.gated
        parts = [part for metric in must for part in METRICS.parts_of(metric)]
        return [
            part.name
            for part in sorted(parts, key=lambda each: _PART_ORDER[each.part])
            if is_finite(self.value(part.name)) and not self._is_whole(part)
        ]

    def _is_whole(self, part: Metric) -> bool:
        return part.part == "without_massive" and self.value(part.name) == self.value(part.base)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Measured:
        names = [each.name for each in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise unknown("field of a measured site", name, names)
        gated, pictures = given.get("gated"), tuple(given.get("pictures", ()))
        whole = {"gated": None if gated is None else tuple(gated), "pictures": pictures}
        return cls(**{**given, **whole})


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
