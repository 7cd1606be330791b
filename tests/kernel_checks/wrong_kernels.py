"""Kernels with one fault each, and words that the first line of the failure must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm, scaled_dot_product_attention

import qgate
from qgate.testing import check_kernel

ROWS, TERMS, COLUMNS = 48, 128, 40
GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(ROWS, TERMS, generator=GENERATOR)
W = torch.randn(COLUMNS, TERMS, generator=GENERATOR) / 11
SQUARE = torch.randn(ROWS, TERMS, generator=GENERATOR) / 11
BATCH = torch.randn(4, 20, 64, generator=GENERATOR)
EXPERTS = torch.randn(4, 24, 64, generator=GENERATOR) / 8
BIAS = torch.randn(COLUMNS, generator=GENERATOR)
Q, K, V = (torch.randn(2, 4, 24, 32, generator=GENERATOR) for _ in range(3))
BY_ROW = qgate.Quantizer("int8", granularity="channel", axis=0)
FP8_BY_ROW = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)
FP8_TENSOR = qgate.Quantizer("fp8_e4m3", granularity="tensor")


@dataclass(frozen=True)
class WrongKernel:
    """A kernel with a fault, how it is checked, and words of the cause."""

    name: str
    words: str
    kernel: Callable[..., Any]
    arguments: tuple[Any, ...] = (X, W)
    like: Callable[..., Any] = linear
    inputs: dict[int, Any] = field(default_factory=lambda: {0: "mxfp8", 1: "mxfp8"})
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> Any:
        """Check the kernel, which must fail."""
        return check_kernel(
            self.kernel, *self.arguments, like=self.like, inputs=self.inputs, **self.options
        )


def cast(x: Tensor, fmt: Any = "mxfp8", **options: Any) -> Tensor:
    return qgate.quantize(x, fmt, **options) if x.numel() else x


def product(x: Tensor, w: Tensor, fmt: Any = "mxfp8", **options: Any) -> Tensor:
    return linear(cast(x, fmt, **options), cast(w, fmt, **options))


def after(change: Callable[[Tensor], Any], fmt: Any = "mxfp8") -> Callable[..., Tensor]:
    """Return a right product whose result is changed in place, or replaced."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        y = product(x, w, fmt)
        changed = change(y)
        return changed if isinstance(changed, Tensor) else y

    return kernel


def before(change: Callable[[Tensor], Tensor], fmt: Any = "mxfp8") -> Callable[..., Tensor]:
    """Return a product whose first argument is cast by something else."""
    return lambda x, w: linear(change(x), cast(w, fmt))


def _blocks(x: Tensor, size: int = 32) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def _with_scales(x: Tensor, change: Callable[[Tensor], Tensor], fmt: str = "mxfp8") -> Tensor:
    """Decode right codes with other scales."""
    if x.shape[-1] % 32 or not x.numel():
        return cast(x, fmt)
    encoded = qgate.encode(x, fmt)
    assert encoded.scales is not None
    changed = qgate.Encoded(
        encoded.quantizer, encoded.codes, encoded.dtype, change(encoded.scales),
        encoded.tensor_scale, encoded.micro,
    )  # fmt: skip
    return changed.decode()


def _pairs_swapped(scales: Tensor) -> Tensor:
    even = scales.shape[-1] // 2 * 2
    order = torch.arange(scales.shape[-1])
    order[:even] = order[:even].reshape(-1, 2).flip(1).reshape(-1)
    return scales[..., order]


def _shape_of_zeros(y: Tensor) -> Tensor:
    return torch.zeros_like(y)


def _rows_beyond_tiles(y: Tensor) -> None:
    y[len(y) // 16 * 16 :] = 0


def _odd_row(y: Tensor) -> None:
    if len(y) % 2:
        y[-1] *= 1.5


def _row(y: Tensor) -> None:
    y[5:6] = 0


def _column(y: Tensor) -> None:
    y[:, 7:8] *= 1.001


def _tile(y: Tensor) -> None:
    y[16:32, 16:32] += 0.25


def _single(y: Tensor) -> Tensor:
    return y * 2 if len(y) == 1 else y


def _fixed_memory(x: Tensor, w: Tensor) -> Tensor:
    """Read the first argument as if it were contiguous."""
    wrong = x.as_strided(x.shape, (x.shape[-1], 1)) if x.dim() == 2 else x
    return product(wrong, w)


def _first_scale_for_all(x: Tensor) -> Tensor:
    if not x.numel():
        return x
    scale = (x[:1].abs().amax() / 127).clamp_min(1e-30)
    return (x / scale).round().clamp(-127, 127) * scale


def _int8_rows(x: Tensor, divisor: float = 127.0) -> Tensor:
    if not x.numel():
        return x
    scale = (x.abs().amax(-1, keepdim=True) / divisor).clamp_min(1e-30)
    return (x / scale).round().clamp(-128, 127) * scale


def _power_of_two_scales(x: Tensor) -> Tensor:
    """Round scales up to powers of two after quantizing."""
    if not x.numel():
        return x
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-30)
    codes = cast(x / scale, "fp8_e4m3")
    return codes * torch.exp2(torch.ceil(torch.log2(scale)))


def _sum_in(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Add up a product one group of terms after another in a narrow dtype."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        x_cast, right = cast(x), cast(w)
        total = torch.zeros(len(x_cast), len(right), dtype=dtype)
        for start in range(0, x_cast.shape[-1], 8):
            part = slice(start, start + 8)
            total += (x_cast[:, part] @ right[:, part].T).to(dtype)
        return total.float()

    return kernel


def _grouped(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bmk,bnk->bmn", x, w)


def _attention(change: Callable[[Tensor], Any] | None = None, shift: int = 0) -> Any:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = cast(k, FP8_TENSOR), cast(v, FP8_TENSOR)
        if shift:
            v = v.roll(shift, -2)
        y = scaled_dot_product_attention(q, k, v)
        if change:
            change(y)
        return y

    return kernel


def _mask_off_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(-1)
    mask[0, 0] = True
    return scaled_dot_product_attention(q, cast(k, FP8_TENSOR), cast(v, FP8_TENSOR), mask)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    mask = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(q, k, v, mask)


def _codes(x: Tensor) -> Tensor:
    return cast(x, FP8_TENSOR) / (x.abs().amax() / 448)


_CALLS = [0]


def _not_repeatable(x: Tensor, w: Tensor) -> Tensor:
    _CALLS[0] += 1
    return product(x, w) * (1 + 1e-7 * (_CALLS[0] % 7))


def _by_row(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, None, :] * w).sum(-1)


def _split_in_short_batches(x: Tensor, w: Tensor) -> Tensor:
    """Add up a product in two parts where there are few rows, as split-K kernels do."""
    middle = x.shape[-1] // 2
    if len(x) > 8:
        return _by_row(x, w)
    return _by_row(x[:, :middle], w[:, :middle]) + _by_row(x[:, middle:], w[:, middle:])


def _norm(x: Tensor) -> Tensor:
    return rms_norm(x, (x.shape[-1],), eps=1e-6)


def _lost_terms(first: int, last: int, factor: float = 0.0) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        y = cast(x, "nvfp4").clone()
        y[..., first:last] *= factor
        return y

    return change


def _tail_of_terms_lost(x: Tensor) -> Tensor:
    y = cast(x).clone()
    whole = y.shape[-1] // 32 * 32
    if whole:
        y[..., whole:] = 0
    return y


NVFP4 = {0: "nvfp4", 1: "nvfp4"}
ROWWISE = {0: BY_ROW, 1: BY_ROW}
ATTENTION = {1: FP8_TENSOR, 2: FP8_TENSOR}
HEADS = (Q, K, V)

WRONG = (
    # Shapes and views
    WrongKernel("odd length", "row 2 of 3 \\(the last one\\) is 1.5 times the expected", after(_odd_row)),
    WrongKernel("partial tile", "row 16 of 17 \\(the last one\\) is zero", after(_rows_beyond_tiles)),
    WrongKernel("single token", "for the (first|last) of 48.*2 times too high", after(_single)),
    WrongKernel("strided", "for strided views", _fixed_memory),
    WrongKernel(
        "only the first batch", "index . of 4 in dimension 0|indices 1 to 3 of 4 in dimension 0",
        lambda x, w: torch.cat([product(x[:1], w), torch.zeros(len(x[1:]), 20, 40)])
        if x.shape[1] == 20 and len(w) == 40
        else product(x, w),
        (BATCH, W[:, :64].contiguous()),
    ),
    WrongKernel("wrong shape", "returns shape", after(lambda y: y[:, :-1])),
    WrongKernel("term tail", "for a partial block: 127 of 128", before(_tail_of_terms_lost)),
    WrongKernel("tile", "rows 16 to 31 and columns 16 to 31.*one tile of 16x16", after(_tile)),
    WrongKernel("row", "row 5 of 48 is zero", after(_row)),
    WrongKernel(
        "column", "column 7 of 40 is 1.001 times the expected", after(_column)
    ),
    # Terms of sums
    WrongKernel("term", "term 77 of the sum over 128.*is lost", before(_lost_terms(77, 78), "nvfp4"),
                inputs=NVFP4),
    WrongKernel("terms twice", "8 terms, 64 to 71, .*added twice",
                before(_lost_terms(64, 72, 2.0), "nvfp4"), inputs=NVFP4),
    WrongKernel("last group of terms", "16 terms, 112 to 127, .*are lost",
                before(_lost_terms(112, 128), "nvfp4"), inputs=NVFP4),
    WrongKernel("fp16 sums", "sums in float16 or tf32", _sum_in(torch.float16)),
    WrongKernel("bf16 sums", "sums in bfloat16", _sum_in(torch.bfloat16)),
    # Scales
    WrongKernel("scale twice", "argument 0 .*off by a power of two|2 times too high",
                before(lambda x: cast(x) * 2)),
    WrongKernel("scale off by 3 %", "1.03 times the expected one", after(lambda y: y * 1.03)),
    WrongKernel("swapped scales", "argument 0 is decoded with the scales of neighboring groups",
                before(lambda x: _with_scales(x, _pairs_swapped))),
    WrongKernel("shifted scales", "argument 0 is decoded with every scale moved",
                before(lambda x: _with_scales(
                    x, lambda s: s.reshape(-1).roll(1).reshape(s.shape)))),
    WrongKernel("one scale", "argument 0 is decoded with one scale",
                before(lambda x: _with_scales(
                    x, lambda s: s.reshape(-1)[:1].expand(s.numel()).reshape(s.shape)))),
    WrongKernel("scales to powers of two", "argument 0 has scales rounded up to powers of two",
                lambda x, w: linear(_power_of_two_scales(x), cast(w, FP8_BY_ROW)),
                inputs={0: FP8_BY_ROW, 1: FP8_BY_ROW}),
    WrongKernel("stale scale", "argument 0 is quantized with half the scale",
                lambda x, w: linear(
                    cast(x, "fp8_e4m3", scale=float((X.abs().amax() * 0.5 / 448).float()))
                    if x.shape == X.shape else cast(x, FP8_TENSOR), cast(w, FP8_TENSOR)),
                inputs={0: FP8_TENSOR, 1: FP8_TENSOR},
                options={"relations": ["one"]}),
    WrongKernel("first row's scale", "argument 0 is quantized with one scale, that of the first", before(_first_scale_for_all, BY_ROW),
                inputs=ROWWISE),
    WrongKernel("another divisor and 3 %", "1.03 times",
                lambda x, w: linear(_int8_rows(x, 127.5), _int8_rows(w, 127.5)) * 1.03,
                inputs=ROWWISE),
    # Formats and groups
    WrongKernel("blocks of 16", "each of arguments 0, 1 has blocks of 16, not of 32",
                lambda x, w: product(x, w, block=16)),
    WrongKernel("other axis", "argument 1 has its scales along axis 0",
                lambda x, w: linear(cast(x), cast(w, axis=0))),
    WrongKernel("mxfp4 for nvfp4", "each of arguments 0, 1 is mxfp4_e2m1, not nvfp4",
                lambda x, w: product(x, w, "mxfp4"), inputs=NVFP4),
    WrongKernel("int8 for fp8", "is int8, not fp8_e4m3",
                lambda x, w: product(x, w, BY_ROW), inputs={0: FP8_BY_ROW, 1: FP8_BY_ROW}),
    WrongKernel("e5m2 for e4m3", "is mxfp8_e5m2, not mxfp8_e4m3",
                lambda x, w: product(x, w, "mxfp8_e5m2")),
    WrongKernel("not quantized", "argument 1 is not quantized to mxfp8_e4m3",
                lambda x, w: linear(cast(x), w)),
    WrongKernel("quantized twice", "argument 0 is quantized twice: to nvfp4",
                before(lambda x: cast(cast(x, "nvfp4")))),
    WrongKernel("truncated", "argument 0 is truncated", before(lambda x: cast(x, rounding="zero"))),
    WrongKernel("no subnormals", "argument 0 flushes subnormal values",
                lambda x, w: linear(
                    torch.where(cast(x, "fp8_e4m3").abs() < 2.0**-6, 0.0, cast(x, "fp8_e4m3")),
                    cast(w, "fp8_e4m3")),
                inputs={0: "fp8_e4m3", 1: "fp8_e4m3"}),
    WrongKernel("nibbles", "argument 0 has neighboring codes swapped",
                before(lambda x: cast(x, "nvfp4").reshape(*x.shape[:-1], -1, 2).flip(-1)
                       .reshape(x.shape) if x.shape[-1] % 2 == 0 else cast(x, "nvfp4"), "nvfp4"),
                inputs=NVFP4),
    # Results
    WrongKernel("zeros", "the result is all zeros", after(_shape_of_zeros)),
    WrongKernel("constant", "the result is 1 everywhere", after(torch.ones_like)),
    WrongKernel("sign", "the opposite sign", after(torch.neg)),
    WrongKernel("magnitude", "lost its sign", after(torch.abs)),
    WrongKernel("transposed", "the result is transposed",
                lambda x, w: product(x, w).T if x.shape == w.shape else product(x, w),
                (X, SQUARE)),
    WrongKernel("bias dropped", "argument 2 is not used: read as zeros",
                lambda x, w, _b: product(x, w), (X, W, BIAS), linear),
    WrongKernel("bias twice", "argument 2 is counted twice|a bias is dropped or added twice",
                lambda x, w, b: product(x, w) + 2 * b, (X, W, BIAS), linear),
    WrongKernel("overflow", "for values times 2\\^12.*Inf where finite",
                after(lambda y: (y * 16).half().float() / 16 if y.numel() and y.abs().amax() > 4e3 else y)),
    WrongKernel("underflow", "for values times 2\\^-12",
                after(lambda y: torch.where(y.abs() < 2e-4, 0.0, y) if y.numel()
                      and y.abs().amax() < 2e-3 else y)),
    WrongKernel("NaN for zero rows", "for zero rows.*NaN where finite",
                lambda x, w: linear(x / x.abs().amax(-1, keepdim=True)
                                    * x.abs().amax(-1, keepdim=True), w) * 0 + product(x, w)
                if x.numel() else product(x, w)),
    WrongKernel("NaN vanishes", "for one NaN.*became finite",
                lambda x, w: product(x.nan_to_num(), w)),
    WrongKernel("not repeatable", "is not repeatable", _not_repeatable,
                options={"repeatable": True}),
    WrongKernel("other sums in short batches", "is not batch-invariant.*the first of 48",
                _split_in_short_batches, (X, W), inputs={}, options={"invariant": True}),
    # Other kinds of kernels
    WrongKernel("expert lost", r"index 3 of 4 in dimension 0 \(the last one\) is zero",
                lambda x, w: _grouped(cast(x), cast(w)) * (torch.arange(len(x)) != 3)[:, None, None],
                (BATCH, EXPERTS), _grouped),
    WrongKernel("head lost", "index 2 of 4 in dimension 1 is zero",
                _attention(lambda y: y[:, 2:3].zero_()), HEADS, scaled_dot_product_attention,
                ATTENTION),
    WrongKernel("cache shifted", "argument 2 is shifted|wrong", _attention(shift=1), HEADS,
                scaled_dot_product_attention, ATTENTION),
    WrongKernel("mask off by one", "the mask shows one key less", _mask_off_by_one, HEADS, _causal,
                ATTENTION, {"relations": ["permuted"]}),
    WrongKernel("window off by one", "argument 3 is taken as 9, not 8",
                lambda q, k, v, window: _windowed(q, cast(k, FP8_TENSOR), v, window + 1),
                (*HEADS, 8), _windowed, {1: FP8_TENSOR}, {"relations": ["permuted"]}),
    WrongKernel("scales dropped", "each of arguments 1, 2 is decoded without scales",
                lambda q, k, v: scaled_dot_product_attention(q, _codes(k), _codes(v)), HEADS,
                scaled_dot_product_attention, ATTENTION, {"relations": ["permuted"]}),
    WrongKernel("wrong column", "column 3 of 40 holds what column 4 of 40 should",
                after(lambda y: y[:, [0, 1, 2, 4, *range(4, 40)]] if y.shape[1] == 40 else y)),
    WrongKernel("rows not normalized", "rows 1 to 47 of 48 \\(to the end\\) are off by a factor each, 2 to 48",
                after(lambda y: y * (1 + torch.arange(len(y))[:, None]) if y.dim() == 2 else y)),
    WrongKernel("half of an argument", "argument 1 counts 0.7 times in the result",
                lambda x, y: x + 0.7 * cast(y), (X, SQUARE), torch.add, {1: "mxfp8"}),
    WrongKernel("no softmax", "the result is the logarithm of the expected one",
                lambda x: x, (X,), lambda x: x.softmax(-1), {}, {"relations": ["one"]}),
    WrongKernel("sums cut off", "errors look like rounding toward zero alone",
                after(lambda y: (y * 2.0**10).trunc() / 2.0**10)),
    WrongKernel("narrow inputs", "each of arguments 0, 1 is rounded to bfloat16",
                lambda x, w: linear(x.bfloat16().float(), w.bfloat16().float()), inputs={}),
    WrongKernel("expert of NaN", "120 of 480 results are NaN.*index 3 of 4 in dimension 0",
                lambda x, w: _grouped(cast(x), cast(w)) / (torch.arange(len(x)) != 3)[:, None, None]
                * (torch.arange(len(x)) != 3)[:, None, None],
                (BATCH[:, :5], EXPERTS), _grouped),
    WrongKernel("norm without its square root", "wrong",
                lambda x: cast(x / (x.square().mean(-1, keepdim=True) + 1e-6)), (X,), _norm, {},
                {"output": "mxfp8"}),
    WrongKernel("gelu by tanh", "wrong",
                lambda x: cast(gelu(x, approximate="tanh")), (X,), gelu, {}, {"output": "mxfp8"}),
    WrongKernel("result truncated", "the result is truncated",
                lambda x: cast(_norm(x), rounding="zero") if x.numel() else x, (X,), _norm, {},
                {"output": "mxfp8"}),
)  # fmt: skip
