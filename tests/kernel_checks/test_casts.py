from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import qgate
from qgate.testing import CheckFailure, check, tiles
from tests.kernel_checks.right_kernels import CASTS, searched
from tests.shares import share

X = torch.randn(24, 96, generator=torch.Generator().manual_seed(3)) * 3
BY_ROW = {"granularity": "channel", "axis": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_a_right_cast_passes(name: str, dtype: torch.dtype) -> None:
    declared, cast = CASTS[name]
    x = X.to(dtype)
    report = check(cast(x), x, format=declared)
    assert report.held == ["the tensor"]
    assert re.search("bit for bit|within float32 noise", report.conventions["values"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int8 amax/127.5", "scale amax/127.5, "),
        ("int8 amax/128", "scale amax/128, "),
        ("int8 of torchao", "scale amax/127.5, "),
        ("fp8 by powers of two", "up to a power of two, bit for bit"),
        ("mxfp4 by even", "scale rule even, ties to even, bit for bit"),
    ],
)
def test_the_convention_of_a_cast_is_named(name: str, words: str) -> None:
    declared, cast = CASTS[name]
    assert words in check(cast(X), X, format=declared).conventions["values"]


def _shifted(x: Tensor) -> Tensor:
    return x.reshape(-1).roll(1).reshape(x.shape)


def _one_wrong(x: Tensor) -> Tensor:
    y = x.clone()
    y[3, 5] *= 2
    return y


def _nan_in_one(x: Tensor) -> Tensor:
    y = x.clone()
    y[3, 5] = torch.nan
    return y


@share(4)
@pytest.mark.parametrize(
    ("values", "fmt", "options", "words"),
    [
        (X, "mxfp8", {}, "is not quantized to mxfp8_e4m3"),
        (qgate.quantize(X, "mxfp4"), "nvfp4", {}, "is mxfp4_e2m1, not nvfp4"),
        (qgate.quantize(X, "mxfp8", block=16), "mxfp8", {}, "has blocks of 16, not of 32"),
        (qgate.quantize(X, "mxfp8", axis=0), "mxfp8", {}, "scales along axis 0, not along -1"),
        (qgate.quantize(X, "mxfp8", rounding="zero"), "mxfp8", {}, "is truncated"),
        (qgate.quantize(X, "mxfp8") * 2, "mxfp8", {}, "2 times too high"),
        (qgate.quantize(X, "int8", **BY_ROW) * 1.03, "int8", BY_ROW, "1.03 times the definition's"),
        (qgate.quantize(X, "int8"), "int8", BY_ROW, "has one scale for the tensor"),
        (qgate.quantize(X, "int4", **BY_ROW), "int8", BY_ROW, "is int4, not int8"),
        (qgate.quantize(X, "fp8_e4m3", scale=0.01), "fp8_e4m3", {"granularity": "tensor"},
         "is quantized with a scale that is"),
        (_shifted(qgate.quantize(X, "mxfp8")), "mxfp8", {}, "is shifted by one element"),
        (torch.zeros_like(X), "mxfp8", {}, "tensor is all zeros"),
        (_nan_in_one(qgate.quantize(X, "mxfp8")), "mxfp8", {}, "1 of 2,304 results are NaN"),
        (_one_wrong(qgate.quantize(X, "mxfp8")), "mxfp8", {}, "column 5 of 96 is wrong"),
        (qgate.quantize(X, "mxfp8")[:-1], "mxfp8", {}, "has shape (23, 96), its source (24, 96)"),
    ],
)  # fmt: skip
def test_a_wrong_cast_is_named(
    values: Tensor, fmt: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckFailure) as failure:
        check(values, X, format=fmt, **options)
    first_line = str(failure.value).splitlines()[0]
    assert words in first_line, first_line


def test_a_failure_shows_the_first_difference_and_the_nearest_convention() -> None:
    values = _one_wrong(qgate.quantize(X, "mxfp8", scale_rule="ceil"))
    with pytest.raises(CheckFailure) as failure:
        check(values, X, format="mxfp8")
    text = str(failure.value)
    right = float(values[3, 5]) / 2
    assert f"first difference at [3, 5]: {2 * right:.9g} where {right:.9g} is right" in text
    assert "nearest of 8 conventions: scale rule ceil" in text


def test_a_convention_that_was_asked_for_is_the_only_one() -> None:
    values = CASTS["int8 amax/127.5"][1](X)
    declared = CASTS["int8 amax/127.5"][0]
    assert check(values, X, format=declared, convention="amax/127.5").held
    with pytest.raises(CheckFailure):
        check(values, X, format=declared, convention="amax/128")
    with pytest.raises(ValueError, match=r"no convention 'amax/126'; there are 'scale amax/127'"):
        check(values, X, format=declared, convention="amax/126")


def test_searched_scales_pass_where_they_are_declared() -> None:
    options: Any = {"granularity": "channel", "axis": 0}
    values = searched(X, "int4")
    assert (
        "our search"
        in check(values, X, format="int4", convention="mse", **options).conventions["values"]
    )
    with pytest.raises(CheckFailure):
        check(values, X, format="int4", **options)
    plain = qgate.quantize(X, "int4", granularity="tensor")
    with pytest.raises(CheckFailure, match="times the squared error of searched"):
        check(plain, X, format="int4", convention="mse", **options)
    with pytest.raises(CheckFailure, match="no scale puts"):
        check(X, X, format="int4", convention="mse", **options)
    with pytest.raises(CheckFailure, match="no searched scales: scale amax/7 explains all values"):
        check(qgate.quantize(X, "int4", **options), X, format="int4", convention="mse", **options)


def test_codes_and_scales_are_checked_by_what_unpacks_them() -> None:
    encoded = qgate.encode(X, "nvfp4")
    assert check(encoded, X, format="nvfp4").held
    assert check((encoded, 1), X, format="nvfp4", unpack=lambda pair: pair[0].decode()).held


def test_tiles_have_one_scale_each() -> None:
    declared, cast = CASTS["fp8 tiles"]
    assert "per tile of 16x16" in check(cast(X), X, format=declared).conventions["values"]
    with pytest.raises(CheckFailure):
        check(cast(X), X, format=tiles("fp8_e4m3", 32, 32))


@pytest.mark.parametrize(
    ("values", "source", "fmt", "options", "words"),
    [
        (X, X, "mxfp9", {}, "unknown format 'mxfp9'. Did you mean"),
        (X, X, "mxfp8", {"blok": 16}, "no option 'blok'"),
        (X, X, qgate.Quantizer("mxfp8"), {"block": 16}, "options go with a format's name only"),
        (X, X, 7, {}, "allowed are a format's name, a qgate.Quantizer"),
        (X.to(torch.int8), X, "int8", {}, "torch.int8 was given to check; give dequantized"),
        ([1.0], X, "int8", {}, "a list was given to check"),
        (X, X.int(), "int8", {}, "the source is torch.int32"),
        (X, X, "mxfp8", {"rounding": "stochastic"}, "was rounded at random has no expected value"),
        (X, X, tiles("fp8_e4m3", 8, 8), {"convention": "mse"}, "convention 'mse' needs a format"),
    ],
)
def test_what_cannot_be_used_is_a_value_error(
    values: Any, source: Any, fmt: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check(values, source, format=fmt, **options)


def test_a_wrong_scalar_is_named() -> None:
    with pytest.raises(CheckFailure, match=r"1\.29999995 where 1\.5 is right"):
        check(torch.tensor(1.3), torch.tensor(1.5), format="fp8_e4m3")
