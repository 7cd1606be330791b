"""Wrong rotations by position: left out, of other pairs, of half a head, by coarse angles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qgate.causes.operator_calls import Call, CallFault
from qgate.expected.intermediates import HALVES, rounded
from qgate.stats.bits import short_name

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotation_faults(call: Call) -> Iterator[CallFault]:
    """List faults of a sum `x * cos + rotate_half(x) * sin`."""
    if call.name != "add" or not call.is_float or len(call.args) < 2:
        return
    makers = call.made(0), call.made(1)
    if not all(maker is not None and maker.name == "mul" for maker in makers):
        return
    (x, cos), (turned, sin) = (maker.args for maker in makers if maker is not None)
    tensors = x, cos, turned, sin
    if not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in tensors):
        return
    maker, width = call.makers.of(turned), x.shape[-1]
    is_rotation = maker is not None and maker.name == "cat" and x.shape == turned.shape
    if not is_rotation or width % 4 or cos.shape != sin.shape or cos.shape[-1] != width:
        return
    for words, rotation in _rotations():
        yield CallFault(words, result=lambda *_, rotation=rotation: rotation(x, cos, sin))


def _rotations() -> Iterator[tuple[str, Rotation]]:
    yield "the rotation by position is left out", lambda x, _cos, _sin: x.clone()
    yield "the rotation by position turns pairs of neighbors, not of halves", _neighbors
    yield "the rotation by position turns the first half of each head alone", _of_half
    # Of queries and keys alike, the two give the same scores.
    words = "the rotation by position turns the other way, or has exchanged cosines and sines"
    yield words, _exchanged
    for dtype in HALVES:
        name = short_name(dtype)
        yield f"the cosines of positions are rounded to {name}", _coarse(dtype, sines=False)
        yield f"the sines of positions are rounded to {name}", _coarse(dtype, cosines=False)
        yield f"cosines and sines of positions are rounded to {name}", _coarse(dtype)


def _coarse(dtype: torch.dtype, *, cosines: bool = True, sines: bool = True) -> Rotation:
    def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos = rounded(cos, dtype) if cosines else cos
        return _turned(x, cos, rounded(sin, dtype) if sines else sin)

    return rotation


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = (side[..., :half].repeat_interleave(2, -1) for side in (cos, sin))
    pairs = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    return x * cos + pairs * sin


def _of_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([_turned(x[..., :half], cos[..., :half], sin[..., :half]), x[..., half:]], -1)


def _exchanged(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(x, sin, cos)
