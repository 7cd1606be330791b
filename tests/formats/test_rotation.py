"""The random Hadamard rotation as an option of every quantizer, against the matrix itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import definition
from tests.formats.oracles import assert_same_bits

NAMES = qgate.formats.names()
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def matrix(signs: list[int]) -> np.ndarray:
    """Signs on the diagonal, times Sylvester's matrix: -1 where the indices share an odd number of
    bits."""
    n = len(signs)
    shared = [[bin(i & j).count("1") % 2 for j in range(n)] for i in range(n)]
    return np.diag(signs) @ (1 - 2.0 * np.array(shared)) / math.sqrt(n)


def numbers(rows: int = 12, columns: int = 64, seed: int = 0) -> torch.Tensor:
    """Whole numbers of 512ths with outlier channels, whose rotations are exact."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-900, 900, (rows, columns)).astype(float)
    x[:, ::17] *= 30
    return torch.from_numpy(x / 512).float()


@pytest.mark.parametrize("name", NAMES)
def test_rotate_quantize_rotate_back(name: str) -> None:
    x, h = numbers(), matrix(SIGNS)
    rotated = torch.from_numpy(x.double().numpy().reshape(-1, 16) @ h).float().view_as(x)
    plain = qgate.quantize(rotated, name, dtype=torch.float64)
    back = (plain.numpy().reshape(-1, 16) @ h.T).reshape(x.shape)
    y = qgate.quantize(x, name, rotation=SIGNS, dtype=torch.float64)
    assert np.allclose(y.numpy(), back, rtol=1e-13, atol=1e-13)
    encoded = qgate.encode(x, name, rotation=SIGNS)
    assert torch.equal(encoded.codes, qgate.encode(rotated, name).codes)
    assert encoded.dtype == x.dtype
    assert torch.equal(encoded.decode(torch.float64), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_definition_says_the_same(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(6, 10, 64, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    x[0, 1, 3], x[1, 2, 20] = math.nan, math.inf
    for signs in (SIGNS, [1, -1], [1, -1, -1, -1, 1, 1, 1, 1]):
        q = qgate.Quantizer(name, rotation=signs, dtype=torch.float64)
        defined = definition.quantize(x.double().numpy(), q, double=dtype == torch.float64)
        assert_same_bits(q(x), defined, f"{q} of {dtype}", x)
        assert qgate.quantize(x, name, rotation=torch.tensor(signs)).dtype == dtype


@pytest.mark.parametrize(
    ("name", "options", "axis"),
    [
        ("nvfp4", {"axis": 0}, 0),
        ("nvfp4", {"block": (16, 16)}, 1),
        ("int8", {"granularity": "channel", "axis": 0}, 1),
        ("int4", {"granularity": "block", "block": 32, "axis": 0}, 0),
        ("uint4", {}, 1),
        ("fp8_e4m3", {}, 1),
    ],
    ids=str,
)
def test_the_axis_is_that_of_blocks_or_the_last(
    name: str, options: dict[str, Any], axis: int
) -> None:
    x, h = numbers(32, 48), matrix(SIGNS)
    moved = np.moveaxis(x.double().numpy(), axis, -1)
    turned = (moved.reshape(-1, 16) @ h).reshape(moved.shape)
    rotated = torch.from_numpy(np.moveaxis(turned, -1, axis).copy()).float()
    ours = qgate.encode(x, name, rotation=SIGNS, **options)
    assert torch.equal(ours.codes, qgate.encode(rotated, name, **options).codes)
    q = qgate.Quantizer(name, rotation=SIGNS, dtype=torch.float64, **options)
    assert_same_bits(q(x), definition.quantize(x.double().numpy(), q), str(q))


def test_outliers_are_spread_and_products_kept() -> None:
    x, w = numbers(64, 64), numbers(32, 64, seed=1)
    exact = x.double() @ w.double().T

    def error(**options: Any) -> float:
        a, b = (qgate.quantize(factor, "int4", dtype=torch.float64, **options) for factor in (x, w))
        return float((a @ b.T - exact).norm() / exact.norm())

    assert error(rotation=SIGNS) < 0.8 * error()
    # Codes of rotated factors have the product of the numbers that are turned back.
    codes = [qgate.encode(operand, "int8", rotation=SIGNS) for operand in (x, w)]
    rotated = [c.codes.double() * c.scales.double() for c in codes]
    back = [c.decode(torch.float64) for c in codes]
    assert torch.allclose(rotated[0] @ rotated[1].T, back[0] @ back[1].T, rtol=1e-12)


def test_gradients_pass_through_both_rotations() -> None:
    x = numbers().requires_grad_()
    direction = torch.randn(12, 64, generator=torch.Generator().manual_seed(2))
    (qgate.quantize(x, "int8", rotation=SIGNS) * direction).sum().backward()
    assert torch.allclose(x.grad, direction, atol=1e-5)
    x.grad = None
    clipped = qgate.quantize(x, "int8", rotation=SIGNS, scale=0.01)
    (clipped * direction).sum().backward()
    h = torch.from_numpy(matrix(SIGNS))
    turned = x.detach().double().view(-1, 16) @ h
    inside = (turned / 0.01).round().abs() <= 127
    expected_grad = ((direction.double().view(-1, 16) @ h) * inside) @ h.T
    assert torch.allclose(x.grad.double().view(-1, 16), expected_grad, atol=1e-5)
    assert 0 < inside.double().mean() < 1


def test_a_report_counts_rotated_numbers() -> None:
    x, h = numbers(), matrix(SIGNS)
    rotated = torch.from_numpy(x.double().numpy().reshape(-1, 16) @ h).float().view_as(x)
    assert qgate.formats.report(x, "mxfp4", rotation=SIGNS) == qgate.formats.report(
        rotated, "mxfp4"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rotation": 16}, ["16", "signs"]),
        ({"rotation": [1, 2]}, ["[1, 2]", "1 or -1"]),
        ({"rotation": [1, -1, 1]}, ["3 signs", "power of two"]),
        ({"rotation": [1]}, ["1 signs", "power of two"]),
        ({"rotation": [1] * 32}, ["rotation of 32", "(3, 40)"]),
    ],
)
def test_bad_rotations_get_one_line(options: dict[str, Any], words: list[str]) -> None:
    for use in (qgate.quantize, qgate.encode, qgate.formats.report):
        with pytest.raises(qgate.QgateError) as caught:
            use(torch.ones(3, 40), "nvfp4", **options)
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in words), message
    with pytest.raises(qgate.QgateError, match="rotation of 2"):
        qgate.quantize(torch.tensor(1.0), "nvfp4", rotation=[1, 1])
