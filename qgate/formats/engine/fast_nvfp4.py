"""NVFP4 in float32, as in its definition, for tensors of ordinary magnitudes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from qgate.formats._element import ElementFormat, round_to_integer
from qgate.formats._scratch import BoundedCache, buffer, whole
from qgate.formats._work import SINGLE, CastContext, single
from qgate.formats.engine.dtypes import FP32_MAX, narrow
from qgate.formats.floats import FloatFormat
from qgate.formats.nvfp4 import Nvfp4Format, nvfp4_format
from qgate.formats.options import Rounding

ORDINARY = 2.0**80
_constants = BoundedCache(16)


class FloatRounding:
    """Rounding of float32 numbers within the range of a format, with its masks as tensors."""

    def __init__(self, fmt: ElementFormat) -> None:
        assert isinstance(fmt, FloatFormat)
        self.largest = fmt.max
        self.smallest = (fmt.min_exponent + SINGLE.bias) << 23
        self.twice_bias = whole((2 * SINGLE.bias + fmt.mantissa) << 23)
        self.exponent, self.magnitude = whole(SINGLE.exponent_mask), whole(SINGLE.magnitude_mask)

    def round(
        self, t: Tensor, scratch: Tensor | None, rounding: Rounding, out: Tensor | None = None
    ) -> Tensor:
        """Round t in place, or to `out`; `scratch` may hold its bits."""
        bits = torch.bitwise_and(t.view(torch.int32), self.exponent, out=scratch)
        bits.clamp_(min=self.smallest)
        inverse = torch.sub(self.twice_bias, bits, out=bits).view(torch.float32)
        t = torch.mul(t, inverse, out=t if out is None else out)
        t = t.round_() if rounding == "even" else round_to_integer(t, SINGLE, rounding)
        return t.div_(inverse)


def shortcut(fmt: Nvfp4Format, x: Tensor, out: Tensor, context: CastContext) -> bool:
    """Write the quantized chunk to `out`, or return False."""
    q, state = context.q, context.state
    assert state is not None
    plain = nvfp4_format(fmt) is not None and isinstance(fmt.element, FloatFormat)
    if context.double or q.rounding == "stochastic" or not plain:
        return False
    encode_scale = float(state.item())
    if not 1 / ORDINARY < encode_scale < ORDINARY:
        return False
    pair = fmt.element, fmt.scale_element
    element, scale = _constants.get(pair, lambda: tuple(map(FloatRounding, pair)))
    dtype, t = x.dtype, buffer("single", x.shape, torch.float32, x.device)
    x = x if dtype == torch.float32 else t.copy_(x)
    size = buffer("size", x.shape, torch.int32, x.device)
    if context.amax_bits is not None:
        amax = context.amax_bits.view(dtype).to(torch.float32).view(torch.int32)
    else:
        size = torch.bitwise_and(x.view(torch.int32), element.magnitude, out=size)
        amax = size.amax(2, keepdim=True)
        if amax.amax().item() >= SINGLE.exponent_mask:
            return False
    decode_scale = single(1.0 / encode_scale)
    factor = single(encode_scale * single(1.0 / fmt.max))
    decode = torch.full((), decode_scale, dtype=torch.float32, device=x.device)
    unrounded = (amax.view(torch.float32) * factor).clamp_(max=scale.largest)
    block_scale = scale.round(unrounded, None, "even")
    encode = (block_scale * decode).reciprocal_().clamp_(max=FP32_MAX)
    t = torch.mul(x, encode, out=t).clamp_(-element.largest, element.largest)
    t = element.round(t, size, q.rounding).mul_(block_scale)
    if out.dtype == torch.float32:
        torch.mul(t, decode, out=out)
    elif not _has_ties(fmt, decode_scale, out.dtype):
        out.copy_(t.mul_(decode))
    else:
        out.copy_(narrow(t.to(torch.float64).mul_(decode_scale), out.dtype))
    return True


@lru_cache(maxsize=64)
def _has_ties(fmt: Nvfp4Format, decode_scale: float, dtype: torch.dtype) -> bool:
    """Tell whether going through float32 could round a value of this tensor twice.

    All values are tried: elements times block scales, about a thousand.
    """
    products = np.outer(fmt.element.magnitudes(), fmt.scale_element.magnitudes()) * decode_scale
    values = torch.from_numpy(products)
    return not torch.equal(values.to(torch.float32).to(dtype), narrow(values, dtype))
