"""Rewrites that change no value: the gate stays green, and a defect in the same rewrite is red."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from qgate.formats.quantizer import Quantizer
from qgate.models import Model
from qgate.models.llama import Attention, LlamaNorm
from tests.campaigns.mutants.bed import Bed, Healthy, examine
from tests.campaigns.mutants.mutant import LLAMA
from tests.shares import share, slow_file

pytestmark = slow_file

UP = "model.layers.2.mlp.up_proj"
Change = Callable[[Tensor], Tensor]


def in_inference_mode(bed: Bed, change: Change) -> None:
    """Run the network as serving code does: its tensors have no versions."""
    network = bed.network
    plain = network.forward
    bed.after(UP, change)
    network.forward = torch.inference_mode()(plain)


def on_flat_tensors(bed: Bed, change: Change) -> None:
    """Hand tokens of all samples to a quantizer as one table."""

    def flat(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(self: Quantizer, x: Tensor) -> Tensor:
            if x.dim() < 3:
                return plain(self, x)
            return change(plain(self, x.reshape(-1, x.shape[-1])).reshape(x.shape))

        return call

    bed.wrap(Quantizer, "__call__", flat)


def with_rows_in_another_order(bed: Bed, change: Change) -> None:
    """Store rows of a weight with their scales in another order, and put the outputs back."""
    module = bed.module(UP)
    order = torch.randperm(len(module.weight), generator=torch.Generator().manual_seed(1))
    stored = Quantizer("int4", granularity="block", block=128).encode(module.weight[order].detach())
    back = order.argsort()

    def forward(x: Tensor) -> Tensor:
        rows = change(stored.decode())
        return linear(x, rows)[..., back]

    module.forward = forward


def with_weights_of_columns(bed: Bed, change: Change) -> None:
    """Keep weights column by column in memory, as other libraries do."""
    for name, module in bed.network.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:
            parameter = module._parameters["weight"]
            assert parameter is not None
            parameter.data = parameter.data.T.contiguous().T
    bed.after(UP, change)


def with_eager_attention(bed: Bed, change: Change) -> None:
    """Compute attention operator by operator, with the softmax in float32.

    In 16 bits it rounds scores and weights, and blocks have twice the error against FP32.
    """
    compute_eagerly(bed, change)


def compute_eagerly(bed: Bed, *args: Any, **options: Any) -> None:
    attend_eagerly(bed.network, *args, **options)


def attend_eagerly(
    network: nn.Module, change: Change = lambda weights: weights, factor: float = 1.0, first: int = 1,
    hidden_key: int | None = None,
) -> None:  # fmt: skip
    """Attend eagerly; `first` is the first later token that a token does not see."""

    def attend(of: Attention, hidden: Tensor) -> Tensor:
        q, k, v = (of.per_head(layer(hidden)) for layer in (of.q_proj, of.k_proj, of.v_proj))
        q, k = of.rope(q, 0), of.rope(k, 0)
        k, v = (side.repeat_interleave(of.heads // of.kv_heads, 1) for side in (k, v))
        scores = q @ k.transpose(-1, -2) * (factor / math.sqrt(of.width))
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(first)
        if hidden_key is not None:
            unseen[hidden_key + 1 :, hidden_key] = True
        weights = scores.masked_fill(unseen, -math.inf).float().softmax(-1).to(q.dtype)
        return of.o_proj((change(weights) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    for module in network.modules():
        if isinstance(module, Attention):
            module.forward = lambda hidden, of=module: attend(of, hidden)


def normalize_in_its_dtype(bed: Bed) -> None:
    """Leave out the float32 of RMSNorm."""

    def norm(of: LlamaNorm, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + of.eps)
        return of.weight * (x * scale)

    for module in bed.network.modules():
        if isinstance(module, LlamaNorm):
            module.forward = lambda x, of=module: norm(of, x)


def with_a_coarse_norm(bed: Bed) -> None:
    compute_eagerly(bed)
    normalize_in_its_dtype(bed)


def as_it_is(x: Tensor) -> Tensor:
    return x


def without_the_last(x: Tensor) -> Tensor:
    """Lose the last column."""
    return torch.cat([x[..., :-1], torch.zeros_like(x[..., -1:])], -1)


def slightly_less(x: Tensor) -> Tensor:
    return x * 0.99


REWRITES = [
    (in_inference_mode, "int8", "layer_outputs"),
    (in_inference_mode, "bf16", "layer_outputs"),
    (on_flat_tensors, "int8", "layer_outputs"),
    (on_flat_tensors, "mxfp4", "gradients"),
    (with_rows_in_another_order, "w4", "layer_outputs"),
    (with_weights_of_columns, "int8", "gradients"),
    (with_weights_of_columns, "bf16", "layer_outputs"),
    (with_eager_attention, "int8", "layer_outputs"),
    (with_eager_attention, "bf16", "layer_outputs"),
    (with_eager_attention, "bf16", "outputs"),
    (with_eager_attention, "fp16", "layer_outputs"),
    (with_eager_attention, "bf16", "gradients"),
]
Rewrite = Callable[[Bed, Change], None]


@share(50, group="rewrites")
@pytest.mark.parametrize("change", [as_it_is, without_the_last, slightly_less])
@pytest.mark.parametrize(("rewrite", "mode", "suite"), REWRITES)
def test_a_harmless_rewrite_is_green_and_a_defect_in_it_is_red(
    rewrite: Rewrite,
    mode: str,
    suite: str,
    change: Change,
    healthy: Healthy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    healthy.record(LLAMA, mode, suite)
    session = healthy.session(LLAMA)
    rewrite(Bed(monkeypatch, session, healthy, mode), change)
    finding = examine(session, mode, suite)
    assert bool(finding.texts) == (change is not as_it_is), finding.texts


WRONG_ATTENTIONS = {
    "scale 0.3 % too large": functools.partial(compute_eagerly, factor=1.003),
    "scale 0.3 % too small": functools.partial(compute_eagerly, factor=0.997),
    "one key of many is not seen": functools.partial(compute_eagerly, hidden_key=17),
    "one later token is seen": functools.partial(compute_eagerly, first=2),
    "norm without float32": with_a_coarse_norm,
    "norm without float32, fused attention": normalize_in_its_dtype,
}


@share(50, group="rewrites")
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("wrong", WRONG_ATTENTIONS)
def test_attention_of_another_arithmetic_leaves_no_room_for_a_defect(
    wrong: str, mode: str, healthy: Healthy, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy.record(LLAMA, mode, "layer_outputs")
    session = healthy.session(LLAMA)
    WRONG_ATTENTIONS[wrong](Bed(monkeypatch, session, healthy, mode))
    assert examine(session, mode, "layer_outputs").texts


@share(50, group="rewrites")
def test_attention_of_a_quantized_model_in_16_bits_may_round_more(healthy: Healthy) -> None:
    def quantized(model: Model) -> nn.Module:
        network: nn.Module = copy.deepcopy(model.module)
        int8 = Quantizer("int8", granularity="channel", axis=0)
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(int8(module.weight.detach()))
        return network.bfloat16()

    def eager(model: Model, factor: float) -> nn.Module:
        network = quantized(model)
        attend_eagerly(network, factor=factor)
        return network

    def texts(build: Callable[[Model], nn.Module], updating: str | None = None) -> str:
        session = healthy.session(LLAMA, updating)
        session.bench.model.modes = {"int8_in_bf16": build}
        finding = examine(session, "int8_in_bf16", "layer_outputs")
        session.commit()
        return finding.texts

    assert texts(quantized, "all") == ""
    assert texts(functools.partial(eager, factor=1.0)) == ""
    assert "over accepted" in texts(functools.partial(eager, factor=1.003))
