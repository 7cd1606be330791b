"""Numbers measured at one site, and those of them that are compared with accepted ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qgate.errors import QgateError, unknown
from qgate.metrics import METRICS, PARTS, Metric, sample_number
from qgate.results.kinds import SCOPES, Scope, scope_of

_PART_ORDER = {part.name: index for index, part in enumerate(PARTS)}
OTHER_VALUES = "gives other values"
"""How the fault of a module begins that does not agree with itself; its cause says more."""
UNNAMED_FAULT = "is not what the definition gives"
"""Words for other values than those of the definition, where nothing says why they differ."""


@dataclass(frozen=True)
class Conformance:
    """Quantized values held at what their definition gives, or at what other inputs gave.

    metric     `differing_share` of the definition, `disagreeing_share` of a module with itself
    values     how many values were looked at; none is a failure
    differing  how many of them are other ones
    about      what was looked at and what was left out, or what is wrong
    """

    metric: str
    values: int
    differing: int
    about: str

    @property
    def share(self) -> float:
        return self.differing / self.values if self.values else 1.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Numbers of one comparison.

    scope                the name of one of `SCOPES`
    values               metric → value; None where it is not defined
    order                place of the site in the order of execution
    nonfinite            NaN and infinities of actual; nonfinite_reference those of the reference
    ideal                relative_mse of an ideal quantizer of the declared format on this tensor;
                         None where nothing is quantized here
    quantizer            name of that format
    floor                measured noise floor of relative and counted metrics; of an isolated error
                         its limit
    grain                what one element is of a share that counts elements
    accepted             the accepted errors, by metric; None where there are none yet
    texts                metrics that are a text, such as what quantizes the site
    accepted_texts       the accepted texts, by metric
    elsewhere            metrics accepted with other arithmetic, each with the device that it is of
    device_room          by metric, how much this device's own arithmetic adds to the error, as
                         measured in this run; it counts beside what another kind of device
                         accepted. Attention in another arithmetic that is proven right has it, too
    parts                values of parts of the tensor, named `metric@worst_channel` in `accepted`;
                         those without massive activations are of the whole where there are none
    gated                metrics that need an accepted value; None means those of the scope
    why                  metric → in words, what its value comes from; "nothing" → why nothing that
                         was measured counts
    conformance          quantized values that were held bit for bit
    pictures             plain data to draw it from (qgate.results.pictures), which nothing judges
    positions            of each sample how many positions were compared; 0 without such an axis
    channels             of an isolated error the width of a token; 0 where nothing was compared
    """

    site: str
    layer: str
    scope: str
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
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    device_room: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    gated: tuple[str, ...] | None = None
    why: Mapping[str, str] | None = None
    conformance: tuple[Conformance, ...] = ()
    pictures: tuple[Mapping[str, Any], ...] = ()
    positions: tuple[int, ...] = ()
    channels: int = 0

    def __post_init__(self) -> None:
        if self.scope not in SCOPES.entries:
            raise unknown(f"scope of {self.site}", self.scope, SCOPES.names())
        if not (math.isfinite(self.floor) and self.floor >= 0):
            raise QgateError(
                f"noise floor {self.floor} at {self.site} is not allowed: it is finite, from 0."
            )
        if not 0 <= self.grain <= 1:
            raise QgateError(f"grain {self.grain} at {self.site} is no share: it is from 0 to 1.")
        for name, room in self.device_room.items():
            if not (math.isfinite(room) and room >= 0):
                raise QgateError(
                    f"device_room {room} of {name} at {self.site} is not allowed: it is finite, "
                    "from 0."
                )
        for name in ("nonfinite", "nonfinite_reference"):
            if getattr(self, name) < 0:
                raise QgateError(f"{name} {getattr(self, name)} at {self.site} is no count.")

    @property
    def key(self) -> tuple[str, str]:
        return self.site, self.scope

    @property
    def about(self) -> Scope:
        """Return what is compared with what, and how that is judged."""
        return scope_of(self.scope)

    @property
    def carried_tokens(self) -> int:
        """Return over how many tokens an error is a mean that blocks carry along; 0 of others."""
        return sum(self.positions) if self.about.over_tokens else 0

    @property
    def compared(self) -> tuple[str, ...]:
        """Return the metrics with accepted values: those that must have one, and all that have.

        An update writes the parts of a site with its other metrics, so one that is missing where
        the site was accepted was removed.
        """
        parts = self.part_metrics() if self.accepted else []
        return tuple(
            dict.fromkeys(
                [*self._must, *parts, *sorted(self.accepted or {}), *sorted(self.accepted_texts)]
            )
        )

    @property
    def _must(self) -> tuple[str, ...]:
        return self.about.gated if self.gated is None else self.gated

    def value(self, metric: str) -> float | None:
        """Return a value by name, also of a part; 1 - correlation is derived if need be."""
        about = METRICS.find(metric)
        values = self.parts.get(about.part, {}) if about.part else self.values
        name = about.base or about.name
        if about.complement_of and name not in values:
            whole = values.get(about.complement_of)
            return None if whole is None else 1.0 - whole
        return values.get(name)

    def part_metrics(self) -> list[str]:
        """Return the metrics of the parts that could be accepted: those of the scope.

        A part without massive activations that is the whole needs no entry of its own.
        """
        parts = [part for metric in self._must for part in METRICS.parts_of(metric)]
        return [
            part.name
            for part in sorted(parts, key=lambda part: _PART_ORDER[part.part])
            if is_finite(self.value(part.name)) and not self._is_whole(part)
        ]

    def sample_figures(self) -> dict[int, str]:
        """Return the metrics of single samples by the number of the sample."""
        return {
            number: f"{metric}@{part}"
            for part, values in self.parts.items()
            if (number := sample_number(part)) is not None
            for metric in values
        }

    def accepted_samples(self) -> dict[int, float]:
        """Return the accepted figures of single samples by the number of the sample."""
        return {
            number: value
            for name, value in (self.accepted or {}).items()
            if (number := sample_number(METRICS.find(name).part)) is not None
        }

    def _is_whole(self, part: Metric) -> bool:
        """Tell if a part without massive activations is the whole, to the noise of the site."""
        if part.part != "without_massive":
            return False
        value, whole = self.value(part.name), self.value(part.base)
        return value is not None and whole is not None and abs(value - whole) <= self.floor


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
