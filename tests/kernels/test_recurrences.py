"""States along time on a CPU are computed by NumPy: the bits of torch, and not while it traces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from qgate.kernels import cases, recurrences

SHAPES = ((7, 3), (1, 5), (64, 16, 4, 8), (0, 4), (3, 0))


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors, values and a start, with numbers of all sizes, NaN and infinity."""
    every = cases.numbers(torch.float32).to(dtype)
    count = torch.Size(shape).numel()
    start = every[-torch.Size(shape[1:]).numel() :] if count else every[:0]
    factors = every.sigmoid()[:count] if len(shape) > 2 else every[::97][:count]
    start = start.reshape(shape[1:]) if count else torch.ones(shape[1:], dtype=dtype)
    return factors.reshape(shape).clone(), every[count : 2 * count].reshape(shape).clone(), start


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy_gives_the_bits_of_torch(
    shape: tuple[int, ...], backward: bool, dtype: torch.dtype
) -> None:
    factors, values, start = tensors(shape, dtype)
    expected, began = values.clone(), start.clone()
    last_expected = recurrences.run_by_torch(factors, expected, start, backward)
    last = recurrences.run(factors, values, start, backward=backward)
    for one, other in ((last, last_expected), (values, expected), (start, began)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())
    last.zero_()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_what_torch_traces_is_made_of_its_operators() -> None:
    factors, values, start = (torch.rand(s) for s in ((4, 3), (4, 3), (3,)))

    def forward(factors: Tensor, values: Tensor, start: Tensor) -> Tensor:
        return recurrences.run(factors, values, start)

    traced = make_fx(forward)(factors, values.clone(), start)
    other = torch.rand(4, 3)
    expected = recurrences.run_by_torch(other, values.clone(), start, False)
    assert torch.equal(traced(other, values.clone(), start), expected)
