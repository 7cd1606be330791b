"""A quantizer is a format plus the scaling that fits a tensor to it: tensor in, tensor out."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from qgate.errors import QgateError, unknown
from qgate.formats._block import BlockFormat
from qgate.formats._element import ROUNDINGS, ElementFormat, Rounding
from qgate.formats._literals import FORMATS, Format
from qgate.formats.integers import IntFormat
from qgate.formats.mx import SCALE_RULES

if TYPE_CHECKING:
    from typing import Unpack

    import torch
    from torch import Tensor

    from qgate.formats.encoded import Encoded

Granularity = Literal["tensor", "channel", "block"]
InfPolicy = Literal["nan", "saturate"]
NanPolicy = Literal["error", "max", "zero"]
SaturatedGrad = Literal["zero", "pass"]

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_ELEMENT_OPTIONS = frozenset(
    {"scale", "granularity", "axis", "block", "rounding", "saturate", "inf", "generator"}
)
_EVERYWHERE = frozenset({"dtype", "saturated_grad"})
_ELEMENT_BLOCK = 128


class Options(TypedDict, total=False):
    """The keywords of `quantize`; see `Quantizer` for what they mean."""

    scale: float | Tensor | None
    granularity: Granularity | None
    axis: int | None
    block: int | None
    scale_rule: str | None
    scale_bits: int | None
    rounding: Rounding | None
    saturate: bool | None
    inf: InfPolicy | None
    narrow: bool | None
    generator: torch.Generator | None
    dtype: torch.dtype | None
    saturated_grad: SaturatedGrad | None


class Quantizer:
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
        given = {k: v for k, v in locals().items() if k not in ("self", "fmt") and v is not None}
        self.format = FORMATS.get(fmt) if isinstance(fmt, str) else fmt
        if not isinstance(self.format, ElementFormat | BlockFormat):
            raise TypeError(f"a format is a name or a qgate format, not {fmt!r}.")
        _check_names(self.format, given)
        _check_choice("rounding", rounding, ROUNDINGS)
        _check_choice("scale rule", scale_rule, SCALE_RULES)
        _check_choice("granularity", granularity, get_args(Granularity))
        _check_choice("inf policy", inf, get_args(InfPolicy))
        _check_choice("saturated_grad", saturated_grad, get_args(SaturatedGrad))
        _check_flag("saturate", saturate)
        _check_flag("narrow", narrow)
        self._given = given
        self.scale = _checked_scale(scale)
        self.granularity: Granularity | None = granularity or self._default_granularity()
        self.axis = _whole("axis", axis, None)
        self.block = _whole("block", block, 1) or self.format.block or _ELEMENT_BLOCK
        self.scale_rule = scale_rule or "floor"
        self.scale_bits = _whole("scale_bits", scale_bits, 2, 8) or 8
        self.rounding: Rounding = rounding or self.format.rounding
        self.saturate = saturate is not False
        self.inf: InfPolicy = inf or "nan"
        self.narrow = narrow is not False
        self.generator = generator
        self.dtype = dtype
        self.saturated_grad: SaturatedGrad = saturated_grad or "zero"
        self._check_together(given)

    def _default_granularity(self) -> Granularity | None:
        if isinstance(self.format, BlockFormat):
            return "block"
        if self.scale is not None or isinstance(self.format, IntFormat):
            return "tensor"
        return None

    def _check_together(self, given: dict[str, Any]) -> None:
        name = self.format.name
        if self.granularity == "channel" and self.axis is None:
            raise QgateError(
                f"granularity 'channel' needs axis=…: which axis of x has {name}'s scales?"
            )
        if isinstance(self.format, ElementFormat):
            if "axis" in given and self.granularity not in ("channel", "block"):
                raise QgateError(
                    f"axis={self.axis} means nothing without granularity 'channel' or 'block'."
                )
            if "block" in given and self.granularity != "block":
                raise QgateError(f"block={self.block} means nothing without granularity 'block'.")
            if "inf" in given and (self.granularity is None or self.scale is not None):
                raise QgateError(
                    f"inf={self.inf!r} is about scales made from x, and here none is made."
                )
            if not self.saturate and self.format.nan_code is None:
                raise QgateError(
                    f"{name} has neither Inf nor NaN and always saturates; saturate=False is for "
                    "formats that can say overflow."
                )
        if self.generator is not None and self.rounding != "stochastic":
            raise QgateError(f"a generator means nothing with rounding {self.rounding!r}.")
        allowed = [f"torch.{name}" for name in _DTYPES]
        if self.dtype is not None and (
            isinstance(self.dtype, str) or str(self.dtype) not in allowed
        ):
            raise TypeError(f"dtype {self.dtype!r} is not one of {', '.join(allowed)}.")
        if self.generator is not None and not hasattr(self.generator, "initial_seed"):
            raise TypeError(f"a generator is a torch.Generator, not {self.generator!r}.")

    def deterministic(self) -> Quantizer:
        """This quantizer with the format's own rounding in place of a random one."""
        if self.rounding != "stochastic":
            return self
        twin = copy.copy(self)
        twin.rounding, twin.generator = self.format.rounding, None
        return twin

    def axis_of(self, ndim: int) -> int:
        """The axis as a number from 0, for a tensor of that many dimensions."""
        axis = -1 if self.axis is None else self.axis
        dims = max(ndim, 1)
        if not -dims <= axis < dims:
            raise QgateError(f"axis {axis} is out of range for a tensor of {ndim} dimensions.")
        return axis % dims

    def __call__(self, x: Tensor) -> Tensor:
        """x on the format's grid: x's shape and device, x's dtype unless `dtype` was given."""
        from qgate.formats.engine import quantizing

        return quantizing.quantize(x, self)

    def encode(self, x: Tensor, *, nan: NanPolicy = "error") -> Encoded:
        """The codes and scales of x; `nan` says what to store where the format has no NaN."""
        from qgate.formats.engine import codec

        _check_choice("nan policy", nan, get_args(NanPolicy))
        return codec.encode(x, self, nan)

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={_brief(v)}" for k, v in self._given.items())
        return f"Quantizer({self.format.name}{', ' if options else ''}{options})"


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
    return Quantizer(fmt, **options)


def _check_names(fmt: Format, given: dict[str, Any]) -> None:
    own = fmt.options if isinstance(fmt, BlockFormat) else _ELEMENT_OPTIONS
    allowed = own | _EVERYWHERE | ({"narrow"} if isinstance(fmt, IntFormat) else set())
    if isinstance(fmt, BlockFormat) and given.get("granularity") == "block":
        allowed = allowed | {"granularity"}
    for name in given:
        if name not in allowed:
            raise QgateError(
                f"{fmt.name} has no option {name!r} (given {given[name]!r}); "
                f"it takes {', '.join(sorted(allowed))}."
            )


def _check_choice(what: str, given: object, allowed: tuple[str, ...]) -> None:
    if given is not None and given not in allowed:
        raise unknown(what, given, allowed)


def _check_flag(name: str, given: object) -> None:
    if given is not None and not isinstance(given, bool):
        raise TypeError(f"{name} is True or False, not {given!r}.")


def _whole(name: str, given: Any, low: int | None, high: int | None = None) -> Any:
    if given is None:
        return None
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{name} is a whole number, not {given!r}.")
    number = given.__index__()
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise QgateError(f"{name} {number} is not allowed; it is {bounds}.")
    return number


def _checked_scale(scale: Any) -> float | Tensor | None:
    if scale is None or hasattr(scale, "dim"):
        return scale  # type: ignore[no-any-return]
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale is a number or a tensor, not {scale!r}.")
    if isinstance(scale, int):
        scale = float(scale) if abs(scale) < 2**1023 else math.inf
    if not (math.isfinite(scale) and scale > 0):
        raise QgateError(f"scale {scale!r} is not allowed; it is a finite number above zero.")
    return float(scale)


def _brief(value: object) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"<{'x'.join(map(str, shape)) or 'scalar'}>"
