"""Attention functions of other packages, with layouts and options of their own."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import qgate
from qgate.collecting import functions
from tests.collecting.collected import WIDTH, batch, found, loss_of, records


def test_attention_functions_of_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def npu_fusion_attention(q: Tensor, k: Tensor, v: Tensor, head_num: int, *_: Any) -> Any:
        return scaled_dot_product_attention(q, k, v), head_num

    package = types.ModuleType("torch_npu")
    package.npu_fusion_attention = npu_fusion_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setattr(functions, "FUNCTIONS", functions.FUNCTIONS[1:])

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sys.modules["torch_npu"].npu_fusion_attention(x, x * 2, x, 4)[0]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Outer())
    with qgate.collect(model, tmp_path / "dump", sites="attention") as collector:
        loss_of(model, batch()).backward()
    assert not collector.missing
    names = [r.name for r in records(tmp_path / "dump") if r.operation == "forward"]
    assert names == ["query", "key", "value", "context"]
    assert package.npu_fusion_attention is npu_fusion_attention


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
) -> Tensor:
    """As flash-attn's: heads after tokens, and the last query sees the last key."""
    del dropout_p
    groups = q.shape[2] // k.shape[2]
    q, k, v = (
        x.transpose(1, 2)
        for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2))
    )
    ahead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    mask = ahead if causal else None
    return scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_attention_with_heads_after_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    package = types.ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(functions, "FUNCTIONS", functions.FUNCTIONS[1:])

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kv = x.unflatten(-1, (2, -1))
            return package.flash_attn_func(
                x[:, 2:].unflatten(-1, (4, -1)), kv[..., :4], kv[..., 4:], 0.0, 0.3, causal
            )  # type: ignore[no-any-return]

    with qgate.collect(
        Outer(), tmp_path / "dump", attention_weights=True, phases=("forward",)
    ) as collector:
        collector._roots[0](batch())
    assert not collector.missing
    got = {r.name: t for r, t in found(tmp_path / "dump")}
    values = got["value"].transpose(1, 2).repeat_interleave(2, 1)
    torch.testing.assert_close((got["attention_weights"] @ values).transpose(1, 2), got["context"])


def test_weights_that_cannot_be_computed_cost_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = types.ModuleType("torch_npu")
    package.npu_fusion_attention = lambda q, k, v, *_: (q * k * v,)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", package)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return package.npu_fusion_attention(x, x * 2, x * 3, 4, "BSH")[0]  # type: ignore[no-any-return]

    model = Outer()

    def run() -> None:
        with qgate.collect(model, tmp_path / "dump", attention_weights=True):
            loss_of(model, batch().requires_grad_()).backward()

    with pytest.warns(
        UserWarning, match="npu_fusion_attention does not say how its weights are made"
    ):
        run()
    names = {r.name for r in records(tmp_path / "dump")}
    assert names == {
        "query",
        "key",
        "value",
        "context",
        "grad_output",
        "grad_query",
        "grad_key",
        "grad_value",
    }
