"""Traces of recurrent states: what was stored after each token, and what the next token read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qgate.gate.segments.probes import several
from qgate.gate.serving.served_state import RUN, ways
from qgate.hooks import ModuleHooks
from qgate.models import Model
from qgate.models.mamba.scanning import ScanResult
from qgate.models.mamba.state import MixerState
from qgate.modes import Quantized
from qgate.modes.states.mixers import StateInputs, StateMixer, given_to, named_mixers

TOKENS = 41
"""Tokens of each request: no multiple of a chunk."""
_CHUNKS = (16, 8, 1, 16)
_FIRST, _LAST = 24, 8
"""Tokens of a free run that are held: the first and the last ones."""


@dataclass
class StateTrace:
    """One state of one mixer, and one way to serve it. All begins with (tokens, batch, …).

    inputs   what the module was given
    tokens   numbers of the tokens whose states were taken
    sources  what was cast after each of these tokens, and `stored` what was made of it
    output   what the module returned
    earlier  what is left of the request that was served before
    """

    at: str
    side: str
    way: str
    chunks: Sequence[int]
    inputs: StateInputs = field(default_factory=lambda: StateInputs({}, {}))
    tokens: list[int] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    stored: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None
    earlier: Tensor | None = None


@torch.no_grad()
def served_traces(quantized: Quantized, base: Model) -> Iterator[list[StateTrace]]:
    """Serve the reference's inputs in every way: per mixer one list, in the order of the ways."""
    requests = several(base.inputs)[:, :TOKENS]
    by_name = given_to(base, requests)
    for mixer in named_mixers(quantized.model):
        inputs = {side: by_name[mixer.name(side)] for side in mixer.leaves}
        yield [
            trace
            for way, chunks in ways(requests.shape[1], _CHUNKS).items()
            for trace in _served(quantized, mixer, inputs, way, chunks)
        ]


def _served(
    quantized: Quantized,
    mixer: StateMixer,
    given: Mapping[str, StateInputs],
    way: str,
    chunks: list[int],
) -> list[StateTrace]:
    cache, length = MixerState(), sum(chunks)
    # Another request: the same texts, one row further and backwards.
    before = {side: of.changed(lambda x: x.roll(1, 0).flip(1)) for side, of in given.items()}
    _serve(mixer, before, [length], cache)
    earlier = {
        "conv": None if cache.conv is None else cache.conv.transpose(0, 1).clone(),
        "ssm": None if cache.ssm is None else cache.ssm.unsqueeze(0).clone(),
    }
    cache.reset()
    assert quantized.mode.states is not None
    sides = [side for side in quantized.mode.states.chosen if side in mixer.leaves]
    traces = [StateTrace(mixer.at, side, way, chunks) for side in sides]
    with ModuleHooks() as hooks:
        for trace in traces:
            _watch_store(hooks, mixer, trace, None)
        outputs = _serve(mixer, given, chunks, cache)
    for trace in traces:
        _take_inputs(trace, mixer, given[trace.side])
        trace.output, trace.earlier = outputs[trace.side].transpose(0, 1), earlier[trace.side]
    return traces


def _take_inputs(trace: StateTrace, mixer: StateMixer, given: StateInputs) -> None:
    """Keep the inputs and the constants."""
    part = mixer.part(trace.side)
    # A convolution of qgate's own has its weight; those in reach are given it.
    own = {"bias": getattr(part, "bias", None), **dict(part.named_parameters())}
    tokens = {port: x.transpose(0, 1) for port, x in given.tokens.items()}
    trace.inputs = StateInputs(tokens, {**own, **given.constants})


def _serve(
    mixer: StateMixer, given: Mapping[str, StateInputs], chunks: list[int], cache: MixerState
) -> dict[str, Tensor]:
    """Return what convolution and scan make of their inputs, chunk by chunk."""
    outputs: dict[str, list[Tensor]] = {side: [] for side in given}
    for start, count in zip(itertools.accumulate([0, *chunks]), chunks, strict=False):
        part = slice(start, start + count)
        for side, of in given.items():
            now = StateInputs({port: x[:, part] for port, x in of.tokens.items()}, of.constants)
            outputs[side].append(_output(now.to(mixer.part(side), cache=cache)))
        cache.length += count
    return {side: torch.cat(listed, 1) for side, listed in outputs.items()}


def _output(result: Tensor | ScanResult) -> Tensor:
    """Return the output of a convolution or a scan."""
    return result.output if isinstance(result, ScanResult) else result


def _watch_store(
    hooks: ModuleHooks, mixer: StateMixer, trace: StateTrace, taking: StateRunTraces | None
) -> None:
    """Take what is cast and what is stored; of some rows and tokens of a free run."""
    store = mixer.part(trace.side).store

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
            rows = slice(None) if taking is None else taking.samples
            trace.tokens += [numbers[n] for n in chosen_numbers]
            trace.sources += [source[n : n + 1, rows].clone() for n in chosen_numbers]
            trace.stored += [stored[n : n + 1, rows].clone() for n in chosen_numbers]

    hooks.add(store, None, after)


class StateRunTraces:
    """Traces of the first pass of a free run: some tokens of its first and its last sample."""

    def __init__(self, quantized: Quantized) -> None:
        self.quantized = quantized
        self.traces: list[StateTrace] = []
        self.length, self.samples = 0, [0]

    def wants(self, token: int) -> bool:
        """Tell if a token is held."""
        return token < _FIRST or token >= self.length - _LAST

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take the tensors of the first pass inside."""
        choices = self.quantized.mode.states
        with ExitStack() as stack:
            for mixer in named_mixers(self.quantized.model) if choices is not None else ():
                for side in choices.chosen if choices is not None else ():
                    if side in mixer.leaves:
                        self._watch(stack.enter_context(ModuleHooks()), mixer, side)
            yield

    def _watch(self, hooks: ModuleHooks, mixer: StateMixer, side: str) -> None:
        trace = StateTrace(mixer.at, side, RUN, ())

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
            inputs = mixer.inputs(side, args, kwargs)
            first = next(iter(inputs.tokens.values()))
            self.length, self.samples = first.shape[1], sorted({0, len(first) - 1})
            _take_inputs(trace, mixer, inputs.changed(lambda x: x.detach()[self.samples]))

        def after(_module: nn.Module, _args: Any, result: Any) -> None:
            trace.output = _output(result).detach()[self.samples].transpose(0, 1)
            trace.chunks = (self.length,)
            self.traces.append(trace)
            # One pass is enough: the hooks would slow down the others.
            hooks.remove()

        hooks.add(mixer.part(side), before, after)
        _watch_store(hooks, mixer, trace, self)
