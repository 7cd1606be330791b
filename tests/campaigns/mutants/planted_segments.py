"""Defects between quantizers and inside products, which isolated errors see in any mode.

Each is planted in one module of the quantized model, in a mode of four and in one of eight bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardswish, linear, scaled_dot_product_attention, silu

from qgate.models import llama as llama_model
from qgate.models.llama import rotary, rotate
from qgate.models.mamba.scanning import ScanResult
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, llama, mamba

Change = Callable[[Tensor], Tensor]


def _attention(**faults: Any) -> Sow:
    """The attention of one layer with another constant, mask, or order of heads."""

    def sow(bed: Bed) -> None:
        at = bed.module("model.layers.2.self_attn")
        at.forward = lambda hidden: _attend(at, hidden, **faults)

    return sow


def _attend(
    at: Any,
    hidden: Tensor,
    *,
    shift: int = 0,
    scale: float = 1.0,
    diagonal: int = 0,
    window: int = 0,
    tiled: bool = False,
    wrap: int = 0,
    context: Change = lambda y: y,
) -> Tensor:
    batch, tokens, _ = hidden.shape

    def per_head(x: Tensor) -> Tensor:
        return x.view(batch, tokens, -1, at.width).transpose(1, 2)

    cos, sin = rotary(tokens + shift, at.width, at.base, hidden.device)
    if wrap:
        positions = torch.arange(tokens) % wrap
        cos, sin = cos[positions], sin[positions]
    moved = rotate(per_head(at.q_proj(hidden)), cos[shift:], sin[shift:])
    k = rotate(per_head(at.k_proj(hidden)), cos[:tokens], sin[:tokens])
    v = per_head(at.v_proj(hidden))
    shared = at.heads // at.kv_heads
    if tiled:
        k, v = k.repeat(1, shared, 1, 1), v.repeat(1, shared, 1, 1)
    else:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril(diagonal)
    if window:
        visible &= ~torch.ones(tokens, tokens, dtype=torch.bool).tril(-window)
    visible |= torch.eye(tokens, dtype=torch.bool) & ~visible.any(1, keepdim=True)
    y = scaled_dot_product_attention(moved, k, v, visible, scale=scale / at.width**0.5)
    return at.o_proj(context(y).transpose(1, 2).flatten(2))


def _attention_in_half(bed: Bed) -> None:
    """Attention whose scores and probabilities are rounded to the half precision of its inputs."""

    def wrapped(fused: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
            if q.dtype == torch.float32:
                return fused(q, k, v, is_causal=is_causal)
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v

        return attention

    bed.wrap(llama_model, "scaled_dot_product_attention", wrapped)


def _product(name: str, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Sow:
    """A product of a quantized input and weight that is another one: `change(y, x, w)`."""

    def sow(bed: Bed) -> None:
        module = bed.module(name)
        plain = module.forward
        module.forward = lambda x: change(plain(x), x, module.weight)

    return sow


def _after(name: str, change: Change) -> Sow:
    return lambda bed: bed.after(name, change)


def _set(name: str, key: str, value: Any) -> Sow:
    return lambda bed: setattr(bed.module(name), key, value)


def _block(forward: Callable[[Any, Tensor], Tensor]) -> Sow:
    def sow(bed: Bed) -> None:
        at = bed.module("model.layers.2")
        at.forward = lambda hidden: forward(at, hidden)

    return sow


def _residual(first: float, second: float) -> Sow:
    def forward(at: Any, hidden: Tensor) -> Tensor:
        hidden = first * hidden + at.self_attn(at.input_layernorm(hidden))
        return second * hidden + at.mlp(at.post_attention_layernorm(hidden))

    return _block(forward)


def _activation(approximated: Change) -> Sow:
    def sow(bed: Bed) -> None:
        at = bed.module("model.layers.2.mlp")
        at.forward = lambda x: at.down_proj(approximated(at.gate_proj(x)) * at.up_proj(x))

    return sow


def _without(start: int, end: int, share: float = 1.0) -> Any:
    return lambda y, x, w: y - share * linear(x[..., start:end], w[:, start:end])


def _element(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """One element of the weight does not reach the sum."""
    row = (x[..., 17] * w[9, 17]).unsqueeze(-1)
    return torch.cat([y[..., :9], y[..., 9:10] - row, y[..., 10:]], -1)


def _scaled(start: int, end: int, factor: float) -> Change:
    def change(y: Tensor) -> Tensor:
        part = factor * y[..., start:end]
        return torch.cat([y[..., :start], part, y[..., end:]], -1)

    return change


def _half(_y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Sums in float16, 16 terms at a time."""
    parts = zip(x.split(16, -1), w.split(16, -1), strict=True)
    total = torch.zeros(*x.shape[:-1], len(w), dtype=torch.float16)
    for a, b in parts:
        total = total + linear(a, b).half()
    return total.float()


def _last_token(y: Tensor) -> Tensor:
    return torch.cat([y[:, :-1], 1.001 * y[:, -1:]], 1)


def _second_sample(y: Tensor) -> Tensor:
    return torch.cat([y[:1], 1.001 * y[1:2], y[2:]]) if len(y) > 1 else y


def _odd_lengths(y: Tensor) -> Tensor:
    return 1.001 * y if y.shape[1] % 2 and y.shape[1] > 1 else y


def _one_token(y: Tensor) -> Tensor:
    return 1.001 * y if y.shape[1] == 1 else y


def _scan(change: Callable[[Any, dict[str, Any]], ScanResult]) -> Sow:
    def sow(bed: Bed) -> None:
        module = bed.module("backbone.layers.2.mixer.scan")
        plain = module.forward
        module.forward = lambda **given: change(plain, given)

    return sow


_FLOWING = ("u", "dt", "B", "C", "z")


def _reset(token: int) -> Sow:
    """The state starts again at a token."""

    def change(plain: Any, given: dict[str, Any]) -> ScanResult:
        parts = []
        for part in (slice(None, token), slice(token, None)):
            cut = {n: given[n][:, part] for n in _FLOWING}
            if cut["u"].shape[1]:
                parts.append(plain(**{**given, **cut}))
        return ScanResult(torch.cat([p.output for p in parts], 1), parts[-1].state)

    return _scan(change)


def _given(**changed: Change) -> Sow:
    def change(plain: Any, given: dict[str, Any]) -> ScanResult:
        return plain(**{**given, **{name: of(given[name]) for name, of in changed.items()}})

    return _scan(change)


def _mixer_residual(bed: Bed) -> None:
    at = bed.module("backbone.layers.2")
    at.forward = lambda hidden: 1.001 * hidden + at.mixer(at.norm(hidden))


def _conv_one_token_short(bed: Bed) -> None:
    """The state of the convolution lacks its oldest token."""
    module = bed.module("backbone.layers.2.mixer.conv1d")
    plain = module.forward

    def forward(x: Tensor, *scale: Any) -> Tensor:
        weight = module.weight[:, 0, 0]
        y = plain(x, *scale)
        lost = x[:, :-3] * weight
        return torch.cat([y[:, :3], y[:, 3:] - lost], 1) if x.shape[1] > 3 else y

    module.forward = forward


MIXER = r"backbone\.layers\.2\.mixer\."
Q, DOWN, UP = (
    "model.layers.2.self_attn.q_proj", "model.layers.2.mlp.down_proj", "model.layers.2.mlp.up_proj"
)  # fmt: skip
_O_INPUT = r"model\.layers\.2\.self_attn\.o_proj:input"
_NORM = "model.layers.2.post_attention_layernorm"

_LLAMA: tuple[tuple[str, Sow, str, str], ...] = (
    ("rope-positions-off-by-one", _attention(shift=1), _O_INPUT, ""),
    ("rope-of-base-9000", _set("model.layers.2.self_attn", "base", 9000.0), _O_INPUT, ""),
    ("softmax-scale-one-percent-off", _attention(scale=1.01), _O_INPUT, ""),
    ("mask-shows-the-next-token", _attention(diagonal=1), _O_INPUT, ""),
    ("mask-hides-the-token-itself", _attention(diagonal=-1), _O_INPUT, ""),
    ("window-of-64-tokens", _attention(window=64), _O_INPUT, ""),
    ("positions-wrap-after-512", _attention(wrap=512), _O_INPUT, ""),
    ("keys-repeated-in-the-wrong-order", _attention(tiled=True), _O_INPUT, "channels"),
    ("heads-swapped", _attention(context=lambda y: y[:, [1, 0, *range(2, y.shape[1])]]), _O_INPUT, r"channels 0 to 63"),
    ("one-head-a-thousandth-off", _attention(context=lambda y: torch.cat([1.001 * y[:, :1], y[:, 1:]], 1)), _O_INPUT, r"channels 0 to 31"),
    ("residual-a-thousandth-off", _residual(1.001, 1.0), _NORM.replace(".", r"\.") + ":input", ""),
    ("second-residual-doubled", _residual(1.0, 2.0), r"model\.layers\.2:output", ""),
    ("second-residual-left-out", _residual(1.0, 0.0), r"model\.layers\.2:output", ""),
    ("norm-of-eps-1e-4", _set(_NORM, "eps", 1e-4), _NORM.replace(".", r"\.") + ":output", ""),
    ("silu-in-bfloat16", _activation(lambda x: silu(x.bfloat16()).float()), DOWN.replace(".", r"\.") + ":input", ""),
    ("silu-as-hardswish", _activation(hardswish), DOWN.replace(".", r"\.") + ":input", ""),
    ("input-channel-lost", _product(DOWN, _without(17, 18)), DOWN.replace(".", r"\.") + ":output", "input channel 17 is missing"),
    ("input-channel-counted-twice", _product(Q, _without(5, 6, -1.0)), Q.replace(".", r"\.") + ":output", "input channel 5 is added twice"),
    ("tile-of-inputs-lost", _product(UP, _without(64, 96)), UP.replace(".", r"\.") + ":output", "input channels 64:96 are missing"),
    ("one-element-of-a-sum-lost", _product(UP, _element), UP.replace(".", r"\.") + ":output", "channel 9 of 256"),
    ("output-channel-lost", _after(UP, _scaled(3, 4, 0.0)), UP.replace(".", r"\.") + ":output", "channel 3 of 256 is zero"),
    ("tile-of-outputs-a-thousandth-off", _after(UP, _scaled(64, 128, 1.001)), UP.replace(".", r"\.") + ":output", "channels 64 to 127 .*one tile of 64"),
    ("sums-in-float16", _product(DOWN, _half), DOWN.replace(".", r"\.") + ":output", ""),
    ("last-token-of-a-product-off", _after(UP, _last_token), UP.replace(".", r"\.") + ":output", "token .*the last one"),
    ("second-sample-of-a-product-off", _after(UP, _second_sample), UP.replace(".", r"\.") + ":output", "number 1 of .*one token alone agrees"),
    ("odd-lengths-of-a-product-off", _after(UP, _odd_lengths), UP.replace(".", r"\.") + ":output", r"a batch of 77 tokens each; .*agree"),
    ("single-token-of-a-product-off", _after(UP, _one_token), UP.replace(".", r"\.") + ":output", r"one token alone; .*agree"),
)  # fmt: skip
_MAMBA: tuple[tuple[str, Sow, str, str], ...] = (
    ("state-reset-at-token-70", _reset(70), MIXER + "scan:output", ""),
    ("state-reset-at-the-last-token", _reset(127), MIXER + "scan:output", "token 127"),
    ("decay-a-thousandth-off", _given(A_log=lambda a: a + 0.001), MIXER + "scan:output", ""),
    ("skip-left-out", _given(D=torch.zeros_like), MIXER + "scan:output", ""),
    ("step-bias-a-hundredth-off", _given(dt_bias=lambda b: 1.01 * b), MIXER + "scan:output", ""),
    ("gate-of-another-token", _given(z=lambda z: z.roll(1, 1)), MIXER + "scan:output", ""),
    ("state-of-the-convolution-one-short", _conv_one_token_short, MIXER + "conv1d:output", ""),
    ("convolution-in-bfloat16", _after("backbone.layers.2.mixer.conv1d", lambda y: y.bfloat16().float()), MIXER + "conv1d:output", ""),
    ("activation-as-hardswish", lambda bed: setattr(bed.module("backbone.layers.2.mixer.act"), "forward", hardswish), MIXER + "act:output", ""),
    ("mixer-residual-off", _mixer_residual, r"backbone\.layers\.2:output", ""),
    ("mixer-norm-of-eps-1e-4", _set("backbone.layers.2.norm", "eps", 1e-4), r"backbone\.layers\.2\.norm:output", ""),
    ("out-channel-of-a-mixer-lost", _product("backbone.layers.2.mixer.out_proj", _without(17, 18)), MIXER + "out_proj:output", "input channel 17 is missing"),
    ("last-token-of-a-mixer-off", _after("backbone.layers.2.mixer.act", _last_token), MIXER + "act:output", "the last one"),
    ("odd-lengths-of-a-mixer-off", _after("backbone.layers.2.mixer.act", _odd_lengths), MIXER + "act:output", r"a batch of 77 tokens each; .*agree"),
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = (
    *(
        llama(f"{name}-in-{mode}", mode, sow, site, says=says)
        for name, sow, site, says in _LLAMA
        for mode in ("mxfp4", "int8")
    ),
    *(
        mamba(f"{name}-in-{mode}", mode, sow, site, says=says)
        for name, sow, site, says in _MAMBA
        for mode in ("mxfp4", "2-1")
    ),
    llama("input-channel-lost-in-bf16", "bf16", _product(DOWN, _without(17, 18)), DOWN.replace(".", r"\.") + ":output", says="token 95 of 128|input channel 17 is missing"),
    llama("attention-of-bf16-tensors", "bf16", _attention_in_half, r"model\.layers\.\d:output"),
    llama("input-channel-lost-in-w4", "w4", _product(DOWN, _without(17, 18)), DOWN.replace(".", r"\.") + ":output", says="input channel 17 is missing"),
)  # fmt: skip
