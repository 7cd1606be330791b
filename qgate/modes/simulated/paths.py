"""The u of the scan: one function per way that modes put the convolution's output on a grid.

Each takes y, the static scale s, the rounding, and the scale of a calibration with alpha 1, and
returns u. k are the codes before they are clamped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qgate.arithmetic import divided
from qgate.modes.simulated.casts import HIGH, LOW, Rounding, round_to_integers

Path = Callable[[Tensor, float, Rounding, float], Tensor]

_STEPS = 8
_SECOND, _THIRD = 15.75, 143.0


def _grid(y: Tensor, s: float | Tensor, rounding: Rounding, low: int = LOW) -> Tensor:
    return round_to_integers(divided(y, s), rounding).clamp(low, HIGH) * s


def grid(y: Tensor, s: float, rounding: Rounding, _wide: float) -> Tensor:
    """Return the value of the code, made in float32 beside the codes."""
    return _grid(y, s, rounding)


def requantized(y: Tensor, s: float, rounding: Rounding, _wide: float) -> Tensor:
    """Return the value of the code, put on the same grid a second time."""
    return _grid(_grid(y, s, rounding), s, "even")


def selective(y: Tensor, s: float, rounding: Rounding, _wide: float) -> Tensor:
    """Round to the grid within its range; beyond it return y."""
    k = round_to_integers(divided(y, s), rounding)
    return torch.where(k.abs() <= HIGH, k * s, y)


def second_grid(y: Tensor, s: float, rounding: Rounding, _wide: float) -> Tensor:
    """Round values beyond the grid to another one that reaches to the largest of them."""
    k = round_to_integers(divided(y, s), rounding)
    beyond = k.abs() > HIGH
    largest = torch.where(beyond, y.abs(), torch.zeros_like(y)).amax()
    wide = divided(largest, HIGH).clamp(min=s)
    return torch.where(beyond, _grid(y, wide, rounding), k * s)


def wide_grid(y: Tensor, s: float, rounding: Rounding, wide: float) -> Tensor:
    """Round values beyond the grid to that of a calibration that clips only rare maxima."""
    k = round_to_integers(divided(y, s), rounding)
    return torch.where(k.abs() > HIGH, _grid(y, wide, rounding), k * s)


def quarter_grid(y: Tensor, s: float, rounding: Rounding, _wide: float) -> Tensor:
    """Use a quarter of the step for codes below 32; outliers still clip."""
    k = round_to_integers(divided(y, s), rounding)
    return torch.where(k.abs() < 32, _grid(y, s / 4, rounding, -HIGH), k.clamp(LOW, HIGH) * s)


def half_grid(y: Tensor, s: float, rounding: Rounding, _wide: float) -> Tensor:
    """Use half the step for codes below 64; outliers still clip."""
    k = round_to_integers(divided(y, s), rounding)
    return torch.where(k.abs() < 64, _grid(y, s / 2, rounding, -HIGH), k.clamp(LOW, HIGH) * s)


def powers(y: Tensor, s: float, rounding: Rounding, _wide: float) -> Tensor:
    """Use steps of s / 4 up to 8 s, powers of two of that step beyond."""
    quarter, edge = s / 4, _STEPS * s
    over = divided((y.abs() - edge).clamp(min=quarter), quarter)
    exponent = (torch.frexp(over).exponent - 1).clamp(0, 255)
    far = y.sign() * (edge + torch.ldexp(torch.full_like(y, quarter), exponent))
    near = y.abs() <= edge
    # An exponent would make numbers of Inf and NaN.
    far = torch.where(y.isfinite(), far, y)
    return torch.where(near, round_to_integers(divided(y, quarter), rounding) * quarter, far)


def three_zones(y: Tensor, s: float, rounding: Rounding, _wide: float) -> Tensor:
    """Use steps of s / 4 up to 15.75 s, of s up to 143 s, of 4 s beyond."""
    size = y.abs()
    near = round_to_integers(divided(y, s / 4), rounding).clamp(-63, 63) * (s / 4)
    middle = y.sign() * round_to_integers(divided(size, s), rounding).clamp(16, _THIRD) * s
    far = round_to_integers(divided(size - _THIRD * s, 4 * s), rounding).clamp(0, 63)
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
