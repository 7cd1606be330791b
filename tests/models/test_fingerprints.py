"""Fingerprints of tensors: the same for the same values, another after any change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qgate.models.fingerprints import _PART, fingerprint

SIZES = [1, 7, _PART - 1, _PART, _PART + 1, 3 * _PART + 5]


def tensor_of(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("size", SIZES)
def test_one_changed_element_shows(size: int, dtype: torch.dtype) -> None:
    x = (tensor_of(size) * 20).to(dtype)
    before = fingerprint(x)
    assert fingerprint(x) == before
    for index in {0, size // 2, size - 1}:
        original = x[index].clone()
        x.data[index] = original + 1
        assert fingerprint(x) != before
        x.data[index] = original
    assert fingerprint(x) == before


@pytest.mark.parametrize("size", SIZES[1:])
def test_swapped_elements_show(size: int) -> None:
    x = torch.nn.Parameter(tensor_of(size))
    before = fingerprint(x)
    x.data[[0, size - 1]] = x.data[[size - 1, 0]]
    assert fingerprint(x) != before
    x.data[[0, size - 1]] = x.data[[size - 1, 0]]
    assert fingerprint(x) == before
    x.data[[0, 1]] = x.data[[1, 0]]
    assert fingerprint(x) != before


def test_shape_dtype_and_device_show() -> None:
    x = tensor_of(12)
    assert fingerprint(x.view(3, 4)) != fingerprint(x)
    assert fingerprint(x.view(torch.int32)) != fingerprint(x)
    assert fingerprint(x)[2] == torch.device("cpu")
    assert fingerprint(x.clone()) == fingerprint(x)
    assert fingerprint(x.view(3, 4).t()) == fingerprint(x.view(3, 4).t())
    assert fingerprint(x[:0])[-1] == 0.0
