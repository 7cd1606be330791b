"""Fused kernels that quantize inside: right ones and wrong ones, each beside its reference.

`python -m tests.kernel_checks.staged_kernels` checks the right ones in float32 and bfloat16, with
`--faults` the wrong ones.

The kernels go another way than the references: codes in torch's own dtypes, experts in one batch,
heads in one product, scales applied after products.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, silu

import qgate
from qgate.testing import CheckFailure, check_kernel, quantized

Kernel = Callable[..., Tensor]
E4M3 = torch.float8_e4m3fn
TINY = 1e-30


@dataclass(frozen=True)
class Staged:
    """A reference that quantizes inside, kernels of it, and what its faults are called.

    kernel   makes a kernel of a fault's name ("" for none) and the dtype of what it rounds inside
    faults   name → words of the first line, any of them
    options  of check_kernel
    """

    name: str
    like: Callable[..., Tensor]
    arguments: Callable[[torch.Generator], list[Tensor]]
    kernel: Callable[[str, torch.dtype], Kernel]
    faults: dict[str, tuple[str, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def example(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [value.to(dtype) for value in self.arguments(generator)]


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


# Codes and scales by torch's own means ------------------------------------------------------------


def _int8(h: Tensor, fault: str = "") -> tuple[Tensor, Tensor]:
    """Return codes and scales by row."""
    amax = h.abs().amax() if fault == "per tensor" else h.abs().amax(-1, keepdim=True)
    scale = amax.clamp_min(TINY) / 127
    if fault == "half scale":
        scale = scale / 2
    ratios = h / scale
    if fault == "missing":
        return ratios, scale
    if fault == "truncated":
        return ratios.trunc(), scale
    if fault == "rounded down":
        return ratios.floor().clamp(-127, 127), scale
    if fault == "saturates at 63":
        return ratios.round().clamp(-63, 63), scale
    if fault == "7 bits":
        return (ratios / 2).round(), 2 * scale
    codes = ratios.round().clamp(-127, 127)
    return codes, scale.roll(1, -2) if fault == "scale of the next row" else scale


def _fp8(h: Tensor, fault: str = "") -> tuple[Tensor, Tensor]:
    """Return codes and scales by row."""
    amax = h.abs().amax() if fault == "per tensor" else h.abs().amax(-1, keepdim=True)
    scale = amax.clamp_min(TINY) / 448
    codes = (h / scale).clamp(-448, 448)
    if fault != "missing":
        codes = codes.to(torch.float8_e5m2 if fault == "e5m2" else E4M3).float()
    if fault == "saturates at 240":
        codes = codes.clamp(-240, 240)
    return codes, scale.roll(1, -2) if fault == "scale of the next row" else scale


def _mx(h: Tensor, largest: float, dtype: torch.dtype | None, fault: str = "") -> Tensor:
    """Return values by blocks of 32 with scales that are powers of two, by the floor rule."""
    if fault == "missing":
        return h
    block = 16 if fault == "blocks of 16" else 32
    width = h.shape[-1]
    padded = torch.nn.functional.pad(h, (0, -width % block))
    blocks = padded.unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(amax.clamp_min(TINY)).exponent - 1 - (8 if largest == 448 else 2)
    if fault == "scale off by two":
        exponent = exponent + 1
    scale = torch.exp2(exponent.float())
    ratios = (blocks / scale).clamp(-largest, largest)
    codes = ratios.to(dtype).float() if dtype is not None else _fp4(ratios, fault)
    if fault == "scale of the next block":
        scale = scale.roll(1, -2)
    return (codes * scale).flatten(-2)[..., :width]


def _fp4(ratios: Tensor, fault: str) -> Tensor:
    """Round to E2M1 by comparing with the middles between its numbers, ties to even codes."""
    middles = ratios.new_tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    numbers = ratios.new_tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    size = ratios.abs().contiguous()
    if fault == "truncated":
        code = torch.bucketize(size, numbers, right=True) - 1
    else:
        below = torch.bucketize(size, middles)  # a tie goes down ...
        above = torch.bucketize(size, middles, right=True)  # ... or up
        code = torch.where(below % 2 == 0, below, above)
    return torch.where(ratios.isnan(), ratios, numbers[code].copysign(ratios))


# References ---------------------------------------------------------------------------------------


def _experts(name: str, **options: Any) -> Callable[..., Tensor]:
    def like(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(len(w13)):
            gate, up = linear(x, w13[expert]).chunk(2, -1)
            h = quantized("h", silu(gate) * up, name, **options)
            result = result + weights[:, expert, None] * linear(h, w2[expert])
        return result

    return like


def _experts_kernel(cast: Callable[[Tensor, str], Tensor]) -> Callable[[str, torch.dtype], Kernel]:
    def make(fault: str, inner: torch.dtype) -> Kernel:
        def experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
            gate_up = torch.einsum("td,efd->etf", x.float(), w13.float())
            half = gate_up.shape[-1] // 2
            gate, up = gate_up[..., :half], gate_up[..., half:]
            if fault == "before the activation":
                h = torch.sigmoid(gate) * cast(_rounded(gate, inner), "") * up
            elif fault == "before up":
                h = cast(_rounded(gate * torch.sigmoid(gate), inner), "") * up
            else:
                h = _rounded(gate * torch.sigmoid(gate) * up, inner)
                if fault == "one expert missing":
                    h = torch.cat([h[:1], cast(h[1:], "")])
                else:
                    h = cast(h, fault)
            y = torch.einsum("etf,edf->etd", h, w2.float())
            return (y * weights.float().T[:, :, None]).sum(0).to(x.dtype)

        return experts

    return make


def _moe_arguments(generator: torch.Generator) -> list[Tensor]:
    x, w13 = torch.randn(20, 48, generator=generator), torch.randn(3, 192, 48, generator=generator)
    w2 = torch.randn(3, 48, 96, generator=generator)
    weights = torch.rand(20, 3, generator=generator)
    return [x, w13 / 7, w2 / 10, weights]


def _dequantized(cast: Callable[[Tensor, str], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def values(h: Tensor, fault: str) -> Tensor:
        codes, scale = cast(h, fault)
        return codes * scale

    return values


def _swiglu(name: str, **options: Any) -> Callable[..., Tensor]:
    def like(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        return linear(quantized("h", silu(linear(x, w1)) * linear(x, w3), name, **options), w2)

    return like


def _swiglu_kernel(
    cast: Callable[[Tensor, str], tuple[Tensor, Tensor]],
) -> Callable[[str, torch.dtype], Kernel]:
    def make(fault: str, inner: torch.dtype) -> Kernel:
        def swiglu(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
            gate, up = (x.float() @ torch.cat([w1, w3]).float().T).split(len(w1), -1)
            gate, up = _rounded(gate, inner), _rounded(up, inner)
            h = _rounded(gate / (1 + torch.exp(-gate)) * up, inner)
            if fault == "no activation":
                h = _rounded(gate * up, inner)
            codes, scale = cast(h, fault)
            return ((codes @ w2.float().T) * scale).to(x.dtype)

        return swiglu

    return make


def _swiglu_arguments(generator: torch.Generator) -> list[Tensor]:
    x = torch.randn(24, 64, generator=generator)
    w1, w3 = (torch.randn(96, 64, generator=generator) / 8 for _ in range(2))
    return [x, w1, w3, torch.randn(40, 96, generator=generator) / 10]


def _attention(name: str, **options: Any) -> Callable[..., Tensor]:
    def like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        return quantized("p", p, name, **options) @ v / p.sum(-1, keepdim=True)

    return like


def _attention_kernel(
    cast: Callable[[Tensor, str], Tensor],
) -> Callable[[str, torch.dtype], Kernel]:
    def make(fault: str, _inner: torch.dtype) -> Kernel:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = torch.einsum("hqd,hkd->hqk", q.float() * q.shape[-1] ** -0.5, k.float())
            p = torch.exp2((scores - scores.max(-1, keepdim=True).values) * 1.4426950408889634)
            total = p.sum(-1, keepdim=True)
            if fault == "normalized first":
                return torch.einsum("hqk,hkd->hqd", cast(p / total, ""), v.float()).to(q.dtype)
            codes = cast(p, fault)
            if fault == "sum of codes":
                total = codes.sum(-1, keepdim=True)
            return (torch.einsum("hqk,hkd->hqd", codes, v.float()) / total).to(q.dtype)

        return attention

    return make


def _attention_arguments(generator: torch.Generator) -> list[Tensor]:
    q, k, v = (torch.randn(3, length, 32, generator=generator) for length in (20, 64, 64))
    return [q, k, v]


def _p_fp8(p: Tensor, fault: str) -> Tensor:
    if fault == "missing":
        return p
    factor = {"scale 1/240": 240.0, "scale 1/224": 224.0, "no scale": 1.0}.get(fault, 448.0)
    if fault == "e5m2":
        return (p * factor).to(torch.float8_e5m2).float() / factor
    if fault == "saturates at 240":
        return (p * factor).to(E4M3).float().clamp_max(240) / factor
    return (p * factor).to(E4M3).float() / factor


def _p_plain(p: Tensor, fault: str) -> Tensor:
    if fault == "missing":
        return p
    if fault == "per row":
        return p.to(E4M3).float()
    return (p * 448).to(E4M3).float() / 448 if fault == "scale 1/448" else p.to(E4M3).float()


def _p_int8(p: Tensor, fault: str) -> Tensor:
    """Return values by blocks of 32 keys."""
    if fault == "missing":
        return p
    block = 64 if fault == "blocks of 64" else 32
    if fault == "per tensor":
        return (p * 127).round() / 127
    width = p.shape[-1]
    padded = torch.nn.functional.pad(p, (0, -width % block)).unflatten(-1, (-1, block))
    scale = padded.amax(-1, keepdim=True).clamp_min(TINY) / 127
    ratios = padded / scale
    codes = ratios.floor() if fault == "truncated" else ratios.round()
    return (codes * scale).flatten(-2)[..., :width]


def tiled_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by tiles of 16 keys with a running largest score."""
    sums, total, largest = 0.0, 0.0, None
    for keys, values in zip(k.split(16, -2), v.split(16, -2), strict=True):
        scores = q @ keys.mT / q.shape[-1] ** 0.5
        top = scores.amax(-1, keepdim=True)
        before, largest = largest, top if largest is None else torch.maximum(largest, top)
        shrunk = 0.0 if before is None else torch.exp(before - largest)
        p = torch.exp(scores - largest)
        sums = sums * shrunk + quantized("p", p, "fp8_e4m3", scale=1 / 256) @ values
        total = total * shrunk + p.sum(-1, keepdim=True)
    return sums / total


def _tiled_kernel(fault: str, _inner: torch.dtype) -> Kernel:
    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q32, k32, v32 = q.float() * q.shape[-1] ** -0.5, k.float(), v.float()
        largest = torch.full((*q.shape[:-1], 1), -1e30)
        total, sums = torch.zeros_like(largest), torch.zeros(*q.shape[:-1], v.shape[-1])
        for start in range(0, k.shape[-2], 16):
            scores = torch.einsum("hqd,hkd->hqk", q32, k32[:, start : start + 16])
            top = torch.maximum(largest, scores.max(-1, keepdim=True).values)
            p, shrunk = (scores - top).exp(), (largest - top).exp()
            codes = (p * 256).to(E4M3).float() / 256
            if fault == "missing":
                codes = p
            if fault == "first tile missing" and start == 0:
                codes = p
            if fault == "scale 1/128":
                codes = (p * 128).to(E4M3).float() / 128
            if fault == "no scale":
                codes = p.to(E4M3).float()
            sums = sums * shrunk + torch.einsum("hqk,hkd->hqd", codes, v32[:, start : start + 16])
            total, largest = total * shrunk + p.sum(-1, keepdim=True), top
        return (sums / total).to(q.dtype)

    return flash


def rms_like(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
    """RMSNorm, quantized by row, and a product."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain
    return linear(quantized("normed", normed, "int8", granularity="channel", axis=0), w)


def _rms_kernel(fault: str, inner: torch.dtype) -> Kernel:
    def rms_gemm(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 / (x32.pow(2).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt()
        if fault == "before the gain":
            codes, scale = _int8(_rounded(normed, inner))
            return ((codes * gain.float()) @ w.float().T * scale).to(x.dtype)
        codes, scale = _int8(_rounded(normed * gain.float(), inner), fault)
        return (codes @ w.float().T * scale).to(x.dtype)

    return rms_gemm


def _rms_arguments(generator: torch.Generator) -> list[Tensor]:
    x = torch.randn(24, 64, generator=generator)
    gain = 0.5 + torch.rand(64, generator=generator)
    return [x, gain, torch.randn(40, 64, generator=generator) / 8]


def layer_norm_like(x: Tensor, gain: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    """LayerNorm, quantized by blocks, and a product."""
    normed = layer_norm(x, x.shape[-1:]) * gain + bias
    return linear(quantized("normed", normed, "mxfp4"), w)


def _layer_norm_kernel(fault: str, inner: torch.dtype) -> Kernel:
    def norm_gemm(x: Tensor, gain: Tensor, bias: Tensor, w: Tensor) -> Tensor:
        centered = x.float() - x.float().mean(-1, keepdim=True)
        normed = centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        normed = normed * gain.float()
        if fault == "bias after":
            h = _mx(_rounded(normed, inner), 6.0, None) + bias.float()
        else:
            h = _mx(_rounded(normed + bias.float(), inner), 6.0, None, fault)
        return (h @ w.float().T).to(x.dtype)

    return norm_gemm


def _layer_norm_arguments(generator: torch.Generator) -> list[Tensor]:
    x, gain, w = _rms_arguments(generator)
    return [x, gain, torch.randn(64, generator=generator) / 4, w]


def two_layers_like(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """Two linear layers; the arguments are quantized, too."""
    h = gelu(linear(x, w1, b1))
    return linear(quantized("hidden", h, "int8", granularity="channel", axis=0), w2)


def _two_layers_kernel(fault: str, inner: torch.dtype) -> Kernel:
    def two_layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
        a, a_scale = _int8(x.float())
        b, b_scale = _int8(w1.float())
        c, c_scale = _int8(w2.float())
        h = (a @ b.T) * a_scale * b_scale.T
        h = h if fault == "bias dropped" else h + b1.float()
        h = _rounded(h, inner)
        if fault == "before the activation":
            codes, scale = _int8(h)
            return ((gelu(codes * scale) @ c.T) * c_scale.T).to(x.dtype)
        h = _rounded(0.5 * h * (1 + torch.erf(h * 0.5**0.5)), inner)
        codes, scale = _int8(h, fault)
        return ((codes @ c.T) * scale * c_scale.T).to(x.dtype)

    return two_layers


def _two_layers_arguments(generator: torch.Generator) -> list[Tensor]:
    x, w1 = torch.randn(24, 64, generator=generator), torch.randn(96, 64, generator=generator) / 8
    b1 = torch.randn(96, generator=generator) / 4
    return [x, w1, b1, torch.randn(40, 96, generator=generator) / 10]


# All of them --------------------------------------------------------------------------------------

_ROWS = qgate.Quantizer("int8", granularity="channel", axis=0)
_MISSING_INT8 = ("is not quantized to int8",)
_MISSING_FP8 = ("is not quantized to fp8_e4m3",)
_ONE_SCALE = ("has one scale for the tensor",)
_NEXT_ROW = ("every scale moved to the next group", "every scale moved to the next row")
_TRUNCATED = ("is truncated",)
_BEFORE_SILU = ("stage h is quantized before silu",)

STAGED = (
    Staged(
        "experts in fp8",
        _experts("fp8_e4m3", granularity="channel", axis=0),
        _moe_arguments,
        _experts_kernel(_dequantized(_fp8)),
        {
            "missing": _MISSING_FP8,
            "scale of the next row": _NEXT_ROW,
            "one expert missing": ("in call 1 of 3",),
            "e5m2": ("is fp8_e5m2",),
            "saturates at 240": ("saturates at 240, the largest number of E4M3 FNUZ, not at 448",),
        },
    ),
    Staged(
        "experts in int8",
        _experts("int8", granularity="channel", axis=0),
        _moe_arguments,
        _experts_kernel(_dequantized(_int8)),
        {
            "missing": _MISSING_INT8,
            "truncated": _TRUNCATED,
            "half scale": ("half the scale",),
            "before the activation": _BEFORE_SILU,
            "before up": ("stage h is quantized before mul",),
            "one expert missing": ("stage h is not quantized to int8 in call 1 of 3",),
        },
    ),
    Staged(
        "experts in mxfp8",
        _experts("mxfp8"),
        _moe_arguments,
        _experts_kernel(lambda h, fault: _mx(h, 448.0, E4M3, fault)),
        {
            "missing": ("is not quantized to mxfp8",),
            "blocks of 16": ("has blocks of 16",),
            "scale off by two": ("twice the scale",),
            "scale of the next block": ("moved to the next group",),
        },
    ),
    Staged(
        "swiglu in int8",
        _swiglu("int8", granularity="channel", axis=0),
        _swiglu_arguments,
        _swiglu_kernel(_int8),
        {
            "missing": _MISSING_INT8,
            "per tensor": _ONE_SCALE,
            "saturates at 63": ("saturates early: no code is beyond 63",),
            "7 bits": ("twice the scale", "int7"),
            "no activation": ("identity is computed in the place of silu",),
            "rounded down": ("is rounded down (floor), not to the nearest",),
        },
    ),
    Staged(
        "swiglu in fp8",
        _swiglu("fp8_e4m3", granularity="channel", axis=0),
        _swiglu_arguments,
        _swiglu_kernel(_fp8),
        {
            "missing": _MISSING_FP8,
            "per tensor": _ONE_SCALE,
            "scale of the next row": _NEXT_ROW,
        },
    ),
    Staged(
        "attention, P in fp8",
        _attention("fp8_e4m3", scale=1 / 448),
        _attention_arguments,
        _attention_kernel(_p_fp8),
        {
            "missing": _MISSING_FP8,
            "normalized first": ("normalized to a sum of 1",),
            "e5m2": ("is fp8_e5m2",),
            "no scale": ("without a scale", "scale"),
            "saturates at 240": ("saturates at 240, the largest number of E4M3 FNUZ, not at 448",),
        },
    ),
    Staged(
        "attention, P in fp8 as it is",
        _attention("fp8_e4m3"),
        _attention_arguments,
        _attention_kernel(_p_plain),
        {
            "missing": _MISSING_FP8,
            "sum of codes": ("exp is rounded to float8_e4m3fn",),
            "normalized first": ("normalized",),
        },
    ),
    Staged(
        "attention, P in int8 by blocks",
        _attention("int8", granularity="block", block=32),
        _attention_arguments,
        _attention_kernel(_p_int8),
        {
            "missing": _MISSING_INT8,
            "blocks of 64": ("has blocks of 64", "one scale"),  # the largest of each row is 1
            "per tensor": ("one scale",),
            "truncated": ("is rounded down (floor)",),  # no value is negative
        },
    ),
    Staged(
        "attention by tiles, P in fp8",
        tiled_like,
        _attention_arguments,
        _tiled_kernel,
        {
            "missing": _MISSING_FP8,
            "no scale": ("scale",),
            "first tile missing": ("stage p is not quantized to fp8_e4m3 in call 1 of 4",),
        },
    ),
    Staged(
        "rms norm in int8",
        rms_like,
        _rms_arguments,
        _rms_kernel,
        {
            "missing": _MISSING_INT8,
            "before the gain": ("stage normed is quantized before mul",),
            "per tensor": _ONE_SCALE,
            "scale of the next row": _NEXT_ROW,
        },
    ),
    Staged(
        "layer norm in mxfp4",
        layer_norm_like,
        _layer_norm_arguments,
        _layer_norm_kernel,
        {
            "missing": ("is not quantized to mxfp4",),
            "truncated": _TRUNCATED,
            "blocks of 16": ("has blocks of 16",),
            "bias after": ("stage normed is quantized before add",),
        },
    ),
    Staged(
        "two layers in int8",
        two_layers_like,
        _two_layers_arguments,
        _two_layers_kernel,
        {
            "missing": ("stage hidden is not quantized",),
            "before the activation": ("stage hidden is quantized before gelu",),
            "half scale": ("half the scale",),
            "per tensor": _ONE_SCALE,
            "bias dropped": ("argument 2 is not used",),
        },
        {"inputs": {0: _ROWS, 1: _ROWS, 3: _ROWS}},
    ),
)


def main(words: list[str]) -> None:
    """Check the kernels; `--faults` the wrong ones, `--seeds N` with so many seeds, `--only NAME`."""
    seeds = int(words[words.index("--seeds") + 1]) if "--seeds" in words else 1
    only = words[words.index("--only") + 1] if "--only" in words else ""
    total = good = 0
    for staged, dtype in itertools.product(STAGED, (torch.float32, torch.bfloat16)):
        if only not in staged.name:
            continue
        faults = list(staged.faults) if "--faults" in words else [""]
        for fault, seed in itertools.product(faults, range(seeds)):
            example = staged.example(dtype, seed)
            kernel, began = staged.kernel(fault, dtype), time.perf_counter()
            try:
                check_kernel(kernel, *example, like=staged.like, **staged.options)
                line, is_good = "green", not fault
            except CheckFailure as failure:
                line = failure.cause
                is_good = bool(fault) and any(w in line for w in staged.faults[fault])
            total, good = total + 1, good + is_good
            about = f"{staged.name}, {dtype}, {fault or 'right'}, seed {seed}"
            seconds = time.perf_counter() - began
            print(f"{'as expected' if is_good else 'OTHERWISE'} {seconds:5.1f} s {about}: {line}")
    print(f"{good} of {total} as expected")


if __name__ == "__main__":
    main(sys.argv[1:])
