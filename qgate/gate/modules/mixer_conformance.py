"""Quantized tensors of Mamba mixers, held bit for bit against the plain model of that block.

The mixer's parts are tapped, and tokens of what each of them returned are compared with what
`qgate.modes.definition` makes of what it was given, with the scales of the calibration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qgate.expected.sampled import sample_groups
from qgate.formats import Quantizer
from qgate.gate.measured import UNNAMED_FAULT
from qgate.gate.measuring.ideals import WEIGHTS, Array, mixer_scales, mixer_weights
from qgate.gate.modules.conformance import (
    HeldRows,
    HeldSite,
    HeldSites,
    around,
    cause_of,
    whole_rows,
)
from qgate.hooks import ModuleHooks
from qgate.models import Model
from qgate.models.mamba.network import MambaMixer
from qgate.modes import Calibration, Quantized
from qgate.modes import definition as block
from qgate.modes.mode import MambaChoices
from qgate.modes.simulated.mixer import SimulatedMixer

F32 = np.float32
_ROWS = 12
_WEIGHT = Quantizer("int8", granularity="tensor", narrow=False)
_TAPPED = (
    "in_cast", "in_proj", "conv_cast", "act", "x_proj", "x_cast", "dt_proj", "dt_cast", "scan",
    "hadamard", "hadamard.cast", "out_proj",
)  # fmt: skip
Tapped = dict[str, Tensor]
Define = Callable[[Array], Array]


@dataclass(frozen=True)
class MixerCast:
    """One place where a mixer quantizes: source and result, and what the definition gives.

    unrounded   the numbers that are rounded, where they are not the source itself
    quantizer   the same cast as a quantizer, for the words of a fault
    has_peak    the grid comes from the largest number of the whole tensor
    """

    site: str
    source: str
    result: str
    define: Define
    quantizer: Quantizer | None = None
    unrounded: Define | None = None
    has_peak: bool = False


@dataclass(frozen=True)
class IdealMixer:
    """A quantized mixer with the scales and the weights that it should have."""

    at: str
    mixer: SimulatedMixer
    weights: block.Weights
    scales: dict[str, np.float32]


class MixerRun(HeldSites):
    """Tensors that quantized Mamba mixers make, held while the model runs."""

    def __init__(self, quantized: Quantized, base: Model, calibration: Calibration) -> None:
        super().__init__()
        assert quantized.mode.choices is not None
        self.choices, self.mode = quantized.mode.choices, quantized.mode.name
        self.arithmetic = calibration.settings.arithmetic
        self.mixers: list[IdealMixer] = []
        for layer in base.layers:
            at = f"{layer}.mixer"
            source = base.module.get_submodule(at)
            mixer = quantized.model.module.get_submodule(at)
            sites = [*WEIGHTS, *(cast.site for cast in self._casts(None))]
            self.sites |= {f"{at}.{site}": HeldSite() for site in sites}
            if isinstance(mixer, SimulatedMixer) and isinstance(source, MambaMixer):
                scales = {n: F32(s) for n, s in mixer_scales(at, calibration).items()}
                self.mixers.append(IdealMixer(at, mixer, mixer_weights(source), scales))
                if source.conv1d.bias is None:
                    del self.sites[f"{at}.conv1d:bias"]

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Hold every quantized tensor of the passes inside."""
        with torch.no_grad():
            for ideal in self.mixers:
                self._hold_weights(ideal)
        with ModuleHooks() as hooks:
            for ideal in self.mixers:
                tapped: Tapped = {}
                for name in _TAPPED:
                    _tap(hooks, name, ideal.mixer.get_submodule(name), tapped)

                def hold(
                    _module: nn.Module, _args: Any, _result: Any,
                    ideal: IdealMixer = ideal, tapped: Tapped = tapped,
                ) -> None:  # fmt: skip
                    self._hold(ideal, tapped)
                    tapped.clear()

                hooks.add(ideal.mixer, after=hold)
            yield

    def _hold(self, ideal: IdealMixer, tapped: Tapped) -> None:
        for cast in self._casts(ideal):
            source, result = tapped[cast.source], tapped[cast.result]
            width = source.shape[-1]
            per_token = Quantizer("int8", granularity="block", block=max(1, width))
            samples = sample_groups(source, per_token)
            if not samples:
                continue
            lines = _spread(samples[0].lines)
            rows = source.reshape(-1, width)[lines].float().cpu().numpy()
            usable = np.isfinite(rows).all(1)
            # One token alone takes another kernel, so it cannot stand for one of many.
            if int(usable.sum()) < min(2, len(lines)):
                continue
            # The definition has no grid for a tensor with NaN or infinities.
            if cast.has_peak and not bool(source.isfinite().all()):
                continue
            source_rows = _with_peak(rows[usable], source) if cast.has_peak else rows[usable]
            expected = cast.define(source_rows)[: int(usable.sum())]
            actual = result.reshape(-1, result.shape[-1])[lines].cpu()[torch.from_numpy(usable)]
            self._compare(ideal, cast, tapped, lines[torch.from_numpy(usable)], actual, expected)

    def _compare(
        self,
        ideal: IdealMixer,
        cast: MixerCast,
        tapped: Tapped,
        lines: Tensor,
        actual: Tensor,
        expected: Array,
    ) -> None:
        source, result = tapped[cast.source], tapped[cast.result]
        values = torch.from_numpy(expected.astype(F32))
        shape = result.shape

        def place(row: int, column: int) -> tuple[int, ...]:
            line = np.unravel_index(int(lines[row]), shape[:-1])
            return (*(int(index) for index in line), column)

        rows = source.reshape(-1, source.shape[-1])[lines].cpu()
        site = f"{ideal.at}.{cast.site}"
        if actual.shape != values.shape:
            self.refuse(site, shape, f"has {actual.shape[-1]} columns, right is {values.shape[-1]}")
            return
        # Codes are integers, which have no negative zero.
        parts = [HeldRows(actual.float() + 0.0, values + 0.0, rows, place)]
        self.compare(site, shape, parts, lambda first: _cause(cast, source, result, first))

    def _hold_weights(self, ideal: IdealMixer) -> None:
        mixer = ideal.mixer
        for site, name in WEIGHTS.items():
            full = f"{ideal.at}.{site}"
            if full not in self.sites or (actual := _stored(mixer, site)) is None:
                continue
            arithmetic = "fp32" if name in ("A_log", "D", "dt_bias") else self.arithmetic
            codes, scale = block.weight_codes(ideal.weights[name], arithmetic)
            expected = torch.from_numpy(codes.astype(F32) * scale) + 0.0
            source = torch.from_numpy(ideal.weights[name])
            values = actual.detach().cpu().reshape(expected.shape) + 0.0
            self.compare(
                full,
                expected.shape,
                [whole_rows(values, expected, source)],
                lambda _first, y=values, x=source: cause_of(y, x, _WEIGHT),  # type: ignore[misc]
            )

    # The casts of a mixer -------------------------------------------------------------------------

    def _casts(self, ideal: IdealMixer | None) -> list[MixerCast]:
        """List what a mixer quantizes on its way; of no mixer, for the names of the sites."""
        casts = _Casts(self.mode, self.choices, ideal)
        listed = [casts.grid("in_proj:input", "in_cast.in", "in_cast.out", "s_n")]
        if self.choices.dynamic_conv:
            listed.append(casts.dynamic())
        exact = self.arithmetic == "fp32"
        is_biased = ideal is not None and ideal.mixer.in_proj.bias is not None
        if exact and not self.choices.dynamic_conv and not is_biased:
            listed.append(casts.linear("in_proj:output", "in_proj", "s_n", "s_z"))
        if self.choices.path_a != "u":
            listed.append(casts.input_of_x_proj())
        if self.choices.path_b != "exact":
            listed.append(casts.u_of_scan())
        if self.choices.float_products:
            if self.choices.regridded != "none":
                listed.append(casts.grid("x_proj:output", "x_cast.in", "x_cast.out", "s_x"))
                listed.append(casts.grid("dt_proj:output", "dt_cast.in", "dt_cast.out", "s_d"))
        elif exact:
            listed.append(casts.linear("x_proj:output", "x_proj", "s_u", "s_x"))
            listed.append(casts.linear("dt_proj:output", "dt_proj", "s_x", "s_d"))
        listed.append(casts.after_hadamard())
        listed.append(MixerCast("scan:output", "scan.out", "scan.out", block.half))
        return listed


class _Casts:
    """Casts of one mixer, each with its definition."""

    def __init__(self, mode: str, choices: MambaChoices, ideal: IdealMixer | None) -> None:
        self.mode, self.choices, self.ideal = mode, choices, ideal
        self.scales = {} if ideal is None else ideal.scales

    def _scale(self, name: str) -> np.float32:
        return self.scales.get(name, F32(1))

    def _int8(self, name: str, rounding: Any = "even") -> Quantizer:
        return Quantizer("int8", scale=float(self._scale(name)), rounding=rounding, narrow=False)

    def grid(self, site: str, source: str, result: str, name: str) -> MixerCast:
        scale = self._scale(name)

        def define(rows: Array) -> Array:
            return block.Casts()(site, block.rne(rows / scale)) * scale

        return MixerCast(site, source, result, define, self._int8(name))

    def linear(self, site: str, name: str, input_scale: str, output_scale: str) -> MixerCast:
        """An integer product, exact, whose rounded sums are codes of the output's grid."""
        s_in, s_out = self._scale(input_scale), self._scale(output_scale)
        weight = None if self.ideal is None else self.ideal.weights[name]

        def define(rows: Array) -> Array:
            assert weight is not None
            codes = block.rne(rows / s_in)
            return block.Casts()(site, block.int8_linear(codes, weight, s_in, s_out, name)) * s_out

        def unrounded(rows: Array) -> Array:
            assert weight is not None
            return block.real_matmul(rows, block.on_grid(weight))

        return MixerCast(
            site, f"{name}.in", f"{name}.out", define, self._int8(output_scale), unrounded
        )

    def dynamic(self) -> MixerCast:
        """The convolution's input on a grid up to its own largest number."""

        def define(rows: Array) -> Array:
            top = np.abs(rows).max()
            scale = top / F32(127) if top > 0 else F32(1)
            return np.asarray(block.rne(rows / scale) * scale)

        q = Quantizer("int8", granularity="tensor", narrow=False)
        return MixerCast("conv1d:input", "conv_cast.in", "conv_cast.out", define, q, has_peak=True)

    def _u(self, y: Array) -> Array:
        return block.scan_u(self.mode, y, self.scales, block.Casts())

    def input_of_x_proj(self) -> MixerCast:
        scale, rounding = self._scale("s_u"), self.choices.conv_rounding

        def define(rows: Array) -> Array:
            u = self._u(rows)
            return block.x_proj_codes(self.mode, rows, u, scale, block.Casts()) * scale

        return MixerCast(
            "x_proj:input", "act.out", "x_proj.in", define, self._int8("s_u", rounding)
        )

    def u_of_scan(self) -> MixerCast:
        plain = self.choices.path_b in ("codes", "grid", "requantized")
        q = self._int8("s_u", self.choices.conv_rounding) if plain else None
        peak = self.choices.path_b == "second_grid"
        return MixerCast("scan:u", "act.out", "scan.u", self._u, q, has_peak=peak)

    def after_hadamard(self) -> MixerCast:
        scale = self._scale("s_o")

        def define(rows: Array) -> Array:
            return block.Casts()("h", block.rha(rows)) * scale

        return MixerCast(
            "out_proj:input", "hadamard.cast.in", "hadamard.out", define,
            self._int8("s_o", "away"), lambda rows: rows * scale,
        )  # fmt: skip


def _tap(hooks: ModuleHooks, name: str, module: nn.Module, tapped: Tapped) -> None:
    """Keep what a part of a mixer is given and what it returns."""

    def before(_module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        if name == "scan":
            tapped["scan.u"] = kwargs["u"].detach()
        else:
            tapped[f"{name}.in"] = args[0].detach()

    def after(_module: nn.Module, _args: Any, result: Any) -> None:
        tensor = result if isinstance(result, Tensor) else result[0]
        tapped[f"{name}.out"] = tensor.detach()

    hooks.add(module, before, after)


def _stored(mixer: SimulatedMixer, site: str) -> Tensor | None:
    """Return the values of a weight's codes, as the mixer reads them."""
    if site in ("A_log", "D"):
        return (mixer.A_codes if site == "A_log" else mixer.D_codes).dequantized()
    if site == "dt_proj:bias":
        return mixer.bias_codes.dequantized()
    if site == "conv1d:bias":
        codes = mixer.conv1d.bias_codes
        return None if codes is None else codes.dequantized()
    weight: Tensor = mixer.get_submodule(site.partition(":")[0]).weight  # type: ignore[assignment]
    return weight


def _spread(lines: Tensor) -> Tensor:
    """Return some of the tokens, the first and the last among them."""
    if len(lines) <= _ROWS:
        return lines
    return lines[torch.linspace(0, len(lines) - 1, _ROWS).long()]


def _with_peak(rows: Array, source: Tensor) -> Array:
    """Add a row of the largest number of the whole tensor, which some grids are made from."""
    finite = source.where(source.isfinite(), 0.0)
    peak = finite.flatten()[finite.abs().argmax()]
    return np.concatenate([rows, np.full((1, rows.shape[1]), float(peak), F32)])


def _cause(cast: MixerCast, source: Tensor, result: Tensor, first: tuple[int, ...]) -> str:
    if cast.quantizer is None:
        return UNNAMED_FAULT
    size = max(source.numel(), result.numel())
    x, y = around(source, first, size), around(result, first, size)
    if cast.unrounded is not None:
        rows = x.reshape(-1, x.shape[-1]).float().cpu().numpy()
        x = torch.from_numpy(cast.unrounded(rows)).reshape(y.shape)
    return cause_of(y, x, cast.quantizer) if x.shape == y.shape else UNNAMED_FAULT
