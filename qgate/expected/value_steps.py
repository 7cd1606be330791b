"""Distances between results in values of their format: κ of IEEE P3109, section 4.4."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qgate.formats import ElementFormat
from qgate.formats.options import Floats


def value_steps(actual: Floats, defined: Floats, fmt: ElementFormat) -> npt.NDArray[np.int64]:
    """Count the finite values of a format from each result to its defined one, both finite.

    Those between the two are counted with the actual result and without the defined one; both
    zeros are one value.
    """
    values = np.unique(fmt.values() + 0.0)
    values = values[np.isfinite(values)]
    ends = [np.searchsorted(values, side + 0.0) for side in (actual, defined)]
    return np.asarray(np.abs(ends[0] - ends[1]), np.int64)


def kappa(actual: Floats, defined: Floats, fmt: ElementFormat) -> float:
    """Return the κ that an implementation with these results has to declare.

    NaN where NaN does not match, infinity where Inf or a finite result does not; else the most
    value steps of any finite defined result.
    """
    if bool((np.isnan(actual) != np.isnan(defined)).any()):
        return math.nan
    infinite = np.isinf(actual) | np.isinf(defined)
    if bool((infinite & (actual != defined)).any()):
        return math.inf
    finite = np.isfinite(defined)
    return float(value_steps(actual[finite], defined[finite], fmt).max(initial=0))
