"""Kernels with right results and a wrong gradient, mixtures of experts, and wrong random rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, one_hot

import qgate
from qgate.kernel_checks.stochastic import Neighbors
from tests.kernel_checks.pairs import BF16, Kernel, Pair, cast, normal

Gradients = Callable[..., tuple[Tensor | None, ...]]


def with_backward(forward: Kernel, backward: Gradients) -> Kernel:
    """Return a function whose gradients another one gives: of the result's gradient and arguments."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Tensor) -> Any:
            ctx.save_for_backward(*arguments)
            return forward(*arguments)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
            return backward(g, *ctx.saved_tensors)

    def kernel(*arguments: Tensor) -> Any:
        return Function.apply(*arguments)

    return kernel


X, W, B = normal(24, 64), normal(20, 64, scale=0.1), normal(20)
SQUARE = normal(64, 64, scale=0.1)
GAIN = normal(64) + 1
BACKWARD: dict[str, Any] = {"relations": ["permuted"], "backward": True}
LONG: dict[str, Any] = {"relations": ["long"], "backward": True}
MX = {0: "mxfp8", 1: "mxfp8"}
TERNARY = torch.randint(0, 12, (24,), generator=torch.Generator().manual_seed(5))
TABLE = normal(12, 16)


# Products -------------------------------------------------------------------------------------


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return linear(cast(x, "mxfp8"), cast(w, "mxfp8"), b)


def right(g: Tensor, x: Tensor, w: Tensor, _b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return g @ cast(w, "mxfp8"), g.T @ cast(x, "mxfp8"), g.sum(0)


def changed(change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Kernel:
    def backward(g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return change(*right(g, x, w, b), g, x, w)

    return with_backward(biased, backward)


def _summed_in(dtype: torch.dtype, g: Tensor) -> Tensor:
    total = torch.zeros(g.shape[1], dtype=dtype)
    for row in g:
        total += row.to(dtype)
    return total.float()


def _product_in(dtype: torch.dtype, g: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros(g.shape[1], x.shape[1], dtype=dtype)
    for start in range(0, len(g), 2):
        total += (g[start : start + 2].T @ x[start : start + 2]).to(dtype)
    return total.float()


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w) * 0.25


def _scaled_backward(is_right: bool) -> Gradients:
    factor = 0.25 if is_right else 1.0
    return lambda g, x, w: (g @ w * factor, g.T @ x * 0.25)


def _square_backward(is_right: bool) -> Gradients:
    return lambda g, x, w: (g @ w if is_right else g @ w.T, g.T @ x)


# Norms and activations ------------------------------------------------------------------------


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def rms_backward(fault: str = "") -> Gradients:
    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        inner = (g * w * x).mean(-1, keepdim=True)
        dx = r * g * w - r.pow(3) * x * inner
        if fault == "no mean":
            dx = r * g * w
        if fault == "no gain":
            dx = r * g - r.pow(3) * x * (g * x).mean(-1, keepdim=True)
        dw = g * x if fault == "not normalized" else g * x * r
        return dx, (dw[:16] if fault == "one tile" else dw).sum(0)

    return backward


def gelu_backward(approximate: str) -> Gradients:
    def backward(g: Tensor, x: Tensor) -> tuple[Tensor]:
        y = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(gelu(y, approximate=approximate), y, g)
        return (grad,)

    return backward


def silu_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * y


def _silu_backward(is_right: bool) -> Gradients:
    def backward(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(x)
        slope = s * (1 + x * (1 - s)) if is_right else s
        return g * y * slope, g * x * s

    return backward


def table_rows(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


class _Rows(torch.autograd.Function):
    adds = True

    @classmethod
    def forward(cls, ctx: Any, table: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(table, index)
        return table[index]

    @classmethod
    def backward(cls, ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        table, index = ctx.saved_tensors
        return torch.zeros_like(table).index_put((index,), g, accumulate=cls.adds), None


class _LastRows(_Rows):
    adds = False


# Experts --------------------------------------------------------------------------------------

TOKENS, ROUTER = normal(20, 32), normal(20, 6)
FIRST, SECOND = normal(6, 24, 32, scale=0.2), normal(6, 32, 24, scale=0.2)
MIXTURE = (TOKENS, ROUTER, FIRST, SECOND)


def mixture(x: Tensor, router: Tensor, first: Tensor, second: Tensor) -> Tensor:
    weights, chosen = router.softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for slot in range(2):
        hidden = torch.nn.functional.silu(torch.einsum("tk,tnk->tn", x, first[chosen[:, slot]]))
        expert = torch.einsum("tn,tkn->tk", hidden, second[chosen[:, slot]])
        y = y + weights[:, slot : slot + 1] * expert
    return y


def dense(fault: str = "") -> Kernel:
    """Compute every expert for every token, and weigh them."""

    def kernel(x: Tensor, router: Tensor, first: Tensor, second: Tensor) -> Tensor:
        p = router.sigmoid() if fault == "sigmoid" else router.softmax(-1)
        weights, chosen = p.topk(1 if fault == "top 1" else 2, -1)
        if fault == "sorted":
            chosen = chosen.sort(-1).values
        if fault != "not normalized":
            weights = weights / weights.sum(-1, keepdim=True)
        if fault == "weighted twice":
            weights = weights * weights
        if fault == "next expert":
            chosen = (chosen + 1) % len(first)
        by_expert = (one_hot(chosen, len(first)) * weights[..., None]).sum(1)
        hidden = torch.nn.functional.silu(torch.einsum("tk,enk->etn", x, first))
        if fault == "weight inside":
            hidden = torch.nn.functional.silu(torch.einsum("te,tk,enk->etn", by_expert, x, first))
            by_expert = (by_expert > 0).to(x)
        y = torch.einsum("etn,ekn->etk", hidden, second)
        return torch.einsum("te,etk->tk", by_expert.to(x), y)

    return kernel


def in_bf16(kernel: Kernel) -> Kernel:
    return lambda *arguments: kernel(*[a.float() for a in arguments]).to(BF16)


HALF_MIXTURE = tuple(t.to(BF16) for t in MIXTURE)


# Rounding at random ---------------------------------------------------------------------------

INT8_RANDOM = qgate.Quantizer("int8", granularity="channel", axis=0, rounding="stochastic")
FP8_RANDOM = qgate.Quantizer("fp8_e5m2", granularity="tensor", rounding="stochastic")
MX_RANDOM = qgate.Quantizer("mxfp8", rounding="stochastic")


def same(x: Tensor) -> Tensor:
    return x


def drawn(cast: Any, chance: Callable[[Tensor, Tensor], Tensor]) -> Kernel:
    """Round to one of two neighbors by what `chance` makes of the share and of random numbers."""

    def kernel(x: Tensor) -> Tensor:
        beside = Neighbors.of(x.double(), cast)
        numbers = torch.rand(x.shape, dtype=torch.float64)
        return torch.where(chance(beside.share, numbers), beside.above, beside.below).to(x.dtype)

    return kernel


def right_chance(share: Tensor, numbers: Tensor) -> Tensor:
    return numbers < share


def _one_seed(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    beside = Neighbors.of(x.double(), FP8_RANDOM)
    numbers = torch.rand(x.shape, dtype=torch.float64, generator=generator)
    return torch.where(numbers < beside.share, beside.above, beside.below).to(x.dtype)


def _wide_dither(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale + 2 * torch.rand(x.shape) - 1).round().clamp(-127, 127) * scale


def _half_too_much(x: Tensor) -> Tensor:
    """Add a number from 0 to 1 and round to the nearest, where floor was meant."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale + 0.5 * torch.rand(x.shape)).round().clamp(-127, 127) * scale


OUT_INT8 = {"output": INT8_RANDOM}
OUT_FP8 = {"output": FP8_RANDOM}
OUT_MX = {"output": MX_RANDOM}
NUMBERS = normal(24, 64)
PAIRS = (
    Pair("gradient of the argument 1 % too large", "the gradient of argument 0 of .* 1\\.01 times",
         with_backward(biased, right), changed(lambda dx, dw, db, *_: (dx * 1.01, dw, db)), (X, W, B), linear, MX, BACKWARD),
    Pair("gradient of the bias of one tile", "the gradient of argument 2 .*(16 to 23|entries|terms|rows).*(lost|left out)",
         with_backward(biased, right), changed(lambda dx, dw, _db, g, *_: (dx, dw, g[:16].sum(0))), (X, W, B), linear, MX, BACKWARD),
    Pair("gradient of the bias beyond 256", "the gradient of argument 2 .*256.*(lost|left out|not count)",
         with_backward(biased, right), changed(lambda dx, dw, _db, g, *_: (dx, dw, g[:256].sum(0))), (X, W, B), linear, MX, LONG),
    Pair("gradient of the bias is a mean", "the gradient of argument 2 .*0\\.04\\d* times",
         with_backward(biased, right), changed(lambda dx, dw, _db, g, *_: (dx, dw, g.mean(0))), (X, W, B), linear, MX, BACKWARD),
    Pair("gradient of the bias in bf16", "the gradient of argument 2 .*(sums in|added up in) bfloat16",
         with_backward(biased, right), changed(lambda dx, dw, _db, g, *_: (dx, dw, _summed_in(BF16, g))), (X, W, B), linear, MX, BACKWARD),
    Pair("gradient of the weight in bf16", "the gradient of argument 1 .*sums in bfloat16",
         with_backward(biased, right), changed(lambda dx, _dw, db, g, x, _w: (dx, _product_in(BF16, g, cast(x, "mxfp8")), db)), (X, W, B), linear, MX, BACKWARD),
    Pair("gradient of the weight of one tile", "the gradient of argument 1 .*8 terms, 16 to 23, .*lost",
         with_backward(biased, right), changed(lambda dx, _dw, db, g, x, _w: (dx, g[:16].T @ cast(x, "mxfp8")[:16], db)), (X, W, B), linear, MX, BACKWARD),
    Pair("scale missing in backward", "the gradient of argument 0 of .* 4 times|multiplication by 0.25 is left out",
         with_backward(scaled, _scaled_backward(True)), with_backward(scaled, _scaled_backward(False)), (X, W), scaled, {}, BACKWARD),
    Pair("gradient by the transposed weight", "the gradient of argument 0 .*argument 1 .*transposed",
         with_backward(linear, _square_backward(True)), with_backward(linear, _square_backward(False)), (X, SQUARE), linear, {}, BACKWARD),
    Pair("gradient of the result is ones", "the gradient of the result is not used: read as ones",
         with_backward(biased, right), changed(lambda _dx, dw, db, g, _x, w: (torch.ones_like(g) @ cast(w, "mxfp8"), dw, db)), (X, W, B), linear, MX, BACKWARD),
    Pair("gradient of the weight in E5M2", "the gradient of argument 1 .*(the gradient of the result|argument 3) is quantized, and not declared",
         with_backward(biased, right), changed(lambda dx, _dw, db, g, x, _w: (dx, cast(g, qgate.Quantizer("fp8_e5m2", granularity="tensor")).T @ cast(x, "mxfp8"), db)), (X, W, B), linear, MX, BACKWARD),
    Pair("no mean in the gradient of a norm", "the gradient of argument 0 .*(left out|summand|not added)",
         with_backward(rms, rms_backward()), with_backward(rms, rms_backward("no mean")), (X, GAIN), rms, {}, BACKWARD),
    Pair("no gain in the gradient of a norm", "the gradient of argument 0 .*argument 1 is not used: read as ones",
         with_backward(rms, rms_backward()), with_backward(rms, rms_backward("no gain")), (X, GAIN), rms, {}, BACKWARD),
    Pair("gradient of the gain not normalized", "the gradient of argument 1 .*(rsqrt|normalized|left out|factor)",
         with_backward(rms, rms_backward()), with_backward(rms, rms_backward("not normalized")), (X * 2, GAIN), rms, {}, BACKWARD),
    Pair("gradient of the gain of one tile", "the gradient of argument 1 .*16 to 23.*(lost|left out)",
         with_backward(rms, rms_backward()), with_backward(rms, rms_backward("one tile")), (X, GAIN), rms, {}, BACKWARD),
    Pair("gradient of GELU by tanh", "the gradient of argument 0 .*gelu.* tanh",
         with_backward(gelu, gelu_backward("none")), with_backward(gelu, gelu_backward("tanh")), (X * 2,), gelu, {}, BACKWARD),
    Pair("gradient of SiLU without its slope", "the gradient of argument 0 .*(silu|left out|summand)",
         with_backward(silu_product, _silu_backward(True)), with_backward(silu_product, _silu_backward(False)), (X, normal(24, 64)), silu_product, {}, BACKWARD),
    Pair("repeated indices overwrite", "the gradient of argument 0 .*(repeated|index|indices|rows)",
         _Rows.apply, _LastRows.apply, (TABLE, TERNARY), table_rows, {}, BACKWARD),
    Pair("no gradient of the bias", "gives no gradient of argument 2",
         with_backward(biased, right), changed(lambda dx, dw, _db, *_: (dx, dw, None)), (X, W, B), linear, MX, BACKWARD),  # type: ignore[arg-type,return-value]
    Pair("weights of experts not normalized", "(div|not normalized|not divided).*", dense(), dense("not normalized"), MIXTURE, mixture),
    Pair("weights of experts not normalized in bf16", "(div|not normalized|not divided).*", in_bf16(dense()), in_bf16(dense("not normalized")), HALF_MIXTURE, mixture),
    Pair("order of the top k", "topk|order", dense(), dense("sorted"), MIXTURE, mixture),
    Pair("weighted twice", "mul|twice|square", dense(), dense("weighted twice"), MIXTURE, mixture),
    Pair("top 1 for top 2", "topk|slot|summand|left out", dense(), dense("top 1"), MIXTURE, mixture),
    Pair("sigmoid for softmax", "sigmoid", dense(), dense("sigmoid"), MIXTURE, mixture),
    Pair("weight before the activation", "before|argument 0", dense(), dense("weight inside"), MIXTURE, mixture),
    Pair("next expert", "arguments 2, 3 are read one entry too far along dimension 0|argument 1 is read one entry too early along dimension 1", dense(), dense("next expert"), MIXTURE, mixture),
    Pair("int8 with twice the chance", "rounds with a bias", drawn(INT8_RANDOM, right_chance), drawn(INT8_RANDOM, lambda s, n: n < s**0.8), (NUMBERS,), same, {}, OUT_INT8),
    Pair("FP8 with one seed for all", "64 seeds give the same bits", drawn(FP8_RANDOM, right_chance), _one_seed, (NUMBERS,), same, {}, OUT_FP8),
    Pair("zeros", "neither neighbor of the exact value", drawn(MX_RANDOM, right_chance), torch.zeros_like, (NUMBERS,), same, {}, OUT_MX),
    Pair("dither of two steps", "neither neighbor of the exact value", drawn(INT8_RANDOM, right_chance), _wide_dither, (NUMBERS,), same, {}, OUT_INT8),
    Pair("half a step too much", "neither neighbor|rounds with a bias", drawn(INT8_RANDOM, right_chance), _half_too_much, (NUMBERS,), same, {}, OUT_INT8),
    Pair("a coin for every value", "rounds with a bias", drawn(FP8_RANDOM, right_chance), drawn(FP8_RANDOM, lambda s, n: (n < 0.5) & (s > 0)), (NUMBERS,), same, {}, OUT_FP8),
    Pair("always up", "does not round at random|rounds with a bias", drawn(MX_RANDOM, right_chance), drawn(MX_RANDOM, lambda s, _n: s > 0), (NUMBERS,), same, {}, OUT_MX),
)  # fmt: skip
