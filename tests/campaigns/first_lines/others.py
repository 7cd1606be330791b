"""Faults in a recurrent model, a U-Net and an encoder of padded batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.campaigns.first_lines.decoders import (
    escaped,
)
from tests.campaigns.first_lines.planting import (
    Fault,
    after,
    attribute,
    before,
    between,
    instead,
    set_at,
    stored,
    times,
)
from tests.gate.test_gradient_code import plant as plant_gradient

# Mamba --------------------------------------------------------------------------------------------

BLOCK = "backbone.layers.1"
MIXER = f"{BLOCK}.mixer"
SCAN = escaped(f"{MIXER}.out_proj:input")
CONV = escaped(f"{MIXER}.x_proj:input")
WITHIN = escaped(MIXER) + r"(\.\w+)?:\w+"


def reset(at: int) -> Any:
    """Begin the states anew at a token."""

    def plant(network: nn.Module) -> None:
        mixer = network.get_submodule(MIXER)
        right = mixer.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if x.shape[1] <= at:
                return right(x, *args, **kwargs)  # type: ignore[no-any-return]
            parts = [right(part, *args, **kwargs) for part in (x[:, :at], x[:, at:])]
            return torch.cat(parts, 1)

        mixer.forward = forward  # type: ignore[method-assign]

    return plant


def parts_swapped(y: Tensor) -> Tensor:
    return torch.cat([y[..., :4], y[..., 12:], y[..., 4:12]], -1)


MAMBA = (
    Fault("mamba", "decay 1 % off", stored(MIXER, "A_log", lambda a: a + 0.01), WITHIN, "A_log|decay|times", bits=(4,)),
    Fault("mamba", "skip left out", stored(MIXER, "D", torch.zeros_like), WITHIN, r"\bD \(", bits=(8,)),
    Fault("mamba", "skip of one channel 5 % off", stored(MIXER, "D", set_at((9,), times(1.05))), WITHIN, r"\bD \(|channel 9", bits=(16,)),
    Fault("mamba", "step bias 5 % off", stored(f"{MIXER}.dt_proj", "bias", times(1.05)), WITHIN, "dt_proj.bias|bias", bits=(4,)),
    Fault("mamba", "states begin anew at token 200", reset(200), ".*" + escaped(MIXER) + ".*", "text longer|calls|token", bits=(16,)),
    Fault("mamba", "bias of the convolution lost", stored(f"{MIXER}.conv1d", "bias", torch.zeros_like), WITHIN, "bias", bits=(4,)),
    Fault("mamba", "taps of the convolution reversed", stored(f"{MIXER}.conv1d", "weight", lambda w: w.flip(-1)), WITHIN, "conv1d.weight|tap|order|revers", bits=(8,)),
    Fault("mamba", "B and C swapped", after(f"{MIXER}.x_proj", parts_swapped), escaped(f"{MIXER}.x_proj:output"), "channels|order", bits=(16,)),
)  # fmt: skip

# U-Net --------------------------------------------------------------------------------------------

FIRST, LAST = "blocks.0", "blocks.1"


def block_without(part: str) -> Any:
    """Compute a block with one part otherwise."""

    def forward(of: Any, x: Tensor, time: Tensor) -> Tensor:
        hidden = of.conv1(of.act(of.norm1(x)))
        moved = of.time(of.act(time))
        if part == "time of the first sample":
            moved = moved[:1].expand_as(moved)
        if part != "no time":
            hidden = hidden + moved[:, :, None, None] * (1.01 if part == "time 1 %" else 1.0)
        hidden = of.norm2(hidden)
        hidden = of.conv2(hidden if part == "no activation" else of.act(hidden))
        return hidden if part == "no shortcut" else of.shortcut(x) + hidden  # type: ignore[no-any-return]

    return forward


def circular(of: Any, x: Tensor) -> Tensor:
    padded = functional.pad(x, (1, 1, 1, 1), mode="circular")
    return functional.conv2d(padded, of.weight, of.bias)


def wrong_axis(of: Any, x: Tensor) -> Tensor:
    q, k, v = (y.flatten(2).unflatten(1, (2, -1)) for y in of.qkv(of.norm(x)).chunk(3, 1))
    weights = (q.mT @ k * of.scale).softmax(-2)
    return x + of.out((v @ weights.mT).flatten(1, 2).unflatten(-1, x.shape[2:]))  # type: ignore[no-any-return]


def eight_groups(of: Any, x: Tensor) -> Tensor:
    return functional.group_norm(x, 2, of.weight, of.bias, of.eps)


_CONV2 = escaped(f"{FIRST}.conv2:") + "(input|output|weight)"
UNET = (
    Fault("unet", "time left out", instead(FIRST, block_without("no time")), escaped(f"{FIRST}.norm2:input"), "time|same vector", bits=(4,)),
    Fault("unet", "time 1 % off", instead(FIRST, block_without("time 1 %")), escaped(f"{FIRST}.norm2:input"), "time|same vector", bits=(8,)),
    Fault("unet", "time of the first sample for all", instead(FIRST, block_without("time of the first sample")), escaped(f"{FIRST}.norm2:input"), "number 1 of 2 of a batch", bits=(16,)),
    Fault("unet", "activation left out", instead(FIRST, block_without("no activation")), escaped(FIRST) + r"\.(conv2|act):input", "in other calls|act", bits=(4,)),
    Fault("unet", "shortcut left out", instead(FIRST, block_without("no shortcut")), ".*", "shortcut", bits=(8,)),
    Fault("unet", "borders from the other side", instead(f"{FIRST}.conv2", circular), escaped(f"{FIRST}.conv2:output"), "border|row|column|token|place", bits=(16,)),
    Fault("unet", "taps turned", stored(f"{FIRST}.conv2", "weight", lambda w: w.flip(-1)), _CONV2, "order|hold others", bits=(4,)),
    Fault("unet", "input channel lost", before(f"{FIRST}.conv2", set_at((slice(None), 5), lambda x: 0 * x)), escaped(f"{FIRST}.conv2:output"), "channel 5", bits=(8,)),
    Fault("unet", "output channel 1 % off", after(f"{FIRST}.conv2", set_at((slice(None), 5), times(1.01))), escaped(f"{FIRST}.conv2:output"), "channel 5", bits=(16,)),
    Fault("unet", "last column of pixels lost", after(f"{FIRST}.conv2", set_at((..., -1), lambda x: 0 * x)), escaped(f"{FIRST}.conv2:output"), "token|column|place|zero", bits=(4,)),
    Fault("unet", "second image of a batch 1 % off", after(f"{FIRST}.conv1", set_at((slice(1, None),), times(1.01))), escaped(f"{FIRST}.conv1:output"), r"number 1|sample|1\.01", bits=(8,)),
    Fault("unet", "bias of a convolution lost", stored(f"{FIRST}.conv1", "bias", torch.zeros_like), escaped(f"{FIRST}.conv1:") + "(output|bias)", "bias|off by", bits=(16,)),
    Fault("unet", "group norm of 2 groups", instead(f"{FIRST}.norm2", eight_groups), escaped(f"{FIRST}.norm2:output"), "depends on channels 0 to 7", bits=(4,)),
    Fault("unet", "group norm of eps 0.01", attribute(f"{FIRST}.norm1", "eps", lambda _: 1e-2), escaped(f"{FIRST}.norm1:output"), "eps|factor each", bits=(8,)),
    Fault("unet", "attention scale 1 % off", attribute("attention", "scale", lambda s: 1.01 * s), escaped("attention.out:input"), r"(qkv:output counts|scores of the softmax are) 1\.0", bits=(16,)),
    Fault("unet", "softmax along the other axis", instead("attention", wrong_axis), escaped("attention.out:input"), "softmax|axis|qkv|elements", bits=(4,)),
    Fault("unet", "skip connection in another order", before(LAST, lambda x: x.roll(8, 1)), escaped(LAST) + r"(\.norm1)?:input", "channels|order|larger|first", bits=(8,)),
    Fault("unet", "skip connection of zeros", before(LAST, set_at((slice(None), slice(16, None)), lambda x: 0 * x)), escaped(LAST) + r"(\.norm1)?:input", "channels 16|zero|first", bits=(16,)),
    Fault("unet", "large values cut in a convolution", after(f"{LAST}.conv1", lambda y: y.where(y.abs() < 1e4, 0.0)), escaped(f"{LAST}.conv1:output"), "as large", bits=(4,)),
    Fault("unet", "one weight of the wrong sign", stored(f"{LAST}.conv1", "weight", set_at((3, 4, 1, 1), lambda w: -w)), escaped(f"{LAST}.conv1:") + "(weight|output)", "sign|1 of 1,728|channel 3|index 4 of 24", bits=(8,)),
    Fault("unet", "upsampling moved by a pixel", after("larger", lambda y: y.roll(1, -1)), "larger:output", "row|moved|later|token|place|column|elements", bits=(16,)),
)  # fmt: skip

# Encoder ------------------------------------------------------------------------------------------

ENCODER_LAYER = "encoder.layer.0"
SELF = f"{ENCODER_LAYER}.attention.self"
MIXED = escaped(f"{ENCODER_LAYER}.attention.output.dense:input")


def unmasked(network: nn.Module) -> None:
    module = network.get_submodule(SELF)
    right = module.forward
    module.forward = lambda x, *_args, **_kwargs: right(x)  # type: ignore[method-assign]


def dropped(attention_of: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Norm what a layer gives without what it was given."""
    return attention_of.LayerNorm(attention_of.dense(x) + 0 * residual)  # type: ignore[no-any-return]


def early_norm(of: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Norm before the residual is added, not behind it."""
    return of.LayerNorm(of.dense(x)) + residual  # type: ignore[no-any-return]


def biased(of: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, of.weight) + 2 * of.bias


def variance_of_sample(of: nn.LayerNorm, x: Tensor) -> Tensor:
    """Divide by one less than the number of channels."""
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + of.eps).sqrt()
    return y * of.weight + of.bias


def positions_from_one(of: nn.Embedding, ids: Tensor) -> Tensor:
    return functional.embedding((ids + 1) % of.num_embeddings, of.weight)


class Tanh(nn.Module):
    """GELU by its approximation."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")


class Cut(nn.Module):
    """SiLU that is cut where no sample goes."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x).clamp(max=40.0)


def exchanged(of: nn.Module, one: str, other: str, *args: Any, **kwargs: Any) -> Any:
    """Run a module with two of its parts exchanged."""
    parts = of._modules[one], of._modules[other]
    of._modules[other], of._modules[one] = parts
    try:
        return type(of).forward(of, *args, **kwargs)
    finally:
        of._modules[one], of._modules[other] = parts


EMBEDDINGS, ATTENTION_OUT = "embeddings", f"{ENCODER_LAYER}.attention.output"
DENSE, LAST_OUT = f"{ENCODER_LAYER}.intermediate.dense", f"{ENCODER_LAYER}.output"
ACT = f"{ENCODER_LAYER}.intermediate.intermediate_act_fn"
ENCODER = (
    Fault("encoder", "padding is attended to", unmasked, MIXED, "padding", bits=(4,)),
    Fault("encoder", "attention scale 2 % off", attribute(SELF, "scaling", lambda s: 1.02 * s), MIXED, r"1\.02", bits=(8,)),
    Fault("encoder", "attention scale 0.6 % off", attribute(SELF, "scaling", lambda s: 1.006 * s), MIXED, r"counts 1\.00|1\.00\d+ times", bits=(16,)),
    Fault("encoder", "query and key swapped", instead(SELF, lambda of, *args, **kwargs: exchanged(of, "query", "key", *args, **kwargs)), escaped(SELF) + ".*|" + MIXED, "place|order|call|hold|product of", bits=(4,)),
    Fault("encoder", "one head of values lost", after(f"{SELF}.value", set_at((..., slice(16, 32)), lambda v: 0 * v)), escaped(f"{SELF}.value:output"), "channels 16 to 31", bits=(16,)),
    Fault("encoder", "residual of attention dropped", instead(ATTENTION_OUT, dropped), escaped(f"{ATTENTION_OUT}.LayerNorm:input"), "residual|input is not used", bits=(8,)),
    Fault("encoder", "norm before the residual", instead(ATTENTION_OUT, early_norm), escaped(ATTENTION_OUT) + r"(\.LayerNorm)?:(input|output)|" + escaped(DENSE) + ":input", "residual|input is not used|other calls|depends|counts", bits=(4,)),
    Fault("encoder", "GELU by tanh", attribute(f"{ENCODER_LAYER}.intermediate", "intermediate_act_fn", lambda _: Tanh()), escaped(ACT) + ":output", "gelu|tanh", bits=(8,)),
    Fault("encoder", "bias twice", instead(DENSE, biased), escaped(DENSE) + ":output", "bias", bits=(16,)),
    Fault("encoder", "variance of a sample", instead(f"{LAST_OUT}.LayerNorm", variance_of_sample), escaped(f"{LAST_OUT}.LayerNorm:output"), "factor|times|variance|divided", bits=(4,)),
    Fault("encoder", "norm without its bias", stored(f"{LAST_OUT}.LayerNorm", "bias", torch.zeros_like), escaped(f"{LAST_OUT}.LayerNorm:") + "(output|bias)", "bias", bits=(8,)),
    Fault("encoder", "positions begin at one", instead(f"{EMBEDDINGS}.position_embeddings", positions_from_one), escaped(EMBEDDINGS) + r"\.position_embeddings:output", "hold what tokens 1 to 127|one entry too far", bits=(16,)),
    Fault("encoder", "token types left out", stored(f"{EMBEDDINGS}.token_type_embeddings", "weight", torch.zeros_like), escaped(EMBEDDINGS) + r"\.\w+:\w+", "token_type|zero|0 times", bits=(4,)),
    Fault("encoder", "pooler reads the second token", before("pooler", lambda x: x[:, 1:]), r"pooler(\.dense)?:input", "token 1|token 0|hold|row", bits=(8,)),
    Fault("encoder", "tanh of the pooler left out", attribute("pooler", "activation", lambda _: nn.Identity()), r"pooler\.activation:output", "tanh", bits=(16,)),
    Fault("encoder", "activation cut at 6 in a layer", after(ACT, lambda y: y.clamp(max=40.0)), escaped(ACT) + ":output|" + escaped(f"{LAST_OUT}.dense:input"), "saturates|above", bits=(8,)),
    Fault("encoder", "gradient of the values 1 % off", lambda network: plant_gradient(network.get_submodule(f"{SELF}.value"), "output", times(1.01)), escaped(ENCODER_LAYER) + ".*", r"value:output.*1\.01|1\.01", (8,), "gradients"),
    Fault("mamba", "gate without SiLU", attribute(MIXER, "activation", lambda _: "relu"), WITHIN, "silu|relu|conv1d", bits=(16,)),
    Fault("mamba", "norm of eps 0.01", attribute("backbone.layers.0.norm", "variance_epsilon", lambda _: 1e-2), escaped("backbone.layers.0.norm:output"), "eps|factor each", bits=(8,)),
    Fault("mamba", "residual 1 % off", between(BLOCK, lambda x, y: y + 0.01 * x), escaped(BLOCK) + ":output", r"counts 1\.0", bits=(16,)),
    Fault("mamba", "residual 0.2 % off", between(BLOCK, lambda x, y: y + 0.002 * x), escaped(BLOCK) + ":output", r"1\.002", bits=(4,)),
    Fault("unet", "activation cut at 40", attribute(FIRST, "act", lambda _: Cut()), escaped(FIRST) + r"\.(act:output|conv2:input)", "saturates|above", bits=(8,)),
    Fault("unet", "shortcut 1 % off", after(f"{FIRST}.shortcut", times(1.01)), escaped(FIRST) + r"(\.shortcut)?:output", r"1\.01", bits=(16,)),
)  # fmt: skip
FAULTS = (*MAMBA, *UNET, *ENCODER)
