"""Defects that test_layer_outputs sees: each breaks one thing that somebody has got wrong before."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import hardswish, linear, softplus

from qgate.formats import Quantizer, integers, quantizer
from qgate.formats.engine import fast_element, fast_mx
from qgate.models.mamba import scanning
from qgate.modes import CalibrationSettings, applying, calibration, resolving
from qgate.modes.simulated import casts, mixer, paths, products
from tests.campaigns.mutants.bed import SAMPLING, Bed
from tests.campaigns.mutants.mutant import MAMBA, Sow, llama, mamba

# Formats -----------------------------------------------------------------------------------------


def _truncating(bed: Bed) -> None:
    bed.patch.setattr(fast_element, "round_to_integer", lambda t, *_: t.trunc_())


def truncating_blocks(bed: Bed) -> None:
    bed.wrap(fast_mx, "_round", lambda plain: lambda *given: plain(*given[:-1], "zero"))


def _exponent_off_by(steps: int) -> Sow:
    def moved(plain: Any) -> Any:
        def top(*args: Any) -> Any:
            exponents = plain(*args)
            if exponents is None:
                return None
            exponent, fields = exponents
            return exponent + (steps << 23), range(fields.start + steps, fields.stop + steps)

        return top

    return lambda bed: bed.wrap(fast_mx, "_top_exponents", moved)


def altered(change: Callable[[Quantizer, Tensor], None]) -> Sow:
    """The engine works with another quantizer than it was given."""

    def wrapped(plain: Any) -> Any:
        def quantize(x: Tensor, q: Quantizer) -> Tensor:
            other = copy.copy(q)
            change(other, x)
            return plain(x, other)

        return quantize

    return lambda bed: bed.wrap(quantizer, "quantize_tensor", wrapped)


def _blocks_of(size: int) -> Sow:
    return altered(lambda q, _: setattr(q, "block", size))


def _turned(bed: Bed) -> None:
    bed.wrap(
        quantizer, "quantize_tensor", lambda plain: lambda x, q: plain(x.mT.contiguous(), q).mT
    )


def _twice(bits: int) -> Sow:
    """Rounded to a few bits before it is rounded to the format."""

    def first(x: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(x)
        return torch.ldexp((fraction * 2**bits).round() / 2**bits, exponent)

    return lambda bed: bed.wrap(
        quantizer, "quantize_tensor", lambda plain: lambda x, q: plain(first(x), q)
    )


def _flushed(plain: Any) -> Any:
    def rounded(constants: Any, x: Tensor, _size: Tensor, top: Tensor, *rest: Any) -> None:
        shift = (constants.element.min_exponent - constants.element.max_exponent) << 23
        smallest = (top + shift).view(torch.float32)
        flushed = x.where(x.abs() >= smallest, 0.0)
        plain(constants, flushed, flushed.view(torch.int32) & 0x7FFFFFFF, top, *rest)

    return rounded


def _saturating_early(bed: Bed) -> None:
    bed.patch.setattr(integers.IntFormat, "bounds", lambda self, **_: (-self.max + 1, self.max - 1))


def _scaled_in_bf16(plain: Any) -> Any:
    def shortcut(fmt: Any, x: Tensor, out: Tensor, call: Any) -> bool:
        done = plain(fmt, x, out, call)
        if call.state is not None:
            out.mul_((call.state.bfloat16().double() / call.state).to(out.dtype))
        return bool(done)

    return shortcut


def _scaled_to_fit(plain: Any) -> Any:
    """Each block is scaled by its amax / 6, not by a power of two."""

    def quantize(x: Tensor, q: Quantizer) -> Tensor:
        scale = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).clamp(min=1e-30) / 6
        spread = scale.expand(*scale.shape[:-1], 32).flatten(-2)
        return plain(x / spread * 6, q) / 6 * spread

    return quantize


def _amax_of_half(plain: Any) -> Any:
    """The scale comes from the first half of the channels."""

    def quantize(x: Tensor, q: Quantizer) -> Tensor:
        if q.granularity != "block":
            return plain(x, q)
        scale = x[..., : x.shape[-1] // 2].abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().clamp(-127, 127) * scale

    return quantize


def _per_tensor(plain: Any) -> Any:
    def entry_of(site: Any, rule: Any, reaches: Any) -> Any:
        entry = plain(site, rule, reaches)
        if site.port != "weight":
            return entry
        quantizer = Quantizer("int8", granularity="tensor")
        return dataclasses.replace(entry, quantizer=quantizer, origin="amax of the tensor")

    return entry_of


def _truncated_to_bf16(plain: Any) -> Any:
    def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
        duplicate = copy.deepcopy(module)
        for tensor in duplicate.state_dict(keep_vars=True).values():
            tensor.data = (tensor.data.view(torch.int32) & -65536).view(torch.float32)
        return plain(duplicate, dtype)

    return in_dtype


def _half_sums(bed: Bed) -> None:
    """Partial sums of 16 products are added up in float16."""
    at = bed.module("model.layers.2.mlp.down_proj")

    def forward(x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float16)
        for a, w in zip(x.split(16, -1), at.weight.split(16, -1), strict=True):
            total = total + linear(a.float(), w.float()).half()
        return total

    at.forward = forward


# Weights and layers of a transformer -------------------------------------------------------------


def _row_gone(weight: Tensor) -> Tensor:
    weight[5] = 0
    return weight


def _columns_swapped(weight: Tensor) -> Tensor:
    return weight.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _poisoned(value: float, *where: Any) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[where] = value
        return tensor

    return change


def _swapped(bed: Bed) -> None:
    layers = bed.module("model.layers")
    layers[1], layers[2] = layers[2], layers[1]


def _head_quantized(bed: Bed) -> None:
    bed.weight("lm_head", Quantizer("int4", granularity="channel", axis=0))


def _without_residual(bed: Bed) -> None:
    block = bed.module("model.layers.3")

    def forward(hidden: Tensor) -> Tensor:
        hidden = block.self_attn(block.input_layernorm(hidden))
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    block.forward = forward


def _other(name: str, attribute: str, value: Any) -> Sow:
    return lambda bed: setattr(bed.module(name), attribute, value)


def _leaking(bed: Bed) -> None:
    """What one sample of a batch leaves behind is seen by the next one."""
    bed.after("model.layers.1", lambda y: y + 0.05 * y.roll(1, 0) if len(y) > 1 else y)


def _changed_weight(bed: Bed) -> None:
    with torch.no_grad():
        bed.session.bench.model.module.get_parameter("model.layers.2.mlp.up_proj.weight")[0, 0] += 1


def _eps_of_all(bed: Bed) -> None:
    for module in bed.session.bench.model.module.modules():
        if hasattr(module, "eps"):
            module.eps = 0.01


# The quantized Mamba block -----------------------------------------------------------------------


def _in_scan(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Sow:
    """The kernel of the scan reads something else than it is given."""

    def wrapped(plain: Any) -> Any:
        return lambda self, **given: plain(self, **change(given))

    return lambda bed: bed.wrap(mixer.HalfScan, "forward", wrapped)


def _forgetting(plain: Any) -> Any:
    """The state starts again at token 64."""

    def forward(self: Any, **given: Any) -> Any:
        flowing = ("u", "dt", "B", "C", "z")
        halves = []
        for part in (slice(None, 64), slice(64, None)):
            halves.append(plain(self, **{**given, **{n: given[n][:, part] for n in flowing}}))
        return scanning.ScanResult(torch.cat([h.output for h in halves], 1), halves[1].state)

    return forward


def _softplus_as_relu(plain: Any) -> Any:
    def forward(self: Any, **given: Any) -> Any:
        scanning.softplus = lambda x: softplus(x, threshold=-2.0)
        try:
            return plain(self, **given)
        finally:
            scanning.softplus = softplus

    return forward


def _b_and_c_swapped(bed: Bed) -> None:
    at = bed.module("backbone.layers.2.mixer")
    plain = at.x_cast.forward

    def forward(x: Tensor) -> Tensor:
        dt, b, c = plain(x).split(at.split, -1)
        return torch.cat([dt, c, b], -1)

    at.x_cast.forward = forward


def _halves_swapped(bed: Bed) -> None:
    bed.after("backbone.layers.3.mixer.in_proj", lambda xz: torch.cat(xz.chunk(2, -1)[::-1], -1))


def _floor_for_away(plain: Any) -> Any:
    return lambda x, how: x.floor() if how == "away" else plain(x, how)


def _on_even_codes(plain: Any) -> Any:
    return lambda x, how: plain(x / 2, how) * 2 if how == "away" else plain(x, how)


def _sums_in(dtype: torch.dtype) -> Sow:
    def wrapped(plain: Any) -> Any:
        return lambda codes, weight: plain(codes, weight).to(dtype).float()

    return lambda bed: bed.wrap(products, "exact_linear", wrapped)


def _nan_hidden(bed: Bed) -> None:
    """A cast makes zeros of NaN, as integer casts do."""
    bed.after("backbone.layers.1.mixer.conv1d", _poisoned(float("nan"), ..., 7))
    cast = bed.module("backbone.layers.1.mixer.u_cast")
    plain = cast.forward
    cast.forward = lambda y: plain(y).nan_to_num(0.0)


def _float_mixer(bed: Bed) -> None:
    turned = bed.session.bench.model.in_basis("rotated").module
    bed.module("backbone.layers.4").mixer = turned.get_submodule("backbone.layers.4.mixer")


def _scales(change: Callable[[dict[str, Any]], None]) -> Sow:
    """Other calibrated scales, with hashes that do not tell."""

    def sow(bed: Bed) -> None:
        measured = bed.session.bench.calibration
        scales = dict(measured.scales)
        change(scales)
        bed.session.bench.calibration = dataclasses.replace(measured, scales=scales)

    return sow


def _doubled(site: str) -> Sow:
    def change(scales: dict[str, Any]) -> None:
        old = scales[site]
        scales[site] = dataclasses.replace(old, scale=2 * old.scale)

    return _scales(change)


def _scales_of_neighbors(scales: dict[str, Any]) -> None:
    for site in [site for site in scales if ".layers.1." in site]:
        other = site.replace(".layers.1.", ".layers.3.")
        scales[site], scales[other] = scales[other], scales[site]


def _stale(hidden: bool) -> Sow:
    """Scales that were measured before the weights changed, with and without a hash that tells."""

    def sow(bed: Bed) -> None:
        other = bed.healthy.session(MAMBA)
        for name, p in other.bench.model.module.named_parameters():
            if name.endswith("in_proj.weight"):
                p.data.mul_(0.7)
        measured = other.bench.calibration
        weights = bed.session.bench.model.weights_hash() if hidden else measured.weights
        bed.session.bench.calibration = dataclasses.replace(measured, weights=weights)

    return sow


def _setup(**changes: Any) -> Sow:
    def sow(bed: Bed) -> None:
        bed.session.bench.setup = dataclasses.replace(bed.session.bench.setup, **changes)
        bed.session.bench._model = None

    return sow


def _percentile(plain: Any) -> Any:
    return lambda values, alpha: plain(values, 0.99 if alpha < 1 else 1.0)


ATTENTION, MIXER = r"model\.layers\.0\.self_attn\.", r"backbone\.layers\.0\.mixer\."
_Q_INPUT = ATTENTION + "q_proj:input"

MUTANTS = (
    # Rounding, scales and blocks.
    llama("int8-truncates", "int8", _truncating, _Q_INPUT),
    llama("mxfp8-truncates", "mxfp8", truncating_blocks, _Q_INPUT),
    llama("block-scale-one-exponent-low", "mxfp8", _exponent_off_by(-1), _Q_INPUT),
    llama("block-scale-one-exponent-high", "mxfp4", _exponent_off_by(1), _Q_INPUT),
    llama("block-of-64-for-32", "mxfp4", _blocks_of(64), _Q_INPUT),
    llama("wrong-axis", "mxfp4", _turned, ATTENTION + ".*:(input|weight)"),
    llama("double-rounding", "mxfp4", _twice(3), _Q_INPUT),
    llama("subnormals-flushed", "mxfp4", lambda bed: bed.wrap(fast_mx, "_round", _flushed), _Q_INPUT),
    llama("clip-at-126", "int8", _saturating_early, _Q_INPUT),
    llama("scale-rounded-to-bf16", "int8", lambda bed: bed.wrap(fast_element, "shortcut", _scaled_in_bf16), _Q_INPUT),
    llama("amax-of-half-the-channels", "int8", lambda bed: bed.wrap(quantizer, "quantize_tensor", _amax_of_half), _Q_INPUT),
    llama("weight-per-tensor-for-per-channel", "int8", lambda bed: bed.wrap(resolving, "_entry_of", _per_tensor), ATTENTION + "q_proj:(weight|output)"),
    llama("bf16-truncates", "bf16", lambda bed: bed.wrap(applying, "in_dtype", _truncated_to_bf16), ATTENTION + "q_proj:weight"),
    llama("float16-accumulation", "fp16", _half_sums, r"model\.layers\.2\.mlp\.down_proj:output"),
    # A transformer.
    llama("one-row-of-a-weight", "int8", lambda bed: bed.weight("model.layers.3.mlp.down_proj", _row_gone), r"model\.layers\.3\.mlp\.down_proj:(weight|output)"),
    llama("nibbles-swapped", "w4", lambda bed: bed.weight("model.layers.2.mlp.up_proj", _columns_swapped), r"model\.layers\.2\.mlp\.up_proj:(weight|output)"),
    llama("nan-in-a-channel", "int8", lambda bed: bed.after("model.layers.1.mlp.down_proj", _poisoned(float("nan"), ..., 3)), r"model\.layers\.1\.mlp\.down_proj:output", says="non-finite"),
    llama("inf-in-a-token", "int8", lambda bed: bed.after("model.layers.2.self_attn.v_proj", _poisoned(float("inf"), 0, 40)), r"model\.layers\.2\.self_attn\.v_proj:output", says="non-finite"),
    llama("layers-swapped", "int8", _swapped, r"model\.layers\.1\..*"),
    llama("head-quantized", "int8", _head_quantized, suite="task", says="kl_divergence"),
    llama("residual-dropped", "int8", _without_residual, r"model\.layers\.3\.post_attention_layernorm:input"),
    llama("rotary-of-another-base", "int8", _other("model.layers.2.self_attn", "base", 500.0), r"model\.layers\.2\.self_attn\.o_proj:input"),
    llama("norm-of-another-eps", "int8", _other("model.layers.1.post_attention_layernorm", "eps", 0.1), r"model\.layers\.1\.post_attention_layernorm:output"),
    llama("samples-leak", "int8", _leaking, r"model\.layers\.1:output"),
    llama("other-weights", "int8", _changed_weight, says="the baseline was made with other weights"),
    llama("reference-changed", "int8", _eps_of_all, "plain model.layers.0:output", suite="reference"),
    # The quantized Mamba block.
    mamba("hadamard-missing", "2-1", lambda bed: bed.patch.setattr(mixer, "transform", lambda y: y * 16), MIXER + "hadamard:output"),
    mamba("conv-bias-dropped", "2-1", lambda bed: setattr(bed.module("backbone.layers.2.mixer.conv1d"), "bias_codes", None), r"backbone\.layers\.2\.mixer\.conv1d:bias"),
    mamba("dt-bias-dropped", "2-1", _in_scan(lambda given: {**given, "dt_bias": None}), MIXER + "scan:output"),
    mamba("d-dropped", "2-1", _in_scan(lambda given: {**given, "D": torch.zeros_like(given["D"])}), MIXER + "scan:output"),
    mamba("gate-not-applied", "2-1", _in_scan(lambda given: {**given, "z": torch.full_like(given["z"], 1.2785)}), MIXER + "scan:output"),
    mamba("state-forgotten", "2-1", lambda bed: bed.wrap(mixer.HalfScan, "forward", _forgetting), MIXER + "scan:output"),
    mamba("softplus-threshold", "2-1", lambda bed: bed.wrap(mixer.HalfScan, "forward", _softplus_as_relu), MIXER + "scan:output"),
    mamba("b-and-c-swapped", "2-1", _b_and_c_swapped, r"backbone\.layers\.2\.mixer\.scan:B"),
    mamba("b-and-c-swapped-in-the-scan", "2-1", _in_scan(lambda given: {**given, "B": given["C"], "C": given["B"]}), MIXER + "scan:output"),
    mamba("x-and-z-swapped", "2-1", _halves_swapped, r"backbone\.layers\.3\.mixer\.in_proj:output"),
    mamba("conv-sees-the-future", "2-1", lambda bed: bed.after("backbone.layers.1.mixer.conv1d", lambda y: y.roll(-1, 1)), r"backbone\.layers\.1\.mixer\.conv1d:output"),
    mamba("conv-rounds-down", "2-1", lambda bed: bed.wrap(casts, "round_to_integers", _floor_for_away), MIXER + "(in_proj:output|x_proj:input)"),
    mamba("conv-on-half-the-codes", "2-1", lambda bed: bed.wrap(casts, "round_to_integers", _on_even_codes), MIXER + "(in_proj:output|x_proj:input)"),
    mamba("silu-approximated", "2-1", lambda bed: bed.patch.setattr(mixer.SlowSiLU, "forward", lambda _, y: hardswish(y)), MIXER + "act:output"),
    mamba("codes-clip-at-126", "2-1", lambda bed: bed.patch.setattr(casts, "HIGH", 126), MIXER + ".*"),
    mamba("codes-clip-at-100", "2-1", lambda bed: bed.patch.setattr(casts, "HIGH", 100), MIXER + ".*"),
    mamba("int16-accumulator", "2-1", _sums_in(torch.int16), MIXER + "in_proj:output"),
    mamba("float16-accumulator", "2-1", _sums_in(torch.float16), MIXER + "in_proj:output"),
    mamba("nan-hidden-by-a-cast", "2-1", _nan_hidden, r"backbone\.layers\.1\.mixer\.conv1d:output"),
    mamba("scan-reads-codes-in-2-4", "2-4", lambda bed: setattr(bed.module("backbone.layers.2.mixer"), "path_b", None), r"backbone\.layers\.2\.mixer\.scan:u"),
    mamba("powers-off-by-one", "5-6", lambda bed: bed.patch.setattr(paths, "_STEPS", 4), MIXER + "x_proj:input"),
    # Better than the declared format can be: something was not quantized, or not that way.
    llama("block-of-16-for-32", "mxfp4", _blocks_of(16), ATTENTION + "q_proj:(input|weight)"),
    llama("scales-that-are-no-powers-of-two", "mxfp4", lambda bed: bed.wrap(quantizer, "quantize_tensor", _scaled_to_fit), _Q_INPUT),
    llama("inputs-left-alone", "int8", lambda bed: bed.module("model.layers.2.mlp.up_proj")._forward_pre_hooks.clear(), says=r"got no tensor, model\.layers\.2\.mlp\.up_proj:input"),
    llama("inputs-not-quantized", "int8", lambda bed: bed.wrap(quantizer, "quantize_tensor", lambda plain: lambda x, q: x if x.dim() > 2 else plain(x, q)), _Q_INPUT),
    llama("weight-left-alone", "int8", lambda bed: bed.weight("model.layers.3.mlp.down_proj", lambda _: bed.session.bench.model.module.get_parameter("model.layers.3.mlp.down_proj.weight").detach()), r"model\.layers\.3\.mlp\.down_proj:weight"),
    mamba("last-layer-not-quantized", "2-1", _float_mixer, r"backbone\.layers\.4\..*"),
    # Calibration.
    mamba("one-scale-doubled", "2-1", _doubled("backbone.layers.2.mixer.in_proj:input"), r"backbone\.layers\.2\.mixer\.in_proj:input", first="in_proj:input .* has 2.* times the scale .* a stale calibration"),
    mamba("scales-of-another-layer", "2-1", _scales(_scales_of_neighbors), r"backbone\.layers\.1\.mixer\.(in_proj|conv1d):input"),
    mamba("stale-calibration", "2-1", _stale(hidden=False), says="the calibration was made with other weights"),
    mamba("stale-calibration-in-disguise", "2-1", _stale(hidden=True), MIXER + ".*"),
    mamba("percentile-0.99", "2-1", _setup(settings=CalibrationSettings(0.99)), says="other calibration"),
    mamba("fewer-prompts", "2-1", _setup(sampling=dataclasses.replace(SAMPLING, calib_samples=2)), says="other calibration"),
    mamba("percentile-0.99-by-mistake", "2-1", lambda bed: bed.wrap(calibration, "quantile", _percentile), MIXER + "x_proj:input"),
    mamba("moving-average-with-another-weight", "2-1", lambda bed: bed.patch.setattr(calibration, "_EMA", 0.9), MIXER + ".*"),
)  # fmt: skip
