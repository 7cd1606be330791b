"""The options of a quantizer as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qgate.formats.groups import Groups
    from qgate.formats.philox import DrawSource

Floats = npt.NDArray[np.float64]
Rounding = Literal["even", "away", "zero", "stochastic"]
ZeroPoint = Literal["minmax"]
Granularity = Literal["tensor", "channel", "block", "groups"]
InfPolicy = Literal["nan", "saturate"]
NanPolicy = Literal["error", "max", "zero"]
SaturatedGrad = Literal["zero", "pass"]

ROUNDINGS: tuple[Rounding, ...] = ("even", "away", "zero", "stochastic")
SCALE_RULES = ("floor", "ceil", "even", "rceil")


class Options(TypedDict, total=False):
    """The keywords of `quantize`, explained in `Quantizer`."""

    scale: float | Tensor | None
    granularity: Granularity | None
    axis: int | None
    block: int | tuple[int, int] | None
    groups: Groups | Callable[[Any, Any], Any] | None
    scale_rule: str | None
    scale_bits: int | None
    rounding: Rounding | None
    saturate: bool | None
    inf: InfPolicy | None
    narrow: bool | None
    zero_point: ZeroPoint | int | Tensor | None
    generator: torch.Generator | DrawSource | None
    rotation: Sequence[int] | Tensor | None
    dtype: torch.dtype | None
    saturated_grad: SaturatedGrad | None


class CastOptions:
    """The options that a format's arithmetic depends on."""

    rounding: Rounding
    saturate: bool
    narrow: bool
    zero_point: ZeroPoint | int | Tensor | None
    generator: Any
    inf: InfPolicy
    scale_rule: str
    scale_bits: int
    tile: tuple[int, int] | None
    groups: Groups | None
