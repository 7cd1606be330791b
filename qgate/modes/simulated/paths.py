"""What the scan reads as u: one function per way that modes put the convolution's output on a grid.

Each takes y, the static scale s, the rounding, and the scale of a calibration with alpha 1, and
returns u. k are the codes before they are clamped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qgate.modes.simulated.casts import HIGH, LOW, Rounding, rounded

Path = Callable[[Tensor, float, Rounding, float], Tensor]

_STEPS = 8
_SECOND, _THIRD = 15.75, 143.0


def _grid(y: Tensor, s: float | Tensor, how: Rounding, low: int = LOW) -> Tensor:
    return rounded(y / s, how).clamp(low, HIGH) * s


def grid(y: Tensor, s: float, how: Rounding, _wide: float) -> Tensor:
    """The value of the code, made in float32 beside the codes."""
    return _grid(y, s, how)


def requantized(y: Tensor, s: float, how: Rounding, _wide: float) -> Tensor:
    """The value of the code, put on the same grid once more."""
    return _grid(_grid(y, s, how), s, "even")


def selective(y: Tensor, s: float, how: Rounding, _wide: float) -> Tensor:
    """On the grid where it reaches, y beyond it."""
    k = rounded(y / s, how)
    return torch.where(k.abs() <= HIGH, k * s, y)


def second_grid(y: Tensor, s: float, how: Rounding, _wide: float) -> Tensor:
    """Values beyond the grid on another one that reaches to the largest of them."""
    k = rounded(y / s, how)
    beyond = k.abs() > HIGH
    largest = torch.where(beyond, y.abs(), torch.zeros_like(y)).amax()
    wide = (largest / HIGH).clamp(min=s)
    return torch.where(beyond, _grid(y, wide, how), k * s)


def wide_grid(y: Tensor, s: float, how: Rounding, wide: float) -> Tensor:
    """Values beyond the grid on the grid of a calibration that clips nothing but rare maxima."""
    k = rounded(y / s, how)
    return torch.where(k.abs() > HIGH, _grid(y, wide, how), k * s)


def quarter_grid(y: Tensor, s: float, how: Rounding, _wide: float) -> Tensor:
    """A quarter of the step for codes below 32; outliers still clip."""
    k = rounded(y / s, how)
    return torch.where(k.abs() < 32, _grid(y, s / 4, how, -HIGH), k.clamp(LOW, HIGH) * s)


def half_grid(y: Tensor, s: float, how: Rounding, _wide: float) -> Tensor:
    """Half the step for codes below 64; outliers still clip."""
    k = rounded(y / s, how)
    return torch.where(k.abs() < 64, _grid(y, s / 2, how, -HIGH), k.clamp(LOW, HIGH) * s)


def powers(y: Tensor, s: float, how: Rounding, _wide: float) -> Tensor:
    """Steps of s / 4 up to 8 s, powers of two of that step beyond."""
    quarter, edge = s / 4, _STEPS * s
    over = (y.abs() - edge).clamp(min=quarter) / quarter
    exponent = (torch.frexp(over).exponent - 1).clamp(0, 255)
    far = y.sign() * (edge + torch.ldexp(torch.full_like(y, quarter), exponent))
    near = y.abs() <= edge
    # An exponent would make numbers of Inf and NaN.
    far = torch.where(y.isfinite(), far, y)
    return torch.where(near, rounded(y / quarter, how) * quarter, far)


def three_zones(y: Tensor, s: float, how: Rounding, _wide: float) -> Tensor:
    """Steps of s / 4 up to 15.75 s, of s up to 143 s, of 4 s beyond."""
    size = y.abs()
    near = rounded(y / (s / 4), how).clamp(-63, 63) * (s / 4)
    middle = y.sign() * rounded(size / s, how).clamp(16, _THIRD) * s
    far = rounded((size - _THIRD * s) / (4 * s), how).clamp(0, 63)
    far = y.sign() * (_THIRD * s + far * 4 * s)
    return torch.where(size <= _SECOND * s, near, torch.where(size <= _THIRD * s, middle, far))


PATHS: dict[str, Path] = {
    path.__name__: path
    for path in (
        grid,
        requantized,
        selective,
        second_grid,
        wide_grid,
        quarter_grid,
        half_grid,
        powers,
        three_zones,
    )
}
