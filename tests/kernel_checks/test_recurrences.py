"""Recurrences in chunks against the same step by step: Mamba-2, linear attention, a delta rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qgate
from qgate.testing import CheckFailure, check_kernel
from tests.kernel_checks.wrong_recurrences import steps
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

GENERATOR = torch.Generator().manual_seed(3)
TOKENS = 24
ALWAYS = 1e9
X, B, C = (torch.randn(TOKENS, width, generator=GENERATOR) for width in (8, 6, 6))
DECAY = torch.rand(TOKENS, generator=GENERATOR) * 0.3
INT8 = qgate.Quantizer("int8", granularity="channel", axis=0)


def chunked(
    size: int = 16,
    carried: Callable[[Tensor], Tensor] = lambda state: state,
    chunks: int = 1000,
    late: int = 0,
) -> Callable[..., Tensor]:
    """Return the same in chunks, as kernels compute it."""

    def kernel(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        state, results = x.new_zeros(b.shape[1], x.shape[1]), [x[:0]]
        for number, start in enumerate(range(0, len(x), size)):
            inside = slice(start, start + size)
            sums = -decay[inside].cumsum(0)
            weights = torch.exp(sums[:, None] - sums[None, :]).tril()
            state = carried(state) * (number < chunks)
            entering = torch.exp(sums - late * sums[0])[:, None] * (c[inside] @ state)
            results.append((c[inside] @ b[inside].T * weights) @ x[inside] + entering)
            leaving = torch.exp(sums[-1] - sums)[:, None] * b[inside]
            state = state * torch.exp(sums[-1]) + leaving.T @ x[inside]
        return torch.cat(results)

    return kernel


@always
@pytest.mark.parametrize("size", [16, 64])
def test_chunks_of_every_size_are_right_and_a_nan_that_a_mask_spreads_is_a_note(size: int) -> None:
    report = check_kernel(chunked(size), X, DECAY, B, C, like=steps, budget_s=ALWAYS)
    assert report.largest["argument 0"] == [257, 257]
    assert report.largest["argument 1"] == [257]
    assert any("what is masked is multiplied by 0" in note for note in report.notes)


@share(8)
@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        (chunked(chunks=5), "rows 80 to 256 of 257"),
        (chunked(chunks=0), "rows 16 to 23 of 24"),
        (chunked(late=1), "rows 16 to 23 of 24"),
        (chunked(carried=lambda state: state.bfloat16().float()), "rows 16 to 23 of 24"),
    ],
    ids=["lost after five chunks", "never carried", "one decay late", "carried in bfloat16"],
)
def test_what_a_chunk_does_not_carry_on_is_red(kernel: Callable[..., Tensor], cause: str) -> None:
    with pytest.raises(CheckFailure) as caught:
        check_kernel(kernel, X, DECAY, B, C, like=steps, budget_s=ALWAYS, relations=["long", "odd"])
    assert cause in caught.value.cause


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Write the delta rule of a fast weight memory."""
    state, results = v.new_zeros(k.shape[1], v.shape[1]), [v[:0]]
    for token in range(len(q)):
        error = v[token] - k[token] @ state
        state = state + beta[token] * torch.outer(k[token], error)
        results.append((q[token] @ state)[None])
    return torch.cat(results)


def solved_delta_rule(size: int, corrects: bool = True) -> Callable[..., Tensor]:
    """Return the delta rule in chunks: errors of a chunk solve a triangular system."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        state, results = v.new_zeros(k.shape[1], v.shape[1]), [v[:0]]
        for start in range(0, len(q), size):
            inside = slice(start, start + size)
            weights = beta[inside, None] * k[inside]
            system = torch.eye(len(weights)) + (k[inside] @ weights.T).tril(-1) * corrects
            errors = torch.linalg.solve_triangular(
                system, v[inside] - k[inside] @ state, upper=False
            )
            results.append(q[inside] @ state + (q[inside] @ weights.T).tril() @ errors)
            state = state + weights.T @ errors
        return torch.cat(results)

    return kernel


@proof
def test_a_delta_rule_in_chunks_is_right_and_one_without_its_correction_is_not() -> None:
    q, k, v = (torch.randn(TOKENS, 8, generator=GENERATOR) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(TOKENS, generator=GENERATOR)
    options: dict[str, Any] = {"like": delta_rule, "relations": ["one", "odd", "prefix"]}
    check_kernel(solved_delta_rule(16), q, k, v, beta, **options)
    with pytest.raises(CheckFailure, match="rows 1 to 23 of 24"):
        check_kernel(solved_delta_rule(16, corrects=False), q, k, v, beta, **options)


@proof
def test_a_quantized_state_is_declared_by_its_reference() -> None:
    """A state that is stored in INT8 after each token is part of what is computed."""

    def like(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return quantized(INT8, x, decay, b, c)

    def quantized(
        cast: Callable[[Tensor], Tensor], x: Tensor, decay: Tensor, b: Tensor, c: Tensor
    ) -> Tensor:
        state, results = x.new_zeros(b.shape[1], x.shape[1]), [x[:0]]
        for token in range(len(x)):
            state = cast(state * torch.exp(-decay[token]) + torch.outer(b[token], x[token]))
            results.append((c[token] @ state)[None])
        return torch.cat(results)

    def by_columns(state: Tensor) -> Tensor:
        return INT8(state.T).T

    arguments = [value[:6] for value in (X, DECAY, B, C)]
    options: dict[str, Any] = {"like": like, "relations": ["prefix"]}
    check_kernel(like, *arguments, **options)
    with pytest.raises(CheckFailure, match="is wrong"):
        check_kernel(lambda *v: quantized(by_columns, *v), *arguments, **options)
