"""Kernels that are wrong beyond one tile, in a later call, at an offset, or that mix up places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.kernel_checks.pairs import (
    BF16,
    FP8,
    FP8_TENSOR,
    FP16,
    INT8,
    Kernel,
    Pair,
    cast,
    normal,
    rowwise,
)

X, W = normal(24, 64), normal(20, 64, scale=0.1)
SQUARE = normal(64, 64, scale=0.1)
LARGE_X, LARGE_W = normal(64, 96), normal(48, 96)
BATCH, MATRICES = normal(3, 12, 32), normal(3, 16, 32, scale=0.2)
LONG: dict[str, Any] = {"relations": ["one", "long"]}
BY_ROW = {0: INT8, 1: INT8}
FP8_BOTH = {0: FP8, 1: FP8}


def int8_product(x: Tensor, w: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    (a, scale_a), (b, scale_b) = rowwise(x), rowwise(w)
    return (linear(a, b) * scale_a * scale_b.reshape(-1)).to(dtype)


def fp8_product(x: Tensor, w: Tensor) -> Tensor:
    return linear(cast(x, FP8), cast(w, FP8))


def mx_product(x: Tensor, w: Tensor) -> Tensor:
    return linear(cast(x, "mxfp8"), cast(w, "mxfp8"))


def batched(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bmk,bnk->bmn", x, w)


def after(product: Kernel, change: Callable[[Tensor], Any]) -> Kernel:
    """Return a product whose result is changed in place or replaced."""

    def kernel(*arguments: Tensor) -> Tensor:
        y = product(*arguments)
        changed = change(y)
        return changed if isinstance(changed, Tensor) else y

    return kernel


def _rows_lost(y: Tensor) -> None:
    y[256:] = 0


def _columns_lost(y: Tensor) -> None:
    y[:, 64:] = 0


def _terms_lost(x: Tensor, w: Tensor) -> Tensor:
    return linear(cast(x, "mxfp8")[:, :128], cast(w, "mxfp8")[:, :128])


def _experts_repeated(x: Tensor, w: Tensor) -> Tensor:
    return batched(x, w)[torch.arange(len(x)) % 16]


def _two_parts(x: Tensor, w: Tensor, parts: int = 2) -> Tensor:
    pieces = zip(cast(x, FP8).chunk(2, -1), cast(w, FP8).chunk(2, -1), strict=True)
    return torch.stack([linear(a, b) for a, b in pieces])[:parts].sum(0)


class CachedScale:
    """A product that keeps the scales of its weight by the weight's address."""

    __name__ = "cached"

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.kept: dict[Any, list[Any]] = {}

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        scale = w.abs().amax(1, keepdim=True) / 127
        entry = self.kept.setdefault((w.data_ptr(), w.shape), [0, w.clone()])
        entry[0] += 1
        return linear(cast(x, INT8), cast(entry[1] if entry[0] > self.calls else w, INT8)) + 0 * scale.sum()  # fmt: skip


def _graph() -> Kernel:
    """Return a product that replays its first result from the second call of a shape on."""
    graphs: dict[Any, Tensor] = {}

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return graphs.setdefault((x.data_ptr(), x.shape, w.data_ptr()), fp8_product(x, w)).clone()

    return kernel


def _from_storage(x: Tensor, w: Tensor) -> Tensor:
    """Read a contiguous argument from the start of its storage."""
    if x.is_contiguous() and x.numel():
        x = x.as_strided(x.shape, x.stride(), 0)
    return mx_product(x, w)


def _int16(change: Callable[[Tensor], Tensor]) -> Kernel:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = rowwise(x), rowwise(w)
        return change(linear(a, b)) * scale_a * scale_b.reshape(-1)

    return kernel


def _wrapped(sums: Tensor) -> Tensor:
    return (sums + 32768).remainder(65536) - 32768


def _saturated(sums: Tensor) -> Tensor:
    return sums.clamp(-32768, 32767)


def _saturating_steps(x: Tensor, w: Tensor) -> Tensor:
    """Add pairs of terms with saturation, as vpmaddubsw and vpaddsw do."""
    (a, scale_a), (b, scale_b) = rowwise(x), rowwise(w)
    total = torch.zeros(len(a), len(b))
    for start in range(0, a.shape[1], 2):
        part = linear(a[:, start : start + 2], b[:, start : start + 2])
        total = _saturated(total + _saturated(part))
    return total * scale_a * scale_b.reshape(-1)


def _tiles_transposed(y: Tensor, size: int = 16) -> Tensor:
    rows, columns = (length // size for length in y.shape)
    if rows * size != y.shape[0] or columns * size != y.shape[1] or not y.numel():
        return y
    return y.reshape(rows, size, columns, size).transpose(1, 3).reshape(y.shape)


def _weights_transposed(x: Tensor, w: Tensor) -> Tensor:
    return linear(cast(x, "mxfp8"), _tiles_transposed(cast(w, "mxfp8"), 32))


def _scales_of_the_next_row(x: Tensor, w: Tensor) -> Tensor:
    (a, scale_a), (b, scale_b) = rowwise(x), rowwise(w)
    return linear(a, b) * scale_a * scale_b.reshape(-1).roll(-1)


def _scales_of_the_next_token(x: Tensor, w: Tensor) -> Tensor:
    (a, scale_a), (b, scale_b) = rowwise(x), rowwise(w)
    return (linear(a, b) * scale_a.roll(1, 0) * scale_b.reshape(-1)).to(BF16)


def _dropout(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.dropout(fp8_product(x, w), 0.1, training=True)


def _race(x: Tensor, w: Tensor) -> Tensor:
    """Lose a partial sum now and then, as two blocks without an atomic addition do."""
    y = mx_product(x, w)
    if y.numel():
        y[int(torch.randint(len(y), ()))] *= 0.5
    return y


def _wrong_stride(x: Tensor, w: Tensor) -> Tensor:
    """Take every argument for contiguous."""
    flat = [t.as_strided(t.shape, (t.shape[-1], 1)) if t.dim() == 2 else t for t in (x, w)]
    return int8_product(*flat)


def _overlapping_tiles(x: Tensor, w: Tensor) -> Tensor:
    """Add the last whole tile of terms again in the place of the partial one."""
    a, b = cast(x, FP8), cast(w, FP8)
    whole = a.shape[1] // 48 * 48
    if whole == a.shape[1] or not whole:
        return linear(a, b)
    part = slice(whole - (a.shape[1] - whole), whole)
    return linear(a[:, :whole], b[:, :whole]) + linear(a[:, part], b[:, part])


PAIRS = (
    Pair("rows beyond 256", r"row 256 of 257 \(the last one\) is zero",
         int8_product, after(int8_product, _rows_lost), (X, W), linear, BY_ROW, LONG),
    Pair("columns beyond 64", r"columns 64 to 256 of 257 \(to the end\) are zero",
         fp8_product, after(fp8_product, _columns_lost), (X, W), linear, FP8_BOTH, LONG),
    Pair("terms beyond 128", r"terms, 128 to \d+, of the sum over .* are lost",
         mx_product, _terms_lost, (X, W), linear, {0: "mxfp8", 1: "mxfp8"}, LONG),
    Pair("experts beyond 16", "hold others: index of dimension 0 16 what 0 should|indices 16 to .* hold what",
         batched, _experts_repeated, (BATCH, MATRICES), batched, {}, LONG),
    Pair("half of split K", "32 terms, 32 to 63, of the sum over 64 .* are lost",
         _two_parts, lambda x, w: _two_parts(x, w, 1), (X, W), linear, FP8_BOTH),
    Pair("cached scales", "uses earlier values of argument 1",
         lambda x, w: linear(cast(x, INT8), cast(w, INT8)), CachedScale(1), (X, W), linear, BY_ROW,
         {"relations": ["again"]}),
    Pair("cached after three calls", "in the fifth call|uses earlier values of argument 1|not repeatable",
         lambda x, w: linear(cast(x, INT8), cast(w, INT8)), CachedScale(3), (X, W), linear, BY_ROW,
         {"relations": ["again"]}),
    Pair("a replayed graph", "gives its earlier result",
         fp8_product, _graph(), (X, W), linear, FP8_BOTH, {"relations": ["again"]}),
    Pair("storage without its offset", "for memory that begins 64 bytes",
         mx_product, _from_storage, (X, W), linear, {0: "mxfp8", 1: "mxfp8"},
         {"relations": ["offset", "strided"]}),
    Pair("wrong stride", "for (strided|transposed)",
         int8_product, _wrong_stride, (X, W), linear, BY_ROW,
         {"relations": ["transposed", "strided"]}),
    Pair("int16 wraps", "wrap at 16 bits", _int16(lambda s: s), _int16(_wrapped),
         (LARGE_X, LARGE_W), linear, BY_ROW),
    Pair("int16 saturates", "saturate at 16 bits", _int16(lambda s: s), _int16(_saturated),
         (LARGE_X, LARGE_W), linear, BY_ROW),
    Pair("int16 saturates in steps", "saturate at 16 bits", _int16(lambda s: s), _saturating_steps,
         (LARGE_X, LARGE_W), linear, BY_ROW),
    Pair("rows late", "argument 0 is read one entry too early along dimension 0|rows hold others: row 0 what 23 should, 1 what 0",
         fp8_product, lambda x, w: fp8_product(x.roll(1, 0), w), (X, W), linear, FP8_BOTH),
    Pair("scales of the next row", "argument 1 is decoded with every scale moved to the (next|previous) (group|row)",
         int8_product, _scales_of_the_next_row, (X, W), linear, BY_ROW),
    Pair("scales of the next token", "argument 0 is decoded with every scale moved to the (next|previous) (group|row)",
         int8_product, _scales_of_the_next_token, (X, W), linear, BY_ROW),
    Pair("tiles transposed", "tiles? of 16x16 (is|are) transposed",
         mx_product, after(mx_product, _tiles_transposed), (normal(32, 64), normal(48, 64)), linear,
         {0: "mxfp8", 1: "mxfp8"}),
    Pair("tiles of the weight transposed", "argument 1 .*tiles? of 32x32 transposed",
         mx_product, _weights_transposed, (X, SQUARE), linear, {0: "mxfp8", 1: "mxfp8"}),
    Pair("dropout", "is not repeatable", fp8_product, _dropout, (X, W), linear, FP8_BOTH),
    Pair("a race", "is not repeatable", mx_product, _race, (X, W), linear,
         {0: "mxfp8", 1: "mxfp8"}),
    Pair("a tile of terms twice", "terms.*(twice|lost|weights of their own)",
         fp8_product, _overlapping_tiles, (X, W), linear, FP8_BOTH),
    Pair("scales swapped", "argument 0 is decoded with the scale of argument 1",
         lambda x, w: linear(cast(x, FP8_TENSOR), cast(w, FP8_TENSOR)).half(),
         lambda x, w: (linear(cast(x, FP8_TENSOR), cast(w, FP8_TENSOR))
                       * (w.abs().max() / x.abs().max())).to(FP16) if x.numel() else linear(x, w).half(),
         (X, W), linear, {0: FP8_TENSOR, 1: FP8_TENSOR}),
)  # fmt: skip
