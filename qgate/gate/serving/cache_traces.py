"""Traces of attention over a quantized cache: what was written, what the last query read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from qgate.gate.measuring.passes import flow
from qgate.gate.segments.probes import several
from qgate.gate.serving.served_state import RUN, ways
from qgate.hooks import ModuleHooks
from qgate.models import Model
from qgate.models.rows import is_text
from qgate.modes import Quantized
from qgate.modes.attention.core import AttentionCore, QuantizedCache
from qgate.modes.attention.planning import CachedAttention
from qgate.modes.attention.sources import sum_of

TOKENS = 77
"""Tokens of each request: beyond the first capacity of a cache, and no multiple of a chunk."""
_CHUNKS = (16, 32, 1, 16)


@dataclass
class CacheTrace:
    """One layer and one way to serve it.

    queries, keys, values   as the projections gave them, (batch, heads, tokens, width)
    sources                 what was cast, keys and values
    read                    keys and values that the last query read, and what every query asked
    squares                 scores, weights and cast weights, (batch, heads, queries, tokens)
    context                 of every token
    gate                    factors of the context, where the attention has some
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
    squares: dict[str, Tensor] = field(default_factory=dict)
    context: Tensor | None = None
    gate: Tensor | None = None
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
    names = {f"{at}.{leaf}" for at, of in attentions.items() for leaf in chain(*of.leaves.values())}
    sites = [site for site in base.sites() if site.module in names and site.port == "output"]
    flowing = flow(base, sites, requests)
    for at, attention in attentions.items():
        source = attention.source
        sides = [
            source.side_of(side, sum_of(flowing[f"{at}.{leaf}:output"] for leaf in leaves))
            for side, leaves in attention.leaves.items()
        ]
        cache = QuantizedCache(attention.core)
        length = sides[0].shape[2]
        # Another request: the same texts, one row further and backwards.
        earlier = [side.roll(1, 0).flip(2) for side in sides]
        for way, chunks in ways(length, _CHUNKS).items():
            cache.reset()
            cache.write(earlier[1], earlier[2])
            cache.attend(earlier[0])
            cache.reset()
            served = CacheTrace(at, way, sides[0], sides[1], sides[2], chunks)
            served.earlier = earlier[1], earlier[2]
            tapped = TappedCore(attention.core)
            with ModuleHooks() as hooks:
                tapped.watch(hooks)
                served.context = _serve(cache, served)
            tapped.fill(served)
            yield served


def _serve(cache: QuantizedCache, trace: CacheTrace) -> Tensor:
    """Write and attend, chunk by chunk."""
    start, context = 0, []
    for count in trace.chunks:
        part = slice(start, start + count)
        cache.write(trace.keys[:, :, part], trace.values[:, :, part])
        context.append(cache.attend(trace.queries[:, :, part]))
        start += count
    return torch.cat(context, 2)


class TappedCore:
    """Tensors of one attention, taken at its casts and where its queries read."""

    def __init__(self, core: AttentionCore) -> None:
        self.core = core
        self.rows: Sequence[int] | None = None
        self.parts: dict[str, list[Tensor]] = {}
        self.latest: dict[str, Tensor] = {}

    def watch(self, hooks: ModuleHooks) -> None:
        """Add the hooks; those in softmax only where more than the cache is quantized."""
        for side in ("keys", "values", "queries", "output"):
            self._tap_input(hooks, self.core.get_submodule(side), side)
        hooks.add(self.core.attend, self._attended)
        hooks.add(self.core.join, self._joined)
        if self.core.choices.is_computed:
            self._tap_input(hooks, self.core.attend.softmax, "scores")
            self._tap_input(hooks, self.core.attend.weights, "weights")
            hooks.add(self.core.attend.weights, None, self._weighed)

    def fill(self, trace: CacheTrace) -> None:
        """Put what was taken into a trace."""
        squares = ("scores", "weights", "cast weights")
        for name, parts in self.parts.items():
            if name not in squares:
                (trace.read if name == "asked" else trace.sources)[
                    "queries" if name == "asked" else name
                ] = torch.cat(parts, 2)
            else:
                trace.squares[name] = _square(parts, trace.queries.shape[1], trace.length)
        trace.read |= {side: self._some(tensor).clone() for side, tensor in self.latest.items()}

    def clear(self) -> None:
        self.parts, self.latest = {}, {}

    def _some(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor if self.rows is None else tensor[list(self.rows)]

    def _tap_input(self, hooks: ModuleHooks, module: nn.Module, name: str) -> None:
        def took(_module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
            self.parts.setdefault(name, []).append(self._some(args[0]))

        hooks.add(module, took)

    def _attended(self, _module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
        self.parts.setdefault("asked", []).append(self._some(args[0]))

    def _joined(self, _module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
        self.latest = {"keys": args[0], "values": args[1]}

    def _weighed(self, _module: nn.Module, _args: Any, result: Tensor) -> None:
        self.parts.setdefault("cast weights", []).append(self._some(result))


def _square(parts: Sequence[Tensor], heads: int, length: int) -> Tensor:
    """Put (batch, key heads, queries of the heads that share one, tokens) of each call in place."""
    whole = parts[0].new_zeros((len(parts[0]), heads, length, length))
    start = 0
    for part in parts:
        shared = heads // part.shape[1]
        count, tokens = part.shape[2] // shared, min(part.shape[3], length)
        rows = part.reshape(len(part), heads, count, part.shape[3])
        whole[:, :, start : start + count, :tokens] = rows[..., :tokens]
        start += count
    return whole


class CacheRunTraces:
    """Traces of the first pass of a free run: its first and its last sample."""

    def __init__(self, quantized: Quantized) -> None:
        self.quantized = quantized
        self.attentions = attentions_of(quantized)
        self.traces: dict[str, CacheTrace] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take the tensors of the first pass inside."""
        with ExitStack() as stack:
            for at, attention in self.attentions.items():
                self._watch(stack.enter_context(ModuleHooks()), at, attention)
            yield

    def _watch(self, hooks: ModuleHooks, at: str, attention: CachedAttention) -> None:
        tapped, source = TappedCore(attention.core), attention.source
        projected: dict[str, Tensor] = {}

        def begin(_module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
            tapped.rows = sorted({0, len(args[0]) - 1})

        def take(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, result: Tensor) -> None:
                projected[name] = result.detach()[tapped.rows]

            return hook

        def output(_module: nn.Module, args: tuple[Any, ...], _kwargs: Any) -> None:
            projected["context"] = args[0].detach()[tapped.rows]

        def finish(_module: nn.Module, _args: Any, _result: Any) -> None:
            needed = {"context", *chain(*attention.leaves.values())}
            if at not in self.traces and needed <= projected.keys():
                q, k, v = (
                    source.side_of(side, sum_of(projected[leaf] for leaf in leaves))
                    for side, leaves in attention.leaves.items()
                )
                context = source.side_of("context", projected["context"])
                trace = CacheTrace(at, RUN, q, k, v, [1] * q.shape[2], context=context)
                trace.gate = source.gate(projected["gate"]) if source.is_gated else None
                tapped.fill(trace)
                self.traces[at] = trace
                # One pass is enough: the hooks would slow down the others.
                hooks.remove()
            tapped.clear()

        hooks.add(attention, None, finish)
        # The arguments of an attention may be named; those of its projections are not.
        first = "q_proj" if source.is_gated else attention.leaves["q"][0]
        hooks.add(attention.get_submodule(first), begin, take("gate") if source.is_gated else None)
        for leaf in chain(*attention.leaves.values()):
            hooks.add(attention.get_submodule(leaf), None, take(leaf))
        tapped.watch(hooks)
        hooks.add(attention.last, output)
