"""Hashes of numbers, in arithmetic of our own, as numpy's random streams change by version."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]


def mix_bits(numbers: Hashes) -> Hashes:
    """Mix the bits of each number, as splitmix64 does in its last steps."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))
