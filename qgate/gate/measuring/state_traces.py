"""Traces of recurrent states: what was stored after each token, and what the next token read.

The same inputs of the reference are served three ways, each by states that another request has used
before: token by token, as one prefill, and as prefill in chunks. A trace of the free run is taken
as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qgate.gate.measuring.cache_traces import RUN, ways
from qgate.gate.measuring.passes import flow
from qgate.gate.measuring.segment_probes import several
from qgate.hooks import ModuleHooks
from qgate.models import Model
from qgate.models.mamba.network import MambaMixer
from qgate.models.mamba.state import MixerState
from qgate.modes import Quantized
from qgate.modes.states.ranges import named_mixers

TOKENS = 41
"""Tokens of each request: no multiple of a chunk."""
_CHUNKS = (16, 8, 1, 16)
_FIRST, _LAST = 24, 8
"""Tokens of a free run that are held: the first and the last ones."""
INPUTS = {"conv": ("input",), "ssm": ("u", "dt", "B", "C", "z")}
_PARTS = {"conv": "conv1d", "ssm": "scan"}


@dataclass
class StateTrace:
    """One state of one mixer, and one way to serve it. All begins with (tokens, batch, …).

    inputs   what the module was given, by port
    tokens   numbers of the tokens whose states were taken
    sources  what was cast after each of these tokens, and `stored` what was made of it
    output   what the module returned
    earlier  what is left of the request that was served before
    """

    at: str
    side: str
    way: str
    chunks: Sequence[int]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    stored: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None
    earlier: Tensor | None = None


@torch.no_grad()
def served_traces(quantized: Quantized, base: Model) -> Iterator[list[StateTrace]]:
    """Serve the reference's inputs in every way: per mixer one list, in the order of the ways."""
    requests = several(base.inputs)[:, :TOKENS]
    mixers = dict(named_mixers(base))
    names = {f"{at}.{part}" for at in mixers for part in _PARTS.values()}
    ports = {port for listed in INPUTS.values() for port in listed}
    sites = [site for site in base.sites() if site.module in names and site.port in ports]
    flowing = flow(base, sites, requests)
    for at in mixers:
        mixer = quantized.model.module.get_submodule(at)
        assert isinstance(mixer, MambaMixer)
        inputs = {
            side: {port: flowing[f"{at}.{_PARTS[side]}:{port}"] for port in listed}
            for side, listed in INPUTS.items()
        }
        yield [
            trace
            for way, chunks in ways(requests.shape[1], _CHUNKS).items()
            for trace in _served(quantized, at, mixer, inputs, way, chunks)
        ]


def _served(
    quantized: Quantized,
    at: str,
    mixer: MambaMixer,
    given: dict[str, dict[str, Tensor]],
    way: str,
    chunks: list[int],
) -> list[StateTrace]:
    cache, length = MixerState(), sum(chunks)
    # Another request: the same texts, one row further and backwards.
    before = {
        side: {port: x.roll(1, 0).flip(1) for port, x in of.items()} for side, of in given.items()
    }
    _serve(mixer, before, [length], cache)
    earlier = {
        "conv": None if cache.conv is None else cache.conv.transpose(0, 1).clone(),
        "ssm": None if cache.ssm is None else cache.ssm.unsqueeze(0).clone(),
    }
    cache.reset()
    assert quantized.mode.states is not None
    traces = [StateTrace(at, side, way, chunks) for side in quantized.mode.states.chosen]
    with ModuleHooks() as hooks:
        for trace in traces:
            _watch_store(hooks, mixer, trace, None)
        outputs = _serve(mixer, given, chunks, cache)
    for trace in traces:
        trace.inputs = {port: x.transpose(0, 1) for port, x in given[trace.side].items()}
        trace.output, trace.earlier = outputs[trace.side].transpose(0, 1), earlier[trace.side]
    return traces


def _serve(
    mixer: MambaMixer, given: dict[str, dict[str, Tensor]], chunks: list[int], cache: MixerState
) -> dict[str, Tensor]:
    """Return what convolution and scan make of their inputs, chunk by chunk."""
    start = 0
    outputs: dict[str, list[Tensor]] = {"conv": [], "ssm": []}
    for count in chunks:
        part = slice(start, start + count)
        now = {side: {port: x[:, part] for port, x in of.items()} for side, of in given.items()}
        outputs["conv"].append(mixer.conv1d(now["conv"]["input"], cache))
        scanned = mixer.scan(
            **now["ssm"], A_log=mixer.A_log, D=mixer.D, dt_bias=mixer.dt_proj.bias, cache=cache
        )
        outputs["ssm"].append(scanned.output)
        cache.length += count
        start += count
    return {side: torch.cat(listed, 1) for side, listed in outputs.items()}


def _watch_store(
    hooks: ModuleHooks, mixer: MambaMixer, trace: StateTrace, taking: StateRunTraces | None
) -> None:
    """Take what is cast and what is stored; of some rows and tokens of a free run."""
    store = mixer.get_submodule(f"{_PARTS[trace.side]}.store")

    def after(_module: nn.Module, args: tuple[Any, ...], stored: Tensor) -> None:
        source, first = args
        pair = source.detach(), stored.detach()
        if trace.side == "conv":
            numbers = range(first, first + source.shape[1])
            pairs = [(x.transpose(0, 1) for x in pair)]
        else:
            numbers = range(first, first + 1)
            # (states, batch, channels) of one token.
            pairs = [(x.permute(1, 2, 0).unsqueeze(0) for x in pair)]
        for source, stored in pairs:
            chosen_numbers = [
                n for n, token in enumerate(numbers) if taking is None or taking.wants(token)
            ]
            rows = slice(None) if taking is None else taking.rows
            trace.tokens += [numbers[n] for n in chosen_numbers]
            trace.sources += [source[n : n + 1, rows].clone() for n in chosen_numbers]
            trace.stored += [stored[n : n + 1, rows].clone() for n in chosen_numbers]

    hooks.add(store, None, after)


class StateRunTraces:
    """Traces of the first pass of a free run: some tokens of its first and its last sample."""

    def __init__(self, quantized: Quantized) -> None:
        self.quantized = quantized
        self.traces: list[StateTrace] = []
        self.length, self.rows = 0, [0]

    def wants(self, token: int) -> bool:
        """Tell if a token is held."""
        return token < _FIRST or token >= self.length - _LAST

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take the tensors of the first pass inside."""
        choices = self.quantized.mode.states
        with ExitStack() as stack:
            for at, mixer in named_mixers(self.quantized.model) if choices is not None else ():
                for side in choices.chosen if choices is not None else ():
                    self._watch(stack.enter_context(ModuleHooks()), at, mixer, side)
            yield

    def _watch(self, hooks: ModuleHooks, at: str, mixer: MambaMixer, side: str) -> None:
        trace = StateTrace(at, side, RUN, ())

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
            given = {"input": args[0]} if side == "conv" else kwargs
            inputs = {port: given[port].detach() for port in INPUTS[side]}
            first = next(iter(inputs.values()))
            self.length, self.rows = first.shape[1], sorted({0, len(first) - 1})
            trace.inputs = {port: x[self.rows].transpose(0, 1) for port, x in inputs.items()}

        def after(_module: nn.Module, _args: Any, result: Any) -> None:
            output = result if side == "conv" else result.output
            trace.output = output.detach()[self.rows].transpose(0, 1)
            trace.chunks = (self.length,)
            self.traces.append(trace)
            # One pass is enough: the hooks would slow down the others.
            hooks.remove()

        hooks.add(mixer.get_submodule(_PARTS[side]), before, after)
        _watch_store(hooks, mixer, trace, self)
