"""Rounding by edges is rounding; the search that ends early finds what the whole search finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qgate.formats import FORMATS
from qgate.scales import rounding
from qgate.scales.rounding import round_rows
from qgate.scales.search import SAME, best_exponent, exponents_near, squared_errors

ELEMENTS = [fmt for fmt in FORMATS if fmt.kind == "element" and fmt.signed]
NARROW = [fmt for fmt in ELEMENTS if fmt.bits <= 8]
NAMES = [fmt.name for fmt in ELEMENTS]


def hard_numbers(fmt: Any) -> np.ndarray:
    """Values, middles between them and their neighbors, from zero to infinity, ascending."""
    values = fmt.magnitudes()[:300]
    middles = (values[1:] + values[:-1]) / 2
    beyond = fmt.saturates_from() * np.array([0.5, 1.0, 2.0, 1e30])
    near = np.concatenate([values, middles, beyond])
    numbers = [near, np.nextafter(near, np.inf), np.nextafter(near, 0), [5e-324, np.inf]]
    return np.unique(np.concatenate(numbers))


@pytest.mark.parametrize("fmt", ELEMENTS, ids=NAMES)
def test_rows_are_rounded_to_the_bits_of_nearest(fmt: Any) -> None:
    row = hard_numbers(fmt)
    rows = np.stack([row, row / 3, row * 2.0**-9])
    rounded = round_rows(fmt, rows)
    assert np.array_equal(rounded, fmt.nearest(torch.from_numpy(rows)).numpy())
    assert not np.signbit(rounded).any()


@pytest.mark.parametrize("fmt", NARROW, ids=[fmt.name for fmt in NARROW])
def test_a_narrow_format_is_rounded_without_its_cast(
    fmt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = hard_numbers(fmt)[None]
    expected = round_rows(fmt, row)
    monkeypatch.setattr(type(fmt), "nearest", None)
    assert np.array_equal(round_rows(fmt, row), expected)


def test_few_numbers_are_not_rounded_by_many_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = FORMATS.get("fp8_e4m3")
    monkeypatch.setattr(rounding.np, "searchsorted", None)
    assert round_rows(fmt, np.array([[0.3, 500.0]])).tolist() == [[0.3125, 448.0]]


def tensors() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {
        "bell curve": np.abs(draw.standard_normal(700)),
        "one outlier": np.append(np.abs(draw.standard_normal(600)), 900.0),
        "rare outlier": np.append(np.abs(draw.standard_normal(600)), 5000.0),
        "powers of two": 2.0 ** np.arange(-30, 9),
        "exact": np.arange(1.0, 7.0),
        "one": np.array([1.0]),
        "small": np.abs(draw.standard_normal(99)) * 1e-200,
    }


@pytest.mark.parametrize("name", list(tensors()))
@pytest.mark.parametrize("fmt", ELEMENTS, ids=NAMES)
def test_the_best_exponent_is_that_of_all(fmt: Any, name: str) -> None:
    sizes = np.sort(tensors()[name])
    weights = np.random.default_rng(4).integers(1, 99, len(sizes)).astype(np.float64)
    if name == "rare outlier":
        weights[:-1] *= 1e6  # to lose it is best, many exponents below the one at which it fits
    every = exponents_near(fmt, float(sizes[-1]))
    errors = squared_errors(fmt, sizes, weights, every)
    for near in (-3.0, 40.0):
        same = [
            e for e, error in zip(every, errors, strict=True) if error <= errors.min() * (1 + SAME)
        ]
        expected = min(same, key=lambda e: (abs(e - near), -e))
        assert best_exponent(fmt, sizes, weights, near) == expected
