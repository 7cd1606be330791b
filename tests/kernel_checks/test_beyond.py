"""Faults that show beyond one tile, in later calls, and in memory at another place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import qgate
from qgate.expected.derived import search_axes
from qgate.expected.longer import LENGTHS, long_inputs
from qgate.kernel_checks.updating import UPDATING
from qgate.testing import CheckFailure, check_kernel
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(24, 64, generator=GENERATOR)
W = torch.randn(20, 64, generator=GENERATOR) / 8
MX = {0: "mxfp8", 1: "mxfp8"}
ALWAYS = 1e9
"""Seconds that no machine needs: what is tried does not depend on its speed."""


def right(x: Tensor, w: Tensor) -> Tensor:
    return linear(qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8"))


def without_rows_from(first: int) -> Callable[[Tensor, Tensor], Tensor]:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        y = right(x, w)
        y[first:] = 0
        return y

    return kernel


def with_terms_to(last: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: right(x[:, :last], w[:, :last])


def with_rows_of_the_first_tile(x: Tensor, w: Tensor) -> Tensor:
    return right(x[torch.arange(len(x)) % 128], w)


def without_the_tail_of(tile: int) -> Callable[[Tensor, Tensor], Tensor]:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        y = right(x, w)
        if len(w) > tile:
            y[:, len(w) // tile * tile :] = 0
        return y

    return kernel


def check(kernel: Callable[..., Tensor], **options: Any) -> qgate.testing.CheckReport:
    return check_kernel(kernel, X, W, like=linear, inputs=MX, budget_s=ALWAYS, **options)


def test_a_right_kernel_is_held_beyond_each_tile_and_the_report_says_how_far() -> None:
    report = check(right)
    assert report.largest == {"argument 0": [257, 288], "argument 1": [257, 288]}
    assert report.unvaried == []
    assert "largest sizes tried: argument 0 257x288, argument 1 257x288" in str(report)


@share(10)
@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        (without_rows_from(128), "rows 128 to 256 of 257 (to the end) are zero"),
        (without_rows_from(256), "row 256 of 257 (the last one) is zero"),
        (with_terms_to(64), "224 terms, 64 to 287, of the sum over 288"),
        (without_the_tail_of(64), "column 256 of 257 (the last one) is zero"),
        (with_rows_of_the_first_tile, "for 257 instead of 24 along dimension 0 of argument 0"),
    ],
    ids=["rows", "the last row", "terms", "a tail", "rows of another tile"],
)
def test_what_is_lost_beyond_a_tile_is_red_and_named(
    kernel: Callable[..., Tensor], cause: str
) -> None:
    with pytest.raises(CheckFailure) as caught:
        check(kernel, relations=["long"])
    assert cause in caught.value.cause


def test_a_dimension_of_one_entry_grows_too() -> None:
    def of_the_first_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = scaled_dot_product_attention(q, k, v)
        y[1:] = 0
        return y

    q, k, v = (torch.randn(1, 2, 6, 8, generator=GENERATOR) for _ in range(3))
    options: dict[str, Any] = {"like": scaled_dot_product_attention, "relations": ["long"]}
    report = check_kernel(scaled_dot_product_attention, q, k, v, budget_s=ALWAYS, **options)
    assert report.largest == {f"argument {number}": [3, 257, 257, 257] for number in range(3)}
    with pytest.raises(CheckFailure, match=r"indices 1 to 2 of 3 in dimension 0 \(to the end\)"):
        check_kernel(of_the_first_sequence, q, k, v, **options)


def test_what_the_seconds_do_not_allow_is_left_out_with_a_word() -> None:
    report = check_kernel(right, X, W, like=linear, inputs=MX, budget_s=1e-9)
    reasons = {name: why for name, why in report.left_out.items() if " instead of " in name}
    assert len(reasons) >= len(LENGTHS)
    assert all(why.startswith("beyond budget_s: about ") for why in reasons.values())
    assert report.largest["argument 0"] == [37, 64]


def accept(path: Path, budget_s: float) -> None:
    before = UPDATING.set(True)
    options: dict[str, Any] = {"like": linear, "inputs": MX, "relations": ["long"]}
    check_kernel(right, X, W, budget_s=budget_s, accept=path, **options)
    UPDATING.reset(before)


def test_values_accepted_by_a_machine_of_another_speed_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gemm.json"
    options: dict[str, Any] = {"like": linear, "inputs": MX, "relations": ["long"], "accept": path}
    accept(path, ALWAYS)
    check_kernel(right, X, W, budget_s=1e-9, **options)
    with monkeypatch.context() as slower:
        slower.setattr("qgate.expected.longer.LENGTHS", (65, 33, 17))
        accept(path, ALWAYS)
    assert any(name.startswith("65 instead of 24") for name in json.loads(path.read_text())["held"])
    assert check_kernel(right, X, W, budget_s=ALWAYS, **options).largest["argument 0"][0] == 257
    with pytest.raises(CheckFailure, match=r"no longer holds .* first '65 instead of 64 along"):
        check_kernel(refuses_partial_blocks, X, W, budget_s=ALWAYS, **options)


def refuses_partial_blocks(x: Tensor, w: Tensor) -> Tensor:
    if x.shape[1] % 32:
        raise ValueError("whole blocks only")
    return right(x, w)


def test_entries_that_are_added_up_differ_from_each_other() -> None:
    axes, _ = search_axes(linear, [X, W])
    inner = [long for long in long_inputs(linear, [X, W], axes, 32) if long.axis.is_inner]
    assert [long.lengths[0] for long in inner] == [288, 257]
    x, w = inner[0].of([X, W], 288, seed=0).arguments
    assert len(x.T.unique(dim=0)) == 288 == len(w.T.unique(dim=0))


# Later calls -------------------------------------------------------------------------------------


def stale_weights() -> Callable[[Tensor, Tensor], Tensor]:
    cache: dict[Any, Tensor] = {}

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        key = w.data_ptr(), w.shape, w.stride()
        if key not in cache:
            cache[key] = qgate.quantize(w, "mxfp8")
        return linear(qgate.quantize(x, "mxfp8"), cache[key])

    return kernel


def stale_results() -> Callable[[Tensor, Tensor], Tensor]:
    cache: dict[Any, Tensor] = {}

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        key = x.data_ptr(), w.data_ptr(), x.shape, w.shape
        return cache.setdefault(key, right(x, w))

    return kernel


def graph_of_the_fourth_call() -> Callable[[Tensor, Tensor], Tensor]:
    calls: dict[Any, list[Tensor]] = {}

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        before = calls.setdefault(x.data_ptr(), [])
        before.append(right(x, w))
        return before[min(len(before), 4) - 1]

    return kernel


@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        (stale_weights(), "uses earlier values of argument 1 where other values in the same"),
        (stale_results(), "gives its earlier result where other values in the same memory are"),
        (graph_of_the_fourth_call(), "gives its earlier result where other values in the same"),
    ],
    ids=["weights", "results", "a graph of the fourth call"],
)
def test_what_is_kept_by_its_address_is_red(kernel: Callable[..., Tensor], cause: str) -> None:
    with pytest.raises(CheckFailure) as caught:
        check(kernel, relations=["again"])
    assert cause in caught.value.cause


def test_arguments_keep_their_values_and_their_memory() -> None:
    x, w = X.clone(), W.T.contiguous().T
    places = []

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        places.append((x.data_ptr(), w.stride()))
        return right(x, w)

    check_kernel(kernel, x, w, like=linear, inputs=MX, relations=["again"])
    assert torch.equal(x, X)
    assert torch.equal(w, W)
    assert x.data_ptr() not in {address for address, _ in places}
    assert {stride for _, stride in places} == {w.stride()}
    assert len({data_address for data_address, _ in places}) == 1


@proof
def test_memory_at_another_place_is_tried() -> None:
    def aligned(x: Tensor, w: Tensor) -> Tensor:
        return right(x, w).roll(x.storage_offset() % 3, 0)

    report = check(right, relations=["offset"])
    assert "memory that begins 64 bytes later" in report.held
    assert not any("one element" in name for name in (*report.held, *report.left_out))
    with pytest.raises(CheckFailure, match="for memory that begins 64 bytes later"):
        check(aligned, relations=["offset"])


@always
def test_memory_that_is_not_aligned_is_tried_where_the_process_may_end() -> None:
    def vectorized(x: Tensor, w: Tensor) -> Tensor:
        if x.data_ptr() % 16:
            os._exit(9)
        return right(x, w)

    assert "memory that begins one element later" in check(right, isolate=True).held
    with pytest.raises(CheckFailure, match="for memory that begins one element later"):
        check(vectorized, isolate=True, relations=["offset"])


def test_expanded_arguments_and_seconds_that_are_none_have_their_words() -> None:
    bias = torch.randn(1, 20, generator=GENERATOR).expand(24, 20)
    report = check_kernel(
        lambda x, w, b: right(x, w) + b, X, W, bias, like=lambda x, w, b: linear(x, w) + b,
        inputs=MX, relations=["again"],
    )  # fmt: skip
    reason = report.left_out["other values in the same memory"]
    assert reason == "an argument is expanded: its memory cannot be written"
    for seconds in (-1, True, "2"):
        with pytest.raises(ValueError, match="give seconds"):
            check_kernel(right, X, W, like=linear, inputs=MX, budget_s=seconds)  # type: ignore[arg-type]
