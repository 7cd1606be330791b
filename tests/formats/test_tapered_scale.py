"""HiF8 with a scale of its own takes the better of 1 and amax / max, in every group.

The oracle rounds to the list of values that en_dtypes knows, ties away, and sums exactly.
"""

from __future__ import annotations

import math
from fractions import Fraction

import en_dtypes
import numpy as np
import pytest
import torch

import qgate
from qgate.formats import definition

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
LAYOUTS = [
    {"granularity": "tensor"},
    {"granularity": "channel", "axis": 0},
    {"granularity": "channel", "axis": 1},
    {"granularity": "block", "block": 16},
    {"granularity": "block", "block": 7, "axis": 0},
]


def _values() -> np.ndarray:
    with np.errstate(invalid="ignore"):
        values = np.abs(np.arange(256, dtype=np.uint8).view(en_dtypes.hifloat8).astype(np.float64))
    return np.unique(values[np.isfinite(values)])


VALUES = _values()


def rounded(x: np.ndarray) -> np.ndarray:
    size = np.minimum(np.abs(x), VALUES[-1])
    above = np.searchsorted(VALUES, size).clip(1, len(VALUES) - 1)
    low, high = VALUES[above - 1], VALUES[above]
    return np.copysign(np.where(size >= (low + high) / 2, high, low), x) + 0.0


def error(y: np.ndarray, x: np.ndarray) -> Fraction:
    return sum((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(y, x, strict=True))


def better(x: np.ndarray, number: type) -> np.ndarray:
    """One group of finite numbers, quantized."""
    amax = float(np.abs(x).max())
    scale = float(number(amax / VALUES[-1])) if amax else 1.0
    plain, scaled = rounded(x), rounded(x / scale) * scale
    return scaled if error(scaled, x) < error(plain, x) else plain


def groups(x: torch.Tensor, options: dict) -> list[tuple[slice, slice]]:
    rows, columns = x.shape
    size, axis = options.get("block"), options.get("axis", 1)
    if options["granularity"] == "tensor":
        return [(slice(None), slice(None))]
    if options["granularity"] == "channel":
        slices = [slice(i, i + 1) for i in range(x.shape[axis])]
        return [(i, slice(None)) if axis == 0 else (slice(None), i) for i in slices]
    return [
        (slice(r, r + size), slice(c, c + 1))
        if axis == 0
        else (slice(r, r + 1), slice(c, c + size))
        for r in range(0, rows, size if axis == 0 else 1)
        for c in range(0, columns, 1 if axis == 0 else size)
    ]


def sample(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Channels that lie anywhere in the range of HiF8, tails, zeros, exact numbers."""
    random = np.random.default_rng(seed)
    x = random.standard_t(3, (21, 37)) * np.exp2(random.uniform(-14, 14, (1, 37)))
    x *= np.exp2(random.uniform(-2, 2, (21, 1)))
    x[3], x[5, ::2], x[7] = 0.0, 0.0, rounded(x[7])
    return torch.from_numpy(x.clip(-6e4, 6e4)).to(dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_each_group_takes_the_better_of_two_scales(
    options: dict, dtype: torch.dtype, seed: int
) -> None:
    x = sample(seed, dtype)
    number = np.float64 if dtype == torch.float64 else np.float32
    exact = x.double().numpy()
    expected = np.empty_like(exact)
    for group in groups(x, options):
        expected[group] = better(exact[group].ravel(), number).reshape(exact[group].shape)
    q = qgate.Quantizer("hif8", dtype=torch.float64, **options)
    y = q(x)
    assert np.array_equal(y.numpy(), expected)
    double = dtype == torch.float64
    assert np.array_equal(definition.quantize(exact, q, double=double), expected)
    encoded = q.encode(x)
    assert torch.equal(encoded.decode(), y)
    assert encoded.scales is not None
    if options["granularity"] != "tensor":
        ones = (encoded.scales == 1).double().mean()
        assert 0.02 < ones < 0.98, "both scales are taken"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_alone(dtype: torch.dtype) -> None:
    """A number that HiF8 has stays with scale 1; any other is itself at its own scale."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    q = qgate.Quantizer("hif8", granularity="block", block=1, dtype=torch.float64)
    encoded = q.encode(every)
    exact = every.double().numpy()
    finite = np.isfinite(exact)
    own = rounded(np.where(finite, exact, 0.0)) == exact
    assert encoded.scales is not None
    scales = encoded.scales.double().numpy()
    assert np.isnan(scales[~finite]).all()
    assert (scales[finite & own] == 1).all()
    assert (scales[finite & ~own] != 1).all()
    defined = definition.quantize(exact, q)
    assert np.array_equal(encoded.decode().numpy(), defined, equal_nan=True)
    assert np.array_equal(q(every).numpy(), defined, equal_nan=True)
    assert np.allclose(defined[finite], exact[finite], rtol=1e-6, atol=2.0**-149)


@pytest.mark.parametrize("seed", range(4))
def test_it_never_loses_to_the_plain_cast(seed: int) -> None:
    random = np.random.default_rng(seed)
    for factor in np.exp2(np.arange(-30.0, 24.0, 3.0)):
        x = torch.from_numpy(random.standard_t(3, 4096) * factor).float()
        exact = x.double().numpy()
        plain = qgate.quantize(x, "hif8", dtype=torch.float64).numpy()
        own = qgate.quantize(x, "hif8", granularity="tensor", dtype=torch.float64).numpy()
        assert ((own - exact) ** 2).sum() <= ((plain - exact) ** 2).sum()


@pytest.mark.parametrize("factor", [1.0, 2.0**-12, 2.0**11])
def test_large_16_bit_tensors_are_counted_and_give_the_same(factor: float) -> None:
    x = (torch.randn(2**18, generator=torch.Generator().manual_seed(0)) * factor).bfloat16()
    q = qgate.Quantizer("hif8", granularity="tensor", dtype=torch.float64)
    assert np.array_equal(q(x).numpy(), definition.quantize(x.double().numpy(), q))


def test_random_rounding_draws_nothing_for_the_choice() -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 1e-5
    roundings = []
    for scale in ({"granularity": "tensor"}, {"scale": float(x.abs().max()) / 32768}):
        generator = torch.Generator().manual_seed(7)
        options = {"rounding": "stochastic", "generator": generator, **scale}
        roundings.append(qgate.quantize(x, "hif8", **options))
    assert torch.equal(*roundings)


@pytest.mark.parametrize("factor", [1e200, 1e-200, 1e307])
def test_float64_numbers_whose_squares_are_none(factor: float) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(
        -8, 8
    )
    y = qgate.quantize(x * factor, "hif8", granularity="tensor")
    wrong = (y / factor - x).square().sum() / x.square().sum()
    assert 10 * math.log10(float(wrong)) < -15


def test_a_group_with_nan_is_nan_and_inf_takes_the_largest_scale() -> None:
    x = torch.ones(2, 8)
    x[0, 0], x[1, 0] = math.nan, math.inf
    y = qgate.quantize(x, "hif8", granularity="channel", axis=0)
    assert y.isnan().all()
    saturated = qgate.encode(x, "hif8", granularity="channel", axis=0, inf="saturate")
    assert saturated.scales is not None
    assert saturated.scales[0].isnan().all()
    assert float(saturated.scales[1]) == float(np.float32(np.finfo(np.float32).max / 32768))


def test_without_saturation_the_choice_is_of_what_comes_out() -> None:
    x = torch.tensor([1.0, 1.125, 60000.0])
    y = qgate.quantize(x, "hif8", granularity="tensor", saturate=False)
    assert y.isfinite().all()
