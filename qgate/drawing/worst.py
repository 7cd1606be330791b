"""The tensors of an analysis with something wrong, worst first."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from qgate.drawing.findings import MUCH_FLUSHED, OUTLIER
from qgate.summaries.reading import (
    flushed,
    format_label,
    nonfinite,
    outliers,
    ratios_db,
    saturated,
    saturation_cost,
    two_ratios,
)
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import brief, counted, percent


@dataclass(frozen=True)
class Bad:
    """A tensor with what is worst about it."""

    tensor: TensorPortrait
    reason: str
    rank: tuple[float, ...]


def worst_tensors(analysis: DumpAnalysis, count: int) -> list[Bad]:
    """Tensors by what is worst about them: not finite; saturated by a cast, by the part of the
    squared error that this has; zeroed by a cast; lossy in any format; of far outliers."""
    found = (bad for tensor in analysis["tensors"] if (bad := _bad(tensor, analysis)) is not None)
    return heapq.nsmallest(
        count, found, key=lambda bad: (*(-part for part in bad.rank), bad.tensor["order"])
    )


def _bad(tensor: TensorPortrait, analysis: DumpAnalysis) -> Bad | None:
    broken = nonfinite(tensor)
    if broken:
        return Bad(tensor, f"{counted(broken, 'value')} not finite", (3, float(broken), 0.0))
    told = tensor.get("formats") or {}
    casts = {n: f for n, f in told.items() if n in analysis["formats"]}
    casts = {n: fate for n, fate in casts.items() if not analysis["formats"][n]["scaled"]}
    over = [(saturation_cost(f), saturated(f), n) for n, f in casts.items() if saturated(f) > 0]
    if over:
        cost, share, name = max((0.0 if math.isnan(c) else c, s, n) for c, s, n in over)
        reason = f"{percent(share)} saturate in {name}, {percent(cost)} of its error"
        return Bad(tensor, reason, (2, cost, share))
    share, name = max(((flushed(fate), n) for n, fate in casts.items()), default=(0.0, ""))
    if share > MUCH_FLUSHED:
        return Bad(tensor, f"{percent(share)} become zero in {name}", (1, share, 0.0))
    ratios = [(ratios_db(fate), name) for name, fate in told.items()]
    finite = [(min(pair), pair, n) for pair, n in ratios if math.isfinite(min(pair))]
    if finite:
        least, pair, name = min(finite)
        label = format_label(analysis, name)
        return Bad(tensor, f"{two_ratios(*pair)} in {label}", (0, -least, 0.0))
    factor = outliers(tensor)
    if factor > OUTLIER:
        return Bad(tensor, f"largest channel {brief(factor)} times the median", (-1, factor, 0.0))
    return None
