"""NVFP4 in float32, which is what its definition computes in, for tensors of ordinary size."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from qgate.formats._element import round_to_integer
from qgate.formats._scratch import buffer
from qgate.formats._work import SINGLE, Call
from qgate.formats.engine.dtypes import FP32_MAX, narrow
from qgate.formats.floats import FloatFormat, to_single_grid
from qgate.formats.nvfp4 import Nvfp4Format

_ORDINARY = 2.0**80


def shortcut(fmt: Nvfp4Format, x: Tensor, out: Tensor, call: Call) -> bool:
    """Write the quantized chunk to `out`, or return False."""
    q, state, element = call.q, call.state, fmt.element
    assert state is not None
    assert isinstance(element, FloatFormat)
    encode_scale = float(state)
    if call.double or q.rounding == "stochastic":
        return False
    if not 1 / _ORDINARY < encode_scale < _ORDINARY:
        return False
    t = buffer("single", x.shape, torch.float32, x.device).copy_(x)
    size = buffer("size", x.shape, torch.int32, x.device)
    size = torch.bitwise_and(t.view(torch.int32), SINGLE.magnitude_mask, out=size)
    amax = size.amax(2, keepdim=True)
    if amax.amax().item() >= SINGLE.exponent_mask:
        return False
    decode_scale = to_single_grid(1.0 / state)
    factor = to_single_grid(state * to_single_grid(state.new_tensor(1.0 / 6.0)))
    wanted = (amax.view(torch.float32) * factor.float()).clamp_(max=fmt.scale_element.max)
    block_scale = fmt.scale_element.cast(wanted, SINGLE, rounding="even")
    encode = (block_scale * decode_scale.float()).reciprocal_().clamp_(max=FP32_MAX)
    t = t.mul_(encode).clamp_(-element.max, element.max)
    bits = torch.bitwise_and(t.view(torch.int32), SINGLE.exponent_mask, out=size)
    bits.clamp_(min=(element.min_exponent + SINGLE.bias) << 23)
    one = (2 * SINGLE.bias + element.mantissa) << 23
    inverse = bits.neg_().add_(one).view(torch.float32)
    t = round_to_integer(t.mul_(inverse), SINGLE, q.rounding).div_(inverse)
    t = t.mul_(block_scale)
    if out.dtype == torch.float32 or not _has_ties(fmt, float(decode_scale), out.dtype):
        out.copy_(t.mul_(decode_scale.float()))
    else:
        out.copy_(narrow(t.to(torch.float64).mul_(decode_scale), out.dtype))
    return True


@lru_cache(maxsize=64)
def _has_ties(fmt: Nvfp4Format, decode_scale: float, dtype: torch.dtype) -> bool:
    """If going through float32 could round a value of this tensor twice.

    There are about a thousand values, elements times block scales, so all of them are tried.
    """
    products = np.outer(fmt.element.magnitudes(), fmt.scale_element.magnitudes()) * decode_scale
    values = torch.from_numpy(products)
    return not torch.equal(values.to(torch.float32).to(dtype), narrow(values, dtype))
