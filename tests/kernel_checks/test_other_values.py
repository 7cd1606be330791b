"""Zeros, small numbers and other positions in arguments after the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad

import qgate
from qgate.testing import CheckFailure, check_kernel, tiles

GENERATOR = torch.Generator().manual_seed(7)
ROW_FP8 = qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def fp8(x: Tensor, guarded: bool) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / (scale.masked_fill(scale == 0, 1.0) if guarded else scale)).to(
        torch.float8_e4m3fn
    ).float() * scale


def fp8_tiles(w: Tensor, guarded: bool) -> Tensor:
    rows, columns = w.shape
    padded = pad(w, (0, -columns % 32, 0, -rows % 32))
    grid = padded.unflatten(1, (-1, 32)).unflatten(0, (-1, 32)).transpose(1, 2)
    cast = fp8(grid.flatten(-2), guarded).unflatten(-1, (32, 32))
    return cast.transpose(1, 2).flatten(2).flatten(0, 1)[:rows, :columns]


@pytest.mark.parametrize("cast", [fp8, fp8_tiles])
def test_a_pruned_weight_that_becomes_nan_is_red(cast: Any) -> None:
    fmt = ROW_FP8 if cast is fp8 else tiles("fp8_e4m3", 32, 32)
    options: dict[str, Any] = {"like": linear, "inputs": {0: ROW_FP8, 1: fmt}}
    x, w = normal(12, 64), normal(70, 64)
    report = check_kernel(lambda x, w: fp8(x, True) @ cast(w, True).T, x, w, **options)
    assert "zero rows (argument 1)" in report.held
    with pytest.raises(CheckFailure, match=r"for zero rows \(argument 1\): .* are NaN"):
        check_kernel(lambda x, w: fp8(x, True) @ cast(w, False).T, x, w, **options)


def normed(k: Tensor, eps: float) -> Tensor:
    result: Tensor = k / (k.square().sum(-1, keepdim=True) + eps).sqrt()
    return result


def test_an_eps_that_only_small_keys_show_is_red() -> None:
    q, k = normal(10, 16), normal(14, 16)

    def like(q: Tensor, k: Tensor) -> Tensor:
        return q @ normed(k, 1e-6).T

    report = check_kernel(lambda q, k: q @ normed(k, 1e-6).T, q, k, like=like)
    assert {"zero rows (argument 1)", "values times 2^-12 (argument 1)"} <= {*report.held}
    for eps in (1.01e-6, -1e-6):
        with pytest.raises(CheckFailure, match=r"\(argument 1\)"):
            check_kernel(lambda q, k: q @ normed(k, eps).T, q, k, like=like)  # noqa: B023


def scores(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """Compute cross entropy in tiles of 50 words; a label in front of `first` of one is not read."""
    hit = torch.zeros(len(logits))
    for start in range(0, logits.shape[1], 50):
        part = logits[:, start : start + 50]
        inside = (labels >= start + first) & (labels < start + 50)
        column = (labels - start).clamp(0, part.shape[1] - 1)
        hit = torch.where(inside, part.gather(1, column[:, None])[:, 0], hit)
    return logits.logsumexp(-1) - hit


def test_positions_that_the_example_does_not_have_are_read() -> None:
    logits = normal(30, 130)
    labels = 1 + torch.randint(0, 49, (30,), generator=GENERATOR)

    def like(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, reduction="none")

    report = check_kernel(lambda x, y: scores(x, y, 0), logits, labels, like=like)
    moved = [name for name in report.held if name.startswith("positions ")]
    assert 1 < len(moved) <= 6
    assert all(name.endswith("further (argument 1)") for name in moved)
    with pytest.raises(CheckFailure, match=r"for positions .* further"):
        check_kernel(lambda x, y: scores(x, y, 1), logits, labels, like=like)


def test_sorted_positions_stay_where_they_are() -> None:
    table, ends = normal(9, 8), torch.tensor([0, 2, 5, 8])
    report = check_kernel(lambda t, i: t[i] * 2, table, ends, like=lambda t, i: t[i] * 2)
    assert not any("further" in name for name in report.held)


def test_an_argument_whose_zeros_make_ties_keeps_its_values() -> None:
    def routed(x: Tensor, router: Tensor) -> Tensor:
        best = (x @ router.T).topk(2, -1)
        chosen = torch.zeros(len(x), len(router), dtype=x.dtype)
        return chosen.scatter(-1, best.indices, best.values.softmax(-1))

    def own(x: Tensor, router: Tensor) -> Tensor:
        """Choose the later one of two that are alike."""
        chosen = torch.zeros(len(x), len(router))
        best = (x @ router.T).flip(-1).topk(2, -1)
        return chosen.scatter(-1, len(router) - 1 - best.indices, best.values.softmax(-1))

    options: dict[str, Any] = {"like": routed, "relations": ["zero rows", "batch", "small"]}
    report = check_kernel(own, normal(20, 16), normal(6, 16), **options)
    for name in ("zero rows (argument 1)", "10 instead of 6 along dimension 0 of argument 1"):
        assert "chooses at a tie" in report.left_out[name]
    assert "values times 2^-12 (argument 1)" in report.held


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_values_may_have_to_be_as_wide_as_queries() -> None:
    q, k, v = (normal(2, 20, 8) for _ in range(3))

    def like_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = torch.empty_like(q)
        result[:] = attention(q, k, v)
        return result

    report = check_kernel(like_queries, q, k, v, like=attention)
    assert any(
        reason == "the kernel refused: it takes this length from argument 0"
        for reason in report.left_out.values()
    )

    def of_twenty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty(len(q), 20, 8).copy_(attention(q, k, v)[:, :1].expand(-1, 20, -1)) \
            if q.shape[1] == 1 else attention(q, k, v)  # fmt: skip

    with pytest.raises(CheckFailure, match=r"returns shape \(2, 20, 8\) for the first of 20"):
        check_kernel(of_twenty, q, k, v, like=attention)
