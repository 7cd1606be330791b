"""Roundings, casts, exact products and paths, against definitions in exact arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qgate.modes.simulated.casts import (
    Cast,
    DynamicCast,
    GridCast,
    codes_on_grid,
    half,
    round_to_integers,
)
from qgate.modes.simulated.products import IntLinear, IntWeight, exact_linear

F32, F64 = np.float32, np.float64
Array = Any


def away(x: Array) -> Array:
    """Half away from zero, in float64, where x - trunc(x) is exact for all that is tested."""
    x = x.astype(F64)
    whole = np.trunc(x)
    return whole + np.sign(x) * (np.abs(x - whole) >= 0.5)


# Rounding ----------------------------------------------------------------------------------------


def near_ties() -> dict[str, Array]:
    draw = np.random.default_rng(0)
    wholes = np.arange(-4096, 4097)
    ties = (wholes + 0.5).astype(F32)
    halves = np.concatenate([np.arange(2**17), draw.integers(0, 2**24, 200_000)]).astype(F64) / 2
    halves = np.concatenate([halves, -halves]).astype(F32)
    arrays_by_name = {
        "multiples of one half": halves,
        "ties": ties,
        "the largest": np.arange(2**23 - 64, 2**23 + 64, 0.5, F64).astype(F32),
    }
    for name in ("ties", "multiples of one half"):
        for direction in (-np.inf, np.inf):
            arrays_by_name[f"{name}, next to {direction}"] = np.nextafter(
                arrays_by_name[name], F32(direction)
            )
    arrays_by_name["random"] = draw.standard_normal(200_000).astype(F32) * draw.choice(
        F32([1e-3, 1, 50, 1e6, 1e30]), 200_000
    )
    arrays_by_name["bfloat16"] = (
        torch.arange(65536).to(torch.int16).view(torch.bfloat16).float().numpy()
    )
    arrays_by_name["odd ones"] = F32(
        [0.0, -0.0, 0.49999997, -0.49999997, np.inf, -np.inf, np.nan, 1e-45, 2.0**24, 3e38]
    )
    return arrays_by_name  # fmt: skip


@pytest.mark.parametrize("name", near_ties())
def test_rounding_of_float32_is_exact(name: str) -> None:
    x = near_ties()[name]
    with np.errstate(invalid="ignore"):
        for rule, expected in (("away", away(x)), ("even", np.rint(x))):
            ours = round_to_integers(torch.from_numpy(x), rule).numpy()  # type: ignore[arg-type]
            finite = np.isfinite(x)
            assert np.array_equal(ours[finite], expected[finite])
            assert np.array_equal(ours[~finite], x[~finite], equal_nan=True)
            assert np.array_equal(np.signbit(ours[~np.isnan(x)]), np.signbit(x[~np.isnan(x)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rounding_of_other_dtypes(dtype: torch.dtype) -> None:
    codes = torch.arange(65536).to(torch.int16)
    if dtype == torch.float64:
        ties = torch.arange(-3000, 3000, dtype=dtype) + 0.5
        x = torch.cat([ties, ties.nextafter(ties + 1), ties.nextafter(ties - 1)])
    else:
        x = codes.view(dtype)
    x = x[x.isfinite()]
    assert np.array_equal(round_to_integers(x, "away").double().numpy(), away(x.double().numpy()))


# Casts -------------------------------------------------------------------------------------------


def test_a_cast_counts_what_it_changed() -> None:
    cast = Cast("even")
    x = torch.tensor([0.4, 126.6, 127.5, 127.4, -128.5, -128.6, 1e9, math.inf, -math.inf, math.nan])
    assert cast(x)[:9].tolist() == [0, 127, 127, 127, -128, -128, 127, 127, -128]
    assert cast(x)[9].isnan()
    assert cast.counts() == {"values": 20, "saturated": 2 * 5, "nonfinite": 2 * 3}
    assert Cast("away")(x)[[2, 4]].tolist() == [127, -128]
    away_cast = Cast("away")
    away_cast(torch.tensor([127.5, -128.5, 127.49, -128.49]))
    assert away_cast.counts() == {"values": 4, "saturated": 2, "nonfinite": 0}
    assert (Cast("even").counts()) == {"values": 0, "saturated": 0, "nonfinite": 0}


def test_gradients_stop_where_a_cast_clips() -> None:
    x = torch.tensor(
        [0.3, 127.4, 127.6, -128.4, -129.0, 500.0, math.inf, math.nan], requires_grad=True
    )
    for cast, factor in ((Cast("even"), 1.0), (GridCast(1.0, "away"), 1.0)):
        x.grad = None
        (cast(x) * torch.arange(1.0, 9)).nansum().backward()
        assert x.grad is not None
        assert x.grad[:6].tolist() == [factor, 2 * factor, 0, 4 * factor, 0, 0]
        assert x.grad[6] == 0
    y = (torch.randn(50) * 100).requires_grad_()
    GridCast(0.5, "even")(y).sum().backward()
    inside = (y.detach() / 0.5).round().clamp(-128, 127) == (y.detach() / 0.5).round()
    assert torch.equal(y.grad, inside.float())  # type: ignore[arg-type]
    assert 0 < int(inside.sum()) < 50


def test_a_cast_without_gradients_makes_none() -> None:
    x = torch.randn(4)
    assert not Cast("even")(x).requires_grad
    with torch.no_grad():
        assert not GridCast(0.1, "even")(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.27, -0.3, 0.005], [-1e-30, 1e-31], [3e38, 1.0]])
def test_a_dynamic_cast_reaches_its_own_largest_value(values: list[float]) -> None:
    x = torch.tensor(values)
    cast = DynamicCast("even")
    y, scale = cast(x)
    largest = float(x.abs().max())
    assert float(scale) == (float(F32(largest) / F32(127)) if largest else 1.0)
    assert (y - x).abs().max() <= 0.5001 * scale
    assert cast.counts()["saturated"] == 0


def test_codes_survive_their_grid_for_any_scale() -> None:
    k = torch.arange(-128.0, 128)
    draw = np.random.default_rng(1)
    scales = np.exp(draw.uniform(np.log(1e-7), np.log(1e4), 4000)).tolist()
    for scale in [*scales, 1e-6, 1 / 127, 0.1, 1.0, *(2.0**e for e in range(-20, 10))]:
        real = k * scale
        assert torch.equal(codes_on_grid(real, scale), k), scale
        assert torch.equal((real / scale).round(), k), scale
        assert torch.equal(GridCast(scale, "even")(real), real), scale


def test_half_shows_overflow() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e6, 1e-9, math.nan])
    assert half(x)[:5].tolist() == [65504, 65504, math.inf, -math.inf, 0]
    assert half(x).dtype == torch.float32
    assert half(x)[5].isnan()


# Integer products --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 1023, 1024, 1025, 1536, 2047, 2048, 2049, 4096, 5000])
@pytest.mark.parametrize("kind", ["largest", "signs", "random", "one sign"])
def test_integer_products_are_exact(width: int, kind: str) -> None:
    draw = np.random.default_rng(width)
    shapes = ((3, width), (5, width))
    if kind == "largest":
        x, w = (np.full(shape, -128) for shape in shapes)
    elif kind == "signs":
        x, w = (draw.choice([-128, 127], shape) for shape in shapes)
    elif kind == "one sign":  # sums far above 2^24, most of them odd
        x, w = (draw.integers(100, 128, shape) for shape in shapes)
    else:
        x, w = (draw.integers(-128, 128, shape) for shape in shapes)
    exact = (x.astype(np.int64) @ w.astype(np.int64).T).astype(F32)
    assert np.array_equal(exact_linear(*(torch.tensor(a).float() for a in (x, w))).numpy(), exact)


@given(st.integers(1, 5000), st.integers(0, 2**31))
@settings(max_examples=60)
def test_integer_products_are_exact_for_any_width(width: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x, w = draw.choice([-128, -1, 126, 127], (2, width)), draw.choice([-128, 127], (2, width))
    exact = (x.astype(np.int64) @ w.astype(np.int64).T).astype(F32)
    assert np.array_equal(
        exact_linear(torch.tensor(x).float(), torch.tensor(w).float()).numpy(), exact
    )


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_bias_is_added_before_the_output_is_rounded(tokens: int) -> None:
    source = nn.Linear(8, 4)
    with torch.no_grad():
        source.bias.copy_(torch.tensor([5.0, -3.0, 0.2, 400.0]))
        layer = IntLinear(source, 0.1, 0.5, "outside", "fp32").eval()
        x = torch.randint(-128, 128, (1, tokens, 8)) * 0.1
        expected = nn.functional.linear(x, layer.weight, source.bias)
        assert torch.equal(layer(x), (expected / 0.5).round().clamp(-128, 127) * 0.5)


@pytest.mark.parametrize("arithmetic", ["fp32", "fp16"])
@pytest.mark.parametrize("size", [1e-9, 1e-6, 1.0, 6e4])
def test_weights_have_finite_codes_at_any_size(arithmetic: Any, size: float) -> None:
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * size
    codes, scale = IntWeight(weight, arithmetic).quantized()
    assert codes.isfinite().all()
    assert codes.abs().max() <= 128
    assert float(scale) > 0
    if size >= 1e-3:
        assert (codes * scale - weight).abs().max() <= 0.57 * float(scale)
        assert codes.abs().max() == 127
