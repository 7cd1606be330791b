"""Values that are not finite, and values that saturate when they are cast as they are.

A format with scales of its own saturates by design: its cost is drawn among the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qgate.charts import shapes
from qgate.charts import sheet as charts
from qgate.charts.figure import dress
from qgate.charts.palette import COLORS, GRAY, WARN
from qgate.charts.sheet import Sheet
from qgate.drawing.losses import share_in
from qgate.summaries.reading import (
    cast_names,
    figure_of,
    format_outcomes,
    grouped,
    nonfinite,
    row_titles,
    saturated,
    saturation_cost,
    tensor_title,
    worst,
)
from qgate.summaries.record import DumpAnalysis, TensorSummary
from qgate.text import counted, percent

_WORST = 15
_BINS = np.logspace(-8, 0, 33)
_NONFINITE = {"NaN": ("nan", WARN), "+Inf": ("posinf", COLORS[0]), "−Inf": ("neginf", COLORS[4])}


class Overflow(NamedTuple):
    """The shares of a tensor beyond either end of a format, and the part of its squared error that
    comes from them."""

    tensor: TensorSummary
    upper: float
    lower: float
    cost: float

    @property
    def share(self) -> float:
        return self.upper + self.lower


def overflows(analysis: DumpAnalysis) -> dict[str, list[Overflow]]:
    """Return the tensors with values beyond the largest of a format without scales, by format."""
    by_format = {
        name: [
            Overflow(
                tensor, figure_of(outcome, "upper"), figure_of(outcome, "lower"),
                max(saturation_cost(outcome), 0.0),
            )
            for tensor, outcome in format_outcomes(analysis["tensors"], name)
            if saturated(outcome) > 0
        ]
        for name in cast_names(analysis)
    }  # fmt: skip
    return {name: mine for name, mine in by_format.items() if mine}


def shares_by(
    label: str, field: Callable[[TensorSummary], str], least: int = 1
) -> Callable[[DumpAnalysis], Sheet | None]:
    """Draw bars of the share of all values that saturate, by format and by a field of which there
    are `least` different ones."""

    def build(analysis: DumpAnalysis) -> Sheet | None:
        names = list(overflows(analysis))
        kinds = grouped(analysis["tensors"], field)
        if not names or len(kinds) < least:
            return None
        kinds = dict(list(kinds.items())[: len(COLORS)])
        shares = {
            (name, kind): share
            for name in names
            for kind, mine in kinds.items()
            if math.isfinite(share := share_in(mine, name, saturated))
        }
        name, kind = max(shares, key=lambda key: shares[key])
        most = percent(shares[name, kind])
        title = f"{most} of the values of {kind} saturate cast to {name}, the most of any {label}"
        if len(kinds) == 1:
            title = f"{most} of all values saturate cast to {name}, the most"
        size = 9, charts.height_for(len(names) * len(kinds), 0.27, 2.7)
        page, axes = shapes.single(title, *size)
        colors, height = charts.type_colors(kinds), 0.8 / len(kinds)
        low = min(share for share in shares.values() if share > 0) / 3
        for number, kind in enumerate(kinds):
            shift = (number - (len(kinds) - 1) / 2) * height
            for row, name in enumerate(names):
                if (name, kind) in shares:
                    share = shares[name, kind]
                    text, color = (percent(share), colors[kind]) if share else ("none", "none")
                    shapes.bars(
                        axes, [share or low], [text], color, rows=[row + shift],
                        height=0.88 * height,
                    )  # fmt: skip
        axes.set_xlim(low, max(shares.values()) * 6)
        charts.share_axis(axes)
        charts.name_rows(axes, names)
        dress(axes, x="share of values beyond the largest of the format", grid="x")
        if len(kinds) > 1:
            charts.legend(page, shapes.patches(colors))
        return page

    return build


def upper_lower(analysis: DumpAnalysis) -> Sheet | None:
    by_format = dict(list(overflows(analysis).items())[: len(COLORS)])
    if not by_format:
        return None
    ends = np.array([(o.upper, o.lower) for mine in by_format.values() for o in mine])
    shares = ends[ends > 0]
    low, high = float(shares.min()), float(shares.max())
    floor = low / 4
    even = (ends.min(1) > 0) & (ends.max(1) <= 2 * ends.min(1))
    title = (
        f"{even.sum()} of {counted(len(ends), 'overflow')} of a tensor in a format are on both "
        "sides alike (within a factor of two)"
    )
    page, axes = shapes.single(title, 7.4, 5.6)
    shapes.diagonal(axes, floor, high * 2)
    colors, markers = charts.format_colors(by_format), charts.format_markers(by_format)
    for name, mine in by_format.items():
        x, y = ([max(getattr(o, side), floor) for o in mine] for side in ("upper", "lower"))
        charts.dots(axes, x, y, colors[name], markers[name], s=34, alpha=0.8)
    axes.set(xlim=(floor / 1.5, high * 2), ylim=(floor / 1.5, high * 2))
    charts.share_axis(axes, "x")
    charts.share_axis(axes, "y")
    for span in (axes.axvspan, axes.axhspan):
        span(floor / 1.5, floor * 1.5, color=GRAY, alpha=0.12, linewidth=0)
    dress(
        axes, title="gray: none on that side", x="share above the largest value",
        y="share below the negative one",
    )  # fmt: skip
    charts.legend(page, shapes.keys(colors, markers))
    return page


def share_histogram(analysis: DumpAnalysis) -> Sheet | None:
    by_format = dict(list(overflows(analysis).items())[: len(COLORS)])
    if not by_format:
        return None
    totals = {
        name: sum(1 for _ in format_outcomes(analysis["tensors"], name)) for name in by_format
    }
    name = max(by_format, key=lambda n: len(by_format[n]))
    of_all = f"{len(by_format[name])} of {counted(totals[name], 'tensor')}"
    title = f"{of_all} saturate cast to {name}, the most of any format"
    page, axes = shapes.single(title, 8.5, 3.8)
    colors = charts.format_colors(by_format)
    least, most = 1.0, 1.0
    for name, mine in by_format.items():
        shares = np.clip([overflow.share for overflow in mine], 1e-8, 1.0)
        counts = np.histogram(shares, _BINS)[0]
        least, most = min(least, float(shares.min())), max(most, float(counts.max()))
        shapes.steps(axes, counts, _BINS, colors[name], 0.15, 1.6)
    axes.set_xlim(max(least / 4, 1e-8), 1)
    axes.set_ylim(0, most * 1.1)
    charts.share_axis(axes)
    charts.whole_numbers(axes, "y", 6)
    dress(axes, x="share of a tensor's values that saturate", y="tensors")
    names = {f"{n} ({totals[n] - len(mine)} without any)": n for n, mine in by_format.items()}
    entries = shapes.keys({text: colors[n] for text, n in names.items()}, linewidth=2)
    charts.legend(page, entries, columns=3)
    return page


def worst_tensors(analysis: DumpAnalysis) -> Sheet | None:
    """Draw tensors that are not finite, then those where most of the error is saturation."""
    by_format = overflows(analysis)
    broken = [tensor for tensor in analysis["tensors"] if nonfinite(tensor)]
    broken = [tensor for tensor, _ in worst(broken, lambda t: float(nonfinite(t)), _WORST)]
    by_tensor: dict[tuple[int, int, str], tuple[str, Overflow]] = {}

    def badness(item: tuple[str, Overflow]) -> tuple[float, float]:
        return item[1].cost, item[1].share

    for name, mine in by_format.items():
        for overflow in mine:
            tensor = overflow.tensor
            key = tensor["rank"], tensor["order"], tensor["title"]
            by_tensor[key] = max(
                by_tensor.get(key, (name, overflow)), (name, overflow), key=badness
            )
    every = sorted(by_tensor.values(), key=badness, reverse=True)
    if not every:
        return None
    rows = every[: max(_WORST - len(broken), 1)]
    name, first = every[0]
    title = (
        f"{tensor_title(first.tensor)} saturates cast to {name}: {percent(first.share)} of its "
        f"values, {percent(first.cost)} of its squared error"
    )
    if broken:
        title = f"{counted(len(broken), 'tensor')} with NaN or Inf; {title}"
    if len(every) > len(rows):
        title += f"; the worst {len(rows)} of {len(every)}"
    page, axes = shapes.single(title, 10, charts.height_for(len(broken) + len(rows), 0.3))
    colors = charts.format_colors(by_format)
    bars = [(100.0, WARN, f"{counted(nonfinite(t), 'value')} not finite") for t in broken]
    bars += [(100 * o.cost, colors[n], f"{percent(o.share)} of the values") for n, o in rows]
    costs, paint, words = zip(*bars, strict=True)
    shapes.bars(axes, costs, words, paint)
    axes.set_xlim(0, 135)
    axes.set_xticks(range(0, 101, 20))
    charts.name_rows(axes, row_titles([*broken, *(o.tensor for _, o in rows)], 62), 62)
    dress(axes, x="part of the squared error that saturated values have (%)", grid="x")
    names = {name for name, _ in rows}
    entries = {**({"NaN or Inf": WARN} if broken else {})}
    entries |= {name: color for name, color in colors.items() if name in names}
    charts.legend(page, shapes.patches(entries))
    return page


def not_finite(analysis: DumpAnalysis) -> Sheet | None:
    broken = [tensor for tensor in analysis["tensors"] if nonfinite(tensor)]
    rows = [tensor for tensor, _ in worst(broken, lambda tensor: float(nonfinite(tensor)), _WORST)]
    if not rows:
        return None
    total = sum(nonfinite(tensor) for tensor in broken)
    first = min(broken, key=lambda tensor: (tensor["order"], tensor["rank"]))
    title = (
        f"{counted(total, 'value')} in {counted(len(broken), 'tensor')} "
        f"{'is' if total == 1 else 'are'} not finite; the first in {tensor_title(first)}"
    )
    page, axes = shapes.single(title, 10, charts.height_for(len(rows), 0.5))
    for number, (key, color) in enumerate(_NONFINITE.values()):
        for row, tensor in enumerate(rows):
            count = int(tensor.get(key) or 0)  # type: ignore[call-overload]
            if count:
                at = row + (number - 1) * 0.27
                text = f"{count:,} ({percent(count / max(tensor['elements'], 1))})"
                shapes.bars(axes, [count], [text], color, rows=[at], height=0.25)
    axes.set_xlim(0.5, max(nonfinite(tensor) for tensor in rows) * 8)
    charts.log_axis(axes, "x")
    charts.name_rows(axes, row_titles(rows, 62), 62)
    dress(axes, x="values", grid="x")
    charts.legend(page, shapes.patches({name: color for name, (_, color) in _NONFINITE.items()}))
    return page
