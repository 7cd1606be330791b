"""Massive activations: a few elements so far above the rest that they hide the rest's errors.

One channel of 26 times the rms of the others kept a cosine at 0.9998 while the others were 15 % off
(paiml/aprender#2091). Whoever looks at such a tensor needs every metric without those elements too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from torch import Tensor

# Between what was measured on both sides: block outputs of the two small models reach 13 times the
# rest and their linear layers' outputs without outlier channels 16; the published case is at 26.
TIMES = 20.0
# Massive elements are few: the largest 1 in 32 are no part of the rest, and so a channel out of 32,
# however large, does not raise what it is held against.
FEW = 32


def massive_beyond(reference: Tensor | Iterable[Tensor]) -> float:
    """The magnitude above which an element of a tensor, or of its parts, is massive; inf if none.

    It is `TIMES` the root mean square of the rest: of all finite elements but the largest 1 in
    `FEW`. The reference alone decides, so that what is measured cannot move its own yardstick.
    """
    parts = [reference] if isinstance(reference, Tensor) else reference
    sizes = np.concatenate([_finite(part) for part in parts] or [np.empty(0, np.float32)])
    kept = len(sizes) - len(sizes) // FEW
    if not kept:
        return math.inf
    largest = float(sizes.max())
    rest = np.partition(sizes, kept - 1)[:kept] if kept < len(sizes) else sizes
    beyond = TIMES * _rms(rest)
    # Of an all but empty tensor every element is beyond the rest, and none is massive.
    return beyond if 0 < beyond < largest else math.inf


def _finite(part: Tensor) -> np.ndarray:
    sizes = part.detach().cpu().abs().reshape(-1)
    sizes = sizes if sizes.dtype.itemsize > 2 else sizes.float()
    found: np.ndarray = sizes[sizes.isfinite()].numpy()
    return found


def _rms(sizes: np.ndarray) -> float:
    unit = float(sizes.max())
    if unit == 0:
        return 0.0
    return unit * math.sqrt(float(np.square(sizes / unit, dtype=np.float64).mean()))
