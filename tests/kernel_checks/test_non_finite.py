"""How far NaN and Inf spread: free among what they reach, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import group_norm, layer_norm, linear, rms_norm

import qgate
from qgate.testing import CheckFailure, check_kernel

GENERATOR = torch.Generator().manual_seed(17)
X = torch.randn(12, 64, generator=GENERATOR)
W = torch.randn(10, 64, generator=GENERATOR)
NAN: dict[str, Any] = {"relations": ["nan"]}


def norm(x: Tensor) -> Tensor:
    """Divide by the RMS as an exact definition does: a row with Inf has zeros and one NaN."""
    return rms_norm(x, (x.shape[-1],), eps=1e-6)


def _norm_by_scale(x: Tensor) -> Tensor:
    """Scale by the largest value first: a row with Inf is NaN throughout."""
    largest = x.abs().amax(-1, keepdim=True)
    y = x / largest
    return y * (y.square().mean(-1, keepdim=True) + 1e-6 / largest.square()).rsqrt()


def _logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


RIGHT: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a norm that spreads less": (norm, _norm_by_scale, (X,)),
    "a norm that spreads more": (_norm_by_scale, norm, (X,)),
    "logsumexp": (_logsumexp, _logsumexp, (X,)),
    "layer norm": (lambda x: layer_norm(x, (64,)), lambda x: layer_norm(x, (64,)), (X,)),
    "group norm": (
        lambda x: group_norm(x, 4, eps=1e-5), lambda x: group_norm(x, 4, eps=1e-5), (X[:, :, None],)
    ),
    "a product": (linear, linear, (X, W)),
    "softmax": (lambda x: x.softmax(-1), lambda x: x.softmax(-1), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_how_far_an_inf_spreads_is_free(case: str) -> None:
    kernel, like, arguments = RIGHT[case]
    report = check_kernel(kernel, *arguments, like=like, **NAN)
    assert report.held == ["the example", "one NaN (argument 0)", "one Inf (argument 0)"]


def _vanishing(x: Tensor) -> Tensor:
    return norm(x).nan_to_num(0.0, 0.0, 0.0)


def _leaking(x: Tensor) -> Tensor:
    y = norm(x)
    if not bool(y.isfinite().all()):
        y = y.clone()
        y[3] = torch.nan
    return y


def _wrong_beside(x: Tensor) -> Tensor:
    y = norm(x)
    bad = ~y.isfinite()
    return torch.where(bad.any(-1, keepdim=True) & ~bad, y + 1, y)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (_vanishing, r"for one NaN \(argument 0\): 64 NaN of the definition became finite numbers"),
        (_leaking, r"64 of 768 results are NaN, which the NaN or Inf of the arguments does not reach: row 3"),
    ],
)  # fmt: skip
def test_a_nan_that_vanishes_or_leaks_is_red(kernel: Any, words: str) -> None:
    with pytest.raises(CheckFailure, match=words):
        check_kernel(kernel, X, like=norm, **NAN)


def test_numbers_beside_an_inf_are_held_where_both_are_finite() -> None:
    with pytest.raises(CheckFailure, match=r"for one Inf"):
        check_kernel(_wrong_beside, X, like=norm, **NAN)


def test_a_nan_made_of_a_finite_definition_is_red() -> None:
    """A softmax of -Inf is finite: no NaN is explained by it."""

    def like(x: Tensor) -> Tensor:
        return 1 / (1 + x.abs())

    def kernel(x: Tensor) -> Tensor:
        return torch.where(x.isinf(), torch.nan, like(x))

    with pytest.raises(CheckFailure, match=r"1 of 768 results are NaN where finite ones"):
        check_kernel(kernel, X, like=like, **NAN)


def test_a_nan_of_a_block_that_one_of_its_values_alone_keeps_is_green() -> None:
    def spread_less(x: Tensor) -> Tensor:
        y = qgate.quantize(x.nan_to_num(), "mxfp8")
        return torch.where(x.isfinite(), y, torch.nan)

    report = check_kernel(
        lambda x: qgate.quantize(x, "mxfp8"), X, like=lambda x: x, output="mxfp8", **NAN
    )
    assert "one NaN (argument 0)" in report.held
    with pytest.raises(CheckFailure, match="became finite"):
        check_kernel(
            lambda x: qgate.quantize(x.nan_to_num(), "mxfp8"),
            X,
            like=lambda x: x,
            output="mxfp8",
            **NAN,
        )
    assert check_kernel(spread_less, X, like=lambda x: x, output="mxfp8", **NAN).held
