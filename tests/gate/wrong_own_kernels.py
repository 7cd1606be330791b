"""Faults of kernels of one's own, where each is, and what the first line must say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.gate.own_kernels import (
    FORMATS,
    Cast,
    Product,
    fp8_rows,
    int4_groups,
    int8_rows,
    mxfp8,
    product_of,
)


@dataclass(frozen=True)
class OwnFault:
    """A faulty product of every layer, or a fault between products, and words of the cause.

    site  what the named place ends with
    """

    name: str
    words: str
    fmt: str = "int8"
    product: Product | None = None
    site: str = "_proj:output|up:output|gate:output|down:output"


def _rows(divisor: float, of: Cast = torch.abs, round_by: Cast = torch.round) -> Cast:
    def cast(x: Tensor) -> Tensor:
        scale = of(x).amax(-1, keepdim=True) / divisor
        return round_by(x / scale).clamp(-127, 127) * scale

    return cast


def _with_scale(change: Callable[[Tensor], Tensor], most: float = 127) -> Cast:
    def cast(x: Tensor) -> Tensor:
        scale = change(x.abs().amax(-1, keepdim=True) / most)
        return (x / scale).round().clamp(-127, 127) * scale

    return cast


def _of_tensor(x: Tensor) -> Tensor:
    return _with_scale(lambda scale: scale.max())(x)


def _decoded_with(change: Callable[[Tensor], Tensor]) -> Cast:
    def cast(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * change(scale)

    return cast


def _after(change: Callable[[Tensor], Tensor], fmt: str = "int8") -> Product:
    right = product_of(fmt)
    return lambda x, w, b: change(right(x, w, b))


def _put(index: object, change: Callable[[Tensor], Tensor | float]) -> Cast:
    def changed(y: Tensor) -> Tensor:
        y = y.clone()
        y[index] = change(y[index])  # type: ignore[index]
        return y

    return changed


def _without_terms(first: int, last: int, fmt: str = "int8") -> Product:
    cast, of_weight = FORMATS[fmt].cast, FORMATS[fmt].of_weight

    def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        x = cast(x).clone()
        x[..., first:last] = 0
        return linear(x, of_weight(w), b)

    return product


def _in_int16(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    sides = [of.abs().amax(-1, keepdim=True) / 127 for of in (x, w)]
    codes = [(of / scale).round() for of, scale in zip((x, w), sides, strict=True)]
    sums = linear(*codes)
    wrapped = torch.remainder(sums + 2**15, 2**16) - 2**15
    y = wrapped * sides[0] * sides[1].mT
    return y if b is None else y + b


def _bias_scaled(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = linear(int8_rows(x), int8_rows(w))
    return y if b is None else y + int8_rows(b)


def _in_bfloat16(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = torch.zeros(*x.shape[:-1], len(w))
    x, w = int8_rows(x), int8_rows(w)
    for k in range(x.shape[-1]):
        y = (y + x[..., k : k + 1] * w[:, k]).bfloat16().float()
    return y if b is None else y + b


def _late_blocks(x: Tensor) -> Tensor:
    return mxfp8(x.roll(-1, -1)).roll(1, -1)


def _mx(change: Callable[[Tensor], Tensor], size: int = 32) -> Cast:
    def cast(x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, size))
        exponents = change(blocks.abs().amax(-1, keepdim=True).log2().floor() - 8)
        scaled = (blocks * torch.exp2(-exponents)).clamp(-448, 448)
        return (scaled.to(torch.float8_e4m3fn).float() * torch.exp2(exponents)).flatten(-2)

    return cast


def _mx_e5m2(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 32))
    scale = torch.exp2(blocks.abs().amax(-1, keepdim=True).log2().floor() - 15)
    return ((blocks / scale).to(torch.float8_e5m2).float() * scale).flatten(-2)


def _w4(change: Callable[[Tensor], Tensor], size: int = 32, most: float = 7) -> Cast:
    def cast(w: Tensor) -> Tensor:
        groups = w.unflatten(-1, (-1, size))
        scale = groups.abs().amax(-1, keepdim=True) / most
        return ((groups / scale).round().clamp(-8, 7) * change(scale)).flatten(-2)

    return cast


def _nibbles(w: Tensor) -> Tensor:
    return int4_groups(w).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _fp8(most: float, dtype: torch.dtype, of_tensor: bool = False) -> Cast:
    def cast(x: Tensor) -> Tensor:
        amax = x.abs().max() if of_tensor else x.abs().amax(-1, keepdim=True)
        scale = amax / most
        return (x / scale).to(dtype).float() * scale

    return cast


def _without_bias(fmt: str) -> Product:
    right = product_of(fmt)
    return lambda x, w, _: right(x, w, None)


def _int8(cast: Cast | None = None, of_weight: Cast | None = None) -> Product:
    return product_of("int8", cast, of_weight)


PRODUCTS = [
    OwnFault("scale 2.02", "amax/63, not of amax/127", product=_int8(_rows(63))),
    OwnFault("weight's scale 1.3", "its weight is quantized with 1.3 times the right scales: 98 of 127 codes", product=_int8(None, _rows(97.7))),
    OwnFault("scale 3 % small", "its input is quantized with 0.969 times the right scales: large values saturate",
             product=_int8(_rows(131))),
    OwnFault("floor", "its input .*down", product=_int8(_rows(127, round_by=torch.floor))),
    OwnFault("truncated", "its input is truncated", product=_int8(_rows(127, round_by=torch.trunc))),
    OwnFault("weight truncated", "its weight is truncated",
             product=_int8(None, _rows(127, round_by=torch.trunc))),
    OwnFault("input not quantized", "its input is not quantized", product=_int8(lambda x: x)),
    OwnFault("weight not quantized", "its weight is not quantized",
             product=_int8(None, lambda w: w)),
    OwnFault("weight of one scale", "its weight has one scale for the tensor",
             product=_int8(None, _of_tensor)),
    OwnFault("input of one scale", "its input has one scale for the tensor",
             product=_int8(_of_tensor)),
    OwnFault("scale of the first row", "its weight .*first (group|row)|its weight .*saturat",
             product=_int8(None, _with_scale(lambda s: s[:1].expand_as(s)))),
    OwnFault("scales of the next row", "its weight .*scale.* (moved to )?the next",
             product=_int8(None, _decoded_with(lambda s: s.roll(1, 0)))),
    OwnFault("scales from the largest value, not magnitude", "scales of its largest values, not of its largest magnitudes",
             product=_int8(_rows(127, of=lambda x: x))),
    OwnFault("scale in bfloat16 of codes", "convention|bfloat16|.",
             product=_int8(_decoded_with(lambda s: s * 1.004))),
    OwnFault("four bits", "keeps the upper 4 of 8 bits",
             product=_int8(None, lambda w: _four_bits(w))),
    OwnFault("sign of codes lost", "its input has lost its sign",
             product=_int8(lambda x: int8_rows(x).abs())),
    OwnFault("zero point", "its input .*zero point",
             product=_int8(lambda x: int8_rows(x) + x.abs().amax(-1, keepdim=True) / 127)),
    OwnFault("result 1 % large", "1.01 times the expected", product=_after(lambda y: y * 1.01)),
    OwnFault("last column zero", "the last one. is zero",
             product=_after(_put((..., -1), torch.zeros_like))),
    OwnFault("columns moved", "64 columns hold others",
             product=_after(lambda y: y.roll(1, -1))),
    OwnFault("rows moved", "rows hold others",
             product=_after(lambda y: y.roll(1, -2))),
    OwnFault("one channel 10 %", "column 5 of .* is 1.1 times",
             product=_after(_put((..., 5), lambda y: y * 1.1))),
    OwnFault("rows beyond 16 zero", "(rows|tokens) 16 to 31 .* zero",
             product=_after(_put((..., slice(16, None), slice(None)), torch.zeros_like))),
    OwnFault("columns beyond 48 wrong", "columns 48 to",
             product=_after(_put((..., slice(48, None)), lambda y: -y))),
    OwnFault("tile transposed", "some tiles of 16x16 are transposed",
             product=_after(_put((..., slice(0, 16), slice(0, 16)), lambda y: y.mT))),
    OwnFault("last term lost", "(term|entry) (63|127) of", product=_without_terms(-1, None)),
    OwnFault("16 terms lost", "16 terms, 32 to 47,", product=_without_terms(32, 48)),
    OwnFault("sums wrap in int16", "wrap", product=_in_int16),
    OwnFault("sums in bfloat16", "sums in bfloat16", product=_in_bfloat16),
    OwnFault("bias dropped", "its bias is not used", site="mlp.",
             product=_without_bias("int8")),
    OwnFault("bias twice", "its bias is counted twice", site="mlp.",
             product=lambda x, w, b: product_of("int8")(x, w, None if b is None else 2 * b)),
    OwnFault("fp8 without scale", "its input (is cast to fp8_e4m3 without a scale|has scales no smaller than 1)", "fp8",
             product_of("fp8", lambda x: x.to(torch.float8_e4m3fn).float())),
    OwnFault("fp8 of the tensor", "one scale for the tensor", "fp8",
             product_of("fp8", _fp8(448, torch.float8_e4m3fn, of_tensor=True))),
    OwnFault("e5m2", "its input .*e5m2", "fp8", product_of("fp8", _fp8(57344, torch.float8_e5m2))),
    OwnFault("fnuz", "its weight .*(fnuz|240)", "fp8",
             product_of("fp8", None, _fp8(240, torch.float8_e4m3fnuz))),
    OwnFault("int8 for fp8", "its input .*int8", "fp8", product_of("fp8", int8_rows)),
    OwnFault("scale to 240", "its input .*scale", "fp8",
             product_of("fp8", _fp8(200, torch.float8_e4m3fn))),
    OwnFault("fp8 weight not quantized", "its weight is not quantized", "fp8",
             product_of("fp8", None, lambda w: w)),
    OwnFault("mx scale 16 times", "with 16 times the scale of the definition", "mxfp8", product_of("mxfp8", _mx(lambda e: e + 4))),
    OwnFault("mx scale half", "half the scale", "mxfp8", product_of("mxfp8", _mx(lambda e: e - 1))),
    OwnFault("mx blocks of 16", "blocks of 16", "mxfp8", product_of("mxfp8", _mx(lambda e: e, 16))),
    OwnFault("mx blocks late", "its input has blocks that begin one element late", "mxfp8",
             product_of("mxfp8", _late_blocks)),
    OwnFault("mx e5m2", "e5m2|NaN", "mxfp8", product_of("mxfp8", None, _mx_e5m2)),
    OwnFault("mx not quantized", "its input is not quantized", "mxfp8",
             product_of("mxfp8", lambda x: x)),
    OwnFault("mx one scale per row", "blocks of 64|one scale", "mxfp8",
             product_of("mxfp8", _mx(lambda e: e.amax(-2, keepdim=True)))),
    OwnFault("mx last block zero", "32 terms|columns 0 to 31", "mxfp8",
             _without_terms(-32, None, "mxfp8")),
    OwnFault("w4 groups of 64", "its weight has blocks of 64", "w4",
             product_of("w4", None, _w4(lambda s: s, 64))),
    OwnFault("w4 next group's scale", "its weight is decoded with (every scale moved to the next group|the scales of neighboring groups swapped)", "w4",
             product_of("w4", None, _w4(lambda s: s.roll(1, -2)))),
    OwnFault("w4 nibbles", "its weight .*(nibbles|neighbo)", "w4", product_of("w4", None, _nibbles)),
    OwnFault("w4 scale of 5", "its weight is quantized with (1.4 times the right scales|a scale of amax/5)", "w4",
             product_of("w4", None, _w4(lambda s: s, most=5))),
    OwnFault("w4 half scale", "its weight .*2 times too low|half", "w4",
             product_of("w4", None, _w4(lambda s: s / 2))),
    OwnFault("w4 inputs in int8", "its input is quantized.*int8", "w4",
             product_of("w4", int8_rows)),
    OwnFault("w4 inputs in fp8", "its input is quantized.*fp8", "w4", product_of("w4", fp8_rows)),
    OwnFault("w4 bias dropped", "its bias is not used", "w4",
             _without_bias("w4"), site="mlp."),
]  # fmt: skip


def _four_bits(w: Tensor) -> Tensor:
    scale = w.abs().amax(-1, keepdim=True) / 127
    return ((w / scale).round() / 16).round() * 16 * scale


def _between(name: str, words: str, site: str, fmt: str = "int8") -> OwnFault:
    return OwnFault(name, words, fmt, None, site)


BETWEEN = [
    _between("eps", "eps is 0.001, not 1e-05", "norm1:output"),
    _between("n - 1", "the sum over 64 is divided by 63, not by 64", "norm1:output"),
    _between("mean of magnitudes", "off by a factor each", "norm1:output"),
    _between("no weight", "weight is not used", "norm1:output"),
    _between("weight plus 1", "weight .*1", "norm1:output"),
    _between("scale of padded heads", r"scores of the softmax are 1/sqrt\(2\)", "o_proj:input"),
    _between("scale of the width", r"scores of the softmax are 1/sqrt\(4\) times", "o_proj:input"),
    _between("scores 1 % large", "scores .*1.01 times", "o_proj:input"),
    _between("mask late", "the mask shows one key more|mask", "o_proj:input"),
    _between("mask early", "the mask shows one key less", "o_proj:input"),
    _between("window", "window|rows 1 to 8 of .*k_proj", "o_proj:input"),
    _between("weights in float16", "float16", "o_proj:input"),
    _between("first key left out", "entry 0|first|row 0", "o_proj:input"),
    _between("heads not joined", "depends on columns 0, 16 of attention.v_proj", "o_proj:input"),
    _between("heads repeated, not interleaved", "head|column 16 of .*v_proj", "o_proj:input"),
    _between("position of queries late", "position", "o_proj:input"),
    _between("values turned", "v_proj", "o_proj:input"),
    _between("rotary base", "base|rotat|rotary", "o_proj:input"),
    # Of these two the place alone is named: pairs of a rotation inside, and a bound that is new.
    _between("rotary pairs interleaved", "tokens 1 to 31 of 32 .* are wrong", "o_proj:input"),
    _between("rotary halves swapped", "halves|sign|backward|opposite", "o_proj:input"),
    _between("rotary positions left out", "positions are not used: all are 0", "o_proj:input"),
    _between("gate and up swapped", "are swapped", "down:input"),
    _between("gate clamped", "of 128 channels .* are wrong", "down:input"),
    _between("gelu for silu", "gelu is computed in the place of silu", "down:input"),
    _between("no activation", "identity is computed in the place of silu", "down:input"),
    _between("up left out", "up:output is not used: read as ones", "down:input"),
    _between("residual of attention dropped", "it has lost its residual", "layers.0:output|norm2:(in|out)put"),
    _between("residual of the MLP dropped", "the result of an addition is not added", "layers.0:output"),
    _between("residual from before attention", "o_proj:output is not used", "layers.0:output"),
    _between("MLP added twice", "down:output is counted twice", "layers.0:output"),
    _between("gelu for silu", "gelu is computed in the place of silu", "down:input", "w4"),
    _between("eps", "eps is 0.001, not 1e-05", "norm1:output", "mxfp8"),
    _between("mask early", "the mask shows one key less", "o_proj:input", "fp8"),
]  # fmt: skip
WRONG = [*PRODUCTS, *BETWEEN]
