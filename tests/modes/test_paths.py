"""The u of the scan, each way against its formula in float64 and against its bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate.modes.simulated.casts import GridCast
from qgate.modes.simulated.mixer import UPath
from qgate.modes.simulated.paths import PATHS
from tests.shares import share

F32, F64 = np.float32, np.float64
Array = Any
Round = Callable[[Array], Array]


def away(x: Array) -> Array:
    x = x.astype(F64)
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def even(x: Array) -> Array:
    return np.rint(x.astype(F64))


ROUND: dict[str, Round] = {"away": away, "even": even}


def over(a: Array, b: float) -> Array:
    """The one inexact step before a rounding: a quotient in float32, as kernels have it."""
    return np.asarray(a, F32) / F32(b)


def on(y: Array, s: float, r: Round, low: int = -128, high: int = 127) -> Array:
    return np.clip(r(over(y, s)), low, high) * s


def grid(y: Array, s: float, r: Round, _w: float) -> Array:
    return on(y, s, r)


def selective(y: Array, s: float, r: Round, _w: float) -> Array:
    k = r(over(y, s))
    return np.where(np.abs(k) <= 127, k * s, y.astype(F64))


def second_grid(y: Array, s: float, r: Round, _w: float) -> Array:
    k = r(over(y, s))
    out = np.abs(k) > 127
    s2 = max(F64(over(np.abs(y[out]).max(), 127)), s) if out.any() else s
    return np.where(out, on(y, s2, r), k * s)


def wide_grid(y: Array, s: float, r: Round, w: float) -> Array:
    k = r(over(y, s))
    return np.where(np.abs(k) > 127, on(y, w, r), k * s)


def quarter_grid(y: Array, s: float, r: Round, _w: float) -> Array:
    return np.where(np.abs(r(over(y, s))) < 32, on(y, s / 4, r, -127), on(y, s, r))


def half_grid(y: Array, s: float, r: Round, _w: float) -> Array:
    return np.where(np.abs(r(over(y, s))) < 64, on(y, s / 2, r, -127), on(y, s, r))


def powers(y: Array, s: float, r: Round, _w: float) -> Array:
    size = np.abs(y)
    beyond = over(np.maximum(size - F32(8 * s), F32(s / 4)), s / 4)
    j = np.clip(np.frexp(beyond.astype(F64))[1] - 1, 0, 255)
    far = np.sign(y.astype(F64)) * (8 * s + 2.0**j * (s / 4))
    return np.where(size <= 8 * s, r(over(y, s / 4)) * (s / 4), far)


def three_zones(y: Array, s: float, r: Round, _w: float) -> Array:
    size, sign = np.abs(y), np.sign(y.astype(F64))
    near = np.clip(r(over(y, s / 4)), -63, 63) * (s / 4)
    middle = sign * np.clip(r(over(size, s)), 16, 143) * s
    far = sign * (143 * s + np.clip(r(over(size - F32(143 * s), 4 * s)), 0, 63) * 4 * s)
    return np.where(size <= 15.75 * s, near, np.where(size <= 143 * s, middle, far))


FORMULAS = {f.__name__: f for f in (grid, selective, second_grid, wide_grid, quarter_grid, half_grid, powers, three_zones)}  # fmt: skip
FORMULAS["requantized"] = grid
NAMES = sorted(PATHS)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Array, float, float]:
    """y of every size around the codes, many on ties and thresholds; a scale with few bits, so
    that its multiples are exact."""
    s = draw(st.integers(1, 4095)) * 2.0 ** draw(st.integers(-24, -2))
    seed = draw(st.integers(0, 2**31))
    g = np.random.default_rng(seed)
    reach = draw(st.sampled_from([1.0, 30, 127.0, 200, 1000]))
    y = g.uniform(-reach, reach, 300)
    y[:100] = np.round(y[:100] * 8) / 8
    y[100:120] = [
        0,
        8,
        -8,
        15.75,
        -15.75,
        31.5,
        63.5,
        127,
        127.5,
        -127.5,
        -128,
        -128.5,
        128,
        143,
        -143,
        143.5,
        395,
        397,
        500,
        -8.25,
    ]
    y = (y * s).astype(F32)
    y[120:160] = np.nextafter(y[80:120], F32(g.choice([-np.inf, np.inf])))
    return y, s, s * draw(st.sampled_from([1.0, 1.5, 4.0]))  # fmt: skip


def u_of(name: str, y: Array, s: float, how: Any, wide: float) -> Array:
    return PATHS[name](torch.from_numpy(y), s, how, wide).numpy().astype(F64)


def test_every_path_has_a_formula() -> None:
    assert set(FORMULAS) == set(PATHS)


@share(4)
@pytest.mark.parametrize("how", ["even", "away"])
@pytest.mark.parametrize("name", NAMES)
@given(cases())
@settings(max_examples=40)
def test_paths_are_their_formulas(name: str, how: str, case: tuple[Array, float, float]) -> None:
    y, s, wide = case
    expected = FORMULAS[name](y, s, ROUND[how], wide)
    ours = u_of(name, y, s, how, wide)
    wrong = np.abs(ours - expected) > 3e-7 * np.abs(expected)
    assert not wrong.any(), (y[wrong] / s, ours[wrong] / s, expected[wrong] / s)


@pytest.mark.parametrize("how", ["even", "away"])
@pytest.mark.parametrize("name", NAMES)
@given(cases())
@settings(max_examples=20)
def test_u_is_as_far_from_y_as_the_steps_allow(
    name: str, how: str, case: tuple[Array, float, float]
) -> None:
    y, s, wide = case
    k = np.abs(ROUND[how](over(y, s)))
    error = np.abs(u_of(name, y, s, how, wide) - y) / s
    slack = 2e-7 * (np.abs(y) / s + 1)  # one unit in the last place
    assert (error <= 0.5 + slack)[k <= 127].all() or name in ("powers", "three_zones")
    if name == "selective":
        assert (error <= 0.5 + slack).all()
        assert (error == 0)[k > 127].all()
    fine = {
        "quarter_grid": (32, 1 / 8),
        "half_grid": (64, 1 / 4),
        "powers": (8, 1 / 8),
        "three_zones": (15.5, 1 / 8),
    }
    if name in fine:
        below, bound = fine[name]
        assert (error <= bound + slack)[k < below].all()
    if name == "three_zones":
        assert (error <= np.where(np.abs(y) <= 143 * s, 0.5, 2.0) + slack)[
            np.abs(y) <= 397 * s
        ].all()
    if name == "powers":
        assert (error <= np.maximum(1 / 8, np.abs(y) / s / 2) + slack).all()


@pytest.mark.parametrize("name", ["grid", "requantized"])
@given(cases())
@settings(max_examples=20)
def test_the_grid_has_at_most_256_values(name: str, case: tuple[Array, float, float]) -> None:
    y, s, wide = case
    y = np.concatenate([y, np.random.default_rng(0).uniform(-200, 200, 5000) * s]).astype(F32)
    u = u_of(name, y, s, "away", wide)
    k = u / s
    assert np.abs(k - np.rint(k)).max() <= 1e-5 * 128
    assert set(np.unique(np.rint(k))) <= set(range(-128, 128))
    assert 200 < len(np.unique(u)) <= 256


@pytest.mark.parametrize("name", ["selective", "second_grid", "wide_grid"])
def test_where_nothing_is_beyond_the_codes_outliers_make_no_difference(name: str) -> None:
    y = np.random.default_rng(2).uniform(-127.4, 127.4, 9000).astype(F32) * F32(0.03)
    assert np.array_equal(u_of(name, y, 0.03, "even", 0.05), u_of("grid", y, 0.03, "even", 0.05))
    y[5] = 128.2 * 0.03
    assert not np.array_equal(
        u_of(name, y, 0.03, "even", 0.05), u_of("grid", y, 0.03, "even", 0.05)
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_visible(name: str) -> None:
    y = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
    u = PATHS[name](y, 0.1, "away", 0.2)
    assert u[0].isnan()
    for odd, sign in ((u[1], 1), (u[2], -1)):
        assert odd.isnan() or sign * odd >= 12.7, "an infinite value became an ordinary one"
    assert u[3:5].tolist() == [0, 0] or name == "second_grid"
    module = UPath(name, 0.1, "away", 0.2)
    module(y)
    assert module.counts()["nonfinite"] == 3
    assert module.counts()["values"] == 6
    assert module.counts()["saturated"] <= 2


@pytest.mark.parametrize(("name", "widest"), [("grid", 127), ("requantized", 127), ("quarter_grid", 127), ("half_grid", 127), ("three_zones", 397)])  # fmt: skip
def test_clipped_values_are_counted_and_take_no_gradient(name: str, widest: int) -> None:
    s = 0.25
    y = (
        torch.randn(4000, generator=torch.Generator().manual_seed(0)) * widest * s
    ).requires_grad_()
    path = UPath(name, s, "away", s)
    path(y).sum().backward()
    whole = (y.detach() / s).double()
    low = -widest if name == "three_zones" else -128
    clipped = (whole > widest + 0.5) | (whole < low - 0.5)
    edge = (
        ((whole - widest).abs() < 2) | ((whole - low).abs() < 2)
        if name == "three_zones"
        else torch.zeros(())
    )
    assert torch.equal(y.grad == 0, clipped) or bool((((y.grad == 0) == clipped) | edge).all())
    assert path.counts()["saturated"] == int((y.grad == 0).sum()) > 500
    if name in ("grid", "requantized"):
        cast = GridCast(s, "away")
        cast(y.detach())
        assert cast.counts() == path.counts()


@pytest.mark.parametrize("name", ["selective", "second_grid", "powers"])
def test_ways_that_clip_nothing_count_nothing(name: str) -> None:
    y = (torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 50).requires_grad_()
    path = UPath(name, 0.25, "even", 1.0)
    path(y).sum().backward()
    assert path.counts() == {"values": 4000, "saturated": 0, "nonfinite": 0}
    assert torch.equal(y.grad, torch.ones(4000))  # type: ignore[arg-type]
