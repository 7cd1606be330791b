"""The short pass says what the full one says, or leaves it to that one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate.stats.bits import dot
from qgate.stats.plain_errors import plain_errors

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def by_numpy(a, r):
    a, r = a.double().numpy().ravel(), r.double().numpy().ravel()
    relative = ((a - r) ** 2).sum() / (r**2).sum()
    return relative, np.corrcoef(a, r)[0, 1], np.abs(a - r).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [32768, 32769, 65536, 300_001])
@pytest.mark.parametrize("noise", [1e-3, 0.1, 3.0])
def test_as_numpy_in_float64(dtype, n, noise):
    torch.manual_seed(n)
    r = (torch.randn(n) * 3 + 0.5).to(dtype)
    a = (r.float() + noise * torch.randn(n)).to(dtype)
    plain, (relative, correlation, largest) = plain_errors(a, r), by_numpy(a, r)
    assert plain.relative_mse == pytest.approx(relative, rel=1e-5)
    assert 1 - plain.correlation == pytest.approx(1 - correlation, rel=1e-4, abs=1e-12)
    assert plain.max_abs == pytest.approx(largest, rel=1e-6)


@given(
    st.integers(0, 2**31),
    st.floats(-9, 9),
    st.floats(-6, 1),
    st.floats(0, 8),
    st.integers(2**15, 2**16),
)
@settings(max_examples=100)
def test_whatever_scale_noise_and_offset_it_is_near_or_silent(seed, scale, noise, offset, n):
    torch.manual_seed(seed)
    r = (torch.randn(n) + offset) * 10**scale
    a = r + torch.randn(n) * 10 ** (scale + noise)
    plain = plain_errors(a, r)
    if plain is not None:
        relative, correlation, largest = by_numpy(a, r)
        assert plain.relative_mse == pytest.approx(relative, rel=1e-4)
        assert 1 - plain.correlation == pytest.approx(1 - correlation, rel=1e-3, abs=1e-11)
        assert plain.max_abs == pytest.approx(largest, rel=1e-6)


def test_heavy_tails():
    torch.manual_seed(0)
    r = torch.distributions.StudentT(1.5).sample((100_000,))
    a = r + 0.01 * torch.randn(100_000)
    plain, (relative, correlation, _) = plain_errors(a, r), by_numpy(a, r)
    assert plain.relative_mse == pytest.approx(relative, rel=1e-4)
    assert 1 - plain.correlation == pytest.approx(1 - correlation, rel=1e-3)


def test_equal_tensors_are_exact_and_not_contiguous_ones_are_read():
    r = torch.randn(300, 200)
    plain = plain_errors(r.T, r.T.clone())
    assert (plain.relative_mse, plain.max_abs) == (0, 0)
    assert plain.correlation == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("side", [0, 1])
def test_numbers_that_single_precision_cannot_square_are_left_to_the_full_pass(bad, side):
    pair = [torch.randn(40_000), torch.randn(40_000)]
    pair[side][4_321] = bad
    assert plain_errors(*pair) is None


@pytest.mark.parametrize(
    ("a", "r"),
    [
        (torch.randn(40_000) * 1e-25, torch.randn(40_000) * 1e-25),  # squares would vanish
        (torch.randn(40_000) + 100, torch.randn(40_000) + 100),  # nothing is left of the spread
        (torch.zeros(40_000), torch.randn(40_000)),
        (torch.randn(40_000), torch.zeros(40_000)),
        (torch.ones(40_000), torch.ones(40_000)),
        (torch.randn(40_000), torch.randn(40_001)),
        (torch.randn(0), torch.randn(0)),
        (torch.arange(40_000), torch.arange(40_000)),
        (torch.randn(40_000).double(), torch.randn(40_000).double()),
    ],
)
def test_what_it_cannot_answer_it_leaves(a, r):
    assert plain_errors(a, r) is None


@pytest.mark.parametrize("n", [0, 1, 8191, 8192, 8193, 65_535, 65_536])
def test_a_dot_product_in_pieces_has_every_element(n):
    x, y = np.random.default_rng(n).uniform(1, 2, (2, n))
    assert dot(x, y) == pytest.approx(math.fsum(x * y), rel=1e-13)
