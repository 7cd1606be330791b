"""Rows of a mode that quantizes recurrent states: what is stored, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from qgate.formats.options import Floats
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.cache_checks import array
from qgate.gate.measuring.conformance import METRIC
from qgate.gate.measuring.site_errors import massive_from, site_errors
from qgate.gate.measuring.state_causes import read_words, stored_words
from qgate.gate.measuring.state_checks import ExpectedState, StateDefinition
from qgate.gate.measuring.state_traces import RUN, StateRunTraces, served_traces
from qgate.models import Model
from qgate.modes import Quantized
from qgate.modes.states.ranges import named_mixers, state_ranges, state_site


def state_rows(
    quantized: Quantized,
    base: Model,
    run: StateRunTraces,
    order: Mapping[str, int],
    layer_of: Callable[[str], str],
) -> list[Measured]:
    """Return rows of what every mixer stores, and of what follows in every way to serve."""
    choices = quantized.mode.states
    assert choices is not None
    measured = state_ranges(base) if choices.is_static else {}
    mixers = dict(named_mixers(base))
    sites = [state_site(at, side) for at in mixers for side in choices.chosen]
    # Names of sites without ranges are candidates for random numbers.
    ranges = {site: array(measured[site]) if site in measured else np.ones(1) for site in sites}
    traces = [trace for listed in served_traces(quantized, base) for trace in listed]
    rows = []
    for at, mixer in mixers.items():
        for side, choice in choices.chosen.items():
            of = StateDefinition(at, side, choice, choices.seed, ranges, mixer)
            expected: list[ExpectedState] = []
            for trace in (*traces, *run.traces):
                if (trace.at, trace.side) == (at, side):
                    expected.append(ExpectedState(trace, of, expected[0] if expected else None))
            module = of.site.partition(":")[0]
            after = order.get(f"{module}:output", 0)
            before = order.get(f"{module}:{'u' if side == 'ssm' else 'input'}", 0)
            rows.append(_stored_row(of, expected, before, layer_of))
            rows += [_read_row(e, module, after, layer_of) for e in expected]
    return rows


def _stored_row(
    of: StateDefinition,
    traces: Sequence[ExpectedState],
    order: int,
    layer_of: Callable[[str], str],
) -> Measured:
    """Return the error of stored states, bit for bit as the definition gives them."""
    served = traces[0]
    reference = served.source
    ideal = _relative_mse(served.stored, reference)
    pair = _tokens_of(served.actual), _tokens_of(reference)
    row = site_errors(
        of.site, layer_of(of.site), "local", order, [pair], beyond=massive_from([pair[1]]),
        ideal=ideal, quantizer=of.choice.words(),
    )  # fmt: skip
    return replace(row, conformance=(_conformance(traces),))


def _relative_mse(actual: Floats, reference: Floats) -> float:
    energy = max(float(np.square(reference).sum()), np.finfo(np.float64).tiny)
    return float(np.square(actual - reference).sum()) / energy


def _tokens_of(states: Floats) -> torch.Tensor:
    """Return states as float32 (batch, tokens, channels)."""
    x = torch.from_numpy(np.ascontiguousarray(states)).float().transpose(0, 1)
    return x.flatten(2) if x.dim() == 4 else x


def _conformance(traces: Sequence[ExpectedState]) -> Conformance:
    """Hold what was stored after every token, in every way to serve."""
    values, differing, words, wrong_ways = 0, 0, "", []
    for expected in traces:
        count = expected.actual.size
        if fault := _source_fault(expected):
            wrong = count
        else:
            wrong = int(expected.wrong.sum())
            fault = stored_words(expected) if wrong else ""
        values, differing = values + count, differing + wrong
        if wrong:
            wrong_ways.append(expected.trace.way.replace("_", " "))
            words = words or fault
    if not words:
        return Conformance(METRIC, values, 0, f"{values:,} values of {len(traces)} ways to serve")
    only = f"; only in {' and '.join(wrong_ways)}" if len(wrong_ways) < len(traces) else ""
    return Conformance(METRIC, values, differing, words + only)


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


def _read_row(
    expected: ExpectedState, module: str, order: int, layer_of: Callable[[str], str]
) -> Measured:
    """Return the distance of states and outputs from what follows of the states stored before."""
    trace = expected.trace
    site = f"{module}:{'output' if trace.way == RUN else trace.way}"
    output = trace.output
    assert output is not None
    if not expected.places.size:
        why = {"isolated": "nothing can be compared: the states of most tokens are not stored"}
        return Measured(
            site=site, layer=layer_of(site), scope="isolated", values={}, order=order,
            nonfinite=0, gated=(), why=why,
        )  # fmt: skip
    stages = [(expected.output_errors(), expected.output_limit)]
    if trace.side == "ssm":
        stages.append((expected.state_errors(), expected.state_limit))
    errors, limit = max(stages, key=lambda stage: float(stage[0].max()) / stage[1])
    worst = float(errors.max())
    return Measured(
        site=site, layer=layer_of(site), scope="isolated",
        values={"relative_mse": float(errors.mean())}, order=order,
        nonfinite=int((~output.isfinite()).sum()), floor=limit,
        parts={"worst_token": {"relative_mse": worst}}, gated=(),
        why=None if worst <= limit else {"isolated": read_words(expected)},
        channels=output.shape[-1],
    )  # fmt: skip
