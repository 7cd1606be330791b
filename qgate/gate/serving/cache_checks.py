"""Traces of a cache, held against the definition of attention over it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from qgate.expected.noise import FUNCTION_ROUNDINGS, MARGIN
from qgate.formats.options import Floats
from qgate.gate.serving.cache_traces import CacheTrace
from qgate.gate.serving.served_state import UNIT, array, moved, noise_limit, row_errors
from qgate.modes.attention import definition
from qgate.modes.attention.choices import AttentionChoices, TensorChoice
from qgate.modes.attention.planning import range_site, ranged_side
from qgate.modes.attention.positions import RotaryPositions


@dataclass(frozen=True)
class CacheDefinition:
    """Definition of one layer of a mode: what is stored, and what is computed of it."""

    at: str
    choices: AttentionChoices
    positions: RotaryPositions
    calibrated: Mapping[str, float]
    window: int = 0
    scaling: float | None = None
    cap: float = 0.0
    ups: tuple[Floats, Floats] | None = None
    """What makes keys and values of latents, where the cache has those."""

    def ranges(self, side: str, heads: int) -> list[float]:
        """Return the calibrated ranges of keys or values: one, or one per head."""
        choice: TensorChoice | None = getattr(self.choices, side)
        if choice is None or not choice.is_static:
            return []
        kind = ranged_side(side, self.choices)
        numbers: Sequence[int | None] = range(heads) if choice.share == "head" else [None]
        return [self.calibrated[range_site(self.at, kind, head)] for head in numbers]

    def stored(self, side: str, source: Floats, ranges: Sequence[float] | None = None) -> Floats:
        """Return what is stored of keys or values, as float32 numbers."""
        choice: TensorChoice | None = getattr(self.choices, side)
        reaches = self.ranges(side, source.shape[1]) if ranges is None else ranges
        is_rotated = self.choices.rotates(side)
        values = definition.stored(source, choice, reaches, rotated=is_rotated)
        return values.astype(np.float32).astype(np.float64)

    def turned(self, x: Floats, start: int = 0) -> Floats:
        """Return tokens turned by their positions, the first of which is `start`."""
        of = self.positions
        return definition.rotary(
            x, of.base, start, of.speeds, of.width, of.factor, in_pairs=of.in_pairs
        )

    def seen(self, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        """Return keys and values of the heads, of those that the cache has."""
        return (keys, values) if self.ups is None else definition.expanded(keys, values, *self.ups)

    def noun(self, side: str) -> str:
        """Return what messages call a tensor of attention."""
        latent = {} if self.ups is None else {"keys": "RoPE parts", "values": "latents"}
        return latent.get(side, side)


class ExpectedTrace:
    """Expected tensors of a trace, in float64."""

    def __init__(self, trace: CacheTrace, of: CacheDefinition) -> None:
        self.trace, self.of = trace, of
        self.turned = of.turned(array(trace.queries))
        self.keys, self.values = array(trace.keys), array(trace.values)
        self.exact_keys = of.turned(self.keys)
        self.exact = definition.exact_mask(of.choices, trace.length)
        self.visible = np.tril(np.ones_like(self.exact))
        if of.window:
            self.visible &= ~np.tril(self.visible, -of.window)

    @cached_property
    def sources(self) -> dict[str, Floats]:
        """Tensors that are to be cast, made of the run's own projections."""
        keys = self.keys if self.of.choices.before_rope else self.exact_keys
        return {"queries": self.turned, "keys": keys, "values": self.values}

    @cached_property
    def stored(self) -> dict[str, Floats]:
        """Tensors that are to be stored of the sources that the run cast."""
        return {side: self.of.stored(side, self.cast(side)) for side in self.sources}

    def cast(self, side: str) -> Floats:
        """Return what the run cast, or what it had to where it cast something else."""
        cast_tensor = self.trace.sources.get(side)
        if cast_tensor is None or self.source_fault(side):
            return self.sources[side].astype(np.float32).astype(np.float64)
        return array(cast_tensor)

    def source_fault(self, side: str) -> bool:
        """Tell if the run cast something else than it had to, beyond float noise."""
        cast_tensor = self.trace.sources.get(side)
        if cast_tensor is None or cast_tensor.shape != self.sources[side].shape:
            return True
        return bool(row_errors(array(cast_tensor), self.sources[side]).max() > self.position_noise)

    @property
    def position_noise(self) -> float:
        """The squared relative error that float32 angles of positions explain."""
        return float((UNIT * (FUNCTION_ROUNDINGS + self.trace.length)) ** 2)

    def read(self, side: str) -> Floats:
        """Return what the last query is to read of keys or values, or every query is to ask."""
        is_turned = side == "keys" and self.of.choices.before_rope
        if side == "queries" and self.of.choices.queries is None:
            return self.turned
        return self.of.turned(self.stored[side]) if is_turned else self.stored[side]

    def wrong_reads(self, side: str) -> np.ndarray:
        """Return where the last query read other numbers; positions move their last bits."""
        actual, expected = array(self.trace.read[side]), self.read(side)
        if side == "keys" and self.of.choices.before_rope:
            rows = row_errors(actual, expected) > self.position_noise
            return np.broadcast_to(rows[..., None], actual.shape)
        return np.asarray((actual != expected) & ~(np.isnan(actual) & np.isnan(expected)))

    # Scores, weights and context ------------------------------------------------------------------

    @cached_property
    def scores(self) -> Floats:
        """Scores of what is asked over what is read."""
        return self.scores_of(self.read("keys"))

    def scores_of(
        self,
        keys: Floats,
        exact: np.ndarray | None = None,
        *,
        values: Floats | None = None,
        queries: Floats | None = None,
        exact_keys: Floats | None = None,
        scaling: float | None = None,
        last: int = 0,
        window: int | None = None,
        cap: float | None = None,
    ) -> Floats:
        """Return the scores over other keys, exact tokens and window."""
        of = self.of
        values = self.read("values") if values is None and of.ups else values
        exact_keys = self.exact_keys if exact_keys is None else exact_keys
        if values is not None and of.ups:
            keys, exact_keys = of.seen(keys, values)[0], of.seen(exact_keys, self.values)[0]
        return definition.scores(
            self.read("queries") if queries is None else queries,
            keys,
            exact_keys,
            self.exact if exact is None else exact,
            of.scaling if scaling is None else scaling,
            last,
            of.window if window is None else window,
            of.cap if cap is None else cap,
        )

    @cached_property
    def weights(self) -> Floats:
        """Weights of the values: quantized ones of the run's own, others of the scores."""
        choice = self.of.choices.weights
        if choice is None:
            return definition.softmax(self.scores)
        return self.cast_weights

    @cached_property
    def cast_weights(self) -> Floats:
        """Quantized weights that are to be made of those that the run's softmax gave."""
        source = array(self.trace.squares["weights"])
        return np.where(self.visible, self.of.stored("weights", source), 0)

    @cached_property
    def context(self) -> Floats:
        return self.weighed(self.weights, self.read("values"))

    def weighed(self, weights: Floats, values: Floats, exact: np.ndarray | None = None) -> Floats:
        """Return the context that weights make of values, the exact ones where they are read."""
        keys, exact = self.exact_keys, self.exact if exact is None else exact
        sides = self.of.seen(keys, values)[1], self.of.seen(keys, self.values)[1]
        return definition.context(weights, *sides, exact)

    def context_of(
        self,
        keys: Floats,
        values: Floats,
        exact: np.ndarray,
        **changed: Any,
    ) -> Floats:
        """Return the context over other keys, values and exact tokens; `changed` as of scores."""
        scores = self.scores_of(keys, exact, values=values, **changed)
        return self.weighed(definition.softmax(scores), values, exact)

    @cached_property
    def limit(self) -> float:
        """The largest squared error of a token, as a share of its energy, that is float noise."""
        if self.of.choices.weights is not None:
            weights = moved(self.weights)
        else:
            weights = definition.softmax(self._moved_scores)
        return self._limit(self.weighed(weights, moved(self.read("values"))), self.context)

    @cached_property
    def score_limit(self) -> float:
        """The same of the scores of a query."""
        return self._limit(*(self._seen(x) for x in (self._moved_scores, self.scores)))

    @cached_property
    def softmax_limit(self) -> float:
        """The same of the weights that softmax makes of the run's own scores."""
        scores = self.actual_scores
        shifted = definition.softmax(np.where(self.visible, moved(scores), -np.inf))
        return self._limit(shifted, definition.softmax(scores))

    @cached_property
    def actual_scores(self) -> Floats:
        """Scores that the run's softmax read, -inf where a query sees nothing."""
        return np.where(self.visible, array(self.trace.squares["scores"]), -np.inf)

    @cached_property
    def _moved_scores(self) -> Floats:
        return self.scores_of(
            moved(self.read("keys")),
            values=moved(self.read("values")),
            queries=moved(self.read("queries")),
            exact_keys=moved(self.exact_keys),
        )

    def _limit(self, shifted: Floats, right: Floats) -> float:
        growth = max(1.0, math.sqrt(max(self.trace.length, self.turned.shape[-1])) / 2)
        return noise_limit(shifted, right, MARGIN * growth + self.trace.length)

    def _seen(self, scores: Floats) -> Floats:
        return np.where(self.visible, scores, 0)

    def score_errors(self, expected: Floats | None = None) -> Floats:
        """Return the squared relative error of the scores of every query."""
        right = self.scores if expected is None else expected
        return row_errors(self._seen(self.actual_scores), self._seen(right))

    def softmax_errors(self) -> Floats:
        """Return the squared relative error of the weights of every query, before their cast."""
        actual = array(self.trace.squares["weights"])
        return row_errors(self._seen(actual), definition.softmax(self.actual_scores))

    @property
    def actual_context(self) -> Floats:
        """Context of the run, before it is quantized."""
        assert self.trace.context is not None
        is_cast = self.of.choices.output is not None
        return array(self.trace.sources["output"] if is_cast else self.trace.context)

    def gated(self, context: Floats) -> Floats:
        """Return what the output projection reads of a context."""
        gate = self.trace.gate
        return context if gate is None else context * array(gate)

    def context_errors(self, expected: Floats | None = None) -> Floats:
        """Return the squared relative error of every head of every token."""
        expected = self.context if expected is None else expected
        actual = self.actual_context
        expected = expected if self.of.choices.output else self.gated(expected)
        if actual.shape != expected.shape:
            return np.full(expected.shape[:-1], np.inf)
        return row_errors(actual, expected)
