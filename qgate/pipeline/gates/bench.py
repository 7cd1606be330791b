"""One model on the bench: every forward pass once, and what the gate wants to know of it.

A mode is measured in three runs. Free-running, the outputs of all blocks: the error carried along.
With every block given the reference's input: the error made in each block. And a short stretch of
text with every site given the reference's tensor, against the error of an ideal quantizer there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from qgate.capture import Capture
from qgate.capture.running import run
from qgate.errors import QgateError
from qgate.models import Model, Site
from qgate.modes import Calibration, Mode, Quantized, apply
from qgate.pipeline.gates.error_pictures import error_picture
from qgate.pipeline.gates.ideals import TAPS, ideal_tensors
from qgate.pipeline.gates.passes import (
    fed,
    flow,
    linear_weights,
    outer_tensors,
    short_layer,
    shortened,
)
from qgate.pipeline.gates.site_errors import (
    Pairs,
    SiteErrors,
    compare,
    massive_from,
    without_massive,
    worst_channel,
)
from qgate.pipeline.setups import ModelSetup

__all__ = ["Bench", "SiteErrors"]

FP32 = "fp32"
_BACKWARD_SAMPLES = 2
# Bytes of logits that wait for the task suite: those of every mode of a small model (35 modes of
# tiny-mamba take 180 MB); of a large vocabulary they are computed again.
_LOGITS = 1 << 28


@dataclass
class Bench:
    """A model with everything computed so far; modes are measured once and kept.

    `reference_mode` is what modes are compared with. Captures are kept by the mode, the basis and
    the kind of pass, so that those of FP32 and of another reference never stand for each other.
    With `pictures` errors also leave what is needed to draw them.
    """

    setup: ModelSetup
    reference_mode: str = FP32
    pictures: bool = False
    progress: Callable[[str], None] = lambda _text: None
    _model: Model | None = None
    _calibration: Calibration | None = None
    _captures: dict[tuple[str, str, str], Capture] = field(default_factory=dict)
    _beyond: dict[tuple[str, str], float] = field(default_factory=dict)
    _measured: dict[str, list[SiteErrors]] = field(default_factory=dict)
    _quantized: dict[str, Quantized] = field(default_factory=dict)
    _gradients: dict[str, list[SiteErrors]] = field(default_factory=dict)
    _logits: dict[str, list[Tensor]] = field(default_factory=dict)

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

    # What modes are compared with -----------------------------------------------------------------

    @cached_property
    def _chosen(self) -> Mode | None:
        """The mode that is the reference, None for FP32."""
        found = self.setup.select(self.reference_mode, self.model)
        if len(found) != 1:
            names = ", ".join(mode.name for mode in found)
            raise QgateError(
                f"reference {self.reference_mode!r} means {len(found)} modes ({names}): name one."
            )
        return None if found[0].is_reference else found[0]

    def reference_basis(self) -> str | None:
        """The basis of the mode that is the reference; None for FP32, which exists in all."""
        return None if self._chosen is None else self._chosen.basis

    def _reference_model(self, basis: str) -> Model:
        if self._chosen is None:
            return self.model.in_basis(basis)
        if self._chosen.basis != basis:
            raise QgateError(
                f"reference {self._chosen.name!r} is in basis {self._chosen.basis!r}, and what is "
                f"compared with it in {basis!r}: choose modes of one basis."
            )
        return self.quantized(self._chosen).model

    def fp32(self, basis: str) -> Capture:
        """Inputs and outputs of all blocks, and the logits, of the FP32 model in a basis."""
        return self._outer(FP32, self.model.in_basis(basis))

    def reference(self, basis: str) -> Capture:
        """The same of what modes are compared with."""
        if self._chosen is None:
            return self.fp32(basis)
        model = self._reference_model(basis)
        return self._outer(self._chosen.name, model, _together(self._chosen))

    def _outer(self, name: str, model: Model, together: bool = True) -> Capture:
        key = (name, model.basis, "outer")
        if key not in self._captures:
            self.progress(f"reference {name} of {model.name}, basis {model.basis}")
            self._captures[key] = outer_tensors(model, self.model.inputs, together=together)
        return self._captures[key]

    def fp32_gradients(self, basis: str) -> dict[str, list[Tensor]]:
        """The gradients of the FP32 model at the outputs of blocks and at weights."""
        return self._backward(FP32, self.model.in_basis(basis))

    def reference_gradients(self, basis: str) -> dict[str, list[Tensor]]:
        """The same of what modes are compared with."""
        if self._chosen is None:
            return self.fp32_gradients(basis)
        return self._backward(self._chosen.name, self._reference_model(basis))

    def _backward(self, name: str, model: Model) -> dict[str, list[Tensor]]:
        key = (name, model.basis, "gradients")
        if key not in self._captures:
            self._captures[key] = self._backward_run(model)
        return self._captures[key].gradients

    def _backward_run(self, model: Model) -> Capture:
        samples = self.model.inputs[:_BACKWARD_SAMPLES]
        return run(model, self._backward_sites(model), samples=samples, gradients=True)

    def _backward_sites(self, base: Model) -> list[Site]:
        return [
            site
            for site in base.sites()
            if self.model.layer_of(site.module)
            and (site.kind, site.port) in (("block", "output"), ("linear", "weight"))
        ]

    # What a mode makes of it ----------------------------------------------------------------------

    def measure(self, mode: Mode) -> list[SiteErrors]:
        """All errors of a mode, sites in the order of execution."""
        if mode.name not in self._measured:
            quantized = self.quantized(mode)
            self.progress(f"mode {mode.name} of {self.model.name}")
            reference = self.reference(quantized.model.basis)
            inputs, together = self.model.inputs, _together(mode)
            carried = outer_tensors(quantized.model, inputs, together=together)
            self._keep_logits(mode, carried)
            local = outer_tensors(quantized.model, inputs, reference, together)
            found = self._blocks("carried", carried, reference)
            found += self._blocks("local", local, reference)
            found += self.site_errors(quantized)
            self._measured[mode.name] = sorted(found, key=lambda each: (each.order, each.scope))
        return self._measured[mode.name]

    def outputs(self, mode: Mode | None) -> list[Tensor]:
        """The logits of every sample, of a mode or of what modes are compared with."""
        if mode is None:
            return self.reference(self.reference_basis() or "plain").tensors["logits"]
        if mode.name in self._logits:
            return self._logits[mode.name]
        # The very pass that `measure` makes: the same bits, whichever of the two comes first.
        model = self.quantized(mode).model
        return outer_tensors(model, self.model.inputs, together=_together(mode)).tensors["logits"]

    def _keep_logits(self, mode: Mode, carried: Capture) -> None:
        kept = [*self._logits.values(), carried.tensors["logits"]]
        if sum(t.numel() * t.element_size() for ts in kept for t in ts) <= _LOGITS:
            self._logits[mode.name] = carried.tensors["logits"]

    def gradients(self, mode: Mode) -> list[SiteErrors]:
        """The gradients of a mode against those of the reference."""
        if mode.name not in self._gradients:
            quantized = self.quantized(mode)
            self.progress(f"gradients of {self.model.name} in mode {mode.name}")
            expected = self.reference_gradients(quantized.model.basis)
            actual = self._backward_run(quantized.model).gradients
            self._gradients[mode.name] = [
                self._row(
                    site.name,
                    "backward",
                    list(zip(actual[site.name], expected[site.name], strict=True)),
                )
                for site in self._backward_sites(self.model.in_basis(quantized.model.basis))
            ]
        return self._gradients[mode.name]

    def _blocks(self, scope: str, actual: Capture, reference: Capture) -> list[SiteErrors]:
        found = []
        for layer in self.model.layers:
            site = f"{layer}:output"
            key = (reference.basis, site)
            if key not in self._beyond:
                self._beyond[key] = massive_from(reference[site])
            pairs = list(zip(actual[site], reference[site], strict=True))
            found.append(self._row(site, scope, pairs, beyond=self._beyond[key]))
        return found

    @cached_property
    def _order(self) -> dict[str, int]:
        return {site.name: place for place, site in enumerate(self.model.sites())}

    def _row(
        self,
        site: str,
        scope: str,
        pairs: Pairs,
        *,
        beyond: float | None = None,
        ideal: float | None = None,
        quantizer: str = "",
        pictures: bool = True,
    ) -> SiteErrors:
        """One comparison; with `beyond`, also by channel and without massive elements."""
        found = compare(pairs, channels=beyond is not None)
        return SiteErrors(
            site,
            short_layer(self.model.layer_of(site.partition(":")[0])),
            scope,
            self._order.get(site, 0),
            found.metrics(),
            found.actual_non_finite.total,
            found.reference_non_finite.total,
            ideal,
            quantizer,
            worst_channel(found),
            None if beyond is None else without_massive(found, pairs, beyond),
            (error_picture(pairs, found),) if self.pictures and pictures else (),
        )

    def site_errors(
        self, quantized: Quantized, declared: Quantized | None = None, *, pictures: bool = True
    ) -> list[SiteErrors]:
        """Every quantized site on a short text, fed by the reference, against the ideal there.

        The ideal is that of the mode itself, or of what was declared in its place: then FP32 is
        what it is compared with, whatever the reference is. Against another mode there is no ideal.
        On a grid that both share only ties differ, and a budget would judge that noise. What
        nobody will see drawn needs no `pictures`.
        """
        basis = quantized.model.basis
        base = self.model.in_basis(basis)
        by_fp32 = declared is not None or self._chosen is None
        true = base if by_fp32 else self._reference_model(basis)
        sample = shortened(self.model.inputs[0])
        wanted = self._compared_sites(quantized, base)
        inputs = [s for s in base.sites() if s.kind == "block" and s.port == "input"]
        flowing = flow(true, {*wanted, *inputs, *linear_weights(base)}, sample)
        actual = fed(quantized, wanted, sample, flowing)
        ideal: dict[str, float] = {}
        named = {entry.site: entry.does for entry in quantized.plan.entries}
        if by_fp32:
            meant = declared or self._meant(quantized)
            ideal = self._ideal_errors(meant, base, flowing)
            if meant is not quantized and quantized.mode.own:
                # A kernel quantizes inside: only what it returns can be looked at.
                ideal = {site: error for site, error in ideal.items() if site.endswith(":output")}
                named = dict.fromkeys(ideal, meant.mode.name)
        return [
            self._row(
                site.name,
                "local",
                [(actual[site.name], flowing[site.name])],
                beyond=massive_from([flowing[site.name]]),
                ideal=ideal.get(site.name),
                quantizer=named.get(site.name, ""),
                pictures=pictures,
            )
            for site in wanted
        ]

    def _meant(self, quantized: Quantized) -> Quantized:
        """What a mode is to compute: what its rules say, or the mode that a kernel stands for."""
        meant = quantized.mode.stands_for
        return self.quantized(self.setup.select(meant, self.model)[0]) if meant else quantized

    def _ideal_errors(
        self, meant: Quantized, base: Model, flowing: dict[str, Tensor]
    ) -> dict[str, float]:
        scales = self._calibration if meant.mode.calibrated else None
        ideal = ideal_tensors(meant.mode, meant.plan, base, flowing, scales)
        return {site: _relative(ideal[site], flowing[site]) for site in ideal if site in flowing}

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


def _together(mode: Mode) -> bool:
    """Whether a sample is the same in a batch as alone."""
    return mode.causal and not mode.own


def _touched(site: Site, planned: set[str]) -> bool:
    return any(f"{site.module}:{port}" in planned for port in ("input", "weight", site.port))


def _relative(ideal: np.ndarray[Any, Any], reference: Tensor) -> float:
    true = reference.detach().float().cpu().numpy().astype(np.float64)
    energy = float(np.square(true).sum())
    error = float(np.square(ideal.astype(np.float64).reshape(true.shape) - true).sum())
    return error / energy if energy else 0.0
