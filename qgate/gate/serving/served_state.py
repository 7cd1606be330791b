"""State that serving keeps between tokens, and that a mode quantizes: one protocol for all kinds.

The same tensors of the reference are served three ways, each over a state that another request has
used before: token by token, as one prefill, and as prefill in chunks. A trace of the free run is
taken as well. Every trace is held against the definition: what was stored bit for bit, what follows
from it to float noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch import Tensor, float64

from qgate.expected.noise import ARITHMETICS, FUNCTION_ROUNDINGS
from qgate.formats.options import Floats
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.site_errors import massive_from
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.modules.conformance import METRIC
from qgate.models import Model

RUN = "the free run"
UNIT = ARITHMETICS["float32"]
_STEP = 2.0**-12
MARGIN = 16.0
"""Times the noise of the definition up to which another tensor is called the run's."""

Candidate = tuple[str, Floats | None]
"""Words for a fault, and the tensor that it gives; made one by one until one is the run's."""


class ServedState(Protocol):
    """A cache, or recurrent states, of one mode."""

    def watch(self) -> AbstractContextManager[None]:
        """Take the tensors of the first pass of a free run inside."""
        ...

    def rows(self, base: Model, sites: ModelSites) -> list[Measured]:
        """Return rows of what is stored, and of what follows from it in every way to serve."""
        ...


# Rows -------------------------------------------------------------------------------------------


@dataclass
class HeldWays:
    """Values that were held bit for bit in several ways to serve, and the first fault in words."""

    ways: int = 0
    wrong_ways: list[str] = field(default_factory=list)
    values: int = 0
    differing: int = 0
    words: str = ""

    def add(self, way: str, values: int, differing: int, fault: Callable[[], str]) -> None:
        """Add what one way gave; `fault` is asked where it is the first that differs."""
        self.ways += 1
        self.values += values
        self.differing += differing
        if differing:
            self.words = self.words or fault()
            self.wrong_ways.append(way.replace("_", " "))

    def conformance(self) -> Conformance:
        """Return the figures of all ways, with the fault and the ways that have it in words."""
        about = f"{self.values:,} values of {self.ways} ways to serve"
        if self.wrong_ways:
            are_some = len(self.wrong_ways) < self.ways
            only = f"; only in {' and '.join(self.wrong_ways)}" if are_some else ""
            about = f"{self.words}{only}"
        return Conformance(METRIC, self.values, self.differing, about)


def stored_row(
    site: str,
    order: int,
    sites: ModelSites,
    tokens: tuple[Tensor, Tensor],
    quantizer: str,
    ideal: float,
    ways_held: HeldWays,
) -> Measured:
    """Return the error of what is stored, (batch, tokens, channels) with its reference."""
    row = sites.local(
        site, order, [tokens], beyond=massive_from(tokens[1:]), ideal=ideal, quantizer=quantizer
    )
    return replace(row, conformance=(ways_held.conformance(),))


def following_row(
    site: str,
    order: int,
    sites: ModelSites,
    errors: tuple[float, float, float],
    words: Callable[[], str],
    output: Tensor,
    channels: int,
) -> Measured:
    """Return the distance from what follows of what is stored: error, worst token, and limit."""
    error, worst, limit = errors
    reason = "" if worst <= limit else words()
    return sites.isolated(
        site, order, error, worst, limit, reason, nonfinite=int((~output.isfinite()).sum()),
        channels=channels,
    )  # fmt: skip


# Ways to serve -----------------------------------------------------------------------------------


def ways(length: int, sizes: Sequence[int]) -> dict[str, list[int]]:
    """Return the numbers of tokens that each way of serving takes at once."""
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(min(sizes[len(chunks) % len(sizes)], length - sum(chunks)))
    return {"decode": [1] * length, "prefill": [length], "chunked_prefill": chunks}


# Numbers -----------------------------------------------------------------------------------------


def moved(x: Floats) -> Floats:
    """Move each number by a small relative step, up or down at random."""
    steps = np.random.default_rng(x.size).choice([-1.0, 1.0], x.shape)
    return np.asarray(x * (1 + _STEP * steps))


def row_errors(actual: Floats, expected: Floats) -> Floats:
    """Return the squared error of each row, as a share of its energy or the usual one's."""
    with np.errstate(over="ignore"):
        energy = np.square(expected).sum(-1)
        scale = np.maximum(np.maximum(energy, np.median(energy)), np.finfo(np.float64).tiny)
        return np.asarray(np.nan_to_num(np.square(actual - expected).sum(-1) / scale, nan=np.inf))


def relative_mse(actual: Floats, reference: Floats) -> float:
    """Return the squared error of all rows together, as a share of their energy."""
    energy = max(float(np.square(reference).sum()), np.finfo(np.float64).tiny)
    return float(np.square(actual - reference).sum()) / energy


def array(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().to(float64).cpu().numpy())


def noise_limit(shifted: Floats, right: Floats, roundings: float) -> float:
    """Return the largest squared error of a row, as a share of its energy, that is float noise.

    `shifted` is what follows of numbers moved by a small step, and `roundings` says how many of the
    numbers' own roundings add up in a result.
    """
    sensitivity = math.sqrt(float(row_errors(shifted, right).max())) / _STEP
    return min(1.0, (UNIT * (roundings * sensitivity + FUNCTION_ROUNDINGS)) ** 2)


# Words -------------------------------------------------------------------------------------------


def first_words(candidates: Iterable[Candidate], explains: Callable[[Floats], bool]) -> str:
    """Return the words of the first fault that explains what a run did; empty without one."""
    tensors = ((words, other) for words, other in candidates if other is not None)
    return next((words for words, other in tensors if explains(other)), "")


def places(wrong: np.ndarray, axes: Sequence[str] = ("request", "head", "token")) -> str:
    """Name the requests, heads and tokens that are wrong, where that is not all of them."""
    names = []
    for axis, name in enumerate(axes):
        other_axes = tuple(number for number in range(wrong.ndim) if number != axis)
        listed = np.flatnonzero(wrong.any(other_axes))
        if len(listed) == wrong.shape[axis]:
            continue
        first, last = int(listed[0]), int(listed[-1])
        if len(listed) == 1:
            names.append(f"{name} {first}")
        elif last - first + 1 == len(listed):
            names.append(f"{name}s {first} to {last}")
        else:
            names.append(f"{len(listed)} {name}s from {first} to {last}")
    return f" ({', '.join(names)})" if names else ""
