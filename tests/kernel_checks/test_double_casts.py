from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate.testing import CheckFailure, check_kernel
from tests.shares import share

BY_ROW: Any = {"granularity": "channel", "axis": 0}
GENERATOR = torch.Generator().manual_seed(3)
X, W = (torch.randn(shape, generator=GENERATOR).bfloat16() for shape in ((24, 64), (16, 64)))


def cast(x: Tensor, fmt: str, **options: Any) -> Tensor:
    return qgate.quantize(x, fmt, **options) if x.numel() else x


@share(3)
@pytest.mark.parametrize(
    ("first", "options", "second"),
    [
        ("int8", BY_ROW, "mxfp8"),
        ("fp8_e4m3", BY_ROW, "int8"),
        ("int8", {"granularity": "tensor"}, "int8"),
    ],
)
def test_an_argument_that_is_quantized_twice(first: str, options: Any, second: str) -> None:
    last = BY_ROW if second == "int8" else {}
    declared = {0: qgate.Quantizer(second, **last)}

    def twice(x: Tensor, w: Tensor) -> Tensor:
        return linear(cast(cast(x, first, **options), second, **last), w)

    with pytest.raises(CheckFailure) as failure:
        check_kernel(twice, X, W, like=linear, inputs=declared, relations=[])
    assert "argument 0 is quantized twice: to " in failure.value.cause
    assert repr(first) in failure.value.cause
    assert "declare" not in failure.value.cause


def tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def product_of_tf32(x: Tensor, w: Tensor) -> Tensor:
    return linear(tf32(x), tf32(w))


def test_operands_of_tf32_are_an_arithmetic_that_is_asked_for() -> None:
    x, w = X.float() * 1.001, W.float() * 1.003
    report = check_kernel(product_of_tf32, x, w, like=linear, arithmetic="tf32-operands")
    assert report.conventions["arithmetic"] == "operands rounded to TF32"
    assert report.smallest_defect["a factor on all values"] < 1e-4
    with pytest.raises(CheckFailure) as failure:
        check_kernel(product_of_tf32, x, w, like=linear, relations=[])
    assert "is rounded to float16 or tf32" in failure.value.cause
    for fault in (lambda y: y * 1.001, lambda y: torch.cat([y[:1] * 1.01, y[1:]])):
        with pytest.raises(CheckFailure):
            check_kernel(
                lambda x, w, fault=fault: fault(product_of_tf32(x, w)),
                x, w, like=linear, arithmetic="tf32-operands", relations=[],
            )  # fmt: skip
