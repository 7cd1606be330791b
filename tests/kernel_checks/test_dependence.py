from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import qgate
from qgate.testing import CheckFailure, check_kernel
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

GENERATOR = torch.Generator().manual_seed(5)
FP8 = qgate.Quantizer("fp8_e4m3", granularity="tensor")
Q, K, V = (torch.randn(2, 12, 16, generator=GENERATOR) for _ in range(3))


def _attention(allowed: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, keys = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return scaled_dot_product_attention(q, FP8(k), FP8(v), allowed(rows, keys))

    return kernel


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def _cause(kernel: Callable[..., Tensor]) -> str:
    with pytest.raises(CheckFailure) as failure:
        check_kernel(kernel, Q, K, V, like=_causal, inputs={1: FP8, 2: FP8}, relations=["permuted"])
    return failure.value.cause


@share(3)
@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (
            lambda row, key: key <= row + 1,
            "the mask shows one key more",
        ),
        (
            lambda row, key: (key <= row) & (key > row - 4),
            "row 4 of the result depends on rows 1 to 4 of argument 1, the reference's on rows 0 "
            "to 4, and so for 7 more",
        ),
        (
            lambda row, key: (key <= row) & ((row != 7) | (key != 2)),
            "row 7 of 12 is wrong: row 7 of the result depends on rows 0, 1, 3, 4, … of argument "
            "1, the reference's on rows 0 to 7",
        ),
    ],
)
def test_a_wrong_mask_is_told_by_the_keys_that_a_row_depends_on(
    allowed: Callable[[Tensor, Tensor], Tensor], words: str
) -> None:
    assert words in _cause(_attention(allowed))


def test_a_right_mask_passes() -> None:
    check_kernel(
        _attention(lambda row, key: key <= row), Q, K, V, like=_causal, inputs={1: FP8, 2: FP8}
    )


@proof
def test_values_that_are_merely_wrong_depend_on_what_they_should() -> None:
    kernel = _attention(lambda row, key: key <= row)

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = kernel(q, k, v)
        return torch.where(torch.arange(y.shape[-2])[:, None] == 3, y * 1.01 + 0.1, y)

    cause = _cause(wrong)
    assert "row 3 of 12 is wrong" in cause
    assert "depends" not in cause


def test_a_result_without_rows_is_told_by_its_entry() -> None:
    x = torch.randn(8, generator=GENERATOR)

    def like(x: Tensor) -> Tensor:
        return x.cumsum(0) + x

    with pytest.raises(CheckFailure) as failure:
        check_kernel(lambda x: x.cumsum(0), x + 3, like=like, relations=["one"])
    assert "depends" not in failure.value.cause

    def late(x: Tensor) -> Tensor:
        return like(torch.cat([x[:1], x[:-1]]))

    with pytest.raises(CheckFailure, match="result depends on") as failure:
        check_kernel(late, x + 3, like=like, relations=["one"])
    assert "of argument 0, the reference's on" in failure.value.cause


def test_rows_of_a_cache_that_is_empty_are_told_apart() -> None:
    """The expected zeros have no noise to measure changes in."""
    x, cache = torch.randn(6, 32, generator=GENERATOR), torch.zeros(10, 32)

    def written(x: Tensor, cache: Tensor) -> Tensor:
        return torch.cat([x, cache[len(x) :]])

    def one_too_many(x: Tensor, cache: Tensor) -> Tensor:
        return torch.cat([x, x[2:3] * 3, cache[len(x) + 1 :]])

    words = "row 6 of the result depends on row 2 of argument 0, the reference's on no row"
    with pytest.raises(CheckFailure, match=words):
        check_kernel(one_too_many, x, cache, like=written, relations=["odd"])


@always
def test_large_arguments_are_not_looked_into() -> None:
    """A kernel is run once for each entry, which takes too long if each run is long."""
    calls = 0
    x = torch.randn(4, 2**17, generator=GENERATOR)

    def kernel(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.cat([x[1:2] + x[2:3].abs(), x[1:]]) if len(x) > 2 else x

    with pytest.raises(CheckFailure, match="row 0 of 4 is wrong\n"):
        check_kernel(kernel, x, like=lambda x: x, relations=["odd"])
    assert calls < 10


def test_keys_that_a_last_tile_lacks_are_left_out_of_the_softmax() -> None:
    def without_the_last_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k.shape[-2] // 16 * 16 or k.shape[-2]
        return scaled_dot_product_attention(q, k[..., :keys, :], v[..., :keys, :])

    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, 2, 40, 32, generator=generator).bfloat16() for _ in range(3)]
    like = scaled_dot_product_attention
    words = "is wrong: 8 entries, 32 to 39 of 40, are left out of the softmax"
    with pytest.raises(CheckFailure, match=words):
        check_kernel(without_the_last_tile, *heads, like=like, relations=["odd"])
