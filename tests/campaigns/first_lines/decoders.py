"""Faults in a decoder of grouped queries with tied embeddings, and in a mixture of experts."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from tests.campaigns.first_lines.planting import (
    Bits,
    Change,
    Fault,
    Plant,
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
from tests.gate.test_gradient_code import plant as plant_gradient

LAYER = "model.layers.0"
AT, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"


def escaped(site: str) -> str:
    return site.replace(".", r"\.")


def attend(
    *, tiled: bool = False, first: int = 1, window: int = 0, half: bool = False, rows: bool = False,
    of_heads: Change | None = None, unseen: int = 0, cap: float = 0.0,
) -> Plant:  # fmt: skip
    """Attend with one thing otherwise; `first` is the first later token that is not seen."""

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float = 1.0,
        **_options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        groups = q.shape[1] // k.shape[1]
        repeated = (
            (x.repeat(1, groups, 1, 1) if tiled else x.repeat_interleave(groups, 1)) for x in (k, v)
        )
        keys, values = repeated
        if rows and len(keys) > 1:
            keys = torch.cat([keys[:1], keys[:1], keys[2:]])
        scores = q.float() @ keys.float().mT * scaling
        if cap:
            scores = scores.clamp(-cap, cap)
        size = scores.shape[-1]
        visible = torch.ones(size, size, dtype=torch.bool)
        if getattr(module, "is_causal", False):
            visible = visible.tril(first - 1)
            if window:
                visible = visible.triu(1 - window)
            if unseen:
                visible[unseen:, :1] = False
        scores = scores.masked_fill(~visible, -math.inf)
        if mask is not None and not getattr(module, "is_causal", False):
            allowed = mask if mask.dtype == torch.bool else mask == 0
            scores = scores.masked_fill(~allowed, -math.inf)
        weights = scores.softmax(-1)
        if half:
            weights = weights.bfloat16().float()
        mixed = (weights @ values.float()).to(q.dtype)
        mixed = mixed if of_heads is None else of_heads(mixed)
        return mixed.transpose(1, 2).contiguous(), None

    def plant(network: nn.Module, module: str = AT) -> None:
        transformers.AttentionInterface.register("planted", attention)
        at: Any = network.get_submodule(module)
        at.config = copy.copy(at.config)
        at.config._attn_implementation_internal = "planted"

    return plant


def turned(change: Any) -> Plant:
    """Change the cosines and sines that one layer reads."""
    return before(AT, lambda pair: change(*pair), "position_embeddings")  # type: ignore[arg-type]


def wrapped(cos: Tensor, sin: Tensor, after: int = 128) -> tuple[Tensor, Tensor]:
    places = torch.arange(cos.shape[-2]) % after
    return cos[..., places, :], sin[..., places, :]


def wrap_angles(network: nn.Module) -> None:
    module = network.get_submodule("model.rotary_emb")
    right = module.forward
    module.forward = lambda x, ids: right(x, ids % 200)  # type: ignore[method-assign]


def swapped_mlp(of: Any, x: Tensor) -> Tensor:
    return of.down_proj(of.act_fn(of.up_proj(x)) * of.gate_proj(x))  # type: ignore[no-any-return]


def clamped_mlp(of: Any, x: Tensor) -> Tensor:
    """Cut an activation as some models do, where no sample goes."""
    return of.down_proj(of.act_fn(of.gate_proj(x)).clamp(max=60.0) * of.up_proj(x))  # type: ignore[no-any-return]


def coarse_norm(of: Any, x: Tensor) -> Tensor:
    y = x.bfloat16()
    return (of.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)  # type: ignore[no-any-return]


def exchanged_norms(network: nn.Module) -> None:
    attention: Any = network.get_submodule(AT)
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def plain_norm(of: Any, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + of.variance_epsilon)
    return (x.float() * scale).to(x.dtype)


def residual(factor: float) -> Plant:
    return between(LAYER, lambda x, y: y + (factor - 1) * x)


def gradient(module: str, port: str, change: Change) -> Plant:
    return lambda network: plant_gradient(network.get_submodule(module), port, change)


def nibbles(w: Tensor) -> Tensor:
    """Swap neighbors in one row, as nibbles that are read in the other order."""
    w[3] = w[3].unflatten(-1, (-1, 2)).flip(-1).flatten()
    return w


def moved_rows(w: Tensor) -> Tensor:
    w[4:12] = w[4:12].roll(1, 0)
    return w


def in_training(module: str, change: Change) -> Plant:
    """Change a result in training mode alone."""

    def plant(network: nn.Module) -> None:
        owner = network.get_submodule(module)
        between(module, lambda _x, y: change(y) if owner.training else y)(network)

    return plant


O_INPUT, DOWN_INPUT = escaped(f"{AT}.o_proj:input"), escaped(f"{MLP}.down_proj:input")
UP, Q = f"{MLP}.up_proj", f"{AT}.q_proj"
OUT = escaped(f"{LAYER}:output")


def _product(
    name: str, what: str, change: Any, words: str, site: str = UP, *, bits: tuple[Bits, ...]
) -> Fault:
    return Fault("decoder", name, change, f"{escaped(site)}:{what}", words, bits)


DECODER = (
    Fault("decoder", "attention scale 0.5 % off", attribute(AT, "scaling", lambda s: s * 1.005), O_INPUT, r"counts 1\.00|scale|1\.00\d+ times", bits=(4,)),
    Fault("decoder", "heads of keys repeated in another order", attend(tiled=True), O_INPUT, "head|channels|k_proj|another order", bits=(8,)),
    Fault("decoder", "the next token is seen", attend(first=2), O_INPUT, "mask|later|next|token", bits=(16,)),
    Fault("decoder", "a window of 24 tokens", attend(window=24), O_INPUT, "token|window|not used", bits=(4,)),
    Fault("decoder", "the first key is lost from token 20 on", attend(unseen=20), O_INPUT, "token", bits=(8,)),
    Fault("decoder", "attention weights in bfloat16", attend(half=True), O_INPUT, "bfloat16", bits=(8,)),
    Fault("decoder", "keys of the first row for the second", attend(rows=True), O_INPUT, "number 1 of 2 of a batch", bits=(4,)),
    Fault("decoder", "one head 1 % off", attend(of_heads=set_at((slice(None), 2), times(1.01))), O_INPUT, "channels 32 to 47|head", bits=(8,)),
    Fault("decoder", "positions wrap after 200", wrap_angles, escaped("model.rotary_emb:output"), "tokens 200 to 319", bits=(16,)),
    Fault("decoder", "positions wrap after 128 in one layer", turned(wrapped), O_INPUT, "tokens 128 to 319", bits=(4,)),
    Fault("decoder", "direction of rotation reversed in one layer", turned(lambda c, s: (c, -s)), O_INPUT, "subtracted|turns the other way", bits=(8,)),
    Fault("decoder", "query norm of eps 0.01", attribute(f"{AT}.q_norm", "variance_epsilon", lambda _: 1e-2), escaped(f"{AT}.q_norm:output"), "eps|factor each", bits=(16,)),
    Fault("decoder", "norms of queries and keys exchanged", exchanged_norms, escaped(f"{AT}.q_norm:output"), r"q_norm\.weight is \S+k_norm\.weight", bits=(4, 16)),
    Fault("decoder", "key norm without its weight", instead(f"{AT}.k_norm", plain_norm), escaped(f"{AT}.k_norm:output"), "weight|channels are off by a factor each", bits=(4,)),
    Fault("decoder", "norm in bfloat16", instead(f"{LAYER}.input_layernorm", coarse_norm), escaped(f"{LAYER}.input_layernorm:output"), "bfloat16", bits=(8,)),
    Fault("decoder", "residual 1 % off", residual(1.01), OUT, "input|residual|times", bits=(16,)),
    Fault("decoder", "residual dropped", residual(0.0), OUT, "residual", bits=(4,)),
    Fault("decoder", "gate and up swapped", instead(MLP, swapped_mlp), escaped(f"{MLP}.act_fn:input"), "gate_proj|up_proj", bits=(8,)),
    Fault("decoder", "activation cut beyond all samples", instead(MLP, clamped_mlp), DOWN_INPUT, "massive|cut|clamp|saturat", bits=(16,)),
    Fault("decoder", "GELU for SiLU", attribute(MLP, "act_fn", lambda _: nn.GELU()), escaped(f"{MLP}.act_fn:output"), "gelu|GELU", bits=(4,)),
    Fault("decoder", "an embedding row no sample reads", stored("model.embed_tokens", "weight", set_at((95,), lambda _: torch.zeros(64))), escaped("model.embed_tokens:") + "(weight|output)", "95|are zero", bits=(8,)),
    Fault("decoder", "head is another copy: a row of zeros", stored("lm_head", "weight", set_at((17,), lambda w: 0 * w)), "(lm_head:output|lm_head:weight|logits)", "17", bits=(16,)),
    Fault("decoder", "embedding 1 % off", after("model.embed_tokens", times(1.01)), escaped("model.embed_tokens:output"), r"1\.01", bits=(4,)),
    Fault("decoder", "final norm of eps 0.01", attribute("model.norm", "variance_epsilon", lambda _: 1e-2), escaped("model.norm:output"), "eps|factor each", bits=(8,)),
    _product("an input channel lost", "output", before(UP, times(0.0, slice(9, 10))), "input channel 9 is missing", bits=(16,)),
    _product("a tile of outputs 1 % off", "output", after(UP, times(1.01, slice(32, 64))), "channels 32 to 63", bits=(4,)),
    _product("last token lost beyond 100 tokens", "output", between(UP, lambda x, y: at_tokens(0.0, slice(-1, None))(y) if x.shape[-2] > 100 else y), "token|other values at", bits=(8,)),
    _product("wrong above 512 rows", "output", between(Q, lambda x, y: y * 1.01 if x.numel() // x.shape[-1] > 512 else y), r"at [\d,]+ and more rows|1\.01 times", Q, bits=(16,)),
    _product("wrong for more than 16 samples", "output", between(UP, lambda x, y: y * 1.01 if x.dim() == 3 and len(x) > 16 else y), "at 64 samples|samples", bits=(4,)),
    _product("rows of zeros become NaN", "output", between(UP, lambda x, y: y.where(x.any(-1, keepdim=True), torch.nan)), "with rows of zeros", bits=(8,)),
    _product("large values become zero", "output", after(Q, lambda y: y.where(y.abs() < 1e4, 0.0)), "as large", Q, bits=(16,)),
    _product("a NaN is hidden", "output", after(UP, lambda y: y.nan_to_num()), "NaN", bits=(4,)),
    _product("one weight of the wrong sign", "(weight|output)", stored(UP, "weight", set_at((7, 11), lambda w: -w)), "1 of 6,144|sign|channel 7|row 7", bits=(8,)),
    _product("one row of a weight 1 % off", "(weight|output)", stored(UP, "weight", set_at((7,), times(1.01))), "row 7|channel 7|row|64 of", bits=(16,)),
    _product("neighbors of a row swapped", "(weight|output)", stored(UP, "weight", nibbles), "swapped|nibble|row 3|order|neighbor|channel 3", bits=(4,)),
    _product("rows of a weight one late", "(weight|output)", stored(UP, "weight", moved_rows), "rows|moved|order|4", bits=(8,)),
    Fault("decoder", "gradient of a head lost", gradient(f"{AT}.o_proj", "input", times(0.0, slice(16, 32))), O_INPUT + "|" + escaped(LAYER), r"o_proj:input.*channels 16|channels 16", suite="gradients", bits=(16,)),
    Fault("decoder", "gradient of a key norm 1 % off", gradient(f"{AT}.k_norm", "input", times(1.01)), escaped(LAYER), r"k_norm:input.*1\.01|k_proj:output.*1\.01", suite="gradients", bits=(4,)),
    Fault("decoder", "gradient of the tied embedding halved", gradient("model.embed_tokens", "weight", times(0.5)), ".*", r"(embed_tokens|lm_head):weight", suite="gradients", bits=(16,)),
    Fault("decoder", "1 % more in training mode", in_training(UP, times(1.01)), escaped(LAYER), "training", suite="gradients", bits=(4,)),
    Fault("decoder", "detached in training mode", in_training(MLP, lambda y: y.detach()), escaped(LAYER), "training", suite="gradients", bits=(8,)),
)  # fmt: skip


# Mixtures -----------------------------------------------------------------------------------------


def routed(change: Any) -> Plant:
    """Change the scores and the numbers of experts that a router returns."""

    def plant(network: nn.Module) -> None:
        router = network.get_submodule(f"{MLP}.gate")
        right = router.forward

        def forward(x: Tensor) -> Any:
            logits, scores, numbers = right(x)
            return logits, *change(scores, numbers)

        router.forward = forward  # type: ignore[method-assign]

    return plant


def one_zero(scores: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    return scores * torch.tensor([1.0, 0.0], dtype=scores.dtype), numbers


def dropped(scores: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Drop what is beyond a capacity of 16 tokens per expert."""
    places = functional.one_hot(numbers, 8).flatten(0, 1).cumsum(0)
    rank = places.gather(1, numbers.reshape(-1, 1)).reshape(numbers.shape)
    return scores.where(rank <= 16, 0.0), numbers


ROUTER, EXPERTS = f"{MLP}.gate", f"{MLP}.experts"
_AT_ROUTER = escaped(LAYER) + r"(\.mlp(\.gate|\.experts(\.act_fn)?)?)?:\w+"
MIXTURE = (
    Fault("mixture", "experts swapped", routed(lambda s, n: (s, n ^ 1)), _AT_ROUTER, "expert", bits=(4,)),
    Fault("mixture", "scores not normalized", routed(lambda s, n: (s * 0.8, n)), _AT_ROUTER, r"score|0\.8|times", bits=(8,)),
    Fault("mixture", "second expert left out", routed(one_zero), _AT_ROUTER, "expert|score|channel|zero", bits=(16,)),
    Fault("mixture", "scores in another order", routed(lambda s, n: (s.flip(-1), n)), _AT_ROUTER, "score|order|expert|channel|swapped", bits=(4,)),
    Fault("mixture", "tokens beyond a capacity dropped", routed(dropped), _AT_ROUTER, "token|score|expert", bits=(8,)),
    Fault("mixture", "routing of the token before", routed(lambda s, n: (s.roll(1, 0), n.roll(1, 0))), _AT_ROUTER, "token|expert|score", bits=(16,)),
    Fault("mixture", "router 1 % off", stored(ROUTER, "weight", times(1.01)), _AT_ROUTER, "router|weight|score|times|elements", bits=(4,)),
    Fault("mixture", "one expert's scores 5 % more", stored(ROUTER, "weight", set_at((2,), times(1.05))), _AT_ROUTER, "channel 2 of 8 is 1.05 times|1 of 8 rows", bits=(8,)),
    Fault("mixture", "down weights of two experts swapped", stored(EXPERTS, "down_proj", lambda w: w[[1, 0, *range(2, 8)]]), _AT_ROUTER, "expert", bits=(16,)),
    Fault("mixture", "one expert 1 % off", stored(EXPERTS, "down_proj", set_at((3,), times(1.01))), _AT_ROUTER, "expert", bits=(4,)),
    Fault("mixture", "gate and up of an expert swapped", stored(EXPERTS, "gate_up_proj", set_at((1,), lambda w: w.roll(48, 0))), _AT_ROUTER, "expert", bits=(8,)),
    Fault("mixture", "a row of one expert lost", stored(EXPERTS, "down_proj", set_at((5, 6), lambda w: 0 * w)), _AT_ROUTER, "expert|channel 6", bits=(16,)),
    Fault("mixture", "experts read rows of one sample late", before(EXPERTS, lambda x: x.roll(1, 0)), _AT_ROUTER, "token|hidden|late|row", bits=(4,)),
    Fault("mixture", "experts' sum 0.5 % off", after(EXPERTS, times(1.005)), _AT_ROUTER, r"1\.00", bits=(8,)),
    Fault("mixture", "residual dropped", residual(0.0), OUT, "residual", bits=(16,)),
    Fault("mixture", "gradient of an expert lost", gradient(EXPERTS, "input", at_tokens(0.0, slice(5, 6))), escaped(LAYER), "token|no gradient", suite="gradients", bits=(4,)),
)  # fmt: skip
FAULTS = (*DECODER, *MIXTURE)
