"""Casts to integer codes: one rounding, one clamp, and a count of the clamped values."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from qgate.arithmetic import divided

Rounding = Literal["even", "away"]
LOW, HIGH = -128, 127


def round_to_integers(x: Tensor, rounding: Rounding) -> Tensor:
    """Round to whole numbers.

    "away" adds the largest float below one half, so that the number just below one half goes to 0;
    adding one half would round it up.
    """
    if rounding == "even":
        return x.round()
    below = 0.5 - torch.finfo(x.dtype).eps / 4
    below_half = torch.tensor(below, dtype=x.dtype, device=x.device)
    return (x + torch.copysign(below_half, x)).trunc()


class _StraightThrough(torch.autograd.Function):
    """`value` in place of x; the gradient goes to x where `passed`, or everywhere."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, value: Tensor, passed: Tensor | None) -> Tensor:
        ctx.passed = passed
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.passed is None else grad * ctx.passed, None, None


def straight_through(x: Tensor, value: Tensor, passed: Tensor | None = None) -> Tensor:
    """Return `value` with the gradient of x."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value
    return _StraightThrough.apply(x, value.detach(), passed)  # type: ignore[no-any-return, no-untyped-call]


class Cast(nn.Module):
    """A cast of k to codes in [-128, 127].

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
        whole = round_to_integers(k.detach(), rounding or self.rounding)
        codes = whole.clamp(LOW, HIGH)
        changed = codes != whole
        self.values += k.numel()
        clamped = changed.count_nonzero()
        if clamped:
            odd = (~whole.isfinite()).count_nonzero()
            self.nonfinite = self.nonfinite + odd
            self.saturated = self.saturated + clamped - whole.isnan().count_nonzero()
        if not (torch.is_grad_enabled() and k.requires_grad):
            return codes
        return straight_through(k, codes, ~changed)

    def counts(self) -> dict[str, int]:
        """Count the values that were cast, those that saturated, and those not finite."""
        return {
            "values": self.values,
            "saturated": int(self.saturated),
            "nonfinite": int(self.nonfinite),
        }

    def extra_repr(self) -> str:
        return f"rounding={self.rounding!r}"


class GridCast(Cast):
    """A cast of x to the nearest multiple of a static scale that has a code."""

    def __init__(self, scale: float, rounding: Rounding) -> None:
        super().__init__(rounding)
        self.scale = scale

    def forward(self, x: Tensor, rounding: Rounding | None = None) -> Tensor:
        return super().forward(divided(x, self.scale), rounding) * self.scale

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, rounding={self.rounding!r}"


class DynamicCast(Cast):
    """A cast of x to a grid whose scale is its own largest magnitude / 127; returns both."""

    def forward(self, x: Tensor, rounding: Rounding | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        largest = x.detach().abs().amax()
        scale = torch.where(largest > 0, divided(largest, 127), torch.ones_like(largest))
        return super().forward(x / scale, rounding) * scale, scale


def codes_on_grid(x: Tensor, scale: float | Tensor) -> Tensor:
    """Return the codes of numbers that are multiples of a scale already."""
    k = divided(x, scale)
    return straight_through(k, k.detach().round())


def half(x: Tensor) -> Tensor:
    """Round to float16, in float32: beyond 65504 it is Inf, as in a kernel."""
    return x.half().float()
