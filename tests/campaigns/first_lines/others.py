"""Faults in a recurrent model, a U-Net and an encoder of padded batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.campaigns.first_lines.decoders import (
    attend,
    escaped,
    gradient,
    in_training,
    plain_norm,
)
from tests.campaigns.first_lines.planting import (
    Fault,
    after,
    at_tokens,
    attribute,
    before,
    between,
    instead,
    set_at,
    stored,
    times,
)

# Mamba --------------------------------------------------------------------------------------------

BLOCK = "backbone.layers.1"
MIXER = f"{BLOCK}.mixer"
SCAN = escaped(f"{MIXER}.out_proj:input")
CONV = escaped(f"{MIXER}.x_proj:input")


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
    Fault("mamba", "decay 1 % off", stored(MIXER, "A_log", lambda a: a + 0.01), SCAN, "A_log|decay|times"),
    Fault("mamba", "skip left out", stored(MIXER, "D", torch.zeros_like), SCAN, "D"),
    Fault("mamba", "skip of one channel 5 % off", stored(MIXER, "D", set_at((9,), times(1.05))), SCAN, "D|channel 9"),
    Fault("mamba", "step bias 5 % off", stored(f"{MIXER}.dt_proj", "bias", times(1.05)), SCAN, "dt_proj.bias|bias"),
    Fault("mamba", "states begin anew at token 200", reset(200), ".*" + escaped(MIXER) + ".*", "text longer|calls|token"),
    Fault("mamba", "bias of the convolution lost", stored(f"{MIXER}.conv1d", "bias", torch.zeros_like), CONV, "conv1d.bias|bias"),
    Fault("mamba", "taps of the convolution reversed", stored(f"{MIXER}.conv1d", "weight", lambda w: w.flip(-1)), CONV, "conv1d.weight|tap|order|revers"),
    Fault("mamba", "B and C swapped", after(f"{MIXER}.x_proj", parts_swapped), escaped(f"{MIXER}.x_proj:output"), "channels|order"),
    Fault("mamba", "gate 1 % off", after(f"{MIXER}.in_proj", times(1.01, slice(64, 128))), escaped(f"{MIXER}.in_proj:output"), "channels 64 to 127"),
    Fault("mamba", "norm without its weight", instead(f"{BLOCK}.norm", plain_norm), escaped(f"{BLOCK}.norm:output"), "weight"),
    Fault("mamba", "residual 1 % off", between(BLOCK, lambda x, y: y + 0.01 * x), escaped(f"{BLOCK}:output"), "input|residual|times"),
    Fault("mamba", "a row of the step's weight 2 % off", stored(f"{MIXER}.dt_proj", "weight", set_at((3,), times(1.02))), ".*" + escaped(MIXER) + ".*", "dt_proj|channel 3"),
    Fault("mamba", "an input channel of a product lost", before(f"{MIXER}.out_proj", times(0.0, slice(5, 6))), escaped(f"{MIXER}.out_proj:output"), "input channel 5 is missing"),
    Fault("mamba", "odd lengths 1 % off", between(f"{MIXER}.in_proj", lambda x, y: y * (1.01 if x.shape[-2] % 2 else 1)), escaped(f"{MIXER}.in_proj:output"), r"77 tokens|other values|1\.01"),
    Fault("mamba", "activation as hardswish", attribute(MIXER, "activation", lambda _: "relu"), CONV, "relu|ReLU|negative"),
    Fault("mamba", "final norm of eps 0.01", attribute("backbone.norm_f", "variance_epsilon", lambda _: 1e-2), escaped("backbone.norm_f:output"), ""),
    Fault("mamba", "one weight of the wrong sign", stored(f"{MIXER}.in_proj", "weight", set_at((7, 11), lambda w: -w)), escaped(f"{MIXER}.in_proj:") + "(weight|output)", "sign|1 of 4,096|channel 7"),
    Fault("mamba", "gradient of the gate 1 % off", gradient(f"{MIXER}.in_proj", "output", times(1.01)), escaped(BLOCK), r"in_proj.*1\.01", suite="gradients"),
    Fault("mamba", "gradient of early tokens lost", gradient(f"{MIXER}.x_proj", "output", at_tokens(0.0, slice(0, 4))), escaped(BLOCK), "no gradient arrives", suite="gradients"),
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
_BLOCK0 = escaped(FIRST) + r"\.(norm2:input|conv1:output)"
UNET = (
    Fault("unet", "time left out", instead(FIRST, block_without("no time")), escaped(f"{FIRST}.norm2:input"), "time|same vector"),
    Fault("unet", "time 1 % off", instead(FIRST, block_without("time 1 %")), escaped(f"{FIRST}.norm2:input"), "time|same vector"),
    Fault("unet", "time of the first sample for all", instead(FIRST, block_without("time of the first sample")), escaped(f"{FIRST}.norm2:input"), "number 1"),
    Fault("unet", "activation left out", instead(FIRST, block_without("no activation")), escaped(FIRST) + r"\.(conv2|act):input", "in other calls|act"),
    Fault("unet", "shortcut left out", instead(FIRST, block_without("no shortcut")), ".*", "shortcut"),
    Fault("unet", "borders from the other side", instead(f"{FIRST}.conv2", circular), escaped(f"{FIRST}.conv2:output"), "border|row|column|token|place"),
    Fault("unet", "taps turned", stored(f"{FIRST}.conv2", "weight", lambda w: w.flip(-1)), _CONV2, "order|turned|swapped|weight|revers|of 2,304"),
    Fault("unet", "input channel lost", before(f"{FIRST}.conv2", set_at((slice(None), 5), lambda x: 0 * x)), escaped(f"{FIRST}.conv2:output"), "channel 5"),
    Fault("unet", "output channel 1 % off", after(f"{FIRST}.conv2", set_at((slice(None), 5), times(1.01))), escaped(f"{FIRST}.conv2:output"), "channel 5"),
    Fault("unet", "last column of pixels lost", after(f"{FIRST}.conv2", set_at((..., -1), lambda x: 0 * x)), escaped(f"{FIRST}.conv2:output"), "token|column|place|zero"),
    Fault("unet", "second image of a batch 1 % off", after(f"{FIRST}.conv1", set_at((slice(1, None),), times(1.01))), escaped(f"{FIRST}.conv1:output"), r"number 1|sample|1\.01"),
    Fault("unet", "bias of a convolution lost", stored(f"{FIRST}.conv1", "bias", torch.zeros_like), escaped(f"{FIRST}.conv1:output"), "bias|off by"),
    Fault("unet", "group norm of 2 groups", instead(f"{FIRST}.norm2", eight_groups), escaped(f"{FIRST}.norm2:output"), ""),
    Fault("unet", "group norm of eps 0.01", attribute(f"{FIRST}.norm1", "eps", lambda _: 1e-2), escaped(f"{FIRST}.norm1:output"), ""),
    Fault("unet", "attention scale 1 % off", attribute("attention", "scale", lambda s: 1.01 * s), escaped("attention.out:input"), r"qkv|scale|1\.0"),
    Fault("unet", "softmax along the other axis", instead("attention", wrong_axis), escaped("attention.out:input"), "softmax|axis|qkv|elements"),
    Fault("unet", "skip connection in another order", before(LAST, lambda x: x.roll(8, 1)), escaped(LAST) + r"(\.norm1)?:input", "channels|order|larger|first"),
    Fault("unet", "skip connection of zeros", before(LAST, set_at((slice(None), slice(16, None)), lambda x: 0 * x)), escaped(LAST) + r"(\.norm1)?:input", "channels 16|zero|first"),
    Fault("unet", "large values cut in a convolution", after(f"{LAST}.conv1", lambda y: y.where(y.abs() < 1e4, 0.0)), escaped(f"{LAST}.conv1:output"), "as large"),
    Fault("unet", "one weight of the wrong sign", stored(f"{LAST}.conv1", "weight", set_at((3, 4, 1, 1), lambda w: -w)), escaped(f"{LAST}.conv1:") + "(weight|output)", "sign|1 of 1,728|channel 3|index 4 of 24"),
    Fault("unet", "upsampling moved by a pixel", after("larger", lambda y: y.roll(1, -1)), "larger:output", "row|moved|later|token|place|column|elements"),
)  # fmt: skip

# Encoder ------------------------------------------------------------------------------------------

ENCODER_LAYER = "encoder.layer.0"
SELF = f"{ENCODER_LAYER}.attention.self"
MIXED = escaped(f"{ENCODER_LAYER}.attention.output.dense:input")
QUERY = f"{SELF}.query"


def _attended(**options: Any) -> Any:
    plant = attend(**options)
    return lambda network: plant(network, SELF)  # type: ignore[call-arg]


def unmasked(network: nn.Module) -> None:
    module = network.get_submodule(SELF)
    right = module.forward
    module.forward = lambda x, *_args, **_kwargs: right(x)  # type: ignore[method-assign]


def one_late(ids: Tensor) -> Tensor:
    return ids.roll(1, -1)


def without_dense_residual(of: Any, hidden: Tensor, x: Tensor) -> Tensor:
    return of.LayerNorm(of.dropout(of.dense(hidden)) + 0.99 * x)  # type: ignore[no-any-return]


def no_bias_norm(of: Any, x: Tensor) -> Tensor:
    return functional.layer_norm(x, of.normalized_shape, of.weight, None, of.eps)


ENCODER = (
    Fault("encoder", "padding is attended to", unmasked, MIXED, "number [012]|padding|mask|token"),
    Fault("encoder", "attention scale 1 % off", attribute(SELF, "scaling", lambda s: 1.01 * s), MIXED, r"counts 1\.0|scale|1\.0\d+ times"),
    Fault("encoder", "one head of zeros", _attended(of_heads=set_at((slice(None), 2), lambda x: 0 * x)), MIXED, "channels 32 to 47"),
    Fault("encoder", "attention weights in bfloat16", _attended(half=True), MIXED, "", (4, 8)),
    Fault("encoder", "bias of the queries lost", stored(QUERY, "bias", torch.zeros_like), escaped(f"{QUERY}:output"), "bias|off by"),
    Fault("encoder", "norm without its bias", instead(f"{ENCODER_LAYER}.output.LayerNorm", no_bias_norm), escaped(f"{ENCODER_LAYER}.output.LayerNorm:output"), "bias"),
    Fault("encoder", "norm of eps 0.01", attribute(f"{ENCODER_LAYER}.attention.output.LayerNorm", "eps", lambda _: 1e-2), escaped(f"{ENCODER_LAYER}.attention.output.LayerNorm:output"), ""),
    Fault("encoder", "residual 1 % off", instead(f"{ENCODER_LAYER}.attention.output", without_dense_residual), escaped(f"{ENCODER_LAYER}.attention.output.LayerNorm:input"), r"0\.99|residual|input"),
    Fault("encoder", "GELU by tanh", attribute(f"{ENCODER_LAYER}.intermediate", "intermediate_act_fn", lambda _: nn.GELU(approximate="tanh")), escaped(f"{ENCODER_LAYER}.intermediate.intermediate_act_fn:output"), "tanh|gelu", (4, 8)),
    Fault("encoder", "positions one late", before("embeddings.position_embeddings", one_late), escaped("embeddings.position_embeddings:output"), "row|token|late|moved"),
    Fault("encoder", "an embedding row no sample reads", stored("embeddings.word_embeddings", "weight", set_at((95,), lambda _: torch.zeros(64))), escaped("embeddings.word_embeddings:") + "(weight|output)", "95"),
    Fault("encoder", "pooled from the second token", before("pooler", lambda x: x[:, 1:]), escaped("pooler.dense:input"), "token|elements|row|other"),
    Fault("encoder", "pooler without tanh", attribute("pooler", "activation", lambda _: nn.Identity()), "(pooler.activation:output|output.pooler_output|pooler:output)", "tanh|elements"),
    Fault("encoder", "third row of a batch 1 % off", after(f"{ENCODER_LAYER}.output.dense", set_at((slice(2, None),), times(1.01))), escaped(f"{ENCODER_LAYER}.output.dense:output"), r"number 2|1\.01|sample"),
    Fault("encoder", "a tile of outputs lost", after(f"{ENCODER_LAYER}.intermediate.dense", times(0.0, slice(64, 96))), escaped(f"{ENCODER_LAYER}.intermediate.dense:output"), "channels 64 to 95"),
    Fault("encoder", "one row alone 1 % off", between(QUERY, lambda x, y: y * (1.01 if len(x) == 1 else 1)), escaped(f"{QUERY}:output"), r"one row alone|1\.01|other values"),
    Fault("encoder", "wrong above 512 rows", between(QUERY, lambda x, y: y * 1.01 if x.numel() // x.shape[-1] > 512 else y), escaped(f"{QUERY}:output"), r"more rows|1\.01"),
    Fault("encoder", "two rows of a weight swapped", stored(QUERY, "weight", lambda w: w[[1, 0, *range(2, 64)]]), escaped(f"{QUERY}:") + "(weight|output)", "swapped|row|order|channel"),
    Fault("encoder", "1 % more in training mode", in_training(QUERY, times(1.01)), escaped(ENCODER_LAYER), "training", suite="gradients"),
)  # fmt: skip
FAULTS = (*MAMBA, *UNET, *ENCODER)
