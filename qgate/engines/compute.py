"""Figures of two engines over the same tokens: differences of log-probabilities, KL, flips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qgate.engines.record import (
    CarryingSample,
    CarryingToken,
    Estimate,
    Spread,
    TokenFigures,
)
from qgate.engines.scored import (
    MISSING,
    BoolArray,
    FloatArray,
    IntArray,
    KeptRows,
    Pair,
    ScoredSample,
)
from qgate.errors import QgateError
from qgate.metrics.intervals import GroupedMean, grouped_mean

AT_ONCE = 1 << 21
"""Logits of one engine that are worked on at a time, in float64."""
FEW_SAMPLES = 4
"""Number of samples below which the interval is taken over runs of tokens."""
RUN = 32
LISTED = 10
_MOST_NATS = 300.0
"""Difference of log-probabilities whose ratio is as good as infinite; sums of it are finite."""


@dataclass
class TokenValues:
    """Values of the tokens of one sample; NaN where an engine gives none.

    same_best        1 where the most likely tokens are the same, 0 where not
    actual_right     1 where the token is the one that the actual engine finds most likely
    reference_right  the same of the reference
    """

    actual: FloatArray
    reference: FloatArray
    kl: FloatArray
    same_best: FloatArray
    actual_right: FloatArray
    reference_right: FloatArray

    @property
    def finite(self) -> BoolArray:
        """Tell which tokens have a finite log-probability of both."""
        return np.isfinite(self.actual) & np.isfinite(self.reference)

    @property
    def difference(self) -> FloatArray:
        """Return the log-probabilities of the actual engine less those of the reference."""
        with np.errstate(invalid="ignore"):
            return self.actual - self.reference

    @property
    def k3(self) -> FloatArray:
        """Return what each token adds to the estimate of the KL."""
        return _k3(self.difference)


def _k3(difference: FloatArray) -> FloatArray:
    terms: FloatArray = np.expm1(np.minimum(difference, _MOST_NATS)) - difference
    return terms


def values_of(
    pairs: Sequence[Pair], progress: Callable[[int, int], None] | None = None
) -> list[TokenValues]:
    """Return the values of all tokens, sample by sample."""
    values = []
    for number, pair in enumerate(pairs):
        if progress is not None:
            progress(number, len(pairs))
        values.append(token_values(*pair))
    return values


def token_values(a: ScoredSample, r: ScoredSample) -> TokenValues:
    """Return the log-probabilities of both engines, token by token, and what logits tell."""
    nothing = np.full(len(a), np.nan)
    values = TokenValues(
        a.logprobs.copy(), r.logprobs.copy(), nothing, _same(a.best, r.best),
        _same(a.best, a.ids), _same(r.best, r.ids),
    )  # fmt: skip
    if a.logits is not None or r.logits is not None:
        _add_logits(a, r, values)
    return values


def _add_logits(a: ScoredSample, r: ScoredSample, values: TokenValues) -> None:
    """Fill in what logits tell, a few rows at a time."""
    ids = torch.from_numpy(a.ids)
    best_tokens = {"actual": a.best.copy(), "reference": r.best.copy()}
    sides = [
        (name, side, side.logits)
        for name, side in (("actual", a), ("reference", r))
        if side.logits is not None
    ]
    if len(a) < 2:
        return
    step = max(1, AT_ONCE // max(rows(1, 2).shape[-1] for _, _, rows in sides))
    for start in range(1, len(a), step):
        stop = min(len(a), start + step)
        logs: dict[str, Tensor] = {}
        for name, sample, rows in sides:
            logits = rows(start, stop)
            _check_ids(sample, ids[start:stop], logits.shape[-1])
            logs[name] = torch.log_softmax(logits.double(), -1)
            own = logs[name].gather(1, ids[start:stop, None])[:, 0]
            # NaN stands for what an engine does not give, and these it gave.
            getattr(values, name)[start:stop] = own.where(~own.isnan(), torch.inf).numpy()
            best_tokens[name][start:stop] = logs[name].argmax(-1).numpy()
        if len(logs) == 2:
            values.kl[start:stop] = _kl(logs["reference"], logs["actual"]).numpy()
        elif r.kept is not None and "actual" in logs:
            part = slice(start - 1, stop - 1)
            values.kl[start:stop] = _kept_kl(r.kept, part, logs["actual"])
    values.same_best = _same(best_tokens["actual"], best_tokens["reference"])
    values.actual_right = _same(best_tokens["actual"], a.ids)
    values.reference_right = _same(best_tokens["reference"], r.ids)


def _same(actual: IntArray, reference: IntArray) -> FloatArray:
    """Return 1 where tokens are the same, 0 where not, NaN where one is missing."""
    is_told = (actual != MISSING) & (reference != MISSING)
    return np.where(is_told, actual == reference, np.nan)


def _check_ids(sample: ScoredSample, ids: Tensor, vocabulary: int) -> None:
    if bool((ids >= vocabulary).any()):
        raise QgateError(
            f"sample {sample.name!r} has token {int(ids.max())}, and logits of {vocabulary:,} "
            "tokens: the ids are of another tokenizer."
        )


def _kl(reference: Tensor, actual: Tensor) -> Tensor:
    _check_vocabularies(actual.shape[-1], reference.shape[-1])
    p = reference.exp()
    return torch.where(p > 0, p * (reference - actual), 0.0).sum(-1)


def _kept_kl(reference: KeptRows, part: slice, actual: Tensor) -> FloatArray:
    """Return the KL to a reference of which a part of the tokens was kept.

    It is the sum of p (exp(d) - 1 - d), where d is the difference of log-probabilities: exact for
    the most likely tokens, and for the others the mean over those that were drawn.
    """
    _check_vocabularies(actual.shape[-1], reference.vocabulary)
    p = reference.logprobs[part]
    terms = _k3(actual.gather(1, torch.from_numpy(reference.ids[part])).numpy() - p)
    top = reference.top
    kl: FloatArray = (np.exp(p) * terms)[:, :top].sum(1)
    return kl + reference.rest[part] * terms[:, top:].mean(1) if top < p.shape[1] else kl


def _check_vocabularies(actual: int, reference: int) -> None:
    if actual != reference:
        raise QgateError(
            f"the engines have logits of {actual:,} and {reference:,} tokens; cut padding of the "
            "vocabulary off both."
        )


def figures_of(pairs: Sequence[Pair], values: Sequence[TokenValues]) -> TokenFigures:
    """Return the figures over all tokens."""
    actual, reference, kl, same_best, actual_right, reference_right = (
        np.concatenate([getattr(v, name) for v in values])
        for name in ("actual", "reference", "kl", "same_best", "actual_right", "reference_right")
    )
    sample, position = places([len(a) for a, _ in pairs])
    ids = np.concatenate([a.ids for a, _ in pairs])
    is_scored = ~np.isnan(actual) & ~np.isnan(reference)
    if not is_scored.any():
        raise QgateError(
            "no token has a log-probability from both engines: there is nothing to compare."
        )
    finite = np.isfinite(actual) & np.isfinite(reference) & is_scored
    infinite = int(is_scored.sum() - finite.sum())
    if not finite.any():
        raise QgateError("all log-probabilities of one engine are NaN or infinite.")
    difference = actual[finite] - reference[finite]
    k3 = _k3(difference)
    groups = groups_of(sample[finite], position[finite])
    kl_told = finite & np.isfinite(kl)
    infinite += int((finite & np.isinf(kl)).sum())
    flips_told = ~np.isnan(same_best)
    order = np.argsort(-k3, kind="stable")
    total = float(k3.sum())
    carried = np.cumsum(k3[order])
    chosen = np.flatnonzero(finite)[order]
    half = position[finite] >= np.array([len(a) for a, _ in pairs])[sample[finite]] / 2
    return TokenFigures(
        samples=len(pairs),
        tokens=int(finite.sum()),
        unscored=int((~is_scored).sum()),
        not_finite=infinite,
        equal_share=float((difference == 0).mean()),
        difference=_estimate(difference, groups),
        magnitude=_spread(np.abs(difference)),
        k3=_estimate(k3, groups),
        ratios=(float(np.exp(difference.min())), _exp(float(difference.max()))),
        kl=_estimate(kl[kl_told], groups[kl_told[finite]]) if kl_told.any() else None,
        kl_spread=_spread(kl[kl_told]) if kl_told.any() else None,
        flips=_estimate(
            1 - same_best[flips_told], groups_of(sample[flips_told], position[flips_told])
        )
        if flips_told.any()
        else None,
        flip_positions=int(flips_told.sum()),
        **_right_tokens(actual_right, reference_right, sample, position),
        perplexity_ratio=_exp(-float(difference.mean())),
        half_carried_by=int(np.searchsorted(carried, total / 2) + 1) if total > 0 else 0,
        first_half=float(k3[~half].mean()) if (~half).any() else 0.0,
        second_half=float(k3[half].mean()) if half.any() else 0.0,
        carriers=tuple(
            CarryingToken(
                pairs[sample[i]][0].name,
                int(position[i]),
                int(ids[i]),
                float(actual[i]),
                float(reference[i]),
                float(value / total),
            )
            for i, value in zip(chosen[:LISTED].tolist(), k3[order][:LISTED], strict=True)
            if value > 0
        ),
        worst_samples=tuple(_worst_samples(pairs, sample[finite], k3)),
    )


def _exp(value: float) -> float:
    return math.exp(min(value, _MOST_NATS))


def places(lengths: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return the number of its sample, and the position in it, of each token of all samples."""
    positions = np.concatenate([np.arange(length) for length in lengths])
    return np.repeat(np.arange(len(lengths)), lengths), positions


def groups_of(sample: IntArray, position: IntArray) -> IntArray:
    """Number what is independent: samples, or runs of tokens where there are few samples."""
    if len(np.unique(sample)) >= FEW_SAMPLES:
        return sample
    runs = position // RUN
    return sample * (int(runs.max()) + 1) + runs


def _right_tokens(
    actual: FloatArray, reference: FloatArray, sample: IntArray, position: IntArray
) -> dict[str, Estimate | None]:
    """Return the shares of tokens that only one engine finds most likely, and the ratio of both."""
    has_values = ~np.isnan(actual) & ~np.isnan(reference)
    if not has_values.any():
        return {}
    groups = groups_of(sample[has_values], position[has_values])
    right, reference_right = actual[has_values], reference[has_values]
    return {
        "lost": _estimate(reference_right * (1 - right), groups),
        "gained": _estimate(right * (1 - reference_right), groups),
        "kept": _estimate(right, groups, reference_right) if reference_right.any() else None,
    }


def _estimate(values: FloatArray, groups: IntArray, over: FloatArray | None = None) -> Estimate:
    """Return the mean of values, or their sum over another sum, with its errors over groups."""
    _, index = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(index, values), np.bincount(index, over)
    return estimate_of(grouped_mean(sums.tolist(), counts.tolist()))


def estimate_of(result: GroupedMean) -> Estimate:
    """Return an estimate without errors where there is one group alone."""
    if result.groups == 1:
        return Estimate(result.mean)
    return Estimate(result.mean, result.half_interval, result.standard_error, result.detectable)


def _spread(values: FloatArray) -> Spread:
    median, q99, q999 = np.quantile(values, [0.5, 0.99, 0.999]).tolist()
    return Spread(float(values.mean()), median, q99, q999, float(values.max()))


def _worst_samples(pairs: Sequence[Pair], sample: IntArray, k3: FloatArray) -> list[CarryingSample]:
    sums = np.bincount(sample, k3, minlength=len(pairs))
    counts = np.bincount(sample, minlength=len(pairs))
    total = float(sums.sum())
    worst = np.argsort(-sums, kind="stable")[:LISTED].tolist()
    return [
        CarryingSample(
            pairs[i][0].name,
            int(counts[i]),
            float(sums[i] / counts[i]),
            float(sums[i] / total),
        )
        for i in worst
        if total > 0 and counts[i] and sums[i] > 0
    ]
