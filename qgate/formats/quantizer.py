"""A quantizer is a format plus the scaling that fits a tensor to it: tensor in, tensor out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, get_args

from qgate.errors import QgateError
from qgate.formats._block import Format, is_format
from qgate.formats._literals import FORMATS
from qgate.formats.encoded import Encoded, encode_tensor
from qgate.formats.engine import quantizing
from qgate.formats.engine.job import check
from qgate.formats.options import (
    Granularity,
    InfPolicy,
    NanPolicy,
    Options,
    Rounding,
    SaturatedGrad,
)
from qgate.formats.settings import QuantizerSettings, check_choice

if TYPE_CHECKING:
    from typing import Unpack

    import torch
    from torch import Tensor

_defaults: dict[str, Quantizer] = {}


class Quantizer(QuantizerSettings):
    """A format with all its options settled; call it on tensors.

    Options left out get the format's default; an option the format does not have is an error.

    scale           element formats: the factor, a number or one per channel or block
    granularity     element formats: which elements share a scale made from their largest
                    magnitude: "tensor", "channel" or "block" (int8 and int4: "tensor" if not given;
                    the others are cast as they are)
    axis            the axis of channels, or the one that blocks run along (-1)
    block           elements per block (MX 32, NVFP4 16, HiF4 64, element formats 128)
    scale_rule      MX: "floor", "ceil", "even" or "rceil"
    scale_bits      MX: width of the scale, 2 to 8
    rounding        "even", "away", "zero" or "stochastic" (`generator` as in torch)
    saturate        element formats: overflow to the largest value, else to Inf or NaN
    inf             what an Inf does to the scale made from it: "nan" makes its whole group NaN,
                    "saturate" gives the largest scale there is
    narrow          integers: leave out the lowest code
    dtype           dtype of the result (x's own); float32 holds every 8-bit result exactly
    saturated_grad  gradient where x saturates: "zero" or "pass"
    """

    def __init__(
        self,
        fmt: str | Format,
        *,
        scale: float | Tensor | None = None,
        granularity: Granularity | None = None,
        axis: int | None = None,
        block: int | None = None,
        scale_rule: str | None = None,
        scale_bits: int | None = None,
        rounding: Rounding | None = None,
        saturate: bool | None = None,
        inf: InfPolicy | None = None,
        narrow: bool | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        saturated_grad: SaturatedGrad | None = None,
    ) -> None:
        options = Options.__annotations__
        given = {k: v for k, v in locals().items() if k in options and v is not None}
        found = FORMATS.get(fmt) if isinstance(fmt, str) else fmt
        if not is_format(found):
            raise TypeError(f"a format is a name or a qgate format, not {fmt!r}.")
        super().__init__(found, given)

    def __call__(self, x: Tensor) -> Tensor:
        """x on the format's grid: x's shape and device, x's dtype unless `dtype` was given."""
        return quantizing.quantize(x, self)

    def encode(self, x: Tensor, *, nan: NanPolicy = "error") -> Encoded:
        """The codes and scales of x; `nan` says what to store where the format has no NaN."""
        check_choice("nan policy", nan, get_args(NanPolicy))
        check(x, self)
        quantizing.announce(x, self)
        return encode_tensor(x, self, nan)


def quantize(x: Tensor, fmt: str | Format | Quantizer, **options: Unpack[Options]) -> Tensor:
    """x on the grid of a format, in x's shape, dtype and device; options as in `Quantizer`.

    The exact result is cast once to x's dtype. It fits except where the format reaches beyond it:
    65504 in float16 goes to 65536 under scale rule "ceil" or as bf16, which float16 cannot hold,
    and products of integer or NVFP4 codes with their scales need more bits than bfloat16 has.
    `dtype=torch.float32` keeps the former exact and the latter as near as float32 gets.
    """
    return as_quantizer(fmt, options)(x)


def encode(
    x: Tensor,
    fmt: str | Format | Quantizer,
    *,
    nan: NanPolicy = "error",
    **options: Unpack[Options],
) -> Encoded:
    """The codes and scales of x; `.decode()` gives what `quantize` gives."""
    return as_quantizer(fmt, options).encode(x, nan=nan)


def as_quantizer(fmt: str | Format | Quantizer, options: Options) -> Quantizer:
    if isinstance(fmt, Quantizer):
        if options:
            raise QgateError(f"{fmt!r} is settled; options {', '.join(options)} came too late.")
        return fmt
    if options or not isinstance(fmt, str):
        return Quantizer(fmt, **options)
    default = _defaults.get(fmt)
    if default is None or FORMATS.entries.get(default.format.name) is not default.format:
        default = _defaults[fmt] = Quantizer(fmt)
    return default


@contextlib.contextmanager
def observe(observer: Callable[[Tensor, Quantizer], None]) -> Iterator[None]:
    """Calls `observer(x, quantizer)` before each quantization inside."""
    quantizing.observers.append(observer)
    try:
        yield
    finally:
        quantizing.observers.remove(observer)
