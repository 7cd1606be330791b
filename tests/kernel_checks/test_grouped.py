"""Grouped products with offsets: right kernels pass for every division of rows, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qgate
from qgate.testing import CheckFailure, check_kernel, grouped_product
from tests.shares import share

SIZES = {
    "even": (8, 8, 8, 8),
    "empty first": (0, 11, 9, 12),
    "empty inside": (13, 0, 0, 19),
    "empty last": (10, 5, 17, 0),
    "one row each, but for the last": (1, 1, 1, 29),
    "all in one": (0, 0, 32, 0),
}
FORMATS: dict[str, Any] = {
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4_e2m1",
    "fp8 by row": qgate.Quantizer("fp8_e4m3", granularity="block", block=64, axis=-1),
}
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def example(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 64, generator=draw)
    w = torch.randn(len(sizes), 24, 64, generator=draw) * torch.tensor([1.0, 3.0, 0.5, 2.0]).view(
        4, 1, 1
    )
    return x, w, torch.tensor(sizes).cumsum(0)


def kernel_of(fmt: Any, **wrong: Any) -> Kernel:
    """A grouped kernel over sorted rows, with a defect."""

    def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        cast = (lambda t: fmt(t)) if callable(fmt) else (lambda t: qgate.quantize(t, fmt))
        xq, wq = cast(x), torch.stack([cast(matrix) for matrix in w])
        if wrong.get("one_scale"):
            sizes = torch.stack([matrix.abs().sum() + 1 for matrix in w])
            wq = wq * (sizes[0] / sizes)[:, None, None]
        y = torch.zeros(len(x), w.shape[1])
        bounds = [0, *ends.tolist()]
        for group in range(len(w)):
            start, end = bounds[group], bounds[group + 1]
            if wrong.get("late"):
                start, end = min(start + (group > 0), end), end + (group < len(w) - 1)
            if wrong.get("tile"):
                end = start + (end - start) // 4 * 4
            used = wrong.get("order", range(len(w)))[group]
            y[start:end] = xq[start:end] @ wq[used].T
        return y

    return grouped


@share(6)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_right_kernel_passes_for_every_division_of_rows(sizes: tuple[int, ...], fmt: Any) -> None:
    report = check_kernel(
        kernel_of(fmt), *example(sizes), like=grouped_product, inputs={0: fmt, 1: fmt}
    )
    assert report.held[0] == "the example"


@share(4)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"order": (0, 3, 2, 1)},
            "all rows of group 1 are multiplied by the matrix of group 3; all rows of group 3 are "
            "multiplied by the matrix of group 1",
        ),
        (
            {"late": True},
            "1 of 8 rows of group 1, from 8, are multiplied by the matrix of group 0",
        ),
        ({"one_scale": True}, "all rows of group 1 are 0.3.* times the expected"),
        ({"tile": True}, "1 of 9 rows of group 1, from 16, are zero"),
    ],
)
def test_a_wrong_kernel_is_named(wrong: dict[str, Any], words: str) -> None:
    sizes = (8, 9, 8, 7) if "tile" in wrong else SIZES["even"]
    with pytest.raises(CheckFailure, match=words):
        check_kernel(
            kernel_of("mxfp8", **wrong),
            *example(sizes),
            like=grouped_product,
            inputs={0: "mxfp8", 1: "mxfp8"},
        )


def test_the_reference_is_what_numpy_multiplies_group_by_group() -> None:
    x, w, ends = example((3, 0, 5, 2))
    groups = np.repeat(np.arange(4), (3, 0, 5, 2))
    rows = [
        w[group].double().numpy() @ row
        for group, row in zip(groups, x.double().numpy(), strict=True)
    ]
    np.testing.assert_allclose(grouped_product(x, w, ends).numpy(), np.stack(rows), atol=1e-4)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([8, 16, 24], "not those of 4 groups"),
        ([8, 4, 24, 32], "never fall"),
        ([8, 16, 24, 31], "the number of rows"),
    ],
)
def test_ends_that_divide_nothing_are_refused(ends: list[int], words: str) -> None:
    x, w, _ = example(SIZES["even"])
    with pytest.raises(ValueError, match=words):
        grouped_product(x, w, torch.tensor(ends))
