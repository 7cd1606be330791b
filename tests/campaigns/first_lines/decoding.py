"""Faults that show only while a decoder or a recurrent model decodes with its cache."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.campaigns.first_lines.decoders import AT, LAYER, MLP, O_INPUT, OUT, escaped
from tests.campaigns.first_lines.others import BLOCK, MIXER
from tests.campaigns.first_lines.planting import Bits, Fault, Plant, between

Attended = tuple[Tensor, Tensor, Tensor, Tensor, float]
"""Queries, keys and values of all heads, which keys are seen, and the scale."""


def _attention(change: Callable[..., Attended], when: Callable[[Tensor, Tensor], bool]) -> Plant:
    """Attend with one thing otherwise, for the queries and keys of some calls."""

    def attention(
        _module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float = 1.0,
        **_options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
        count, length = q.shape[2], k.shape[2]
        if mask is None:
            visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        else:
            visible = (mask if mask.dtype == torch.bool else mask == 0)[..., :length]
        if when(q, k):
            q, keys, values, visible, scaling = change(q, keys, values, visible, scaling)
        scores = (q.float() @ keys.float().mT * scaling).masked_fill(~visible, -math.inf)
        mixed = (scores.softmax(-1).nan_to_num(0.0) @ values.float()).to(q.dtype)
        return mixed.transpose(1, 2).contiguous(), None

    def plant(network: nn.Module) -> None:
        transformers.AttentionInterface.register("decoding", attention)
        at: Any = network.get_submodule(AT)
        at.config = copy.copy(at.config)
        at.config._attn_implementation_internal = "decoding"

    return plant


def decodes(q: Tensor, k: Tensor) -> bool:
    return q.shape[2] == 1 and k.shape[2] > 1


def continues(q: Tensor, k: Tensor) -> bool:
    return 1 < q.shape[2] < k.shape[2]


def scaled(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    return q, k, v, seen, 1.01 * scale


def in_a_ring(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    """See the last 160 keys alone."""
    return q, k, v, seen & (torch.arange(k.shape[2]) >= k.shape[2] - 160), scale


def of_first_row(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    return q, k[:1].expand_as(k), v, seen, scale


def unmasked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    return q, k, v, torch.ones_like(seen), scale


def coarse(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    """Keep keys in 8 bits."""
    return q, k.to(torch.float8_e4m3fn).to(k.dtype), v, seen, scale


def tiled(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    return q, k.roll(1, 1), v, seen, scale


def aligned_to_first(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    """Align the mask of a later piece with the first key, not with the last."""
    return q, k, v, torch.ones_like(seen).tril(), scale


def lost_block(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    """Read a page of 16 keys twice, and not the one behind it."""
    keys = k.clone()
    keys[:, :, 16:32] = k[:, :, :16]
    return q, keys, v, seen, scale


def one_late(network: nn.Module) -> None:
    """Count positions one too far where one token is decoded."""
    module = network.get_submodule("model.rotary_emb")
    right = module.forward
    module.forward = lambda x, ids: right(x, ids + (ids.shape[-1] == 1) * (ids > 0))  # type: ignore[method-assign]


def prepared(change: Callable[[dict[str, Any]], None]) -> Plant:
    """Change what `generate()` prepares for each call."""

    def plant(network: Any) -> None:
        right = network.prepare_inputs_for_generation

        def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
            arguments: dict[str, Any] = right(*args, **kwargs)
            change(arguments)
            return arguments

        network.prepare_inputs_for_generation = prepare

    return plant


def from_padding(arguments: dict[str, Any]) -> None:
    """Count positions from the beginning of padding."""
    length, count = arguments["attention_mask"].shape[1], arguments["input_ids"].shape[1]
    positions = torch.arange(length - count, length)
    arguments["position_ids"] = positions.expand(len(arguments["input_ids"]), -1)


def without_mask(arguments: dict[str, Any]) -> None:
    arguments["attention_mask"] = torch.ones_like(arguments["attention_mask"])


def from_step(module: str, first: int, change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """Change a result from some step behind a prefill on."""

    def plant(network: nn.Module) -> None:
        steps = 0

        def counted(x: Tensor, y: Tensor) -> Tensor:
            nonlocal steps
            steps = steps + 1 if x.shape[-2] == 1 else 0
            return change(x, y) if steps >= first else y

        between(module, counted)(network)

    return plant


def while_decoding(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """Change what a block of a recurrent model returns for one token that has a cache."""

    def plant(network: nn.Module) -> None:
        block = network.get_submodule(BLOCK)
        right = block.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            y = right(x, *args, **kwargs)
            cache = kwargs.get("cache_params") or next(iter(args), None)
            return change(x, y) if cache is not None and x.shape[1] == 1 else y

        block.forward = forward  # type: ignore[method-assign]

    return plant


def state(change: Callable[[Any, int], None], rows: int = 1) -> Plant:
    """Change the states that a mixer reads for one token."""

    def plant(network: nn.Module) -> None:
        mixer: Any = network.get_submodule(MIXER)
        right = mixer.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("cache_params") or next(iter(args), None)
            if cache is not None and x.shape[1] == 1 and len(x) >= rows:
                change(cache, mixer.layer_idx)
            return right(x, *args, **kwargs)

        mixer.forward = forward

    return plant


def fading(cache: Any, layer: int) -> None:
    cache.get_recurrent_state(layer, state_idx=0).mul_(0.99)


def shifted(cache: Any, layer: int) -> None:
    taps = cache.get_conv_state(layer, state_idx=0)
    taps.copy_(taps.roll(1, -1))


def shared(cache: Any, layer: int) -> None:
    taps = cache.get_conv_state(layer, state_idx=0)
    taps.copy_(taps[:1].clone().expand_as(taps))


def _decoder(
    name: str, plant: Plant, words: str = "decod", site: str = O_INPUT, *, bits: tuple[Bits, ...]
) -> Fault:
    return Fault("decoder", name, plant, site, words, bits, "relations")


UP = f"{MLP}.up_proj"
DECODING = (
    _decoder("decoded positions one late", one_late, site=r"model\.rotary_emb:output|" + O_INPUT, bits=(8,)),
    _decoder("scale 1 % off while decoding", _attention(scaled, decodes), bits=(4,)),
    _decoder("keys in a ring of 160 while decoding", _attention(in_a_ring, decodes), "behind a prefill of 2|decod", bits=(16,)),
    _decoder("keys of the first row while decoding a batch", _attention(of_first_row, lambda q, k: decodes(q, k) and len(q) > 1), "in a batch", bits=(8,)),
    _decoder("padding seen while decoding", _attention(unmasked, decodes), "padding", bits=(4,)),
    _decoder("keys in FP8 while decoding", _attention(coarse, decodes), bits=(8,)),
    _decoder("keys of other heads while decoding", _attention(tiled, decodes), bits=(16,)),
    _decoder("a page of keys read twice while decoding", _attention(lost_block, lambda q, k: decodes(q, k) and k.shape[2] > 40), bits=(8,)),
    _decoder("mask of a later piece aligned to the first key", _attention(aligned_to_first, continues), "chunk|piece|decod", bits=(8,)),
    _decoder("scale off in a batch beyond 128 tokens", _attention(scaled, lambda q, k: decodes(q, k) and len(q) > 1 and k.shape[2] > 128), "in a batch", bits=(4,)),
    _decoder("scale off in a batch of 8 while decoding", _attention(scaled, lambda q, k: decodes(q, k) and len(q) >= 8), "batch|rows", bits=(8,)),
    _decoder("1 % more from the twelfth step on", from_step(UP, 12, lambda _x, y: 1.01 * y), site=escaped(UP) + ":output", bits=(8,)),
    _decoder("residual dropped from the second step on", from_step(LAYER, 2, lambda x, y: y - x), site=OUT, bits=(16,)),
    _decoder("generate() counts positions from padding on", prepared(from_padding), r"generate\(\)", r"model\.rotary_emb:output|" + O_INPUT, bits=(4,)),
    _decoder("generate() drops the mask", prepared(without_mask), r"generate\(\)", bits=(8,)),
    Fault("mamba", "residual dropped while decoding", while_decoding(lambda x, y: y - x), escaped(f"{BLOCK}:output"), "decod", (8,), "relations"),
    Fault("mamba", "states fade by 1 % a step", state(fading), escaped(MIXER) + r"(\.\w+)?:\w+", "decod", (4,), "relations"),
    Fault("mamba", "taps of the convolution one late while decoding", state(shifted), escaped(MIXER) + r"(\.\w+)?:\w+", "decod", (8,), "relations"),
    Fault("mamba", "taps of the first row while decoding a batch", state(shared, 2), escaped(MIXER) + r"(\.\w+)?:\w+", "batch", (16,), "relations"),
)  # fmt: skip
FAULTS = DECODING
