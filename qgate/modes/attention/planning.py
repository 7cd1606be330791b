"""The plan of a mode that quantizes attention, and the network that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.formats import Quantizer
from qgate.models.kv_cache import LayerCache
from qgate.models.llama import Attention
from qgate.modes.attention.casting import StoredSide, quantizer_of
from qgate.modes.attention.choices import SIDES, AttentionChoices
from qgate.modes.attention.core import AttentionCore, LatentCore, QuantizedCache
from qgate.modes.attention.sources import (
    AttentionSource,
    LatentSource,
    layer_of,
    named_attentions,
    source_of,
)
from qgate.modes.plan import PlanEntry, numbers_of

if TYPE_CHECKING:
    from qgate.models.model import Model

Side = Literal["queries", "keys", "keys_before_rope", "values"]
Ranges = Mapping[str, float]
"""Calibrated largest magnitudes, by what `range_site` calls them."""


class CachedAttention(nn.Module):
    """A replacement of an attention that shares and trains its parameters."""

    def __init__(self, source: AttentionSource, core: AttentionCore) -> None:
        super().__init__()
        for leaf in source.parts:
            if getattr(source.module, leaf, None) is not None:
                setattr(self, leaf, getattr(source.module, leaf))
        self.source, self.core = source, core
        self.leaves = {side: source.leaves(side) for side in "qkv"}

    @property
    def last(self) -> nn.Linear:
        """Return the projection of the context."""
        return self.get_submodule(self.source.last)  # type: ignore[return-value]

    def new_cache(self) -> LayerCache:
        """Return an empty cache of this layer."""
        return QuantizedCache(self.core)

    def forward(self, hidden: Tensor, cache: LayerCache | None = None) -> Tensor:
        (q, k, v), gate = self.source.projections(hidden)
        if cache is not None:
            cache.write(k, v)
            context = cache.attend(q)
        elif q.requires_grad or k.requires_grad or v.requires_grad:
            context = self.core.whole(q, k, v)
        else:
            context = self.core.decode(q, k, v)
        context = context if gate is None else context * gate
        return self.last(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class CachedDecoderAttention(CachedAttention):
    """The same in a decoder of transformers, whose cache has the quantized one of each layer."""

    def __init__(self, source: AttentionSource, core: AttentionCore, layer_idx: int) -> None:
        super().__init__(source, core)
        self.layer_idx = layer_idx

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_more: object,
    ) -> tuple[Tensor, None]:
        cache = None if past_key_values is None else self._cache_in(past_key_values)
        if attention_mask is not None:
            self._check_mask(attention_mask, hidden_states.shape[1], cache)
        if cache is not None:
            # Lengths and positions are counted by the cache of transformers.
            counted = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
            past_key_values.update(counted, counted, self.layer_idx)
            past_key_values.layers[self.layer_idx].quantized = cache
            # Gradients go through a whole text, and not through the memory of a cache.
            trains = torch.is_grad_enabled() and self.last.weight.requires_grad
            cache = None if trains and not cache.length else cache
        return super().forward(hidden_states, cache), None

    def _cache_in(self, past: Any) -> QuantizedCache:
        """Return the quantized cache of this layer in one of transformers."""
        layer = past.layers[self.layer_idx] if self.layer_idx < len(past.layers) else None
        cache = getattr(layer, "quantized", None)
        length = 0 if layer is None else layer.get_seq_length()
        cache = QuantizedCache(self.core) if cache is None or not length else cache
        if cache.length != length:
            raise QgateError(
                f"a cache of {length} tokens has {cache.length} that this mode stored: fill it by "
                "the network of the mode, under torch.no_grad()."
            )
        return cache

    def _check_mask(self, mask: Tensor, count: int, cache: QuantizedCache | None) -> None:
        """Refuse padding: queries see all tokens before them, or those in a window."""
        length = count + (0 if cache is None else cache.length)
        sees = mask if mask.dtype == torch.bool else mask == 0
        causal = self.core.visible(count, length, mask.device)
        # A cache with a window holds the last tokens alone, and the mask is about those.
        columns = sees.shape[-1]
        seen, before = causal[:, -columns:], causal[:, :-columns]
        is_plain = (
            mask.dim() == 4
            and sees.shape[2:] == seen.shape
            and bool((sees == seen).all())
            and not bool(before.any())
        )
        if not is_plain:
            raise QgateError(
                "modes of the cache take texts without padding, and masks of nothing but later "
                "tokens: leave attention_mask out."
            )


def range_site(at: str, side: Side, head: int | None = None) -> str:
    """Return the name of a calibrated range: of all heads, or of one."""
    return f"{at}.cache:{side}" + ("" if head is None else f"[{head}]")


def cache_site(at: str, side: str) -> str:
    """Return the name of the place where keys or values are stored, or others are computed."""
    return f"{at}.{'cache' if side in ('keys', 'values') else 'attention'}:{side}"


def attention_entries(
    choices: AttentionChoices, model: Model, ranges: Ranges, samples: int
) -> list[PlanEntry]:
    """List what the caches of a model store; `samples` is the number of calibrated ones."""
    check_fit(choices, model)
    return [
        entry
        for at, source in named_attentions(model)
        for side in choices.chosen
        for entry in [_entry(at, side, source, choices, ranges, samples)]
    ]


def check_fit(choices: AttentionChoices, model: Model) -> None:
    """Refuse a model without attention that a mode can quantize, or with texts too long for it."""
    sources = [source for _, source in named_attentions(model)]
    tokens = max((x.shape[1] for x in model.inputs if x.dim() == 2), default=0)
    for source in sources:
        source.positions.check_length(tokens)
    windows = [source.window for source in sources]
    if all(0 < window <= choices.window for window in windows):
        raise QgateError(
            f"in this mode the last {choices.window} tokens stay as they are, and queries of "
            f"{model.name} see {max(windows)} at most: nothing that they read is quantized. Choose "
            "another mode."
        )
    if choices.is_computed and any(isinstance(source, LatentSource) for source in sources):
        raise QgateError(
            f"the attention of {model.name} reads latents of all heads, and modes of its products "
            "are for keys and values: choose a mode of the cache, kv-*."
        )


def _entry(
    at: str,
    side: str,
    source: AttentionSource,
    choices: AttentionChoices,
    ranges: Ranges,
    samples: int,
) -> PlanEntry:
    choice = choices.chosen[side]
    quantizer = _quantizer(at, side, source, choices, ranges)
    does = [choice.words()]
    if isinstance(source, LatentSource):
        does.insert(0, "RoPE part of the keys" if side == "keys" else "latent of keys and values")
    if side == "keys" and choices.before_rope:
        does.append("before RoPE")
    if quantizer.rotation and choices.rotates(side):
        does.append(f"rotated by {len(quantizer.rotation)}")
    if choices.sinks and side in ("keys", "values"):
        does.append(f"first {choices.sinks} tokens as they are")
    if choices.window and side in ("keys", "values"):
        does.append(f"last {choices.window} tokens as they are")
        if 0 < source.window <= choices.window:
            does.append(f"never read quantized: queries see {source.window} tokens")
    scale = quantizer.scale if isinstance(quantizer.scale, float) else None
    origin = "amax of its elements"
    if choice.share == "unit":
        origin = "1 at its largest value"
    if choice.is_static:
        of = "each head" if choice.share == "head" else "the tensor"
        origin = f"calibrated, largest of {samples} samples in {of}"
    scales = numbers_of(quantizer.scale) if choice.is_static else ()
    return PlanEntry(cache_site(at, side), ", ".join(does), scale, origin, calibrated=scales)


def _quantizer(
    at: str,
    side: str,
    source: AttentionSource,
    choices: AttentionChoices,
    ranges: Ranges,
) -> Quantizer:
    choice = choices.chosen[side]
    count, width = source.shape_of(side)
    reaches = []
    if choice.is_static:
        kind = ranged_side(side, choices)
        heads = range(count) if choice.share == "head" else [None]
        reaches = [ranges[range_site(at, kind, head)] for head in heads]
    return quantizer_of(choice, count, width, reaches, choices.rotates(side))


def ranged_side(side: str, choices: AttentionChoices) -> Side:
    """Return the calibrated tensor whose range the scales of a side are made from."""
    if side == "keys":
        return "keys_before_rope" if choices.before_rope else "keys"
    return "queries" if side == "queries" else "values"


def cache_attentions(
    model: Model, network: nn.Module, choices: AttentionChoices, ranges: Ranges
) -> None:
    """Replace every attention of a network that shares the parameters of a model, in place."""
    for at, source in named_attentions(model):
        sides = {side: StoredSide(None, None) for side in SIDES}
        for side, choice in choices.chosen.items():
            sides[side] = StoredSide(choice, _quantizer(at, side, source, choices, ranges))
        shared = source_of(network.get_submodule(at), at)
        assert shared is not None
        parts = choices, sides, shared.positions.turn, shared.scaling, shared.window, shared.cap
        core = AttentionCore(*parts)
        if isinstance(shared, LatentSource):
            core = LatentCore(shared, *parts)
        block, _, leaf = at.rpartition(".")
        is_own = isinstance(shared.module, Attention)
        replacement = CachedAttention(shared, core)
        if not is_own:
            replacement = CachedDecoderAttention(shared, core, layer_of(shared.module, at))
        setattr(network.get_submodule(block), leaf, replacement.eval())
