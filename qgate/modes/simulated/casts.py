"""Casts to integer codes: one rounding, one clamp, and a count of what the clamp changed."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Rounding = Literal["even", "away"]
LOW, HIGH = -128, 127


def rounded(x: Tensor, how: Rounding) -> Tensor:
    """Whole numbers; "away" adds the largest float below one half, so that what lies just below
    one half goes to 0, which adding one half would not give."""
    if how == "even":
        return x.round()
    below = 0.5 - torch.finfo(x.dtype).eps / 4
    below_half = torch.tensor(below, dtype=x.dtype, device=x.device)
    return (x + torch.copysign(below_half, x)).trunc()


class _Straight(torch.autograd.Function):
    """`value` in place of x; the gradient goes to x where `kept`, everywhere if that is None."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, value: Tensor, kept: Tensor | None) -> Tensor:
        ctx.kept = kept
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.kept is None else grad * ctx.kept, None, None


def straight(x: Tensor, value: Tensor, kept: Tensor | None = None) -> Tensor:
    """`value` forward, x backward."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value
    return _Straight.apply(x, value.detach(), kept)  # type: ignore[no-any-return, no-untyped-call]


class Cast(nn.Module):
    """k to codes in [-128, 127].

    A clamp hides overflow, an integer cast hides NaN: both are counted here, since the codes no
    longer show them. NaN stays NaN.
    """

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self.rounding: Rounding = rounding
        self.values = 0
        self.saturated: Tensor | int = 0
        self.nonfinite: Tensor | int = 0

    def forward(self, k: Tensor, rounding: Rounding | None = None) -> Tensor:
        whole = rounded(k.detach(), rounding or self.rounding)
        codes = whole.clamp(LOW, HIGH)
        changed = codes != whole
        self.values += k.numel()
        found = changed.count_nonzero()
        if found:
            odd = (~whole.isfinite()).count_nonzero()
            self.nonfinite = self.nonfinite + odd
            self.saturated = self.saturated + found - whole.isnan().count_nonzero()
        if not (torch.is_grad_enabled() and k.requires_grad):
            return codes
        return straight(k, codes, ~changed)

    def counts(self) -> dict[str, int]:
        """How many values were cast, how many the clamp changed, how many were not finite."""
        return {
            "values": self.values,
            "saturated": int(self.saturated),
            "nonfinite": int(self.nonfinite),
        }

    def extra_repr(self) -> str:
        return f"rounding={self.rounding!r}"


class GridCast(Cast):
    """x to the nearest multiple of a static scale that has a code."""

    def __init__(self, scale: float, rounding: Rounding) -> None:
        super().__init__(rounding)
        self.scale = scale

    def forward(self, x: Tensor, rounding: Rounding | None = None) -> Tensor:
        return super().forward(x / self.scale, rounding) * self.scale

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, rounding={self.rounding!r}"


class DynamicCast(Cast):
    """x to a grid whose scale is its own largest magnitude / 127, and that scale."""

    def forward(self, x: Tensor, rounding: Rounding | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        largest = x.detach().abs().amax()
        scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
        return super().forward(x / scale, rounding) * scale, scale


def codes_on_grid(x: Tensor, scale: float | Tensor) -> Tensor:
    """The codes of numbers that are multiples of a scale already."""
    k = x / scale
    return straight(k, k.detach().round())


def half(x: Tensor) -> Tensor:
    """Rounded to float16, kept as float32: beyond 65504 it is Inf, as in a kernel."""
    return x.half().float()
