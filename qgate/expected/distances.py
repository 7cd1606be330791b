"""Squared distances of a result from the values that it is compared with."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from qgate.formats.options import Floats


def relative_error(actual: Floats | Tensor, exact: Floats | Tensor) -> float:
    """Return the squared distance as a share of the squared exact values; 0 if those are zero."""
    values, right = (_float64(side).reshape(-1) for side in (actual, exact))
    energy = float(np.square(right).sum())
    return float(np.square(values - right).sum()) / energy if energy else 0.0


def distance_to_multiple(actual: Tensor, ideal: Tensor) -> float:
    """Return the squared distance of two tensors, whatever one factor between them."""
    values, right = (side.double().nan_to_num(0.0, 0.0, 0.0) for side in (actual, ideal))
    energy = float(right.square().sum())
    factor = float((values * right).sum()) / energy if energy else 1.0
    return float((values - factor * right).square().sum())


def _float64(side: Floats | Tensor) -> Floats:
    if isinstance(side, Tensor):
        side = side.detach().double().cpu().numpy()
    return np.asarray(side, dtype=np.float64)
