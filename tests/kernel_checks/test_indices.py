"""Kernels that read by position: no derived input makes one read outside of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention

from qgate.expected.derived import search_axes
from qgate.testing import CheckFailure, check_kernel, grouped_product

ASSERT = "CUDA error: device-side assert triggered"
GENERATOR = torch.Generator().manual_seed(11)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def _below(bound: int, *shape: int) -> Tensor:
    return torch.randint(bound, shape, generator=GENERATOR)


def _held(positions: Tensor, length: int) -> None:
    """End the device as a GPU does where a position lies outside."""
    if positions.numel() and (int(positions.max()) >= length or int(positions.min()) < 0):
        raise RuntimeError(ASSERT)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="none")


def _losses_on_device(logits: Tensor, labels: Tensor) -> Tensor:
    _held(labels, logits.shape[1])
    return _losses(logits, labels)


def _rows_on_device(ids: Tensor, table: Tensor) -> Tensor:
    _held(ids, len(table))
    return embedding(ids, table)


def paged(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor) -> Tensor:
    """Attend to the pages of each sequence: q (b, h, d), cache (pages, size, h, d)."""
    k, v = (cache[pages].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
    return scaled_dot_product_attention(q[:, :, None], k, v)[:, :, 0]


def _paged_on_device(q: Tensor, keys: Tensor, values: Tensor, pages: Tensor) -> Tensor:
    _held(pages, min(len(keys), len(values)))
    return paged(q, keys, values, pages)


def masked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attend to the first keys of each sequence, as many as `lengths` says."""
    inside = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
    return scaled_dot_product_attention(q, k, v, inside[:, None])


def _masked_on_device(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    _held(lengths - 1, k.shape[1])
    return masked(q, k, v, lengths)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def _picked_on_device(x: Tensor, index: Tensor) -> Tensor:
    _held(index, len(x))
    return _picked(x, index)


LABELS = torch.tensor([0, 3, 1, 2] * 6)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Any, ...]]] = {
    "classes": (_losses_on_device, _losses, (_randn(24, 50), _below(50, 24))),
    "few of the classes": (_losses_on_device, _losses, (_randn(24, 50), LABELS)),
    "fewer classes than rows": (_losses_on_device, _losses, (_randn(24, 5), LABELS)),
    "as many classes as rows": (_losses_on_device, _losses, (_randn(24, 24), LABELS)),
    "embedding": (_rows_on_device, embedding, (_below(100, 24), _randn(100, 32))),
    "a table with unused rows": (_rows_on_device, embedding, (LABELS, _randn(40, 16))),
    "paged attention": (
        _paged_on_device, paged,
        (_randn(3, 2, 16), _randn(12, 4, 2, 16), _randn(12, 4, 2, 16), _below(6, 3, 5)),
    ),
    "lengths": (
        _masked_on_device, masked,
        (_randn(3, 4, 16), _randn(3, 40, 16), _randn(3, 40, 16), torch.tensor([7, 31, 18])),
    ),
    "rows by index": (_picked_on_device, _picked, (_randn(30, 8), _below(9, 12))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_no_position_lies_outside_of_a_derived_input(case: str) -> None:
    kernel, like, arguments = CASES[case]
    report = check_kernel(kernel, *arguments, like=like)
    assert len(report.held) > 8, report
    assert any("in another order" in name for name in report.held)


def test_dimensions_that_integers_index_are_named_in_the_report() -> None:
    report = check_kernel(_losses_on_device, _randn(24, 50), LABELS, like=_losses)
    reason = report.left_out["cuts of dimension 1 of argument 0"]
    assert reason == "argument 1 holds positions in it"
    assert "3 of 24 along dimension 0 of argument 0, dimension 0 of argument 1" in report.held


def test_a_reference_that_does_not_refuse_long_positions_keeps_them_inside() -> None:
    _, like, arguments = CASES["lengths"]
    axes, _ = search_axes(like, arguments)
    keys = next(axis for axis in axes if (1, 1) in axis.dimensions)
    assert keys.positions_in == (3,)
    for count, allowed in ((32, True), (31, False), (7, False)):
        cut = keys.take(arguments, torch.arange(count))
        assert keys.keeps_positions(arguments, cut, count) is allowed
    ends = torch.tensor([8, 16, 24, 40])
    assert keys.keeps_positions([*arguments[:3], ends], [*arguments[:3], ends], 40), "an end"


def test_ends_of_groups_stay_inside() -> None:
    def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        _held(ends - 1, len(x))
        return grouped_product(x, w, ends)

    ends = torch.tensor([8, 8, 19, 32])
    report = check_kernel(grouped, _randn(32, 48), _randn(4, 24, 48), ends, like=grouped_product)
    assert any("along dimension 1 of argument 1" in name for name in report.held)
    assert any("dimension 1 of argument 0, dimension 2 of argument 1" in n for n in report.held)


def test_codes_are_no_positions() -> None:
    """Packed weights of 8 bits, and wider integers of both signs, are cut as other arguments."""

    def decoded(x: Tensor, codes: Tensor) -> Tensor:
        return x @ codes.to(x.dtype).T

    for dtype in (torch.int8, torch.uint8, torch.int32):
        codes = (
            (_randn(40, 64) * 5).abs().to(dtype)
            if dtype == torch.uint8
            else (_randn(40, 64) * 5).to(dtype)
        )
        report = check_kernel(decoded, _randn(24, 64), codes, like=decoded)
        assert "the first of 40 along dimension 0 of argument 1" in report.held
        assert any("permuted" not in n and "dimension 1 of argument 1" in n for n in report.held)


def test_other_shapes_take_positions_of_the_example() -> None:
    shapes = [[(40, 5), (40,)]]
    report = check_kernel(_losses_on_device, _randn(24, 5), LABELS, like=_losses, shapes=shapes)
    assert "shapes 40x5, 40" in report.held


def test_a_wrong_kernel_with_positions_is_red() -> None:
    def off_by_one(ids: Tensor, table: Tensor) -> Tensor:
        return embedding((ids + 1) % len(table), table)

    ids, table = _below(100, 24), _randn(100, 32)
    with pytest.raises(CheckFailure, match="off_by_one is wrong"):
        check_kernel(off_by_one, ids, table, like=embedding)


def test_nothing_becomes_empty_but_rows_and_that_comes_last() -> None:
    order: list[tuple[int, ...]] = []

    def linear(x: Tensor, w: Tensor) -> Tensor:
        assert len(w)
        assert x.shape[1]
        order.append(tuple(x.shape))
        return x @ w.T

    report = check_kernel(
        linear, _randn(24, 64), _randn(20, 64), like=lambda x, w: x @ w.T, shapes=[[(7, 8), (3, 8)]]
    )
    empty = [name for name in report.held if name.startswith("none of")]
    assert empty == ["none of 24 along dimension 0 of argument 0"] == report.held[-1:]
    assert not report.left_out
    q, k, v = (_randn(2, 3, 10, 16) for _ in range(3))
    report = check_kernel(scaled_dot_product_attention, q, k, v,
                          like=scaled_dot_product_attention, relations=["empty"])  # fmt: skip
    assert report.held[1:] == ["none of 10 along dimension 2 of argument 0"]
