"""A loaded model with what its reference computes: passes that are made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from qgate.capture import Capture
from qgate.capture.running import run
from qgate.device_errors import DeviceMemoryError, in_parts
from qgate.errors import QgateError
from qgate.gate.measuring import passes
from qgate.gate.measuring.compared_sites import backward_sites
from qgate.gate.measuring.passes import (
    capture_sites,
    check_repeatable,
    outer_tensors,
    short_layer,
    shortened,
)
from qgate.models import Model
from qgate.models.long_texts import long_text
from qgate.models.model import inputs_hash
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.models.rows import token_ids
from qgate.modes import Calibration, Mode, Quantized, apply
from qgate.modes.setups import ModelSetup

FP32 = "fp32"
T = TypeVar("T")
_BACKWARD_SAMPLES = 2


@dataclass
class LoadedModel:
    """Model in its modes, and the captures of what they are compared with.

    `reference_mode` is what modes are compared with. Captures are kept by the mode, the basis and
    the kind of pass, so that those of FP32 and of another reference never stand for each other.
    """

    setup: ModelSetup
    reference_mode: str = FP32
    pictures: bool = False
    progress: Callable[[str], None] = lambda _text: None
    at_once: int = field(default_factory=lambda: passes.AT_ONCE)
    _model: Model | None = None
    _captures: dict[tuple[str, str, str], Capture] = field(default_factory=dict)
    _modes: dict[str, Mode] = field(default_factory=dict)
    _quantized: dict[str, Quantized] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        if self._model is None:
            self.progress(f"loading {self.setup.model}")
            self._model = self.setup.load()
            check_repeatable(self._model)
        return self._model

    @property
    def layers(self) -> list[str]:
        """List the names of the blocks, without what they have in common."""
        # Layers that cannot be run by themselves are known after a first run.
        self.model.sites()
        return [self.short_layer(name) for name in self.model.layers]

    def short_layer(self, name: str) -> str:
        """Return `layers.3` for `backbone.layers.3`; the whole name where that means several."""
        short = [short_layer(layer) for layer in self.model.layers]
        return short_layer(name) if len({*short}) == len(short) else name

    def layer_of(self, site: str) -> str:
        """Return the layer of a site or module, without what all layers have in common."""
        return self.short_layer(self.model.layer_of(site.partition(":")[0]))

    @cached_property
    def joins_samples(self) -> bool:
        """True where two samples side by side have twice the rows of one in every outer tensor.

        An exported graph may take samples of one size, and a decoder may have rows behind queries.
        """
        first = shortened(self.model.inputs[0])
        if not isinstance(first, Tensor):
            return False
        try:
            alone, joined = (
                outer_tensors(self.model, [sample]).tensors
                for sample in (first, torch.cat([first, first]))
            )
        except (*LENGTH_REFUSALS, DeviceMemoryError):
            return False
        return all(
            (2 * len(tensor), *tensor.shape[1:]) == of_two.shape
            for site, tensors in alone.items()
            for tensor, of_two in zip(tensors, joined[site], strict=True)
        )

    def in_parts(self, run: Callable[[], T], undo: Callable[[], object] = lambda: None) -> T:
        """Run what takes `at_once` samples at a time, and fewer once they do not fit the device."""

        def run_some(at_once: int) -> T:
            self.at_once = at_once
            return run()

        name, device = self.model.name, self.model.device
        return in_parts(run_some, self.at_once, name, device, undo)[0]

    def runs_together(self, mode: Mode) -> bool:
        """Tell if the samples of a mode run in batches."""
        return mode.runs_together and self.joins_samples

    @cached_property
    def long_text(self) -> Tensor | None:
        """Token ids of texts that are longer than the samples; None where those are no text."""
        return long_text(self.model)

    def long_row(self, mode: Mode) -> Tensor | None:
        """Return a text that is longer than the samples, if a mode reads one in one pass."""
        is_in_steps = mode.attention is not None or mode.states is not None
        if is_in_steps or self.long_text is None:
            return None
        longest = max(ids.shape[1] for x in self.model.inputs if (ids := token_ids(x)) is not None)
        return self.long_text[:1] if self.long_text.shape[1] > longest else None

    @cached_property
    def calibration(self) -> Calibration:
        self.progress(f"calibrating {self.model.name}")
        return self.setup.calibrate(self.model)

    def mode(self, name: str) -> Mode:
        """Return a mode of the model by name, which is resolved once."""
        if name not in self._modes:
            self._modes[name] = self.setup.select(name, self.model)[0]
        return self._modes[name]

    def quantized(self, mode: Mode) -> Quantized:
        """Return the model in a mode."""
        if mode.name not in self._quantized:
            scales = self.calibration if mode.calibrated else None
            self._quantized[mode.name] = apply(mode, self.model, scales)
        return self._quantized[mode.name]

    @cached_property
    def linear_tensors(self) -> dict[str, Tensor]:
        """Capture inputs and outputs of linear layers on a short text, for all formats."""
        sites = [s for s in self.model.sites() if s.is_product and s.port != "weight"]
        return capture_sites(self.model, sites)

    def ran(self) -> dict[str, Quantized]:
        """Return the modes that were applied so far."""
        return dict(self._quantized)

    # The reference --------------------------------------------------------------------------------

    @cached_property
    def _chosen(self) -> Mode | None:
        """Return the mode that is the reference, None for FP32."""
        modes = self.setup.select(self.reference_mode, self.model)
        if len(modes) != 1:
            names = ", ".join(mode.name for mode in modes)
            raise QgateError(
                f"reference {self.reference_mode!r} means {len(modes)} modes ({names}): name one."
            )
        return None if modes[0].is_reference else modes[0]

    def reference_basis(self) -> str | None:
        """Return the basis of the mode that is the reference; None for FP32, which has all."""
        return None if self._chosen is None else self._chosen.basis

    def reference_model(self, basis: str) -> Model:
        """Return the model that modes in a basis are compared with."""
        if self._chosen is None:
            return self.model.in_basis(basis)
        if self._chosen.basis != basis:
            raise QgateError(
                f"reference {self._chosen.name!r} is in basis {self._chosen.basis!r}, and what is "
                f"compared with it in {basis!r}: choose modes of one basis."
            )
        return self.quantized(self._chosen).model

    def fp32(self, basis: str) -> Capture:
        """Capture inputs and outputs of all blocks, and logits, of the FP32 model in a basis."""
        return self._outer(FP32, self.model.in_basis(basis), self.joins_samples)

    def reference(self, basis: str) -> Capture:
        """Capture the same of the reference mode."""
        if self._chosen is None:
            return self.fp32(basis)
        model = self.reference_model(basis)
        return self._outer(self._chosen.name, model, self.runs_together(self._chosen))

    def _outer(self, name: str, model: Model, together: bool) -> Capture:
        key = (name, model.basis, "outer")
        if key not in self._captures:
            self.progress(f"reference {name} of {model.name}, basis {model.basis}")
            self._captures[key] = self.in_parts(
                lambda: outer_tensors(
                    model, self.model.inputs, together=together, most=self.at_once
                )
            )
        return self._captures[key]

    def fp32_gradients(self, basis: str) -> dict[str, list[Tensor]]:
        """Return the gradients of the FP32 model at the outputs of blocks and at weights."""
        return self._backward(FP32, self.model.in_basis(basis))

    def reference_gradients(self, basis: str) -> dict[str, list[Tensor]]:
        """Return the same gradients of the reference mode."""
        if self._chosen is None:
            return self.fp32_gradients(basis)
        return self._backward(self._chosen.name, self.reference_model(basis))

    def _backward(self, name: str, model: Model) -> dict[str, list[Tensor]]:
        key = (name, model.basis, "gradients")
        if key not in self._captures:
            self._captures[key] = self._backward_run(model)
        return self._captures[key].gradients

    def _backward_run(self, model: Model, forced: Capture | None = None) -> Capture:
        samples = self.model.inputs[:_BACKWARD_SAMPLES]
        sites = backward_sites(model, is_forced=forced is not None)
        return run(model, sites, samples=samples, gradients=True, forced=forced)

    def _forcing(self, basis: str, samples: slice = slice(_BACKWARD_SAMPLES)) -> Capture:
        """Capture what is forced on blocks: the reference's inputs, and gradients at outputs."""
        tensors = {name: of[samples] for name, of in self.reference(basis).tensors.items()}
        gradients = {name: of[samples] for name, of in self.reference_gradients(basis).items()}
        inputs = inputs_hash(self.model.inputs[samples])
        return Capture(self.model.name, basis, inputs, tensors, gradients)
