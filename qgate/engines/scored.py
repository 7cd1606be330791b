"""Samples that an engine scored: token ids, and the log-probability that it gave to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qgate.errors import QgateError

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.dumps import Dump

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
LogitRows = Callable[[int, int], "Tensor"]
"""Reads the logits that predict the tokens from one position up to another, one row per token."""
MISSING = -1
"""Stands for a token that an engine does not tell."""


@dataclass(frozen=True)
class KeptRows:
    """Kept tokens of each position of a sample but the first, the most likely one in front.

    ids       token ids, one row per position
    logprobs  of these tokens
    top       how many of them are the most likely ones; the others are draws
    rest      probability of all tokens that are not among these most likely ones
    """

    ids: IntArray
    logprobs: FloatArray
    top: int
    rest: FloatArray
    vocabulary: int


@dataclass(frozen=True)
class ScoredSample:
    """One sequence of tokens as one engine scored it.

    name      the request's id where there is one, else the number of the sample
    ids       token ids
    logprobs  of each token given those before it; NaN where the engine gives none
    best      the most likely token at each position; MISSING where the engine does not tell
    logits    reads logits where there are any; then the other two are computed from them
    kept      what was kept of logits in place of all of them
    """

    name: str
    ids: IntArray
    logprobs: FloatArray
    best: IntArray
    logits: LogitRows | None = None
    kept: KeptRows | None = None

    def __len__(self) -> int:
        return len(self.ids)


Pair = tuple[ScoredSample, ScoredSample]


@dataclass(frozen=True)
class EngineRun:
    """Samples of one engine, with its dump where there is one.

    dump  the tensors of its modules, where a dump was given
    """

    label: str
    samples: tuple[ScoredSample, ...]
    dump: Dump | None = None


def scored(
    name: str,
    ids: IntArray,
    logprobs: FloatArray | None = None,
    logits: LogitRows | None = None,
    kept: KeptRows | None = None,
) -> ScoredSample:
    """Make a sample of ids with log-probabilities, with logits or what was kept of them."""
    if logprobs is None:
        logprobs = np.full(len(ids), np.nan)
    best = np.full(len(ids), MISSING, np.int64)
    if kept is not None:
        best[1:] = kept.ids[:, 0]
    return ScoredSample(name, ids, logprobs, best, logits, kept)


def align(actual: EngineRun, reference: EngineRun) -> list[Pair]:
    """Pair the samples of two engines: by name if both have the same names, else by order.

    Samples of other tokens are refused: differences between them would mean nothing.
    """
    by_name = {sample.name: sample for sample in reference.samples}
    if len(by_name) == len(reference.samples) and {s.name for s in actual.samples} == set(by_name):
        pairs = [(sample, by_name[sample.name]) for sample in actual.samples]
    elif len(actual.samples) == len(reference.samples):
        pairs = list(zip(actual.samples, reference.samples, strict=True))
    else:
        raise QgateError(
            f"{actual.label!r} has {len(actual.samples):,} samples and {reference.label!r} "
            f"{len(reference.samples):,}: give two files of the same requests."
        )
    if not pairs:
        raise QgateError(f"{actual.label!r} has no samples: there is nothing to compare.")
    for a, r in pairs:
        _check_tokens(actual, reference, a, r)
    return pairs


def _check_tokens(
    actual: EngineRun, reference: EngineRun, a: ScoredSample, r: ScoredSample
) -> None:
    if np.array_equal(a.ids, r.ids):
        return
    shorter = min(len(a), len(r))
    differing = np.flatnonzero(a.ids[:shorter] != r.ids[:shorter])
    if len(differing):
        position = int(differing[0])
        where = (
            f"token {position} is {a.ids[position]} in {actual.label!r} and {r.ids[position]} in "
            f"{reference.label!r}"
        )
    else:
        where = (
            f"it has {len(a):,} tokens in {actual.label!r} and {len(r):,} in {reference.label!r}"
        )
    raise QgateError(
        f"the engines did not score the same tokens: in sample {a.name!r}, {where}. Let one engine "
        "score the tokens that the other one drew (prompt_logprobs of vLLM, input_token_logprobs "
        "of SGLang)."
    )
