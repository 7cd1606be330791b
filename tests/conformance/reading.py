"""Read what other tools stored with qgate's formats, and compare it with what they read."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import qgate
from qgate.formats.options import Options
from tests.formats import oracles

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

# A peer divides in float32 or multiplies by a reciprocal: its quotient is this far from the exact
# one, and an element whose quotient is no farther from a tie may go to either side of it.
QUOTIENT_ERROR = 2.0**-21


def decode(
    codes: Tensor,
    fmt: str | qgate.formats.Format,
    scales: Tensor | None = None,
    *,
    tensor_scale: Tensor | None = None,
    zero_points: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Unpack[Options],
) -> Tensor:
    """Return the values that qgate reads from codes and scales which others stored."""
    quantizer = qgate.Quantizer(fmt, **options)
    encoded = qgate.Encoded(quantizer, codes, dtype, scales, tensor_scale, zero_points=zero_points)
    return encoded.decode()


def nibbles(packed: Tensor) -> Tensor:
    """Return the codes of bytes with two codes each along the last axis, the low half first."""
    data = packed.view(torch.uint8)
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def fields(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes of rows of bytes that hold `bits` bits each, lowest bit first."""
    data = np.unpackbits(packed.contiguous().view(torch.uint8).numpy(), axis=-1, bitorder="little")
    data = data[..., : data.shape[-1] // bits * bits]
    groups = data.reshape(*data.shape[:-1], -1, bits).astype(np.int64)
    return torch.from_numpy((groups << np.arange(bits)).sum(axis=-1))


def near_ties(
    quotients: Tensor, fmt: str, *, zero_points: Tensor | None = None, narrow: bool = True
) -> Mask:
    """Find quotients that a rounding error of float32 may carry over a tie of the format.

    Zero points, as many as quotients, are added to them before or after they are rounded.
    """
    middles = np.sort(oracles.midpoints(fmt, narrow=narrow))[1:-1]  # beyond them both saturate
    shift = 0.0 if zero_points is None else oracles.to_float64(zero_points)
    numbers = oracles.to_float64(quotients)
    error = QUOTIENT_ERROR * (abs(numbers) + abs(shift))
    numbers = numbers + shift
    above = np.clip(np.searchsorted(middles, numbers), 1, len(middles) - 1)
    distance = np.minimum(abs(numbers - middles[above - 1]), abs(numbers - middles[above]))
    return np.asarray(distance <= error)


def assert_same_codes(ours: Tensor, theirs: Tensor, may_differ: Mask, label: str) -> None:
    """Expect the same values except near ties, which have to be few."""
    actual, expected = oracles.to_float64(ours), oracles.to_float64(theirs)
    assert actual.shape == expected.shape, label
    wrong = (actual != expected) & ~may_differ
    first = tuple(np.argwhere(wrong)[0]) if wrong.any() else None
    assert first is None, (
        f"{label}: {wrong.sum()} differ, first {first}: {actual[first]!r}, not {expected[first]!r}"
    )
    # One in a group of 32, where its scale is amax / 127.5 and its lowest number such a tie.
    assert may_differ.mean() < 1 / 32, f"{label}: {may_differ.sum()} elements are near ties"


def normal_numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return float32 numbers with rows of unequal size, the same on every machine."""
    rng = np.random.default_rng(seed)
    rows = np.exp2(rng.integers(-3, 4, (*shape[:-1], 1)))
    return torch.from_numpy((rng.standard_normal(shape) * rows).astype(np.float32))
