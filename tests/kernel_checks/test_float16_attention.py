"""Attention with float16 sums is named, and faults that it does not explain are red."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qgate.arithmetics.known import ATTENTIONS
from qgate.testing import CheckFailure, check_kernel
from tests.kernel_checks.real.kernel import FP16, normal
from tests.kernel_checks.real.torch_attention import attention
from tests.shares import share

SIDES = normal(41, *[(1, 2, 48, 32)] * 3, dtype=FP16)
WORDS = {
    "float16-products": "products of tiles rounded to float16",
    "float16-running": "scores, maximum, sums and result kept in float16",
}


def kernel_of(name: str, scale: float = 1.0, factor: float = 1.0) -> Callable[..., Tensor]:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values = ATTENTIONS[name].values(q, k, v, q.shape[-1] ** -0.5 * scale, None, FP16, 16)
        return (values.to(FP16).float() * factor).to(FP16)

    return kernel


@pytest.mark.parametrize("name", WORDS)
def test_sums_in_float16_are_named(name: str) -> None:
    report = check_kernel(kernel_of(name), *SIDES, like=attention, relations=["one"])
    words = report.conventions["arithmetic"]
    assert words.startswith("fused attention (in tiles of 16 keys), P rounded to float16")
    assert words.endswith(WORDS[name])
    assert any("of the RMS on these inputs, against exact sums" in note for note in report.notes)


@share(4)
@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("fault", [{"scale": 1.005}, {"factor": 1.002}], ids=str)
def test_faults_stay_red(name: str, fault: dict[str, float]) -> None:
    with pytest.raises(CheckFailure, match=r"1\.00[2-6]\d* times"):
        check_kernel(kernel_of(name, **fault), *SIDES, like=attention, relations=["one"])


def test_an_arithmetic_that_was_asked_for_is_the_only_one() -> None:
    kernel, like = kernel_of("float16-running"), scaled_dot_product_attention
    report = check_kernel(kernel, *SIDES, like=like, relations=[], arithmetic="float16-running")
    assert "kept in float16" in report.conventions["arithmetic"]
    with pytest.raises(CheckFailure, match="it follows fused attention"):
        check_kernel(kernel, *SIDES, like=like, relations=[], arithmetic="float16-products")
