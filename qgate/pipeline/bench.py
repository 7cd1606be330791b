"""One model on the bench: every forward pass once, and what the gate wants to know of it.

A mode is measured in three runs. Free-running, the outputs of all blocks: the error carried along.
With every block given the reference's input: the error made in each block. And a short stretch of
text with every site given the reference's tensor, against the error of an ideal quantizer there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.capture import Capture
from qgate.capture.running import run
from qgate.errors import QgateError
from qgate.models import Model, Site
from qgate.modes import Calibration, Mode, Quantized, apply
from qgate.pipeline.ideals import TAPS, ideal_tensors
from qgate.pipeline.passes import fed, flow, linear_weights, outer_tensors, short_layer, shortened
from qgate.pipeline.setups import ModelSetup
from qgate.stats import ErrorStats, errors

_BACKWARD_SAMPLES = 2
METRICS = ("relative_mse", "correlation", "mse", "mae", "max_abs", "sqnr_db", "cosine")


@dataclass(frozen=True)
class SiteErrors:
    """The errors at one site in one scope, as plain numbers."""

    site: str
    layer: str
    scope: str
    order: int
    values: dict[str, float]
    nonfinite: int
    nonfinite_reference: int
    ideal: float | None = None
    quantizer: str = ""
    worst_channel: float | None = None


@dataclass
class Bench:
    """A model with everything computed so far; modes are measured once and kept."""

    setup: ModelSetup
    reference_mode: str = "fp32"
    progress: Callable[[str], None] = lambda _text: None
    _model: Model | None = None
    _calibration: Calibration | None = None
    _references: dict[str, Capture] = field(default_factory=dict)
    _measured: dict[str, list[SiteErrors]] = field(default_factory=dict)
    _quantized: dict[str, Quantized] = field(default_factory=dict)
    _gradients: dict[str, list[SiteErrors]] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        if self._model is None:
            self.progress(f"loading {self.setup.model}")
            self._model = self.setup.load()
        return self._model

    @property
    def layers(self) -> list[str]:
        """The names of the blocks, without what they have in common."""
        return [short_layer(name) for name in self.model.layers]

    @property
    def calibration(self) -> Calibration:
        if self._calibration is None:
            self.progress(f"calibrating {self.model.name}")
            self._calibration = self.setup.calibrate(self.model)
        return self._calibration

    def quantized(self, mode: Mode) -> Quantized:
        """The model in a mode."""
        if mode.name not in self._quantized:
            scales = self.calibration if mode.calibrated else None
            self._quantized[mode.name] = apply(mode, self.model, scales)
        return self._quantized[mode.name]

    def ran(self) -> dict[str, Quantized]:
        """The modes that were applied so far."""
        return dict(self._quantized)

    def reference(self, basis: str) -> Capture:
        """Inputs and outputs of all blocks, and the logits, of the reference in a basis."""
        if basis not in self._references:
            model = self._reference_model(basis)
            self.progress(f"reference of {model.name}, basis {basis}")
            self._references[basis] = outer_tensors(model, model.inputs)
        return self._references[basis]

    def _reference_model(self, basis: str) -> Model:
        if self.reference_mode == "fp32":
            return self.model.in_basis(basis)
        mode = self.setup.select(self.reference_mode, self.model)[0]
        quantized = self.quantized(mode)
        if quantized.plan.basis != basis:
            raise QgateError(
                f"reference {mode.name!r} is in basis {quantized.plan.basis!r}, and what is "
                f"compared with it in {basis!r}: choose modes of one basis."
            )
        return quantized.model

    def measure(self, mode: Mode) -> list[SiteErrors]:
        """All errors of a mode, sites in the order of execution."""
        if mode.name not in self._measured:
            quantized = self.quantized(mode)
            self.progress(f"mode {mode.name} of {self.model.name}")
            basis = quantized.model.basis
            reference = self.reference(basis)
            together = mode.causal and not mode.own
            carried = outer_tensors(quantized.model, self.model.inputs, together=together)
            local = outer_tensors(quantized.model, self.model.inputs, reference, together)
            found = self._blocks("carried", carried, reference)
            found += self._blocks("local", local, reference)
            found += self.site_errors(quantized)
            self._measured[mode.name] = sorted(found, key=lambda each: (each.order, each.scope))
        return self._measured[mode.name]

    def outputs(self, mode: Mode | None) -> list[Tensor]:
        """The logits of every sample, of a mode or of the reference."""
        if mode is None:
            return self.reference("plain").tensors["logits"]
        model = self.quantized(mode).model
        with torch.no_grad():
            return [model(sample) for sample in self.model.inputs]

    def reference_gradients(self, basis: str) -> dict[str, list[Tensor]]:
        """The gradients of the reference at the outputs of blocks and at weights."""
        key = f"{basis} gradients"
        if key not in self._references:
            base = self._reference_model(basis)
            samples = self.model.inputs[:_BACKWARD_SAMPLES]
            sites = self._backward_sites(base)
            self._references[key] = run(base, sites, samples=samples, gradients=True)
        return self._references[key].gradients

    def _backward_sites(self, base: Model) -> list[Site]:
        return [
            site
            for site in base.sites()
            if self.model.layer_of(site.module)
            and (site.kind, site.port) in (("block", "output"), ("linear", "weight"))
        ]

    def gradients(self, mode: Mode) -> list[SiteErrors]:
        """The gradients of a mode against those of the reference."""
        if mode.name not in self._gradients:
            quantized = self.quantized(mode)
            self.progress(f"gradients of {self.model.name} in mode {mode.name}")
            basis = quantized.model.basis
            expected = self.reference_gradients(basis)
            sites = self._backward_sites(self._reference_model(basis))
            samples = self.model.inputs[:_BACKWARD_SAMPLES]
            actual = run(quantized.model, sites, samples=samples, gradients=True).gradients
            order = self._order()
            found = []
            for site in sites:
                pairs = list(zip(actual[site.name], expected[site.name], strict=True))
                layer = short_layer(self.model.layer_of(site.module))
                place = order.get(site.name, 0)
                found.append(_plain(site.name, layer, "backward", place, _errors(pairs)))
            self._gradients[mode.name] = found
        return self._gradients[mode.name]

    def _blocks(self, scope: str, actual: Capture, reference: Capture) -> list[SiteErrors]:
        order = self._order()
        found = []
        for layer in self.model.layers:
            site = f"{layer}:output"
            pairs = list(zip(actual[site], reference[site], strict=True))
            total = _errors(pairs, channel_axis=-1)
            found.append(_plain(site, short_layer(layer), scope, order.get(site, 0), total))
        return found

    def _order(self) -> dict[str, int]:
        return {site.name: place for place, site in enumerate(self.model.sites())}

    def site_errors(
        self, quantized: Quantized, declared: Quantized | None = None
    ) -> list[SiteErrors]:
        """Every quantized site on a short text, fed by the reference, against the ideal there.

        The ideal is that of the mode itself, or of what was declared in its place.
        """
        meant = quantized if declared is None else declared
        base = self._reference_model(quantized.model.basis)
        sample = shortened(self.model.inputs[0])
        wanted = self._compared_sites(quantized, base)
        inputs = [s for s in base.sites() if s.kind == "block" and s.port == "input"]
        flowing = flow(base, {*wanted, *inputs, *linear_weights(base)}, sample)
        actual = fed(quantized, wanted, sample, flowing)
        scales = self._calibration if quantized.mode.calibrated else None
        ideal = ideal_tensors(meant.mode, meant.plan, base, flowing, scales)
        named = {entry.site: entry.does for entry in quantized.plan.entries}
        order = self._order()
        found = []
        for site in wanted:
            name = site.name
            made = errors(actual[name].float(), flowing[name].float(), channel_axis=-1)
            best = _relative(ideal[name], flowing[name]) if name in ideal else None
            layer = short_layer(self.model.layer_of(site.module))
            found.append(
                _plain(name, layer, "local", order.get(name, 0), made, best, named.get(name, ""))
            )
        return found

    def _compared_sites(self, quantized: Quantized, base: Model) -> list[Site]:
        """Sites inside blocks that the mode quantizes, and the outputs of linear layers there."""
        head = set(self.model.head or ())
        planned = {entry.site for entry in quantized.plan.entries}
        everything = bool({"*"} & planned)
        taps = quantized.mode.choices is not None
        found = []
        for site in base.sites():
            if not self.model.layer_of(site.module) or site.module in head:
                continue
            leaf = f"{site.module.rpartition('.')[2]}:{site.port}"
            if taps:
                wanted = leaf in TAPS and ".mixer." in site.module
            else:
                wanted = site.name in planned or (site.kind == "linear" and site.port != "weight")
                wanted = wanted and (everything or _touched(site, planned))
            if wanted:
                found.append(site)
        return found


def _touched(site: Site, planned: set[str]) -> bool:
    return any(f"{site.module}:{port}" in planned for port in ("input", "weight", site.port))


def _relative(ideal: np.ndarray[Any, Any], reference: Tensor) -> float:
    true = reference.detach().float().cpu().numpy().astype(np.float64)
    energy = float(np.square(true).sum())
    error = float(np.square(ideal.astype(np.float64).reshape(true.shape) - true).sum())
    return error / energy if energy else 0.0


def _plain(
    site: str,
    layer: str,
    scope: str,
    order: int,
    found: ErrorStats,
    ideal: float | None = None,
    quantizer: str = "",
) -> SiteErrors:
    metrics = found.metrics()
    return SiteErrors(
        site,
        layer,
        scope,
        order,
        {name: metrics[name] for name in METRICS if name in metrics},
        found.actual_non_finite.total,
        found.reference_non_finite.total,
        ideal,
        quantizer,
        _worst_channel(found),
    )


def _errors(pairs: list[tuple[Tensor, Tensor]], channel_axis: int | None = None) -> ErrorStats:
    """The errors of all pairs together."""
    if not pairs:
        raise QgateError("nothing was compared: there is no pair of tensors.")
    parts = [errors(a.float(), r.float(), channel_axis=channel_axis) for a, r in pairs]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _worst_channel(found: ErrorStats) -> float | None:
    """The largest squared error of a channel over the mean energy of all of them."""
    channels = found.channels
    if channels is None:
        return None
    energy = float(channels.sum_square_reference.mean())
    return float(channels.sum_square_error.max()) / energy if energy else None
