"""`assert_quantized_close`, in the place of an assertion of torch, also in unittest."""

from __future__ import annotations

import re
import unittest

import pytest
import torch

import qgate
from qgate.testing import CheckFailure, assert_quantized_close

X = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
FORMATS = {
    "mxfp8": {},
    "nvfp4": {},
    "fp8_e4m3": {},
    "int8": {"granularity": "channel", "axis": 0},
    "hif8": {},
}


def lines_of(actual: object, source: torch.Tensor, fmt: str, **options: object) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        assert_quantized_close(actual, source, format=fmt, **options)
    return [line.strip() for line in str(caught.value).splitlines()]


@pytest.mark.parametrize("name", FORMATS)
def test_right_values_pass_and_one_wrong_value_is_named_as_torch_does(name: str) -> None:
    values = qgate.quantize(X, name, **FORMATS[name])
    assert_quantized_close(values, X, format=name, **FORMATS[name])
    assert_quantized_close(qgate.encode(X, name, **FORMATS[name]), X, format=name, **FORMATS[name])
    wrong = values.clone()
    wrong[5, 7] += 1
    with pytest.raises(AssertionError) as theirs:
        torch.testing.assert_close(wrong, values, rtol=0, atol=0)
    lines = lines_of(wrong, X, name, **FORMATS[name])
    assert differences(lines) == differences(str(theirs.value).splitlines())


def differences(lines: list[str]) -> list[tuple[object, ...]]:
    """The figures of the lines that torch writes, too."""
    figures: list[tuple[object, ...]] = []
    for line in lines:
        if match := re.match(r"Mismatched elements: (\d+) / (\d+) \((.*)%\)", line):
            figures.append(match.groups())
        if match := re.match(r"Greatest (\w+) difference: (\S+) at index (\(.*?\))", line):
            figures.append((match[1], pytest.approx(float(match[2]), rel=1e-5), match[3]))
    assert len(figures) == 3
    return figures


def test_a_value_within_the_tolerance_of_torch_is_wrong_all_the_same() -> None:
    """The next value of the format for a value of it: what a tolerance was made for."""
    values = qgate.quantize(X, "mxfp8")
    wrong = values.clone()
    wrong[wrong > 0] *= 1.0 + 2.0**-12
    torch.testing.assert_close(wrong, values, rtol=1e-3, atol=1e-3)
    assert "no scale puts its values on that grid" in lines_of(wrong, X, "mxfp8")[0]


def test_nan_is_the_greatest_difference() -> None:
    values = qgate.quantize(X, "mxfp8")
    values[3, 2] = float("nan")
    assert "Greatest absolute difference: nan at index (3, 2)" in lines_of(values, X, "mxfp8")


def test_a_message_comes_first_and_the_cause_after_it() -> None:
    lines = lines_of(X, X, "mxfp8", msg="the cache of keys")
    assert lines[0] == "the cache of keys"
    assert "mxfp8_e4m3 tensor" in lines[1]
    with pytest.raises(ValueError, match="unknown format 'mxfp9'"):
        assert_quantized_close(X, X, format="mxfp9")
    with pytest.raises(ValueError, match="give dequantized values"):
        assert_quantized_close(X.to(torch.int8), X, format="int8")


class TestCase(unittest.TestCase):
    """In the style of unittest, with its own assertions around it."""

    def test_right(self) -> None:
        assert_quantized_close(qgate.quantize(X, "mxfp4"), X, format="mxfp4")

    def test_wrong(self) -> None:
        with self.assertRaisesRegex(CheckFailure, "2 times"):  # noqa: PT027
            assert_quantized_close(qgate.quantize(X, "mxfp4") * 2, X, format="mxfp4")
