"""A quantizer is a format plus the scaling that fits a tensor to it: tensor in, tensor out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from qgate.errors import QgateError
from qgate.formats._block import Format, is_format
from qgate.formats._literals import FORMATS
from qgate.formats.encoded import Encoded, encode_tensor
from qgate.formats.engine import quantizing
from qgate.formats.engine.dtypes import INPUTS
from qgate.formats.engine.job import check
from qgate.formats.options import NanPolicy, Options
from qgate.formats.settings import QuantizerSettings, check_choice
from qgate.tensor_inputs import plain_tensor, valueless

if TYPE_CHECKING:
    from typing import Unpack

    from torch import Tensor

Observer = Callable[["Tensor", Any], None]
_defaults: dict[str, Quantizer] = {}


class Quantizer(QuantizerSettings):
    """A format with all its options; call it on tensors.

    Omitted options get the format's default; an option that the format does not have is an error.

    scale           element formats: the factor, a number or one per channel or block
    granularity     element formats: which elements share a scale made from their largest
                    magnitude: "tensor", "channel" or "block" (by default "tensor" for
                    integers; the others are cast without a scale)
    axis            the axis of channels, or the one that blocks run along (-1)
    block           elements per block (MX 32, NVFP4 16, HiF4 64, element formats 128), or a pair:
                    rows and columns of a tile over the last two axes
    scale_rule      MX: "floor", "ceil", "even" or "rceil"
    scale_bits      MX: width of the scale, 2 to 8
    rounding        "even", "away", "zero" or "stochastic" (`generator` as in torch)
    saturate        element formats: overflow to the largest value, else to Inf or NaN
    inf             what an Inf does to the scale made from it: "nan" makes its whole group NaN,
                    "saturate" gives the largest scale there is
    narrow          integers: leave out the lowest code (of signed ones without a zero point)
    zero_point      integers: the code of 0, one per scale; "minmax" makes scale and zero point from
                    the ends of each group (the default of unsigned ones without a scale)
    rotation        signs, +1 or -1, as many as a power of two: blocks of that many elements, along
                    the blocks or the last axis, are multiplied by them and by the normalized
                    Hadamard matrix, quantized, and turned back
    dtype           dtype of the result (x's own); float32 holds every 8-bit result exactly
    saturated_grad  gradient where x saturates: "zero" or "pass"
    """

    _observers: ClassVar[tuple[Observer, ...]] = ()
    _changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, fmt: str | Format, **options: Unpack[Options]) -> None:
        named = FORMATS.get(fmt) if isinstance(fmt, str) else fmt
        if not is_format(named):
            raise TypeError(f"a format is a name or a qgate format, not {fmt!r}.")
        for name in options:
            if name not in Options.__annotations__:
                allowed = ", ".join(Options.__annotations__)
                raise TypeError(f"a quantizer has no option {name!r}; there are {allowed}.")
        values = {name: options.get(name) for name in Options.__annotations__}
        super().__init__(named, {name: v for name, v in values.items() if v is not None})

    def __call__(self, x: Tensor) -> Tensor:
        """Round x to the format's grid, in x's shape, device and dtype (or in `dtype`)."""
        for observer in self._observers:
            observer(x, self)
        try:
            return quantizing.quantize(x, self)
        except QgateError:
            raise
        except Exception as error:
            # Some formats can be traced: only what fails is refused.
            if reason := valueless(x):
                raise TypeError(f"cannot quantize {reason}") from error
            raise

    def encode(self, x: Tensor, *, nan: NanPolicy = "error") -> Encoded:
        """Return the codes and scales of x; `nan` says what stands for NaN in a format without."""
        check_choice("nan policy", nan, get_args(NanPolicy))
        check(x, self)
        x = plain_tensor(x, "encode", INPUTS)
        for observer in self._observers:
            observer(x, self)
        return encode_tensor(x, self, nan)


def quantize(x: Tensor, fmt: str | Format | Quantizer, **options: Unpack[Options]) -> Tensor:
    """Round x to the grid of a format, in x's shape, dtype and device.

    The options are those of `Quantizer`.

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
    """Return the codes and scales of x; their `.decode()` equals `quantize`."""
    return as_quantizer(fmt, options).encode(x, nan=nan)


def as_quantizer(fmt: str | Format | Quantizer, options: Options) -> Quantizer:
    if isinstance(fmt, Quantizer):
        if options:
            raise QgateError(
                f"{fmt!r} has its options already; pass {', '.join(options)} where it is made."
            )
        return fmt
    if options or not isinstance(fmt, str):
        return Quantizer(fmt, **options)
    default = _defaults.get(fmt)
    if default is None or FORMATS.entries.get(default.format.name) is not default.format:
        default = _defaults[fmt] = Quantizer(fmt)
    return default


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call `observer(x, quantizer)` before each quantization inside, in any thread."""
    with Quantizer._changing:
        Quantizer._observers = (*Quantizer._observers, observer)
    try:
        yield
    finally:
        with Quantizer._changing:
            observers = list(Quantizer._observers)
            observers.remove(observer)
            Quantizer._observers = tuple(observers)
