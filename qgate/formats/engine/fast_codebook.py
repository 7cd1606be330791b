"""Codebooks in float32: most ratios are far from the middle of two levels, and are looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.formats._block import block_amax_bits
from qgate.formats._codebook import Codebook
from qgate.formats._work import DOUBLE, SINGLE, CastContext, widen
from qgate.formats.codebook import CodebookFormat
from qgate.formats.options import Rounding

_BINS = 2**12
_ORDINARY = 2.0**60


def shortcut(fmt: CodebookFormat, x: Tensor, out: Tensor, context: CastContext) -> bool:
    """Write the quantized chunk to `out`, or return False.

    A product of two float32 numbers is rounded once. Ratios near a middle are divided again, in
    float64, as the definition divides.
    """
    q, book = context.q, fmt.element
    if fmt.by_blocks or context.double or q.rounding == "stochastic" or out.dtype != torch.float32:
        return False
    single = x.to(torch.float32)
    bits = block_amax_bits(single, SINGLE)  # numbers would be compared without subnormal ones
    amax, is_zero = bits.view(torch.float32), bits == 0
    if not bool((is_zero | ((amax > 1 / _ORDINARY) & (amax < _ORDINARY))).all()):
        return False
    if fmt.scaled_by == "amax" and fmt.share == 1:
        scale = amax / amax.new_tensor(fmt.reach)
    else:
        wide = widen(single)
        scale = fmt.scales(wide, wide.abs().amax(2, keepdim=True)).to(torch.float32)
    ratios = single / scale.where(scale > 0, 1.0)
    low, high = book.bounds()
    per_level = (_BINS - 1) / (high - low)
    bins = ratios.clamp(low, high).sub_(low).mul_(per_level).to(torch.int32).reshape(-1)
    values = SINGLE.table((book, q.rounding, "bins"), lambda: _values(book, q.rounding), x.device)
    y = values.index_select(0, bins).view(x.shape)
    near = y.isnan().nonzero(as_tuple=True)
    parts = scale.double().where(scale > 0, 1.0).expand_as(single)[near]
    y[near] = book.cast(single[near].double() / parts, DOUBLE, rounding=q.rounding).float()
    torch.mul(y, scale, out=out)
    return True


def _values(book: Codebook, rounding: Rounding) -> list[float]:
    """Return the level of each bin; NaN with an edge within a bin of it, or a zero with a sign."""
    low, high = book.bounds()
    width = (high - low) / (_BINS - 1)
    starts = torch.arange(_BINS, dtype=torch.float64, device="cpu") * width + low
    first, last = (
        book.cast(starts + shift * width, DOUBLE, rounding=rounding) for shift in (-1, 2)
    )
    unsure = (first != last) | ((first == 0) & (book.negative_zero is not None))
    return first.masked_fill(unsure, float("nan")).tolist()
