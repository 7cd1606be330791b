"""Faults of engines that logits tell: another temperature, order of tokens, or position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qgate.engines.scored import Pair
from qgate.text.wording import brief

ROWS = 256
"""Positions whose logits are looked at, the first of each sample in turn."""
FEWEST = 4
COLUMNS = 64
"""Entries of the vocabulary that are looked for among all of them."""
EXPLAINED = 0.02
"""Share of the difference that a fault may leave where it is named."""
LEAST_STEP = 2e-3
"""Share by which a factor differs from one, where it is a temperature and no noise."""


def find_causes(pairs: Sequence[Pair]) -> list[str]:
    """Name faults that explain nearly all of the difference between the logits of two engines."""
    logits = _logits(pairs)
    if logits is None:
        return []
    actual, reference, sample = logits
    difference = _left(actual, reference)
    if not difference > 0:
        return []
    return list(_causes(actual, reference, sample, EXPLAINED * difference))


def _causes(actual: Tensor, reference: Tensor, sample: Tensor, most: float) -> Iterator[str]:
    factor = float((actual * reference).sum() / reference.square().sum().clamp_min(1e-300))
    if abs(factor - 1) > LEAST_STEP and _left(actual, factor * reference) < most:
        yield (
            f"the logits are {brief(factor)} times the other engine's: one of the two applies a "
            f"temperature ({brief(1 / factor)}) or a scale, and the other does not"
        )
        return
    # Neighbors of one sample: at the end of a sample there is no other position.
    inside = sample[:-1] == sample[1:]
    early, late = actual[:-1][inside], actual[1:][inside]
    before, after = reference[:-1][inside], reference[1:][inside]
    if len(early) >= FEWEST:
        for own, other, words in ((early, after, "after"), (late, before, "before")):
            if _left(own, other) < most:
                yield f"the logits are those of one position {words} it in the other engine"
                return
    if _left(actual.sort(-1).values, reference.sort(-1).values) < most and _has_its_columns(
        actual, reference
    ):
        yield "the logits are the other engine's in another order of the vocabulary"


def _has_its_columns(actual: Tensor, reference: Tensor) -> bool:
    """Tell if the entries that differ most are those of other entries, at every position.

    Logits of other tokens may have the same values, sorted, because both are many.
    """
    differing = (actual - reference).square().sum(0)
    chosen = differing.topk(min(COLUMNS, len(differing))).indices
    columns = actual[:, chosen].T
    nearest = torch.cdist(columns, reference.T).min(1)
    left = float(nearest.values.square().sum())
    distinct = len(nearest.indices.unique())
    return left < EXPLAINED * float(differing[chosen].sum()) and 2 * distinct > len(chosen)


def _left(actual: Tensor, reference: Tensor) -> float:
    return float((actual - reference).square().sum())


def _logits(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return some rows of both, each less its mean, which changes no probability, and the sample of
    each row."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    count = 0
    most = max(8, ROWS // max(1, len(pairs)))
    for number, (a, r) in enumerate(pairs):
        if a.logits is None or r.logits is None or len(a) < 2:
            continue
        stop = min(len(a), 1 + most)
        x, y = a.logits(1, stop).double(), r.logits(1, stop).double()
        if x.shape != y.shape:
            return None
        is_finite = torch.isfinite(x).all(-1) & torch.isfinite(y).all(-1)
        finite_rows = int(is_finite.sum())
        rows.append((x[is_finite], y[is_finite], torch.full((finite_rows,), number)))
        count += finite_rows
        if count >= ROWS:
            break
    if count < FEWEST:
        return None
    actual, reference, sample = (torch.cat(side) for side in zip(*rows, strict=True))
    return (
        actual - actual.mean(-1, keepdim=True),
        reference - reference.mean(-1, keepdim=True),
        sample,
    )
