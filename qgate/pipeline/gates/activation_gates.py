"""The activations of a model under the gate: where outliers are, and how large.

They are accepted for a model by its name and not for its weights: what is asked is whether another
training has made them harder to quantize.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qgate.activation_stats.compute import activations
from qgate.activation_stats.record import LayerActivations
from qgate.baselines import Origin, ReferenceTensor
from qgate.baselines.origin import COLLECTED
from qgate.errors import QgateError, unknown
from qgate.gate import Measured, Policy
from qgate.metrics import METRICS
from qgate.modes import Mode
from qgate.pipeline.gates.bench import Bench
from qgate.pipeline.gates.judging import Judging, Outcome
from qgate.pipeline.gates.subjects import ModelSubject
from qgate.results.pictures import MagnitudePicture

if TYPE_CHECKING:
    from qgate.storage.places import Place

TITLE = "activations"
"""What the accepted record is called."""
_LEAST = -200.0
_GATED = tuple(each.name for each in METRICS.of("activations"))
_ANALYSES: dict[str, Any] = {
    "visualization.enabled.magnitude_input": True,
    "visualization.enabled.magnitude_output": True,
    "visualization.enabled.outlier_layer_wise": True,
    "smoothing.enabled": False,
    "formats": ["fp8_e4m3"],
}


class ActivationSubject(ModelSubject):
    """A model whose weights may be others than those that its record was made with."""

    @property
    def name(self) -> str:
        return f"activations-{super().name}"

    @property
    def bases(self) -> Sequence[str]:
        return ()

    @property
    def is_calibrated(self) -> bool:
        return False

    def origin(self) -> Origin:
        return replace(super().origin(), model=self.name, weights=COLLECTED)

    def title(self, mode: str) -> str:
        return mode

    def references(self, basis: str) -> dict[str, ReferenceTensor]:
        raise unknown(f"basis of {self.name}", basis, [])


class ActivationGates(Judging):
    """The gates of one model's activations; it runs once for all layers."""

    subject: ActivationSubject

    def __init__(self, bench: Bench, baselines: Place, policy: Policy, **how: Any) -> None:
        super().__init__(ActivationSubject(bench), baselines, policy, **how)

    def activations(self, suite: str, layer: str) -> Outcome:
        """How large the values of a layer's tensors are, and how far its outliers reach."""
        here = self._by_layer.get(layer)
        if here is None:
            raise unknown(f"layer of {self.subject.bench.model.name}", layer, self._by_layer)
        mode = Mode(TITLE, "the model as it is")
        return self.judge(suite, mode, here, layer, title=TITLE, label="model", whole=[layer])

    def _again(self, _label: str, _name: str) -> list[tuple[str, str]]:
        return []

    @cached_property
    def _by_layer(self) -> dict[str, list[Measured]]:
        """What one run of all samples measured, once and for all tests."""
        bench = self.subject.bench
        made = activations(bench.model, list(bench.model.inputs), **_ANALYSES)
        found: dict[str, list[Measured]] = {layer: [] for layer in bench.layers}
        for order, each in enumerate(made.record["layers"]):
            site = f"{each['module']}:{each['role']}"
            layer = self.subject.layer_of(site)
            if layer in found and each["role"] != "weight":
                drawn = _magnitudes(each) if self.plots != "none" else ()
                found[layer].append(_row(site, layer, each, order, drawn))
        if not any(found.values()):
            raise QgateError(f"no activations of {bench.model.name} are in one of its layers.")
        return found


def _magnitudes(told: LayerActivations) -> tuple[MagnitudePicture, ...]:
    """Where the values lie; no format is asked about."""
    portrait = told["portrait"]
    if "binades" not in portrait:
        return ()
    picture = MagnitudePicture(
        kind="magnitudes",
        format="",
        low=portrait["binades"]["first"],
        counts=list(portrait["binades"]["counts"]),
        zeros=portrait.get("zeros", 0),
        nonfinite=portrait["nan"] + portrait["posinf"] + portrait["neginf"],
        largest=None,
        smallest=None,
        saturated=0,
        flushed=0,
    )
    return (picture,)


def _row(
    site: str,
    layer: str,
    told: LayerActivations,
    order: int,
    drawn: tuple[MagnitudePicture, ...],
) -> Measured:
    portrait = told["portrait"]
    return Measured(
        site=site,
        layer=layer,
        scope="forward",
        values=measures(told),
        order=order,
        nonfinite=portrait["nan"] + portrait["posinf"] + portrait["neginf"],
        gated=_GATED,
        why=dict.fromkeys(_GATED, ""),
        pictures=drawn,
    )


def measures(told: LayerActivations) -> dict[str, float | None]:
    """Logarithms of sizes, so that a drift is a factor.

    log2_amax       of the largest magnitude, mean over samples
    log2_median     of the median of the largest magnitudes of tokens
    log2_outliers   of one more than the tokens beyond the threshold, mean over samples
    log2_channel    of the largest channel over the median channel
    log2_tail       of the fourth root of the fourth standardized moment: 0.4 for a normal
                    distribution
    """
    tokens: Mapping[str, Any] = (told.get("magnitude") or {}).get("token") or {}
    outliers: Mapping[str, Any] = told.get("outliers") or {}
    kurtosis = told["portrait"].get("kurtosis")
    return {
        "log2_amax": _log2(next(iter(tokens.get("top", ())), None)),
        "log2_median": _log2(tokens.get("median")),
        "log2_outliers": _log2(1 + outliers.get("mean_count", 0.0)),
        "log2_channel": _log2(outliers.get("channel_ratio")),
        "log2_tail": _log2(None if kurtosis is None else (kurtosis + 3) ** 0.25),
        "outlier_tokens": outliers.get("mean_count"),
        "kurtosis": kurtosis,
    }


def _log2(value: float | None) -> float:
    """The logarithm, and far below all numbers there are for what is none or not there."""
    return math.log2(value) if value is not None and value > 0 else _LEAST
