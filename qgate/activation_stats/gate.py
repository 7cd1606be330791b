"""Gates of a model's activations: where outliers are, and how large.

They are accepted for a model by its name and not by its weights: another training may have made
them harder to quantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qgate.activation_stats.compute import activations
from qgate.activation_stats.record import LayerActivations
from qgate.activation_stats.settings import GATED
from qgate.baselines import Origin
from qgate.baselines.origin import COLLECTED
from qgate.errors import QgateError, unknown
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_subject import ModelSubject
from qgate.gate.measuring.pictures import log2_or_least
from qgate.gate.policy import Policy
from qgate.gate.sessions import GateSession, Outcome, gate
from qgate.gate.subjects import Subject
from qgate.metrics import METRICS
from qgate.modes import Mode
from qgate.results.pictures import MagnitudePicture

TITLE = "activations"
"""Name of the accepted record."""
_GATED = tuple(metric.name for metric in METRICS.of("activations"))


class ActivationSubject(Subject):
    """Model whose weights may be others than those that its record was made with."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.model = bench, ModelSubject(bench)
        self.name = f"activations-{self.model.name}"
        self.device, self.options = self.model.device, self.model.options

    def origin(self) -> Origin:
        return replace(self.model.origin(), model=self.name, weights=COLLECTED)

    def layer_of(self, site: str) -> str:
        return self.model.layer_of(site)

    @cached_property
    def tensors(self) -> list[LayerActivations]:
        """Measure all samples in one run for all tests, whatever limits each of them has."""
        model = self.bench.model
        return activations(model, list(model.inputs), settings=GATED).record["layers"]


class ActivationGates(GateSession):
    """Gates of one model's activations; it runs once for all layers."""

    subject: ActivationSubject

    def __init__(self, bench: Bench, baselines: Path, policy: Policy, **options: Any) -> None:
        super().__init__(ActivationSubject(bench), baselines, policy, **options)

    @gate
    def layer(self, suite: str, layer: str) -> Outcome:
        """Judge how large a layer's values are, and how far its outliers reach."""
        rows = self._rows(layer)
        mode = Mode(TITLE, "the model as it is")
        return self.judge(suite, mode, rows, layer, label="model", whole=[layer])

    def _rows(self, layer: str) -> list[Measured]:
        """Measure the inputs and outputs of one layer."""
        bench, layer_of = self.subject.bench, self.subject.layer_of
        if layer not in bench.layers:
            raise unknown(f"layer of {bench.model.name}", layer, bench.layers)
        sites = {
            f"{tensor['module']}:{tensor['role']}": (order, tensor)
            for order, tensor in enumerate(self.subject.tensors)
            if tensor["role"] != "weight"
        }
        if not any(layer_of(site) in bench.layers for site in sites):
            raise QgateError(f"no activations of {bench.model.name} are in one of its layers.")
        return [
            self._row(site, layer, order, tensor)
            for site, (order, tensor) in sites.items()
            if layer_of(site) == layer
        ]

    def _row(self, site: str, layer: str, order: int, tensor: LayerActivations) -> Measured:
        values = tensor["portrait"]
        nonfinite = values["nan"] + values["posinf"] + values["neginf"]
        pictures: tuple[MagnitudePicture, ...] = ()
        if self.plots != "none" and "binades" in values:
            picture = MagnitudePicture(
                kind="magnitudes",
                format="",
                low=values["binades"]["first"],
                counts=list(values["binades"]["counts"]),
                zeros=values.get("zeros", 0),
                nonfinite=nonfinite,
                largest=None,
                smallest=None,
                saturated=0,
                flushed=0,
            )
            pictures = (picture,)
        return Measured(
            site=site,
            layer=layer,
            scope="forward",
            values=measures(tensor),
            order=order,
            nonfinite=nonfinite,
            gated=_GATED,
            why=dict.fromkeys(_GATED, ""),
            pictures=pictures,
        )


def measures(tensor: LayerActivations) -> dict[str, float | None]:
    """Return logarithms of sizes, so that a drift is a factor.

    log2_amax       of the largest magnitude, mean over samples
    log2_median     of the median of the largest magnitudes of tokens
    log2_outliers   of one more than the tokens beyond the threshold, mean over samples
    log2_channel    of the largest channel over the median channel
    log2_tail       of the fourth root of the fourth standardized moment: 0.4 for a normal
                    distribution
    """
    tokens: Mapping[str, Any] = (tensor.get("magnitude") or {}).get("token") or {}
    outliers: Mapping[str, Any] = tensor.get("outliers") or {}
    kurtosis = tensor["portrait"].get("kurtosis")
    return {
        "log2_amax": log2_or_least(next(iter(tokens.get("top", ())), None)),
        "log2_median": log2_or_least(tokens.get("median")),
        "log2_outliers": log2_or_least(1 + outliers.get("mean_count", 0.0)),
        "log2_channel": log2_or_least(outliers.get("channel_ratio")),
        "log2_tail": log2_or_least(None if kurtosis is None else (kurtosis + 3) ** 0.25),
        "outlier_tokens": outliers.get("mean_count"),
        "kurtosis": kurtosis,
    }
