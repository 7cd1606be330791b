"""Percentiles in passes, held against a sort of all values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from qgate.comparing import exact_percentiles as passes

Values = npt.NDArray[np.float64]
PERCENTS = (1, 50, 90, 95, 99, 100)


def _sorted(values: Values) -> list[float]:
    ordered = np.sort(np.abs(values))
    return [float(ordered[max(math.ceil(p * len(values) / 100), 1) - 1]) for p in PERCENTS]


VALUES: dict[str, Callable[[np.random.Generator, int], Values]] = {
    "of all magnitudes": lambda draw, n: (
        draw.standard_normal(n) * 10.0 ** draw.integers(-300, 300, n)
    ),
    "few values": lambda draw, n: draw.integers(-3, 4, n) / 3,
    "one value": lambda _draw, n: np.full(n, -0.1),
    "one ulp apart": lambda draw, n: 1 + draw.integers(0, 9, n) * 2.0**-52,
    "close together": lambda draw, n: 1 + draw.integers(0, 1 << 18, n) * 2.0**-52,
    "subnormal": lambda draw, n: draw.integers(0, 99, n) * 5e-324,
}


@pytest.mark.parametrize("most", [1, 5, 300, 1 << 19], ids="at most {} sorted".format)
@pytest.mark.parametrize("kind", VALUES)
def test_passes_give_what_a_sort_gives(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_MOST_SORTED", most)
    for seed in range(20):
        draw = np.random.default_rng(seed)
        count = int(draw.integers(1, 2000))
        parts = np.split(VALUES[kind](draw, count), [count // 3])
        exact = passes.exact_percentiles(parts.__iter__, PERCENTS)
        assert exact == _sorted(np.concatenate(parts))


def test_no_values_have_no_percentiles() -> None:
    assert np.isnan(passes.exact_percentiles(lambda: [np.empty(0)], PERCENTS)).all()
