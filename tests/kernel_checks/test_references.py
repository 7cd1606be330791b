"""References that are none: random numbers, states, and arguments changed in place."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, scaled_dot_product_attention

from qgate.testing import CheckFailure, check_kernel

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(12, 32, generator=GENERATOR)
W = torch.randn(6, 32, generator=GENERATOR)
RANDOM = r"gives other values in a second call with the same arguments: it draws random numbers \("


def test_zeros_are_not_a_module_with_dropout() -> None:
    """A module starts in train mode, where its noise would explain anything."""
    module = nn.Sequential(nn.Linear(32, 6, bias=False), nn.Dropout(0.5))
    with pytest.raises(CheckFailure, match="the result is all zeros"):
        check_kernel(lambda x: torch.zeros(len(x), 6), X, like=module)
    assert module.training
    assert module[1].training
    weight = module[0].weight.detach()
    check_kernel(lambda x: linear(x, weight), X, like=module)
    check_kernel(module, X, like=lambda x: linear(x, weight.to(x.dtype)))
    check_kernel(functools.partial(module.forward), X, like=module.forward)
    assert module.training


def test_modules_come_back_as_they_were_after_a_failure() -> None:
    module = nn.Sequential(nn.Linear(32, 6), nn.Dropout(0.5))
    module[0].eval()
    with pytest.raises(CheckFailure):
        check_kernel(lambda x: torch.zeros(len(x), 6), X, like=module)
    assert [part.training for part in module.modules()] == [True, False, True]


@pytest.mark.parametrize(
    "like",
    [
        lambda x, w: dropout(linear(x, w), 0.5),
        lambda x, w: linear(x, w) * (1 + 1e-3 * torch.rand(())),
        lambda x, w: scaled_dot_product_attention(x, w, w, dropout_p=0.5),
    ],
)
def test_a_reference_that_draws_random_numbers_is_refused(like: Any) -> None:
    with pytest.raises(ValueError, match=RANDOM) as error:
        check_kernel(lambda x, w: torch.zeros(len(x), len(w)), X, W, like=like)
    assert "dropout_p=0" in str(error.value)


def test_a_reference_with_a_counter_is_refused() -> None:
    calls = [0]

    def counting(x: Tensor, w: Tensor) -> Tensor:
        calls[0] += 1
        return linear(x, w) * calls[0]

    words = "in a second call with the same arguments: it depends on the calls before"
    with pytest.raises(ValueError, match=words):
        check_kernel(linear, X, W, like=counting)


def test_a_reference_that_changes_after_other_inputs_is_refused() -> None:
    longest = [len(X)]

    def remembering(x: Tensor, w: Tensor) -> Tensor:
        longest[0] = max(longest[0], len(x))
        return linear(x, w) * (1 + (longest[0] - len(X)))

    words = (
        "like=remembering gives other values after the kernel was called: it depends on the calls"
    )
    with pytest.raises(ValueError, match=words):
        check_kernel(
            linear, X, W, like=remembering, relations=["one"], shapes=[[(20, 32), (6, 32)]]
        )


def test_sums_in_another_order_are_no_random_numbers() -> None:
    """Atomic sums of a device differ by roundings."""

    def unsteady(x: Tensor, w: Tensor) -> Tensor:
        return linear(x, w) * (1 + torch.finfo(x.dtype).eps * float(torch.rand(())))

    assert check_kernel(linear, X, W, like=unsteady).held


def test_a_kernel_that_draws_random_numbers_is_named() -> None:
    words = r"^the kernel is not repeatable: .* of 72 values differ in run 2 of the same input: it draws"
    with pytest.raises(CheckFailure, match=words):
        check_kernel(lambda x, w: dropout(linear(x, w), 0.5), X, W, like=linear)
    calls = [0.0]

    def counting(x: Tensor, w: Tensor) -> Tensor:
        calls[0] += 1
        return linear(x, w) * calls[0]

    words = r"^counting is not repeatable: 6 of 6 values differ in run 2 of the same input$"
    with pytest.raises(CheckFailure, match=words):
        check_kernel(counting, X, W, like=linear)


def test_other_bits_within_float_noise_are_a_note() -> None:
    """Atomic sums of a device have another order in each run."""
    calls = [0]

    def atomic(x: Tensor, w: Tensor) -> Tensor:
        calls[0] += 1
        total = torch.zeros(len(x), len(w))
        for term in torch.arange(x.shape[1]).roll(calls[0]).tolist():
            total += x[:, term : term + 1] * w[:, term]
        return total

    report = check_kernel(atomic, X, W, like=linear)
    assert len(report.notes) == 1
    assert re.match("other bits in run [23] of the same input: ", report.notes[0])
    for options in ({"repeatable": True}, {"invariant": True}):
        with pytest.raises(CheckFailure, match=r"^atomic is not (repeatable|batch-invariant): "):
            check_kernel(atomic, X, W, like=linear, **options)
    assert not check_kernel(linear, X, W, like=linear, repeatable=True).notes


# Arguments in place ------------------------------------------------------------------------------


def test_an_argument_that_the_kernel_alone_changes_is_a_failure() -> None:
    def scaling(x: Tensor, w: Tensor) -> Tensor:
        y = linear(x, w)
        w.mul_(2)
        return y

    before = W.clone()
    with pytest.raises(CheckFailure) as failure:
        check_kernel(scaling, X, W, like=linear)
    words = "scaling changes argument 1 in place; the reference does not"
    assert failure.value.cause == words
    assert torch.equal(W, before)

    def scaling_of_three(x: Tensor, w: Tensor) -> Tensor:
        return scaling(x, w) if len(x) == 3 else linear(x, w)

    with pytest.raises(CheckFailure, match=r"changes argument 1 in place for 3 of 12 along dim"):
        check_kernel(scaling_of_three, X, W, like=linear)


def test_an_argument_that_the_reference_changes_or_that_is_returned_is_a_note() -> None:
    def written(x: Tensor, cache: Tensor) -> Tensor:
        cache[: len(x)] = x
        return cache[: len(x)] * 2

    def returned(x: Tensor, cache: Tensor) -> Tensor:
        cache[: len(x)] = x
        return cache

    def like(x: Tensor, cache: Tensor) -> Tensor:
        return torch.cat([x, cache[len(x) :]])

    cache = torch.zeros(20, 32)
    report = check_kernel(written, X, cache, like=written)
    assert report.notes == ["argument 1 is changed in place, as the reference does"]
    report = check_kernel(returned, X, cache, like=like)
    assert report.notes == ["argument 1 is changed in place and returned"]
    assert not cache.any()
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(CheckFailure, match=r"counted twice"):
            check_kernel(lambda x, c: 2 * written(x, c), X.to(dtype), cache.to(dtype), like=written)


# Results that cannot be compared -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "like", "words"),
    [
        (lambda _x, _w: None, linear, r"returns nothing \(None\) for the example, right is shape \(12, 6\)"),
        (lambda x, w: linear(x, w).sum(), linear, r"returns one number, without dimensions for the example, right is shape \(12, 6\)"),
        (lambda x, w: linear(x, w).sum().reshape(1), lambda x, w: linear(x, w).sum(), r"returns shape \(1,\) for the example, right is one number, without dimensions"),
        (lambda x, w: linear(x, w) if len(x) != 3 else None, linear, r"returns nothing \(None\) for 3 of 12"),
        (lambda x, w: linear(x, w) if len(x) != 3 else (x, w), linear, r"returns tuple for 3 of 12 along .*, a tensor of values for the example"),
        (lambda x, w: linear(x, w) if len(x) != 3 else linear(x, w)[0, 0], linear, r"returns one number, without dimensions for 3 of 12"),
        (lambda x, w: linear(x, w).sum() * 1.01, lambda x, w: linear(x, w).sum(), r"1\.01 times"),
    ],
)  # fmt: skip
def test_results_of_other_kinds_have_words_of_their_own(kernel: Any, like: Any, words: str) -> None:
    with pytest.raises(CheckFailure, match=words):
        check_kernel(kernel, X, W, like=like)
