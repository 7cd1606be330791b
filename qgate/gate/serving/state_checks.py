"""Traces of recurrent states, held against the definition of a mixer that stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from qgate.expected.noise import MARGIN
from qgate.formats.options import Floats
from qgate.gate.serving.served_state import array, moved, noise_limit, row_errors
from qgate.gate.serving.state_traces import StateTrace
from qgate.modes.states import definition
from qgate.modes.states.choices import StateChoice
from qgate.modes.states.recurrences import RECURRENCES, Recurrence

Change = Callable[[Floats], Floats]


def unchanged(x: Floats) -> Floats:
    return x


@dataclass(frozen=True)
class StateDefinition:
    """Definition of the stored states of one mixer: choices and ranges.

    ranges  of every site of the model, by name
    kind    of the scan
    """

    site: str
    side: str
    choice: StateChoice
    seed: int
    ranges: Mapping[str, Floats]
    kind: str

    def stored(
        self,
        source: Floats,
        tokens: list[int],
        choice: StateChoice | None = None,
        ranges: Floats | None = None,
        site: str = "",
    ) -> Floats:
        """Return what is stored after tokens, by another choice, ranges or site if given."""
        choice = choice or self.choice
        reaches = self.ranges.get(self.site) if ranges is None else ranges
        draws = None
        if choice.stochastic:
            draws = definition.draws(site or self.site, self.seed, tokens, source.shape[2:])
        return definition.stored(source, choice, reaches, draws)


class ExpectedState:
    """Expected tensors of a trace, in float64."""

    def __init__(self, trace: StateTrace, of: StateDefinition, like: ExpectedState | None) -> None:
        """`like` has served the same inputs in another way: the same sources are stored alike."""
        self.trace, self.of = trace, of
        self.inputs = {port: array(x) for port, x in trace.inputs.tokens.items()}
        self.constants = {
            name: array(x) if isinstance(x, torch.Tensor) else x
            for name, x in trace.inputs.constants.items()
        }
        self.source, self.actual = (array(torch.cat(x)) for x in (trace.sources, trace.stored))
        self._like = like

    @cached_property
    def stored(self) -> Floats:
        """States that are to be stored of what the run cast."""
        like = self._like
        if (
            like is not None
            and like.trace.tokens == self.trace.tokens
            and np.array_equal(like.source, self.source)
        ):
            return like.stored
        return self.of.stored(self.source, self.trace.tokens)

    @cached_property
    def wrong(self) -> np.ndarray:
        """Mark numbers that are other ones than the definition stores."""
        return np.asarray(
            (self.actual != self.stored) & ~(np.isnan(self.actual) & np.isnan(self.stored))
        )

    # What was read --------------------------------------------------------------------------------

    @cached_property
    def places(self) -> np.ndarray:
        """Places among the tokens whose earlier states are known as well."""
        earlier = 1 if self.of.side == "ssm" else self.weight.shape[1] - 1
        numbers = self.trace.tokens
        backs = [min(earlier, token) for token in numbers]
        known = [
            n >= back and numbers[n - back] == numbers[n] - back for n, back in enumerate(backs)
        ]
        return np.flatnonzero(known)

    @cached_property
    def earlier(self) -> Floats | None:
        """States that the request before left."""
        return None if self.trace.earlier is None else array(self.trace.earlier)

    @cached_property
    def tokens(self) -> np.ndarray:
        return np.asarray(np.array(self.trace.tokens, int)[self.places])

    @cached_property
    def weight(self) -> Floats:
        return np.asarray(self.constants["weight"])[:, 0]

    def input(self, port: str) -> Floats:
        """Return an input at the tokens that are held."""
        return np.asarray(self.inputs[port][self.tokens])

    def kept(self, stored: Floats, back: int = 1, begin: Floats | None = None) -> Floats:
        """Return what is kept of the token that many before each; `begin` is before the first."""
        nothing = np.zeros_like(stored[0])
        rows = []
        for row, token in zip(self.places, self.tokens, strict=True):
            if token >= back:
                # Of a part of a long text the tokens before it are not known.
                rows.append(stored[row - back] if row >= back else nothing)
            else:
                is_known = begin is not None and back - token <= len(begin)
                rows.append(begin[token - back] if is_known else nothing)  # type: ignore[index]
        return np.stack(rows)

    # The scan -------------------------------------------------------------------------------------

    @cached_property
    def recurrence(self) -> Recurrence:
        return RECURRENCES[self.of.kind](self.constants)

    @cached_property
    def now(self) -> dict[str, Floats]:
        """Inputs at the tokens that are held."""
        return {port: self.input(port) for port in self.inputs}

    def states_after(self, before: Floats, change: Change = unchanged) -> Floats:
        """Return the states that follow from those before; `change` moves all numbers."""
        parts = [before, *self.recurrence.steps(self.now)]
        return self.recurrence.next(*(change(part) for part in parts))

    def states_stored_early(self) -> Floats:
        """Return what is cast where states are stored after they decay and take nothing new yet."""
        parts, next_of = self.recurrence.steps(self.now), self.recurrence.next
        full = next_of(self.actual[self.places], *self.recurrence.takes(parts))
        before = np.concatenate([np.zeros_like(full[:1]), full[:-1]])
        return next_of(before, *self.recurrence.decays(parts))

    @cached_property
    def heads(self) -> int:
        """Heads that the channels of a state belong to."""
        return self.recurrence.heads(self.inputs) if self.of.side == "ssm" else 1

    @cached_property
    def states(self) -> Floats:
        """States that follow from those that the run stored."""
        return self.states_after(self.kept(self.actual))

    def state_errors(self, expected: Floats | None = None) -> Floats:
        """Return the squared relative error of each channel's states, (tokens, batch, channels)."""
        return row_errors(self.source[self.places], self.states if expected is None else expected)

    @cached_property
    def state_limit(self) -> float:
        shifted = self.states_after(self.kept(self.actual), moved)
        return noise_limit(shifted, self.states, MARGIN * 2)

    def outputs_of(self, states: Floats, change: Change = unchanged) -> Floats:
        """Return the outputs of states."""
        parts = [states, *self.recurrence.reads(self.now)]
        return self.recurrence.read(*(change(part) for part in parts))

    # The convolution ------------------------------------------------------------------------------

    def convolved(
        self,
        stored: Floats,
        late: int = 0,
        begin: Floats | None = None,
        change: Change = unchanged,
        *,
        now: Floats | None = None,
        is_turned: bool = False,
    ) -> Floats:
        """Return the convolution over what is kept, perhaps late, or in the opposite order."""
        now = self.input("input") if now is None else now
        earlier = [self.kept(stored, back + late, begin) for back in range(1, self.weight.shape[1])]
        bias = self.constants["bias"]
        parts = [*(earlier if is_turned else earlier[::-1]), now]
        return definition.convolved(
            [change(part) for part in parts],
            change(self.weight),
            None if bias is None else change(bias),
        )

    # Both -----------------------------------------------------------------------------------------

    @cached_property
    def output(self) -> Floats:
        """Outputs that follow from the run's own states, or from what it kept."""
        if self.of.side == "conv":
            return self.convolved(self.actual)
        return self.outputs_of(self.source[self.places])

    @property
    def actual_output(self) -> Floats:
        assert self.trace.output is not None
        return np.asarray(array(self.trace.output)[self.tokens])

    def output_errors(self, expected: Floats | None = None) -> Floats:
        """Return the squared relative error of each token's output, (tokens, batch)."""
        right = self.output if expected is None else expected
        return row_errors(self.actual_output, right)

    @cached_property
    def output_limit(self) -> float:
        if self.of.side == "conv":
            shifted = self.convolved(self.actual, change=moved)
        else:
            shifted = self.outputs_of(self.source[self.places], moved)
        return noise_limit(shifted, self.output, MARGIN * 2)
