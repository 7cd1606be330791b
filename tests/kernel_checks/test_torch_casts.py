"""Casts of torch beyond the largest number, each by the name of its convention."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.kernel_checks.torch_casts import (
    DTYPES,
    FORMATS,
    SOURCES,
    hard_numbers,
    named_cast,
    torch_casts,
)
from qgate.testing import CheckFailure, check, check_kernel

E4M3 = torch.float8_e4m3fn
EVERY = hard_numbers(torch.bfloat16)


def test_every_float8_dtype_of_torch_is_measured() -> None:
    named = {name for name in dir(torch) if name.startswith("float8_")}
    assert {str(dtype).removeprefix("torch.") for dtype in DTYPES} == named
    casts = torch_casts()
    assert [(cast.target, cast.source) for cast in casts] == [
        (d, s) for d in DTYPES for s in SOURCES
    ]
    assert all(cast.convention and not cast.problem for cast in casts)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_convention_is_what_ml_dtypes_or_saturation_makes(dtype: torch.dtype) -> None:
    """ml_dtypes never saturates; a clamp before its cast does."""
    name = str(dtype).removeprefix("torch.")
    numbers = EVERY.float().numpy()
    largest = float(torch.finfo(dtype).max)
    with np.errstate(all="ignore"):
        plain = numbers.astype(getattr(ml_dtypes, name))
        clamped = np.clip(numbers, -largest, largest).astype(getattr(ml_dtypes, name))
    infinite = np.where(np.isinf(numbers), plain, clamped)
    beyond = "Inf" if name == "float8_e5m2" else "NaN"
    for codes, words in (
        (plain, f"overflow to {beyond}"),
        (clamped, f"overflow to {largest:g}"),
        (infinite, f"overflow to {largest:g}, but Inf to {beyond}"),
    ):
        y = torch.from_numpy(codes.view(np.uint8).copy()).view(dtype)
        assert named_cast(EVERY, y).convention == f"the definition, {words}"
        report = check(y.float(), EVERY, format=FORMATS[dtype])
        assert report.conventions["values"] == f"the definition, {words}, bit for bit"


def test_nothing_is_claimed_of_numbers_that_do_not_occur() -> None:
    x = torch.linspace(-448, 448, 99)
    report = check(x.clamp(-448, 448).to(E4M3).float(), x, format="fp8_e4m3")
    assert report.conventions["values"] == "the definition, bit for bit"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda y: torch.where(y.abs() == 448, 240.0, y), "becomes 240, not -448"),
        (lambda y: torch.where(y.isnan(), 0.0, y), "nan becomes 0, not nan"),
        (lambda y: torch.where(y == 0, -y, y), "becomes 0, not -0"),
    ],
)
def test_a_cast_that_no_convention_explains_is_told(fault: object, words: str) -> None:
    y: Tensor = fault(EVERY.to(E4M3).float())  # type: ignore[operator]
    cast = named_cast(EVERY, y.to(E4M3))
    assert not cast.convention
    assert cast.problem.endswith(words), cast.problem


def test_a_kernel_is_held_at_its_convention() -> None:
    """A kernel whose result overflows to NaN is named, and refused where saturation is declared."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)) * 400

    def nans(x: Tensor) -> Tensor:
        y = x.clamp(-448, 448).to(E4M3)
        return torch.where(x.abs() > 464, torch.nan, y.float())

    options = {"like": lambda x: x, "relations": ["one"]}
    report = check_kernel(nans, x, output="fp8_e4m3", **options)
    assert report.conventions["result"] == "the definition, overflow to NaN"
    with pytest.raises(CheckFailure, match="NaN where finite ones are"):
        check_kernel(nans, x, output="fp8_e4m3", convention="overflow to 448", **options)
