"""Faults of engines that logits tell: another temperature, order of tokens, or position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qgate.engines.scored import Pair
from qgate.text.numbers import brief

ROWS = 256
"""Positions whose logits are looked at, the first of each sample in turn."""
FEWEST = 4
EXPLAINED = 0.02
"""Share of the difference that a fault may leave where it is named."""
LEAST_STEP = 2e-3
"""Share by which a factor differs from one, where it is a temperature and no noise."""


def find_causes(pairs: Sequence[Pair]) -> list[str]:
    """Name faults that explain nearly all of the difference between the logits of two engines."""
    logits = _logits(pairs)
    if logits is None:
        return []
    actual, reference = logits
    difference = float((actual - reference).square().sum())
    if not difference > 0:
        return []
    return list(_causes(actual, reference, EXPLAINED * difference))


def _causes(actual: Tensor, reference: Tensor, most: float) -> Iterator[str]:
    factor = float((actual * reference).sum() / reference.square().sum().clamp_min(1e-300))
    if abs(factor - 1) > LEAST_STEP and _left(actual, factor * reference) < most:
        yield (
            f"the logits are {brief(factor)} times the other engine's: one of the two applies a "
            f"temperature ({brief(1 / factor)}) or a scale, and the other does not"
        )
    elif _left(actual.sort(-1).values, reference.sort(-1).values) < most:
        yield "the logits are the other engine's in another order of the vocabulary"
    else:
        for step, words in ((1, "after"), (-1, "before")):
            a, r = (actual[:-1], reference[1:]) if step > 0 else (actual[1:], reference[:-1])
            # Rows of other samples stand side by side now and then, and leave a rest.
            if _left(a, r) < 0.2 * most / EXPLAINED:
                yield f"the logits are those of one position {words} it in the other engine"


def _left(actual: Tensor, reference: Tensor) -> float:
    return float((actual - reference).square().sum())


def _logits(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor] | None:
    """Return some rows of both, each less its mean, which changes no probability."""
    rows: list[tuple[Tensor, Tensor]] = []
    count = 0
    most = max(8, ROWS // max(1, len(pairs)))
    for a, r in pairs:
        if a.logits is None or r.logits is None or len(a) < 2:
            continue
        stop = min(len(a), 1 + most)
        x, y = a.logits(1, stop).double(), r.logits(1, stop).double()
        if x.shape != y.shape:
            return None
        is_finite = torch.isfinite(x).all(-1) & torch.isfinite(y).all(-1)
        rows.append((x[is_finite], y[is_finite]))
        count += int(is_finite.sum())
        if count >= ROWS:
            break
    if count < FEWEST:
        return None
    actual, reference = (torch.cat(side) for side in zip(*rows, strict=True))
    return actual - actual.mean(-1, keepdim=True), reference - reference.mean(-1, keepdim=True)
