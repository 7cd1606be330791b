"""Rows of a mode that quantizes the cache: what is stored, and attention over it, way by way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.attention_rows import stage_rows, tokens_of
from qgate.gate.measuring.cache_causes import context_words, read_words, source_words
from qgate.gate.measuring.cache_checks import (
    CacheDefinition,
    ExpectedTrace,
    array,
    relative_mse,
)
from qgate.gate.measuring.cache_traces import RUN, RunTraces, served_traces
from qgate.gate.measuring.site_errors import massive_from
from qgate.gate.measuring.site_rows import HeldWays, ModelSites
from qgate.models import Model
from qgate.modes import Quantized
from qgate.modes.attention.planning import cache_site
from qgate.modes.attention.sources import AttentionSource, LatentSource, source_of


def cache_rows(
    quantized: Quantized, base: Model, run: RunTraces, sites: ModelSites
) -> list[Measured]:
    """Return rows of what every cache stores, and of attention over it in every way to serve."""
    choices = quantized.mode.attention
    assert choices is not None
    ranges = {} if quantized.scales is None else quantized.scales.ranges()
    sources: dict[str, AttentionSource] = {}
    by_layer: dict[str, list[ExpectedTrace]] = {}
    for trace in (*served_traces(quantized, base), *run.traces.values()):
        source = source_of(base.module.get_submodule(trace.at), trace.at)
        assert source is not None
        sources[trace.at] = source
        ups = None
        if isinstance(source, LatentSource):
            ups = array(source.ups()[0]), array(source.ups()[1])
        of = CacheDefinition(
            trace.at, choices, source.positions, ranges, source.window, source.scaling, source.cap,
            ups,
        )  # fmt: skip
        by_layer.setdefault(trace.at, []).append(ExpectedTrace(trace, of))
    rows = []
    for at, traces in by_layer.items():
        stored = sites.place(f"{at}.{sources[at].leaf('v')}:output")
        for side in ("queries", "keys", "values"):
            if side in choices.chosen:
                rows.append(_stored_row(at, side, traces, stored, sites))
        read = f"{at}.{sources[at].last}:input"
        last = sites.place(read)
        if choices.is_computed:
            rows += stage_rows(at, traces, last, sites)
        rows += [_context_row(expected, read, last, sites) for expected in traces]
    return rows


def _stored_row(
    at: str, side: str, traces: Sequence[ExpectedTrace], order: int, sites: ModelSites
) -> Measured:
    """Return the error of stored keys or values, bit for bit as the definition gives them."""
    served = next(expected for expected in traces if expected.trace.way != RUN)
    choice = getattr(served.of.choices, side)
    actual, right = array(served.trace.read[side]), served.read(side)
    reference = {"queries": served.turned, "keys": served.exact_keys}.get(side, served.values)
    pair = tokens_of(right if actual.shape != right.shape else actual), tokens_of(reference)
    row = sites.local(
        cache_site(at, side), order, [pair], beyond=massive_from([pair[1]]),
        ideal=relative_mse(right, reference), quantizer=choice.words(),
    )  # fmt: skip
    return replace(row, conformance=(_conformance(side, traces),))


def _conformance(side: str, traces: Sequence[ExpectedTrace]) -> Conformance:
    """Hold what was cast and what was read, in every way to serve."""
    held = HeldWays()
    for expected in traces:
        right = expected.read(side)
        words = source_words if expected.source_fault(side) else read_words
        if words is source_words or tuple(expected.trace.read[side].shape) != right.shape:
            wrong = right.size
        else:
            wrong = int(expected.wrong_reads(side).sum())
        held.add(expected.trace.way, right.size, wrong, partial(words, expected, side))
    return held.conformance()


def _context_row(expected: ExpectedTrace, read: str, order: int, sites: ModelSites) -> Measured:
    """Return the distance of attention from its definition over what the cache holds."""
    trace = expected.trace
    site = read if trace.way == RUN else f"{trace.at}.cache:{trace.way}"
    worst, context = float(expected.context_errors().max()), trace.context
    assert context is not None
    is_shaped = tuple(context.shape) == expected.context.shape
    error = relative_mse(array(context), expected.context) if is_shaped else np.inf
    reason = "" if worst <= expected.limit else context_words(expected)
    return sites.isolated(
        site, order, error, worst, expected.limit, reason,
        nonfinite=int((~context.isfinite()).sum()), channels=trace.queries.shape[-1],
    )  # fmt: skip
