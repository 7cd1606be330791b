"""Rows of attention whose own tensors are quantized: scores, softmax, weights and output apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qgate.formats.options import Floats
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.attention_causes import score_words, softmax_words, weight_words
from qgate.gate.measuring.cache_checks import ExpectedTrace, array, relative_mse
from qgate.gate.measuring.site_rows import HeldWays, ModelSites
from qgate.modes.attention import definition
from qgate.modes.attention.planning import cache_site

_OUTPUT = "the output is not quantized as declared"


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
    held = HeldWays()
    for expected in traces:
        actual = expected._seen(array(expected.trace.squares["cast weights"]))
        wrong = int((actual != expected.cast_weights).sum())
        held.add(expected.trace.way, actual.size, wrong, partial(weight_words, expected, actual))
    return held.conformance()


def _held_output(traces: Sequence[ExpectedTrace]) -> Conformance:
    """Hold the cast of the output bit for bit."""
    held = HeldWays()
    for expected in traces:
        assert expected.trace.context is not None
        right = expected.of.stored("output", array(expected.trace.sources["output"]))
        wrong = array(expected.trace.context) != expected.gated(right).astype(np.float32)
        held.add(expected.trace.way, wrong.size, int(wrong.sum()), lambda: _OUTPUT)
    return held.conformance()
