"""Rows of a mode that quantizes the cache: what is stored, and attention over it, way by way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qgate.formats.options import Floats
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.serving.cache_causes import context_words, read_words, source_words
from qgate.gate.serving.cache_checks import CacheDefinition, ExpectedTrace
from qgate.gate.serving.cache_traces import CacheRunTraces, served_traces
from qgate.gate.serving.score_causes import score_words, softmax_words, weight_words
from qgate.gate.serving.served_state import (
    RUN,
    HeldWays,
    array,
    following_row,
    relative_mse,
    stored_row,
)
from qgate.models import Model
from qgate.modes.attention import definition
from qgate.modes.attention.planning import cache_site
from qgate.modes.attention.sources import AttentionSource, LatentSource, source_of

_OUTPUT = "the output is not quantized as declared"


class ServedCaches(CacheRunTraces):
    """The caches of a mode: traces of its free run, and rows of every way to serve."""

    def rows(self, base: Model, sites: ModelSites) -> list[Measured]:
        """Return rows of what every cache stores, and of attention over it in every way."""
        choices = self.quantized.mode.attention
        assert choices is not None
        scales = self.quantized.scales
        ranges = {} if scales is None else scales.ranges()
        sources: dict[str, AttentionSource] = {}
        by_layer: dict[str, list[ExpectedTrace]] = {}
        for trace in (*served_traces(self.quantized, base), *self.traces.values()):
            source = source_of(base.module.get_submodule(trace.at), trace.at)
            assert source is not None
            sources[trace.at] = source
            ups = None
            if isinstance(source, LatentSource):
                ups = array(source.ups()[0]), array(source.ups()[1])
            of = CacheDefinition(
                trace.at, choices, source.positions, ranges, source.window, source.scaling,
                source.cap, ups,
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
    tokens = tokens_of(right if actual.shape != right.shape else actual), tokens_of(reference)
    ideal = relative_mse(right, reference)
    site, ways = cache_site(at, side), _held(side, traces)
    return stored_row(site, order, sites, tokens, choice.words(), ideal, ways)


def _held(side: str, traces: Sequence[ExpectedTrace]) -> HeldWays:
    """Hold what was cast and what was read, in every way to serve."""
    ways = HeldWays()
    for expected in traces:
        right = expected.read(side)
        words = source_words if expected.source_fault(side) else read_words
        if words is source_words or tuple(expected.trace.read[side].shape) != right.shape:
            wrong = right.size
        else:
            wrong = int(expected.wrong_reads(side).sum())
        ways.add(expected.trace.way, right.size, wrong, partial(words, expected, side))
    return ways


def _context_row(expected: ExpectedTrace, read: str, order: int, sites: ModelSites) -> Measured:
    """Return the distance of attention from its definition over what the cache holds."""
    trace = expected.trace
    site = read if trace.way == RUN else f"{trace.at}.cache:{trace.way}"
    context = trace.context
    assert context is not None
    is_shaped = tuple(context.shape) == expected.context.shape
    error = relative_mse(array(context), expected.context) if is_shaped else np.inf
    errors = error, float(expected.context_errors().max()), expected.limit
    words, channels = partial(context_words, expected), trace.queries.shape[-1]
    return following_row(site, order, sites, errors, words, context, channels)


def stage_rows(
    at: str, traces: Sequence[ExpectedTrace], order: int, sites: ModelSites
) -> Iterator[Measured]:
    """Yield the rows of the stages of one attention: each is given what the run gave it.

    Of every stage its error against exact inputs is measured, beside that of an ideal quantizer;
    and every way to serve is held against the definition.
    """
    served = traces[0]
    choices = served.of.choices
    exact_scores = served._seen(served.scores_of(served.exact_keys, queries=served.turned))
    asks = [choices.chosen[side].words() for side in ("queries", "keys") if side in choices.chosen]
    if asks:
        sides = served._seen(served.actual_scores), served._seen(served.scores), exact_scores
        yield _local(sites, cache_site(at, "scores"), order, sides, ", ".join(asks))
    for stage, errors_of, limit_of, words_of in (
        ("scores", ExpectedTrace.score_errors, lambda e: e.score_limit, score_words),
        ("softmax", ExpectedTrace.softmax_errors, lambda e: e.softmax_limit, softmax_words),
    ):
        worst = _worst(traces, errors_of, limit_of, words_of)
        site = cache_site(at, stage)
        yield sites.isolated(site, order, *worst, channels=served.trace.length)
    if choices.weights is not None:
        right = definition.softmax(served.actual_scores)
        sides = served._seen(array(served.trace.squares["cast weights"])), served.weights, right
        words = choices.weights.words()
        row = _local(sites, cache_site(at, "weights"), order, sides, words)
        yield replace(row, conformance=(_held_weights(traces),))
    if {"values", "output"} & choices.chosen.keys():
        yield _output_row(at, traces, order, sites)


def _output_row(
    at: str, traces: Sequence[ExpectedTrace], order: int, sites: ModelSites
) -> Measured:
    """Return the error that the product of weights and values makes, and the output's cast."""
    served = traces[0]
    choices = served.of.choices
    weights = served.weights
    if choices.weights is not None:
        weights = served._seen(array(served.trace.squares["cast weights"]))
    exact = definition.context(weights, served.values, served.values, served.exact)
    actual, right = served.actual_context, served.context
    words = [
        choices.chosen[side].words() for side in ("values", "output") if side in choices.chosen
    ]
    figures: tuple[Conformance, ...] = ()
    if choices.output is not None:
        assert served.trace.context is not None
        actual, right = array(served.trace.context), served.of.stored("output", right)
        figures = (_held_output(traces),)
    sides = actual, right, exact
    row = _local(sites, cache_site(at, "output"), order, sides, ", ".join(words))
    return replace(row, conformance=figures)


def tokens_of(heads: Floats) -> Tensor:
    """Return (batch, heads, tokens, width) as float32 tokens of channels."""
    return torch.from_numpy(np.ascontiguousarray(heads)).float().transpose(1, 2).flatten(2)


def _local(
    sites: ModelSites,
    site: str,
    order: int,
    sides: tuple[Floats, Floats, Floats],
    quantizer: str,
) -> Measured:
    """Return the error of a stage and of its definition against what exact inputs give."""
    actual, right, exact = sides
    pairs = [(tokens_of(actual), tokens_of(exact))]
    ideal = relative_mse(right, exact) if quantizer else None
    return sites.local(site, order, pairs, ideal=ideal, quantizer=quantizer)


def _worst(
    traces: Sequence[ExpectedTrace],
    errors: Callable[[ExpectedTrace], Floats],
    limit: Callable[[ExpectedTrace], float],
    words: Callable[[ExpectedTrace], str],
) -> tuple[float, float, float, str]:
    """Return error, worst row, limit and reason of the way that is farthest from its definition."""
    worst = max(traces, key=lambda expected: float(errors(expected).max()) / limit(expected))
    rows, bound = errors(worst), limit(worst)
    reason = ""
    if not float(rows.max()) <= bound:
        reason = f"{words(worst)} (in {worst.trace.way.replace('_', ' ')})"
    return float(rows.mean()), float(rows.max()), bound, reason


def _held_weights(traces: Sequence[ExpectedTrace]) -> Conformance:
    """Hold the cast of the weights bit for bit."""
    ways = HeldWays()
    for expected in traces:
        actual = expected._seen(array(expected.trace.squares["cast weights"]))
        wrong = int((actual != expected.cast_weights).sum())
        ways.add(expected.trace.way, actual.size, wrong, partial(weight_words, expected, actual))
    return ways.conformance()


def _held_output(traces: Sequence[ExpectedTrace]) -> Conformance:
    """Hold the cast of the output bit for bit."""
    ways = HeldWays()
    for expected in traces:
        assert expected.trace.context is not None
        right = expected.of.stored("output", array(expected.trace.sources["output"]))
        wrong = array(expected.trace.context) != expected.gated(right).astype(np.float32)
        ways.add(expected.trace.way, wrong.size, int(wrong.sum()), lambda: _OUTPUT)
    return ways.conformance()
