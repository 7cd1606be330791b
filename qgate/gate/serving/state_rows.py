"""Rows of a mode that quantizes recurrent states: what is stored, and what is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from qgate.formats.options import Floats
from qgate.gate.measured import Measured
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.serving.served_state import (
    RUN,
    HeldWays,
    array,
    following_row,
    relative_mse,
    stored_row,
)
from qgate.gate.serving.state_causes import read_words, stored_words
from qgate.gate.serving.state_checks import ExpectedState, StateDefinition
from qgate.gate.serving.state_traces import StateRunTraces, served_traces
from qgate.models import Model
from qgate.modes.states.mixers import named_mixers
from qgate.modes.states.ranges import state_ranges


class ServedMixers(StateRunTraces):
    """The recurrent states of a mode: traces of its free run, and rows of every way to serve."""

    def rows(self, base: Model, sites: ModelSites) -> list[Measured]:
        """Return rows of what every mixer stores, and of what follows in every way."""
        choices = self.quantized.mode.states
        assert choices is not None
        measured = state_ranges(base) if choices.is_static else {}
        mixers = named_mixers(self.quantized.model)
        pairs = [(mixer, side) for mixer in mixers for side in choices.chosen
                 if side in mixer.leaves]  # fmt: skip
        names = [mixer.site(side) for mixer, side in pairs]
        # Names of sites without ranges are candidates for random numbers.
        ranges = {name: array(measured[name]) if name in measured else np.ones(1) for name in names}
        traces = [trace for listed in served_traces(self.quantized, base) for trace in listed]
        rows = []
        for mixer, side in pairs:
            kind = mixer.part(side).kind if side == "ssm" else ""
            choice, site = choices.chosen[side], mixer.site(side)
            of = StateDefinition(site, side, choice, choices.seed, ranges, kind)
            expected: list[ExpectedState] = []
            for trace in (*traces, *self.traces):
                if (trace.at, trace.side) == (mixer.at, side):
                    expected.append(ExpectedState(trace, of, expected[0] if expected else None))
            port = mixer.part(side).ports[0]
            module, after = mixer.name(side), sites.place(mixer.readers[side])
            served, order = expected[0], sites.place(f"{module}:{port}") or after
            tokens = _tokens_of(served.actual), _tokens_of(served.source)
            ideal = relative_mse(served.stored, served.source)
            ways = _held(expected)
            rows.append(stored_row(site, order, sites, tokens, choice.words(), ideal, ways))
            rows += [_read_row(e, module, after, sites) for e in expected]
        return rows


def _tokens_of(states: Floats) -> torch.Tensor:
    """Return states as float32 (batch, tokens, channels)."""
    x = torch.from_numpy(np.ascontiguousarray(states)).float().transpose(0, 1)
    return x.flatten(2) if x.dim() == 4 else x


def _held(traces: Sequence[ExpectedState]) -> HeldWays:
    """Hold what was stored after every token, in every way to serve."""
    ways = HeldWays()
    for expected in traces:
        fault = _source_fault(expected)
        wrong = expected.actual.size if fault else int(expected.wrong.sum())
        words = partial(_source_fault if fault else stored_words, expected)
        ways.add(expected.trace.way, expected.actual.size, wrong, words)
    return ways


def _source_fault(expected: ExpectedState) -> str:
    """Say if other tokens were stored than those given, or other inputs of the convolution."""
    trace = expected.trace
    length = sum(trace.chunks)
    if trace.way != RUN and len(trace.tokens) != length:
        return f"states are stored after {len(trace.tokens)} of {length} tokens"
    if trace.way != RUN and trace.tokens != [*range(length)]:
        first = next(n for n, token in enumerate(trace.tokens) if token != n)
        return f"token {first} is stored as if it were token {trace.tokens[first]}"
    if trace.side == "conv" and not np.array_equal(
        expected.source, expected.inputs["input"][trace.tokens]
    ):
        return "what is kept for later tokens is not the input of the convolution"
    return ""


def _read_row(expected: ExpectedState, module: str, order: int, sites: ModelSites) -> Measured:
    """Return the distance of states and outputs from what follows of the states stored before."""
    trace = expected.trace
    site = f"{module}:{'output' if trace.way == RUN else trace.way}"
    output = trace.output
    assert output is not None
    if not expected.places.size:
        why = {"isolated": "nothing can be compared: the states of most tokens are not stored"}
        return sites.row(site, "isolated", order, why=why)
    stages = [(expected.output_errors(), expected.output_limit)]
    if trace.side == "ssm":
        stages.append((expected.state_errors(), expected.state_limit))
    errors, limit = max(stages, key=lambda stage: float(stage[0].max()) / stage[1])
    figures = float(errors.mean()), float(errors.max()), limit
    words, channels = partial(read_words, expected), output.shape[-1]
    return following_row(site, order, sites, figures, words, output, channels)
