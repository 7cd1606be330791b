"""Measurements of one model in its modes, with every forward pass made once.

A mode is measured in three runs. Free-running, the outputs of all blocks: the error carried along.
With every block given the reference's input: the error made in each block. And a short stretch of
text with every site given the reference's tensor, against the error of an ideal quantizer there.
What the free run made between its quantizers is held against FP32 code fed with its own tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qgate.capture import Capture, run
from qgate.gate.measured import Measured
from qgate.gate.measuring import late
from qgate.gate.measuring.call_arguments import arguments_of, computed_tables, takes_several
from qgate.gate.measuring.canary import BROKEN, HEALTHY, quantized_outputs
from qgate.gate.measuring.compared_sites import (
    backward_sites,
    outputs_outside,
    quantized_sites,
    untouched_sites,
)
from qgate.gate.measuring.ideals import IdealErrors, ideal_errors
from qgate.gate.measuring.loaded_model import LoadedModel
from qgate.gate.measuring.passes import (
    fed,
    flow,
    idle_experts,
    linear_weights,
    outer_tensors,
    shortened,
)
from qgate.gate.measuring.site_errors import (
    Pairs,
    channels_last,
    massive_from,
    more_error,
    row_pairs,
    site_errors,
    unless_idle,
    unless_vanished,
)
from qgate.gate.measuring.site_rows import ModelSites, static_rows
from qgate.gate.segments.noise import SegmentNoise
from qgate.gate.segments.probes import several
from qgate.gate.segments.rows import segment_rows
from qgate.gate.segments.segments import Segments
from qgate.gate.segments.views import view_of
from qgate.models.experts import mixtures_of
from qgate.modes import Mode, Quantized, apply

if TYPE_CHECKING:
    from qgate.gate.segments.attention_arithmetic import RunAttention
    from qgate.gate.segments.gradient_code import GradientCode
    from qgate.gate.serving.served_state import ServedState

# Bytes of logits that wait for the task suite: 35 modes of tiny-mamba take 180 MB.
_LOGITS = 1 << 28


@dataclass
class Bench(LoadedModel):
    """Model with everything computed so far; modes are measured once and kept.

    With `pictures` errors also carry the data to draw them.
    """

    _beyond: dict[tuple[str, str], float] = field(default_factory=dict)
    _measured: dict[str, list[Measured]] = field(default_factory=dict)
    _segments: dict[str, Segments] = field(default_factory=dict)
    _gradients: dict[str, list[Measured]] = field(default_factory=dict)
    _logits: dict[str, list[Tensor]] = field(default_factory=dict)
    _declared_ideals: dict[Mode, dict[str, float]] = field(default_factory=dict)
    _by_reference: dict[tuple[str, bool], tuple[list[Measured], str]] = field(default_factory=dict)

    def measure(self, mode: Mode) -> list[Measured]:
        """Measure all errors of a mode, sites in the order of execution."""
        if mode.name not in self._measured:
            self._measured[mode.name] = self.in_parts(
                lambda: self._measure(mode), lambda: self._segments.pop(mode.name, None)
            )
        return self._measured[mode.name]

    def _measure(self, mode: Mode) -> list[Measured]:
        quantized = self.quantized(mode)
        self.progress(f"mode {mode.name} of {self.model.name}")
        reference = self.reference(quantized.model.basis)
        inputs, together = self.model.inputs, self.runs_together(mode)
        segments, meant = self.segments(quantized), self.meant_of(quantized)
        holding = late.holding.Holding(quantized, self.model, meant, segments.met_shapes)
        served: list[ServedState] = []
        if mode.attention is not None:
            served.append(late.cache_rows.ServedCaches(quantized))
        if mode.states is not None:
            served.append(late.state_rows.ServedMixers(quantized))
        with contextlib.ExitStack() as stack:
            for watch in (holding.watch, *(state.watch for state in served)):
                stack.enter_context(watch())
            carried = outer_tensors(
                quantized.model, inputs, None, together, segments.watch, self.at_once
            )
        self._keep_logits(mode, carried)
        rows = self.site_errors(quantized)
        # A layer that is one module is compared there already, on a short text.
        inner, layers = {row.site for row in rows}, quantized.model.layers
        outer = [name for name in layers if f"{name}:output" not in inner]
        if outer:
            local = outer_tensors(quantized.model, inputs, reference, together, most=self.at_once)
            rows += self._blocks("local", local, reference, outer)
        rows += self._blocks("carried", carried, reference, layers)
        rows += self._outputs(carried, reference)
        rows += static_rows(quantized.plan, self._places) + self._isolated(quantized, segments)
        base = self.model.in_basis(quantized.model.basis)
        if mixtures_of(base.module):
            rows += late.expert_rows.expert_rows(quantized, base, meant, self._places)
        for state in served:
            rows += state.rows(base, self._places)
        return holding.attach(unless_idle(rows) if self._chosen is None else rows, self._places)

    def with_reference_attention(
        self, mode: Mode, *, gradients: bool = False
    ) -> tuple[list[Measured], str]:
        """Measure blocks and outputs, or gradients, with attention by the reference's code.

        What is said beside is the arithmetic of the mode's own attention. There are no rows unless
        that is right, and not what the reference's code gives.
        """
        key = (mode.name, gradients)
        if key not in self._by_reference:
            quantized = self.quantized(mode)
            base = self.model.in_basis(quantized.model.basis)
            attention = late.attention_arithmetic.RunAttention.of(quantized.model, base)
            measure = self._gradients_by_reference if gradients else self._errors_by_reference
            rows = [] if self._chosen is not None else measure(mode, quantized, attention)
            self._by_reference[key] = rows, attention.words()
        return self._by_reference[key]

    def _errors_by_reference(
        self, _mode: Mode, quantized: Quantized, attention: RunAttention
    ) -> list[Measured]:
        model, inputs = quantized.model, self.model.inputs
        if not attention.is_right_otherwise(inputs):
            return []
        reference, together = self.reference(model.basis), self.runs_together(quantized.mode)
        with attention.by_reference():
            carried = outer_tensors(model, inputs, None, together, most=self.at_once)
            local = outer_tensors(model, inputs, reference, together, most=self.at_once)
        rows = self._blocks("local", local, reference, model.layers)
        rows += self._blocks("carried", carried, reference, model.layers)
        return rows + self._outputs(carried, reference)

    def _gradients_by_reference(
        self, mode: Mode, quantized: Quantized, attention: RunAttention
    ) -> list[Measured]:
        def run_backward(sample: Any) -> None:
            run(quantized.model, backward_sites(quantized.model, is_forced=False), samples=[sample],
                gradients=True)  # fmt: skip

        if not attention.has_right_gradients(self.model.inputs[:1], run_backward):
            return []
        with attention.by_reference():
            return self._gradient_rows(mode)

    def outputs(self, mode: Mode | None) -> list[Tensor]:
        """Return the logits of every sample, of a mode or (None) of the reference."""
        if mode is None:
            return self.reference(self.reference_basis() or "plain").tensors["logits"]
        if mode.name in self._logits:
            return self._logits[mode.name]
        # The very pass that `measure` makes: the same bits, whichever of the two comes first.
        model, inputs = self.quantized(mode).model, self.model.inputs
        together = self.runs_together(mode)
        return self.in_parts(
            lambda: outer_tensors(model, inputs, together=together, most=self.at_once)
        ).tensors["logits"]

    @cached_property
    def long_reference(self) -> Tensor:
        """Logits of the reference along the long text, in the plain basis."""
        return late.long_texts.token_logits(
            self.reference_model("plain"), late.long_texts.long_text(self.model)
        )

    def _keep_logits(self, mode: Mode, carried: Capture) -> None:
        tensors = carried.tensors["logits"]
        if sum(t.nbytes for of in (*self._logits.values(), tensors) for t in of) <= _LOGITS:
            self._logits[mode.name] = tensors

    def gradients(self, mode: Mode) -> list[Measured]:
        """Measure the gradients that a mode makes in each block, against the reference's."""
        if mode.name not in self._gradients:
            self.progress(f"gradients of {self.model.name} in mode {mode.name}")
            is_on_cpu = self.model.device.type == "cpu"
            rows = self._gradient_rows(mode) if is_on_cpu else self._rows_with_room(mode)
            quantized = self.quantized(mode)
            rows = self._gradient_code.attach(rows, quantized, self.meant_of(quantized))
            self._gradients[mode.name] = rows
        return self._gradients[mode.name]

    def _gradient_rows(self, mode: Mode) -> list[Measured]:
        quantized = self.quantized(mode)
        products = late.gradient_factors.ProductGradients(quantized, self.meant_of(quantized))
        with products.watch(), idle_experts(quantized.model) as idle:
            pairs = self.gradient_pairs(mode)
        rows = []
        for site, pair in pairs.items():
            row = self._row(site, "backward", list(zip(*pair, strict=True)))
            row = replace(row, conformance=products.conformance(row, pair[0]))
            rows.append(row if site in idle else unless_vanished(row, *pair))
        return rows

    def _rows_with_room(self, mode: Mode) -> list[Measured]:
        """Measure gradients, and how much more error rounding the scaled scores adds to them.

        Attention of 16 bits is computed twice by its definition, with either rounding and with all
        else as it is: what a quantizer gets wrong is in both.
        """
        with late.fused_attention.FusedAttention() as attention:
            rows = self._gradient_rows(mode)
        if not attention.calls:
            return rows
        with late.fused_attention.FusedAttention(rounds_scaled=False):
            plain = self._gradient_rows(mode)
        with late.fused_attention.FusedAttention(rounds_scaled=True):
            scaled = self._gradient_rows(mode)
        return [
            replace(row, device_room=more_error(less, more))
            for row, less, more in zip(rows, plain, scaled, strict=True)
        ]

    def gradient_pairs(self, mode: Mode) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
        """Return the gradients of a mode in each block by site, and the reference's.

        Every block gets the reference's input, and the reference's gradient at its output.
        """
        quantized = self.quantized(mode)
        basis = quantized.model.basis
        forcing, key = self._forcing(basis), (self.reference_mode, basis, "forced gradients")
        if key not in self._captures:
            self._captures[key] = self._backward_run(self.reference_model(basis), forcing)
        expected = self._captures[key].gradients
        actual = self._backward_run(quantized.model, forcing).gradients
        # Packed weights of a model's own mode take no gradient.
        sites = backward_sites(quantized.model, is_forced=True)
        return {s.name: (actual[s.name], expected[s.name]) for s in sites if s.port != "output"}

    def segments(self, quantized: Quantized) -> Segments:
        """Return what holds a mode's code between quantizers, after inputs of other lengths."""
        if quantized.mode.name not in self._segments:
            base = self.model.in_basis(quantized.model.basis)
            view = view_of(quantized, base, self.meant_of(quantized))
            noise = self._noise.among_massive(base) if view.ports else {}
            segments = Segments(quantized.model, base, view, quantized.mode.own, noise)
            self._segments[quantized.mode.name] = segments
            segments.probe(several(self.model.inputs), self.long_row(quantized.mode))
        return self._segments[quantized.mode.name]

    def not_isolated(self, mode: Mode) -> dict[str, str]:
        """Return the places of a mode without an isolated error, each with the reason."""
        return self.segments(self.quantized(mode)).left_out

    def _isolated(self, quantized: Quantized, segments: Segments) -> list[Measured]:
        noise = self._noise.of(segments.base) if segments.errors else {}
        rows = segment_rows(segments, noise, self._places)
        if not segments.is_half:
            return rows
        inputs, mode, differing = self.model.inputs, quantized.mode, None
        if mode.dtype is not None and not mode.own:
            long = self.long_row(mode)
            rows, differing = late.half_twins.with_twin(rows, quantized, segments, inputs, long)
        return late.half_code.with_half(rows, segments, several(inputs), differing)

    def _blocks(
        self, scope: str, actual: Capture, reference: Capture, layers: Sequence[str]
    ) -> list[Measured]:
        rows = []
        for layer in layers:
            site = f"{layer}:output"
            key = (reference.basis, site)
            if key not in self._beyond:
                self._beyond[key] = massive_from(reference[site])
            pairs = row_pairs(self.model, site, actual[site], reference[site])
            rows.append(self._row(site, scope, pairs, beyond=self._beyond[key], whole=True))
        return rows

    def _outputs(self, actual: Capture, reference: Capture) -> list[Measured]:
        """Measure the outputs of the model, which are in no layer."""
        outputs = {name: reference[name] for name in reference if ":" not in name}
        return [
            self._row(
                name,
                "carried",
                row_pairs(self.model, name, actual.tensors.get(name, []), expected),
                beyond=massive_from(expected),
                order=len(self._places.order) + number,
                whole=True,
            )
            for number, (name, expected) in enumerate(outputs.items())
        ]

    @cached_property
    def _noise(self) -> SegmentNoise:
        return SegmentNoise(several(self.model.inputs))

    @cached_property
    def _gradient_code(self) -> GradientCode:
        return late.gradient_code.GradientCode(self.model, self.layer_of)

    @cached_property
    def _places(self) -> ModelSites:
        order = {site.name: order for order, site in enumerate(self.model.sites())}
        return ModelSites(order, self.layer_of)

    def _row(
        self,
        site: str,
        scope: str,
        pairs: Pairs,
        pictures: bool = True,
        order: int | None = None,
        **details: Any,
    ) -> Measured:
        return site_errors(
            site,
            self.layer_of(site),
            scope,
            self._places.place(site) if order is None else order,
            channels_last(pairs, self.model.channel_axis(site)),
            draw=self.pictures and pictures,
            **details,
        )

    def site_errors(
        self, quantized: Quantized, declared: Quantized | None = None, *, pictures: bool = True
    ) -> list[Measured]:
        """Measure every quantized site on a short text, fed by the reference, against its ideal.

        The ideal is that of the mode itself, or of `declared` in its place, which is compared with
        FP32 whatever the reference is. Against another mode there is no ideal: two modes on one
        grid differ only at ties, and a budget would judge that noise.
        """
        base = self.model.in_basis(basis := quantized.model.basis)
        by_fp32 = declared is not None or self._chosen is None
        true = base if by_fp32 else self.reference_model(basis)
        sample = shortened(self.model.inputs[0])
        untouched = untouched_sites(quantized, base) if by_fp32 else []
        present = {site.name for site in quantized.model.sites()}
        alone = list(dict.fromkeys([*untouched, *outputs_outside(base)]))
        sites = list(dict.fromkeys([*quantized_sites(quantized, base), *alone]))
        modules = {site.module for site in alone if site.name in present}
        inputs = [site for site in base.sites() if site.port == "input"]
        blocks = [site for site in inputs if site.is_block]
        alone = [s for s in inputs if s.module in modules]
        flowing = flow(true, {*sites, *blocks, *alone, *linear_weights(base)}, sample)
        present &= {name for name, tensor in flowing.items() if tensor.numel()}
        sites = [site for site in sites if site.name in present]
        given = [s.module for s in alone if takes_several(true, s)] + computed_tables(true, modules)
        whole = {} if quantized.mode.own else arguments_of(true, given, sample)
        actual = fed(quantized, sites, sample, flowing, alone, whole)
        ideal = IdealErrors(quantizers={e.site: e.does for e in quantized.plan.entries})
        if by_fp32:
            meant = declared or self.meant_of(quantized)
            # The healthy and the broken canary declare the same.
            if declared is not None and declared.mode in self._declared_ideals:
                ideal.errors = self._declared_ideals[declared.mode]
            else:
                ideal = ideal_errors(quantized, meant, base, flowing, actual)
            if declared is not None:
                self._declared_ideals[declared.mode] = ideal.errors
            ideal.errors = {site.name: 0.0 for site in untouched} | ideal.errors
        return [
            self._row(
                site.name,
                "local",
                [(actual[site.name], flowing[site.name])],
                beyond=massive_from([flowing[site.name]]),
                ideal=ideal.errors.get(site.name),
                unexplained=ideal.unexplained.get(site.name, ""),
                quantizer=ideal.quantizers.get(site.name, ""),
                pictures=pictures,
                is_gated=site not in untouched,
            )
            for site in sites
        ]

    @cached_property
    def canary_rows(self) -> tuple[list[Measured], list[Measured]]:
        """Measure a quantizer as it should be and one that truncates, both against the former."""
        if not any(site.is_product for site in self.model.sites()):
            return quantized_outputs(self.model, HEALTHY), quantized_outputs(self.model, BROKEN)
        healthy, broken = (apply(mode, self.model) for mode in (HEALTHY, BROKEN))
        rows = self.site_errors(healthy, healthy), self.site_errors(broken, healthy, pictures=False)
        return [replace(row, gated=()) for row in rows[0]], [replace(r, gated=()) for r in rows[1]]

    def meant_of(self, quantized: Quantized) -> Quantized:
        """Return the mode's own rules, or the mode that its kernel stands for."""
        mode = quantized.mode
        if mode.meant is not None:
            return self.quantized(mode.meant)
        meant = mode.stands_for
        return self.quantized(self.mode(meant)) if meant else quantized
