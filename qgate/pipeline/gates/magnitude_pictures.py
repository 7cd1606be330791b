"""What a gate over a format leaves to be drawn: the octaves its values lie in, beside its range."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
from torch import Tensor

from qgate import formats
from qgate.results.pictures import MagnitudePicture


def magnitude_picture(
    values: npt.ArrayLike | Tensor,
    weights: npt.ArrayLike | None = None,
    *,
    fmt: str = "",
    nonfinite: int = 0,
    saturated: int = 0,
    flushed: int = 0,
) -> MagnitudePicture:
    """The octaves of values that occur `weights` times each, or once.

    Without a format it is about the values alone. Those that are not finite are counted with
    `nonfinite`, which is what a caller left out.
    """
    x = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    x = np.asarray(x, np.float64).reshape(-1)
    often = None if weights is None else np.asarray(weights, np.float64).reshape(-1)
    finite = np.isfinite(x)
    wild = _total(~finite, often)
    if wild:
        x, often = x[finite], None if often is None else often[finite]
    zero = x == 0
    zeros = _total(zero, often)
    if zeros:
        x, often = x[~zero], None if often is None else often[~zero]
    exponent = np.frexp(x)[1]
    low = int(exponent.min()) - 1 if len(x) else 0
    counts = np.bincount(exponent - (low + 1), weights=often) if len(x) else np.zeros(0)
    largest, smallest = ends(fmt)
    return MagnitudePicture(
        kind="magnitudes",
        format=fmt,
        low=low,
        counts=[round(each) for each in counts.tolist()],
        zeros=zeros,
        nonfinite=nonfinite + wild,
        largest=largest,
        smallest=smallest,
        saturated=saturated,
        flushed=flushed,
    )


def _total(which: npt.NDArray[np.bool_], often: npt.NDArray[np.float64] | None) -> int:
    return int(which.sum()) if often is None else round(float(often[which].sum()))


@cache
def ends(fmt: str) -> tuple[float | None, float | None]:
    """The largest and the smallest magnitude of a format, as log2; None where scales move them."""
    found = formats.get(fmt) if fmt else None
    if found is None or found.kind == "block" or found.always_scaled:
        return None, None
    low, high = found.bounds()
    return math.log2(max(-low, high)), math.log2(found.min_subnormal)
