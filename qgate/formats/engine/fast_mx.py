"""MX quantization in float32, and for large 16-bit tensors on the CPU by table.

Both work from the exponent field of S + emax, called `top` here: the block's largest value and its
smallest quantum are integer offsets from it. They hold where no number that matters comes near
float32's ends; other chunks take the exact way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgate.formats._element import round_to_integer
from qgate.formats._scratch import BoundedCache, buffer, whole
from qgate.formats._work import SINGLE, CastContext
from qgate.formats.floats import FloatFormat
from qgate.formats.mx import MxFormat
from qgate.formats.options import Rounding

_TABLE_PAYS_FROM = 2**20
_WIDE = 32

_stacks = BoundedCache(8)
_constants = BoundedCache(64)


class MxConstants:
    """Summands and masks of a format and a scale rule, as tensors."""

    def __init__(self, fmt: MxFormat, rule: str) -> None:
        self.element = element = fmt.element
        self.has_exponents = isinstance(element, FloatFormat)
        smallest = (
            element.min_exponent if isinstance(element, FloatFormat) else element.max_exponent
        )
        span = element.max_exponent - smallest + element.mantissa
        self.lowest, self.highest = (span - 124 + SINGLE.bias) << 23, (120 + SINGLE.bias) << 23
        self.one_zero = element.negative_zero is None
        self.saturates = rule in ("floor", "even")
        self.carry = fmt.carry(rule, 23)
        self.to_carry = whole(self.carry)
        self.to_limit = whole(int((element.max / 2.0**element.max_exponent - 1) * 2**23))
        self.to_smallest = whole((smallest - element.max_exponent) << 23)
        self.twice_bias = whole((2 * SINGLE.bias + element.mantissa) << 23)
        self.magnitude, self.exponent = whole(SINGLE.magnitude_mask), whole(SINGLE.exponent_mask)


def shortcut(fmt: MxFormat, x: Tensor, out: Tensor, context: CastContext) -> bool:
    """Write the quantized chunk to `out`, or return False."""
    q = context.q
    if context.double or q.rounding == "stochastic" or q.scale_bits != 8:
        return False
    constants = _constants.get((fmt, q.scale_rule), lambda: MxConstants(fmt, q.scale_rule))
    size = buffer("size", x.shape, torch.int32, x.device)
    by_table = (
        x.dtype.itemsize == 2 and x.device.type == "cpu" and context.numel >= _TABLE_PAYS_FROM
    )
    if by_table:
        codes = buffer("codes", x.shape, torch.int32, x.device).copy_(x.view(torch.int16))
        size = torch.bitwise_and(codes, 0x7FFF, out=size)
        amax = size.amax(2, keepdim=True).to(torch.int16)
        amax = amax.view(x.dtype).to(torch.float32).view(torch.int32)
    else:
        single = x
        if x.dtype != torch.float32:
            single = buffer("single", x.shape, torch.float32, x.device).copy_(x)
        size = torch.bitwise_and(single.view(torch.int32), constants.magnitude, out=size)
        amax = size.amax(2, keepdim=True)
    exponents = _top_exponents(constants, amax)
    if exponents is None:
        return False
    top, fields = exponents
    if not by_table:
        _round(constants, single, size, top, out, q.rounding)
        return True
    key = (fmt, q.rounding, x.dtype, out.dtype)
    stack = _stacks.get(key, lambda: TableStack(fmt, q.rounding, x.dtype, out.dtype))
    stack.look_up(codes, top, fields, out)
    return True


def _top_exponents(constants: MxConstants, amax: Tensor) -> tuple[Tensor, range] | None:
    """Return the exponent fields of S + emax, in place, and their range as numbers.

    None means that a block is too near float32's ends.
    """
    ends = torch.aminmax(amax)
    low, high = int(ends.min.item()), int(ends.max.item())
    if high > constants.highest:
        return None
    if low < constants.lowest:
        # Blocks of zeros are zeros at any scale: give them one that is in use.
        amax = amax.where(amax != 0, high or SINGLE.bias << 23)
        low = int(amax.amin().item())
        high = max(high, low)
        if low < constants.lowest:
            return None
    if constants.carry:
        amax = amax + constants.to_carry
    fields = range((low + constants.carry) >> 23, ((high + constants.carry) >> 23) + 1)
    return amax.bitwise_and_(constants.exponent), fields


def _round(
    constants: MxConstants, x: Tensor, size: Tensor, top: Tensor, out: Tensor, rounding: Rounding
) -> None:
    """Round x in float32; `size` are its magnitude bits and is overwritten."""
    work = buffer("single", x.shape, torch.float32, x.device)
    if constants.saturates:
        limit = (top + constants.to_limit).view(torch.float32)
        x = torch.clamp(x, -limit, limit, out=work)
    exponent = top
    if constants.has_exponents:
        exponent = torch.maximum(
            size.bitwise_and_(constants.exponent), top + constants.to_smallest, out=size
        )
    inverse = torch.sub(constants.twice_bias, exponent, out=exponent).view(torch.float32)
    t = torch.mul(x, inverse, out=work)
    t = t.round_() if rounding == "even" else round_to_integer(t, SINGLE, rounding)
    if constants.one_zero:
        t = t.add_(0.0)
    if out.dtype == torch.float32:
        torch.div(t, inverse, out=out)
    else:
        out.copy_(t.div_(inverse))


class TableStack:
    """Tables of the results for all 65,536 numbers of a 16-bit dtype, one per exponent field.

    Rows are filled as fields occur, so that only those take memory.
    """

    def __init__(
        self, fmt: MxFormat, rounding: Rounding, dtype: torch.dtype, out_dtype: torch.dtype
    ) -> None:
        self.constants, self.rounding, self.dtype = MxConstants(fmt, "floor"), rounding, dtype
        self.rows = torch.empty(256, 2**16, dtype=out_dtype, device="cpu")
        self.filled: set[int] = set()

    def look_up(self, codes: Tensor, top: Tensor, fields: range, out: Tensor) -> None:
        for field in fields if len(fields) <= _WIDE else (top >> 23).unique().tolist():
            if field not in self.filled:
                self._fill(field)
        index = codes.add_((top >> 7).add_(2**15)).view(-1)
        if out.is_contiguous():
            torch.index_select(self.rows.view(-1), 0, index, out=out.view(-1))
        else:
            out.copy_(self.rows.view(-1).index_select(0, index).view(out.shape))

    def _fill(self, field: int) -> None:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu").to(torch.int16)
        x = every.view(self.dtype).to(torch.float32)
        size = x.view(torch.int32).bitwise_and(SINGLE.magnitude_mask)
        top = torch.tensor([field << 23], dtype=torch.int32, device="cpu")
        _round(self.constants, x, size, top, self.rows[field], self.rounding)
        self.filled.add(field)
