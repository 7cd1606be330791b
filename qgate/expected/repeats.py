"""Noise between two calls of the same input, as sums in another order make it."""

from __future__ import annotations

from torch import Tensor

REPETITIONS = 3
"""Calls of the same input, which are compared with each other."""
_SIGMAS = 6.0


def has_a_factor(change: Tensor, values: Tensor) -> bool:
    """Tell if a change follows the values that it changes.

    The last bits of sums in another order fall to either side. A counter or a state that scales
    what a call gives does not: its changes have the signs of the values, or all the other ones.
    """
    products = (change.double() * values.double()).nan_to_num(0.0, 0.0, 0.0)
    return bool(products.sum().abs() > _SIGMAS * products.square().sum().sqrt())
