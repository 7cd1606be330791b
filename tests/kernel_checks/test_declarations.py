"""A kernel that quantizes without a declaration is told the declaration that explains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate import Quantizer
from qgate.testing import CheckFailure, check_kernel

GENERATOR = torch.Generator().manual_seed(8)
X, W = (torch.randn(shape, generator=GENERATOR) for shape in ((24, 128), (40, 128)))
BY_ROW = {"granularity": "channel", "axis": 0}
BY_TENSOR = {"granularity": "tensor"}
CASES: dict[str, tuple[dict[int, Any], Any]] = {
    "int8 by row": ({0: Quantizer("int8", **BY_ROW)}, None),
    "fp8 by tensor for fp8": ({0: Quantizer("fp8_e4m3", **BY_TENSOR)}, {0: "fp8_e4m3"}),
    "fp8 by tensor, twice": (
        dict.fromkeys((0, 1), Quantizer("fp8_e4m3", **BY_TENSOR)), {0: "fp8_e4m3", 1: "fp8_e4m3"}
    ),
    "nvfp4": ({0: "nvfp4", 1: "nvfp4"}, None),
    "weights in int4": ({1: Quantizer("int4", granularity="block", block=32)}, None),
}  # fmt: skip


def kernel_of(formats: dict[int, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        values = [x, w]
        for position, fmt in formats.items():
            values[position] = qgate.quantize(values[position], fmt)
        return linear(*values)

    return kernel


@pytest.mark.parametrize("name", CASES)
def test_the_first_line_holds_a_declaration_that_passes(name: str) -> None:
    formats, declared = CASES[name]
    options: dict[str, Any] = {"like": linear, "relations": ["permuted"]}
    with pytest.raises(CheckFailure) as failure:
        check_kernel(kernel_of(formats), X, W, inputs=declared, **options)
    text = failure.value.cause.partition("declare inputs=")[2]
    assert text, failure.value.cause
    suggested = eval(text, {"Quantizer": Quantizer})
    assert set(suggested) == set(formats)
    check_kernel(kernel_of(formats), X, W, inputs=suggested, **options)


def test_a_bfloat16_kernel_that_quantizes_its_activations_is_named() -> None:
    x, w = X.bfloat16(), W.bfloat16()

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return linear(qgate.quantize(x, Quantizer("int8", **BY_ROW)).to(w.dtype), w)

    with pytest.raises(CheckFailure, match=r"argument 0 is quantized, .*\{0: Quantizer\('int8'"):
        check_kernel(kernel, x, w, like=linear, relations=["permuted"])


def test_no_declaration_is_suggested_for_a_factor() -> None:
    with pytest.raises(CheckFailure) as failure:
        check_kernel(lambda x, w: linear(x, w) * 1.01, X, W, like=linear, relations=["permuted"])
    assert "declare inputs" not in failure.value.cause
