"""Relations of kernels: faults that other shapes show, and right kernels in every format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate.errors import QgateError
from qgate.testing import RelationFailure, check_relations
from tests.shares import share

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(40, 128, generator=GENERATOR)
W = torch.randn(24, 128, generator=GENERATOR) / 11
BY_ROW = qgate.Quantizer("int8", granularity="channel", axis=0)


def row_by_row(x: Tensor, w: Tensor) -> Tensor:
    """Add up every row in one order, whatever the batch."""
    return torch.stack([(row * w).sum(1) for row in x]) if len(x) else linear(x, w)


def in_halves_at_powers_of_two(x: Tensor, w: Tensor) -> Tensor:
    """Split K where it is a power of two and rows are few, as vllm#55131 did."""
    terms = x.shape[1]
    if terms & (terms - 1) or len(x) > 20:
        return row_by_row(x, w)
    half = terms // 2
    return row_by_row(x[:, :half], w[:, :half]) + row_by_row(x[:, half:], w[:, half:])


def added_in_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(len(x), len(w), dtype=torch.bfloat16)
    for start in range(0, x.shape[1], 32):
        total += linear(x[:, start : start + 32], w[:, start : start + 32]).bfloat16()
    return total.float()


def split_for_few_rows(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w) if len(x) > 20 else added_in_bfloat16(x, w)


def wrong_remainder(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w)
    if len(x) > 32 and len(x) % 32 == 1:
        y[-1] = y[-2]
    return y


def wrong_columns(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w)
    if y.shape[1] > 16 and y.shape[1] % 16 == 1 and y.numel():
        y[:, -1] = 0
    return y


def per_tensor(x: Tensor, w: Tensor) -> Tensor:
    return linear(qgate.quantize(x, "int8", granularity="tensor"), w)


def drawn(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w) + 1e-7 * torch.randn(len(x), len(w))


class Keeping:
    """A kernel that leaves something of a call in the workspace of the next."""

    def __init__(self) -> None:
        self.workspace = torch.zeros(())

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        y = linear(x, w) + self.workspace
        self.workspace = 1e-4 * y.mean()
        return y


FAULTS: tuple[tuple[Callable[..., Tensor], bool, str], ...] = (
    (in_halves_at_powers_of_two, True, r"alone: .*only where K is 16, 32, 64, 128, powers of two"),
    (added_in_bfloat16, False, "split K: result .* as the sum of 2 parts of K = 128"),
    (split_for_few_rows, False, "alone: result .* for the first of 40"),
    (wrong_remainder, False, r"prefix: result .* for 33 of 40 .*from \(32, 0\) on"),
    (wrong_columns, False, "split N: result .* for 17 of 24"),
    (per_tensor, False, "alone: .*it has a dynamic scale per tensor, made of the whole batch"),
    (drawn, False, "repeat: result is .* off .* in call 2 of the same input"),
    (Keeping(), False, "repeat: result is .* off .* in call 2 of the same input"),
    (linear, True, "is other bits"),
)


@share(3)
@pytest.mark.parametrize(("kernel", "bitwise", "words"), FAULTS)
def test_a_planted_fault_is_named(kernel: Callable[..., Tensor], bitwise: bool, words: str) -> None:
    with pytest.raises(RelationFailure, match=words):
        check_relations(kernel, X, W, like=linear, bitwise=bitwise)


def quantized(fmt: Any, **options: Any) -> Callable[..., Tensor]:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        if not x.numel() or not w.numel():
            return linear(x, w)
        return linear(qgate.quantize(x, fmt, **options), qgate.quantize(w, fmt, **options))

    return kernel


RIGHT: tuple[tuple[Callable[..., Tensor], Any, bool], ...] = (
    (linear, None, False),
    (row_by_row, None, True),
    (in_halves_at_powers_of_two, None, False),
    (quantized("mxfp8"), "mxfp8", False),
    (quantized("mxfp4"), "mxfp4", False),
    (quantized("int8", granularity="channel", axis=0), BY_ROW, False),
)


@share(3)
@pytest.mark.parametrize(("kernel", "fmt", "bitwise"), RIGHT)
def test_right_kernels_agree(kernel: Callable[..., Tensor], fmt: Any, bitwise: bool) -> None:
    inputs = {} if fmt is None else {0: fmt, 1: fmt}
    report = check_relations(kernel, X, W, like=linear, inputs=inputs, bitwise=bitwise)
    assert {"repeat", "alone", "others", "permuted", "prefix", "split N"} <= {*report.agreed}
    # A scale per row is made of all of K: a rank with a part of it makes another one.
    assert ("split K" in report.agreed) is (fmt is not BY_ROW)
    assert any("int8 makes a scale of all of K" in v for v in report.left_out.values()) is (
        fmt is BY_ROW
    )


def test_what_a_kernel_cannot_be_asked_is_refused() -> None:
    with pytest.raises(QgateError, match="unknown relation of a kernel 'chunked'"):
        check_relations(linear, X, W, like=linear, relations=["chunked"])
    with pytest.raises(QgateError, match=r"is no model; of a kernel give like="):
        check_relations(linear, X, W)
    with pytest.raises(QgateError, match="no dimension of the arguments"):
        check_relations(torch.sum, X, like=torch.sum)
