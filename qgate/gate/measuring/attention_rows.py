"""Rows of attention whose own tensors are quantized: scores, softmax, weights and output apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from qgate.formats.options import Floats
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.attention_causes import score_words, weight_words
from qgate.gate.measuring.cache_checks import ExpectedTrace, array
from qgate.gate.measuring.conformance import METRIC
from qgate.gate.measuring.site_errors import site_errors
from qgate.modes.attention import definition
from qgate.modes.attention.planning import cache_site

Stage = Callable[[ExpectedTrace], Floats]


def stage_rows(
    at: str, traces: Sequence[ExpectedTrace], order: int, layer_of: Callable[[str], str]
) -> Iterator[Measured]:
    """Yield the rows of the stages of one attention: each is given what the run gave it.

    Of every stage its error against exact inputs is measured, beside that of an ideal quantizer;
    and every way to serve is held against the definition.
    """
    served = traces[0]
    choices = served.of.choices
    exact_scores = served._seen(
        definition.scores(served.turned, served.exact_keys, served.exact_keys, served.exact)
    )
    asks = [choices.chosen[side].words() for side in ("queries", "keys") if side in choices.chosen]
    if asks:
        sides = served._seen(served.actual_scores), served._seen(served.scores), exact_scores
        yield _local(cache_site(at, "scores"), sides, ", ".join(asks), order, layer_of)
    yield _isolated(
        cache_site(at, "scores"), traces, lambda e: e.score_errors(), lambda e: e.score_limit,
        score_words, order, layer_of,
    )  # fmt: skip
    yield _isolated(
        cache_site(at, "softmax"), traces, lambda e: e.softmax_errors(), lambda e: e.softmax_limit,
        lambda _expected: "weights are not the softmax of the scores", order, layer_of,
    )  # fmt: skip
    if choices.weights is not None:
        right = definition.softmax(served.actual_scores)
        sides = served._seen(array(served.trace.squares["cast weights"])), served.weights, right
        row = _local(cache_site(at, "weights"), sides, choices.weights.words(), order, layer_of)
        yield replace(row, conformance=(_held_weights(traces),))
    if {"values", "output"} & choices.chosen.keys():
        yield _output_row(at, traces, order, layer_of)


def _output_row(
    at: str, traces: Sequence[ExpectedTrace], order: int, layer_of: Callable[[str], str]
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
    row = _local(
        cache_site(at, "output"), (actual, right, exact), ", ".join(words), order, layer_of
    )
    return replace(row, conformance=figures)


def tokens_of(heads: Floats) -> Tensor:
    """Return (batch, heads, tokens, width) as float32 tokens of channels."""
    return torch.from_numpy(np.ascontiguousarray(heads)).float().transpose(1, 2).flatten(2)


def _local(
    site: str,
    sides: tuple[Floats, Floats, Floats],
    quantizer: str,
    order: int,
    layer_of: Callable[[str], str],
) -> Measured:
    """Return the error of a stage and of its definition against what exact inputs give."""
    actual, right, exact = sides
    energy = max(float(np.square(exact).sum()), np.finfo(np.float64).tiny)
    ideal = float(np.square(right - exact).sum()) / energy
    pairs = [(tokens_of(actual), tokens_of(exact))]
    return site_errors(
        site, layer_of(site), "local", order, pairs,
        ideal=ideal if quantizer else None, quantizer=quantizer,
    )  # fmt: skip


def _isolated(
    site: str,
    traces: Sequence[ExpectedTrace],
    errors: Stage,
    limit: Callable[[ExpectedTrace], float],
    words: Callable[[ExpectedTrace], str],
    order: int,
    layer_of: Callable[[str], str],
) -> Measured:
    """Return the way to serve whose stage is farthest from its definition."""
    worst = max(traces, key=lambda expected: float(errors(expected).max()) / limit(expected))
    rows, bound = errors(worst), limit(worst)
    why = {}
    if not float(rows.max()) <= bound:
        way = worst.trace.way.replace("_", " ")
        why = {"isolated": f"{words(worst)} (in {way})"}
    return Measured(
        site=site, layer=layer_of(site), scope="isolated",
        values={"relative_mse": float(rows.mean())}, order=order, nonfinite=0, floor=bound,
        parts={"worst_token": {"relative_mse": float(rows.max())}}, gated=(), why=why or None,
        channels=worst.trace.length,
    )  # fmt: skip


def _held_weights(traces: Sequence[ExpectedTrace]) -> Conformance:
    """Hold the cast of the weights bit for bit."""
    values, differing, words = 0, 0, ""
    for expected in traces:
        actual = expected._seen(array(expected.trace.squares["cast weights"]))
        wrong = actual != expected.cast_weights
        values, differing = values + actual.size, differing + int(wrong.sum())
        if wrong.any():
            words = words or weight_words(expected, actual)
    about = words or f"{values:,} values of {len(traces)} ways to serve"
    return Conformance(METRIC, values, differing, about)


def _held_output(traces: Sequence[ExpectedTrace]) -> Conformance:
    """Hold the cast of the output bit for bit."""
    values, differing = 0, 0
    for expected in traces:
        assert expected.trace.context is not None
        right = expected.of.stored("output", array(expected.trace.sources["output"]))
        wrong = array(expected.trace.context) != right
        values, differing = values + wrong.size, differing + int(wrong.sum())
    about = f"{values:,} values of {len(traces)} ways to serve"
    return Conformance(
        METRIC, values, differing, "the output is not quantized as declared" if differing else about
    )
