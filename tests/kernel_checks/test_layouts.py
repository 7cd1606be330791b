"""Scales by thread and warp, and scales in memory: right kernels are green, whatever the values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import qgate
from qgate.formats.groups import key_threads, query_threads, warps
from qgate.testing import CheckFailure, check, check_kernel
from tests.kernel_checks.pairs import Pair
from tests.kernel_checks.wrong_layouts import (
    BY_THREAD,
    PAIRS,
    attention,
    by_warp,
    keys,
    queries,
    scaled_dot_product_attention,
)
from tests.shares import share


def drawn(seed: int, tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 1, tokens, 16, generator=generator).to(dtype) for _ in range(3)]


@share(6)
@pytest.mark.parametrize("seed", range(20))
def test_attention_by_threads_is_green(seed: int) -> None:
    report = check_kernel(
        attention(), *drawn(seed, 33 + seed * 3), like=scaled_dot_product_attention,
        inputs=BY_THREAD, relations=["one"],
    )  # fmt: skip
    assert report.conventions["argument 0"].startswith("scale amax/127 plus 1e-07")


@share(12)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "name", ["K not smoothed", "columns not packed", "tiles of 128x4 not applied"]
)
def test_right_kernels_of_layouts_are_green(name: str, seed: int) -> None:
    (pair,) = (pair for pair in PAIRS if pair.name == name)
    generator = torch.Generator().manual_seed(seed)

    def other(x: object) -> object:
        if isinstance(x, qgate.Encoded):
            return qgate.encode(torch.randn(x.codes.shape, generator=generator), "mxfp8")
        assert isinstance(x, torch.Tensor)
        return torch.randn(x.shape, generator=generator) + x.mean(-2, keepdim=True)

    redrawn: Pair = replace(pair, arguments=tuple(map(other, pair.arguments)))
    assert redrawn.check(pair.right).held


@share(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [5, 70])
def test_casts_by_threads_are_named(tokens: int, dtype: torch.dtype) -> None:
    x = drawn(tokens, tokens, dtype)[0]
    for cast, groups in ((queries, query_threads()), (keys, key_threads()), (by_warp, warps(32))):
        q = qgate.Quantizer("int8", groups=groups)
        report = check(cast(x.float()), x, format=q)
        assert "plus 1e-07" in report.conventions["values"]
        own = q(x.float())
        assert check(own, x.float(), format=q).conventions["values"].startswith("scale amax/127, ")
        if tokens > 8:
            with pytest.raises(CheckFailure, match="has one scale per 4 tokens, not one per"):
                check(by_warp(x.float(), 4), x, format=q)
