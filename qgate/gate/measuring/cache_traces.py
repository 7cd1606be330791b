"""Traces of attention over a quantized cache: what was written, what the last query read.

The same keys and values of the reference are served three ways, each by a cache that served another
request before: token by token, as one prefill, and as prefill in chunks. A trace of the free run is
taken as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qgate.gate.measuring.passes import flow
from qgate.gate.measuring.segments import several
from qgate.hooks import ModuleHooks
from qgate.models import Model
from qgate.models.rows import is_text
from qgate.modes import Quantized
from qgate.modes.attention.core import AttentionCore, QuantizedCache
from qgate.modes.attention.planning import CachedAttention

TOKENS = 77
"""Tokens of each request: beyond the first capacity of a cache, and no multiple of a chunk."""
_CHUNKS = (16, 32, 1, 16)
RUN = "the free run"


@dataclass
class CacheTrace:
    """One layer and one way to serve it.

    queries, keys, values   as the projections gave them, (batch, heads, tokens, width)
    sources                 what was cast, keys and values
    read                    keys and values that the last query read
    context                 of every token
    earlier                 keys and values of the request that the cache served before
    """

    at: str
    way: str
    queries: Tensor
    keys: Tensor
    values: Tensor
    chunks: list[int]
    sources: dict[str, Tensor] = field(default_factory=dict)
    read: dict[str, Tensor] = field(default_factory=dict)
    context: Tensor | None = None
    earlier: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return self.queries.shape[2]


def attentions_of(quantized: Quantized) -> dict[str, CachedAttention]:
    """Return the attentions of a mode by name."""
    modules = quantized.model.module.named_modules()
    return {name: module for name, module in modules if isinstance(module, CachedAttention)}


@torch.no_grad()
def served_traces(quantized: Quantized, base: Model) -> Iterator[CacheTrace]:
    """Serve the reference's queries, keys and values in every way, layer by layer."""
    requests = several(base.inputs)
    requests = requests[:, :TOKENS] if is_text(requests) else requests
    attentions = attentions_of(quantized)
    names = {f"{at}.{leaf}_proj" for at in attentions for leaf in "qkv"}
    sites = [site for site in base.sites() if site.module in names and site.port == "output"]
    flowing = flow(base, sites, requests)
    for at, attention in attentions.items():
        sides = [attention.per_head(flowing[f"{at}.{leaf}_proj:output"]) for leaf in "qkv"]
        cache = QuantizedCache(attention.core)
        length = sides[0].shape[2]
        # Another request: the same texts, one row further and backwards.
        earlier = [side.roll(1, 0).flip(2) for side in sides]
        for way, chunks in ways(length).items():
            cache.reset()
            cache.write(earlier[1], earlier[2])
            cache.attend(earlier[0])
            cache.reset()
            served = CacheTrace(at, way, sides[0], sides[1], sides[2], chunks)
            served.earlier = earlier[1], earlier[2]
            with watched(attention.core, served):
                served.context = _serve(cache, served)
            yield served


def ways(length: int) -> dict[str, list[int]]:
    """Return the numbers of tokens that each way of serving writes at once."""
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(min(_CHUNKS[len(chunks) % len(_CHUNKS)], length - sum(chunks)))
    return {"decode": [1] * length, "prefill": [length], "chunked_prefill": chunks}


def _serve(cache: QuantizedCache, trace: CacheTrace) -> Tensor:
    """Write and attend, chunk by chunk."""
    start, context = 0, []
    for count in trace.chunks:
        part = slice(start, start + count)
        cache.write(trace.keys[:, :, part], trace.values[:, :, part])
        context.append(cache.attend(trace.queries[:, :, part]))
        start += count
    return torch.cat(context, 2)


@contextmanager
def watched(core: AttentionCore, trace: CacheTrace) -> Iterator[None]:
    """Take what is cast, and what the last query reads."""
    cast: dict[str, list[Tensor]] = {"keys": [], "values": []}
    latest: dict[str, Tensor] = {}

    def attended(_module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
        latest["keys"], latest["values"] = args[1], args[2]

    with ModuleHooks() as hooks:
        for side, parts in cast.items():

            def took(
                _module: nn.Module, args: tuple[Any, ...], _kwargs: Any,
                parts: list[Tensor] = parts,
            ) -> None:  # fmt: skip
                parts.append(args[0].detach())

            hooks.add(getattr(core, side), took)
        hooks.add(core.attend, attended)
        yield
        trace.sources = {side: torch.cat(parts, 2) for side, parts in cast.items() if parts}
        trace.read = {side: tensor.detach().clone() for side, tensor in latest.items()}


class RunTraces:
    """Traces of the first pass of a free run: its first and its last sample."""

    def __init__(self, quantized: Quantized) -> None:
        self.attentions = attentions_of(quantized)
        self.traces: dict[str, CacheTrace] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take the tensors of the first pass inside."""
        with ModuleHooks() as hooks:
            for at, attention in self.attentions.items():
                self._watch(hooks, at, attention)
            yield

    def _watch(self, hooks: ModuleHooks, at: str, attention: CachedAttention) -> None:
        tapped: dict[str, Tensor] = {}

        def take(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, result: Tensor) -> None:
                tapped[name] = result

            return hook

        def cast(name: str) -> Any:
            def hook(_module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
                tapped[name] = args[0]

            return hook

        def attended(_module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
            tapped["read keys"], tapped["read values"] = args[1], args[2]

        def finish(_module: nn.Module, _args: Any, _result: Any) -> None:
            if at not in self.traces and {"q", "read keys", "keys", "context"} <= tapped.keys():
                self.traces[at] = _of_run(at, attention, tapped)
            tapped.clear()

        for leaf in "qkv":
            hooks.add(attention.get_submodule(f"{leaf}_proj"), None, take(leaf))
        for side in ("keys", "values"):
            hooks.add(attention.core.get_submodule(side), cast(side))
        hooks.add(attention.core.attend, attended)
        hooks.add(attention.o_proj, cast("context"))
        hooks.add(attention, None, finish)


def _of_run(at: str, attention: CachedAttention, tapped: dict[str, Tensor]) -> CacheTrace:
    rows = sorted({0, len(tapped["q"]) - 1})
    some = {name: tensor[rows].detach().clone() for name, tensor in tapped.items()}
    q, k, v = (attention.per_head(some[leaf]) for leaf in "qkv")
    trace = CacheTrace(at, RUN, q, k, v, [1] * q.shape[2])
    trace.sources = {side: some[side] for side in ("keys", "values")}
    trace.read = {side: some[f"read {side}"] for side in ("keys", "values")}
    trace.context = attention.per_head(some["context"])
    return trace
