"""Rows of a mode that quantizes the cache: what is stored, and attention over it, way by way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.attention_rows import stage_rows, tokens_of
from qgate.gate.measuring.cache_causes import context_words, read_words, source_words
from qgate.gate.measuring.cache_checks import CacheDefinition, ExpectedTrace, array
from qgate.gate.measuring.cache_traces import RUN, RunTraces, served_traces
from qgate.gate.measuring.conformance import METRIC
from qgate.gate.measuring.site_errors import massive_from, site_errors
from qgate.models import Model
from qgate.modes import Quantized
from qgate.modes.attention.planning import cache_site
from qgate.modes.attention.sources import source_of


def cache_rows(
    quantized: Quantized,
    base: Model,
    run: RunTraces,
    order: Mapping[str, int],
    layer_of: Callable[[str], str],
) -> list[Measured]:
    """Return rows of what every cache stores, and of attention over it in every way to serve."""
    choices = quantized.mode.attention
    assert choices is not None
    ranges = {} if quantized.scales is None else quantized.scales.ranges()
    by_layer: dict[str, list[ExpectedTrace]] = {}
    for trace in (*served_traces(quantized, base), *run.traces.values()):
        source = source_of(base.module.get_submodule(trace.at))
        assert source is not None
        of = CacheDefinition(trace.at, choices, source.base, ranges)
        by_layer.setdefault(trace.at, []).append(ExpectedTrace(trace, of))
    rows = []
    for at, traces in by_layer.items():
        stored = order.get(f"{at}.v_proj:output", 0)
        for side in ("queries", "keys", "values"):
            if side in choices.chosen:
                rows.append(_stored_row(at, side, traces, stored, layer_of))
        last = order.get(f"{at}.o_proj:input", 0)
        if choices.is_computed:
            rows += stage_rows(at, traces, last, layer_of)
        rows += [_context_row(expected, last, layer_of) for expected in traces]
    return rows


def _stored_row(
    at: str,
    side: str,
    traces: Sequence[ExpectedTrace],
    order: int,
    layer_of: Callable[[str], str],
) -> Measured:
    """Return the error of stored keys or values, bit for bit as the definition gives them."""
    served = next(expected for expected in traces if expected.trace.way != RUN)
    site, choice = cache_site(at, side), getattr(served.of.choices, side)
    actual, right = array(served.trace.read[side]), served.read(side)
    reference = {"queries": served.turned, "keys": served.exact_keys}.get(side, served.values)
    pair = tokens_of(right if actual.shape != right.shape else actual), tokens_of(reference)
    ideal = float(np.square(right - reference).sum() / np.square(reference).sum())
    row = site_errors(
        site, layer_of(site), "local", order, [pair], beyond=massive_from([pair[1]]), ideal=ideal,
        quantizer=choice.words(),
    )  # fmt: skip
    return replace(row, conformance=(_conformance(side, traces),))


def _conformance(side: str, traces: Sequence[ExpectedTrace]) -> Conformance:
    """Hold what was cast and what was read, in every way to serve."""
    values, differing, words, wrong_ways = 0, 0, "", []
    for expected in traces:
        actual, right = expected.trace.read[side], expected.read(side)
        count = right.size
        if expected.source_fault(side):
            fault, wrong = source_words(expected, side), count
        elif tuple(actual.shape) != right.shape:
            fault, wrong = read_words(expected, side), count
        else:
            wrong = int(expected.wrong_reads(side).sum())
            fault = read_words(expected, side) if wrong else ""
        values, differing = values + count, differing + wrong
        if wrong:
            wrong_ways.append(expected.trace.way.replace("_", " "))
            words = words or fault
    if not words:
        about = f"{values:,} values of {len(traces)} ways to serve"
        return Conformance(METRIC, values, 0, about)
    only = f"; only in {' and '.join(wrong_ways)}" if len(wrong_ways) < len(traces) else ""
    return Conformance(METRIC, values, differing, words + only)


def _context_row(expected: ExpectedTrace, order: int, layer_of: Callable[[str], str]) -> Measured:
    """Return the distance of attention from its definition over what the cache holds."""
    trace = expected.trace
    site = f"{trace.at}.o_proj:input" if trace.way == RUN else f"{trace.at}.cache:{trace.way}"
    errors = expected.context_errors()
    worst, context = float(errors.max()), trace.context
    assert context is not None
    energy = float(np.square(expected.context).sum())
    is_shaped = tuple(context.shape) == expected.context.shape
    squares = float(np.square(array(context) - expected.context).sum()) if is_shaped else np.inf
    why = None if worst <= expected.limit else {"isolated": context_words(expected)}
    return Measured(
        site=site, layer=layer_of(site), scope="isolated",
        values={"relative_mse": squares / energy}, order=order,
        nonfinite=int((~context.isfinite()).sum()), floor=expected.limit,
        parts={"worst_token": {"relative_mse": worst}}, gated=(), why=why,
        channels=trace.queries.shape[-1],
    )  # fmt: skip
