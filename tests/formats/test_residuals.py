"""TurboQuant's second stage against its definition, and against the bounds that papers state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import qgate
from qgate.formats._codebook import LLOYD
from qgate.formats._literals import RESIDUAL_NAMES
from qgate.formats.codebook import Codebook, CodebookFormat
from qgate.formats.residual import Projection, ResidualFormat
from tests.formats.hard_blocks import assert_defined, hard_rows
from tests.shares import share

DISTORTIONS = {1: 0.56, 2: 0.18, 3: 0.047}
"""Squared errors of inner products with a vector of length 1, times its size: TurboQuant's Theorem
2 for one bit more than the levels have."""


def first_stage(bits: int) -> CodebookFormat:
    return CodebookFormat("first", Codebook("first", LLOYD[bits]), size=128, scaled_by="rms")


def slow(x: np.ndarray, bits: int, p: np.ndarray) -> np.ndarray:
    """Algorithm 2 of the paper on one vector, in its own coordinates, as it is written."""
    levels = np.array(LLOYD[bits])
    s = float(np.float32(math.sqrt(np.mean(x**2))))
    near = levels[np.abs(x[:, None] / s - levels).argmin(1)] * s
    residual = x - near
    signs = np.where(p @ residual >= 0, 1.0, -1.0)
    length = math.sqrt(float(residual @ residual))
    return np.asarray(near + math.sqrt(math.pi / 2) / len(x) * length * (p.T @ signs))


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_it_is_the_algorithm_of_the_paper(bits: int) -> None:
    x = torch.randn(40, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = Projection.drawn(0, 128).matrix
    expected = np.stack([slow(row, bits, p) for row in x.numpy()])
    ours = qgate.quantize(x, f"lloyd{bits}_qjl").numpy()
    assert np.abs(ours - expected).max() < 1e-6


@share(3)
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_inner_products_are_right_on_average_within_the_published_variance(bits: int) -> None:
    """Over projections; the first stage alone makes them smaller by a fixed share."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(8, 128, dtype=torch.float64, generator=generator) for _ in "xy")
    y = y / y.norm(dim=1, keepdim=True)
    draws = np.random.default_rng(3)
    first = first_stage(bits)
    estimates = []
    for _ in range(300):
        p = Projection(draws.normal(size=(128, 128)).clip(-7.9, 7.9))
        fmt = ResidualFormat("drawn", first.element, first, p)
        estimates.append((qgate.quantize(x, fmt) * y).sum(1))
    products, right = torch.stack(estimates), (x * y).sum(1)
    residual_norm = (qgate.quantize(x, first) - x).square().sum(1)
    bound = math.pi / 2 / 128 * residual_norm
    assert (products.var(0) < 1.25 * bound).all()
    assert ((products.mean(0) - right).abs() < 4.5 * (bound / 300).sqrt()).all()
    error = (products - right).square().mean(0) / x.square().sum(1) * 128
    assert DISTORTIONS[bits] * 0.75 < error.mean() < DISTORTIONS[bits] * 1.3
    many = torch.randn(4000, 128, dtype=torch.float64, generator=generator)
    share = (qgate.quantize(many, first) * many).sum() / many.square().sum()
    assert share < 1 - 0.9 * {1: 0.36, 2: 0.117, 3: 0.03}[bits]


@pytest.mark.parametrize("options", [{}, {"axis": 0, "inf": "saturate"}], ids=str)
@pytest.mark.parametrize("name", RESIDUAL_NAMES)
def test_hard_blocks_by_the_definition(name: str, options: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = hard_rows(dtype)
        x[8, 0], x[9] = torch.finfo(dtype).max, LLOYD[1][1]
        assert_defined(x, name, **options)


def test_codes_and_signs_are_stored() -> None:
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    encoded = qgate.encode(x, "lloyd2_qjl")
    assert encoded.scales is not None
    assert encoded.micro is not None
    assert (encoded.scales.shape, encoded.micro.shape) == ((3, 3, 2), (3, 3, 16))
    assert torch.equal(encoded.codes, qgate.encode(x, "lloyd2").codes)
    assert not encoded.micro[:, 2, 6:].any()


def test_a_projection_is_a_square_of_normal_numbers() -> None:
    matrix = Projection.drawn(0, 128).matrix
    assert abs(matrix.mean()) < 0.02
    assert matrix.std() == pytest.approx(1, abs=0.02)
    assert np.sort(matrix.ravel())[[163, 8192, 16220]] == pytest.approx([-2.33, 0, 2.33], abs=0.1)
    assert Projection.drawn(0, 128) is Projection.drawn(0, 128)
    for wrong in (np.zeros((2, 3)), np.full((2, 2), 9.0), np.full((2, 2), math.nan)):
        with pytest.raises(qgate.QgateError, match="a square matrix of"):
            Projection(wrong)
