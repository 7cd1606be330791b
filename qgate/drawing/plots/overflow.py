"""What is no number at all, and what a format that casts values as they are is too small for.

A format with scales of its own saturates by design: that is drawn among the losses, as its cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import COLORS, GRAY, WARN
from qgate.charts.sheet import (
    Drawing,
    Sheet,
    bars,
    dots,
    format_colors,
    format_markers,
    height_for,
    legend,
    line,
    log_axis,
    patch,
    rows_named,
    share_axis,
    sheet,
    type_colors,
    whole_numbers,
)
from qgate.drawing.losses import share_in
from qgate.summaries.reading import (
    cast_names,
    fates,
    figure_of,
    grouped,
    nonfinite,
    quant_type_of,
    row_titles,
    saturated,
    saturation_cost,
    tensor_title,
    worst,
)
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import counted, percent

_WORST = 15
_BINS = np.logspace(-8, 0, 33)


class Over(NamedTuple):
    """The shares of a tensor that are beyond either end of a format, and the part of its squared
    error that they have."""

    tensor: TensorPortrait
    upper: float
    lower: float
    cost: float

    @property
    def share(self) -> float:
        return self.upper + self.lower


def overflows(analysis: DumpAnalysis) -> dict[str, list[Over]]:
    """Tensors with anything beyond the largest value of a format that casts, by format."""
    found = {
        name: [
            Over(
                tensor, figure_of(fate, "upper"), figure_of(fate, "lower"),
                max(saturation_cost(fate), 0.0),
            )
            for tensor, fate in fates(analysis["tensors"], name)
            if saturated(fate) > 0
        ]
        for name in cast_names(analysis)
    }  # fmt: skip
    return {name: told for name, told in found.items() if told}


def _build_shares(
    analysis: DumpAnalysis, what: str, field: Callable[[TensorPortrait], str]
) -> Sheet | None:
    """Bars of the share of all values that saturate, by format and by a field."""
    names = list(overflows(analysis))
    kinds = dict(list(grouped(analysis["tensors"], field).items())[: len(COLORS)])
    if not names:
        return None
    told = {
        (name, kind): share
        for name in names
        for kind, mine in kinds.items()
        if math.isfinite(share := share_in(mine, name, saturated))
    }
    name, kind = max(told, key=lambda key: told[key])
    most = percent(told[name, kind])
    title = f"{most} of the values of {kind} saturate cast to {name}, the most of any {what}"
    if len(kinds) == 1:
        title = f"{most} of all values saturate cast to {name}, the most"
    made = sheet(9, height_for(len(names) * len(kinds), 0.27, 2.7), title)
    axes = made.figure.subplots()
    colors, height = type_colors(kinds), 0.8 / len(kinds)
    low = min(share for share in told.values() if share > 0) / 3
    for place, kind in enumerate(kinds):
        shift = (place - (len(kinds) - 1) / 2) * height
        for row, name in enumerate(names):
            share = told.get((name, kind), math.nan)
            if math.isfinite(share):
                bars(axes, [max(share, low)] if share > 0 else [low], [row + shift],
                     colors[kind] if share > 0 else "none", 0.88 * height)  # fmt: skip
                axes.annotate(
                    percent(share) if share else "none", (share or low, row + shift), (4, 0),
                    textcoords="offset points", va="center", fontsize=SMALL,
                )  # fmt: skip
    axes.set_xlim(low, max(told.values()) * 6)
    share_axis(axes)
    rows_named(axes, names)
    dress(axes, x="share of values beyond the largest of the format", grid="x")
    if len(kinds) > 1:
        legend(made, {kind: patch(colors[kind]) for kind in kinds})
    return made


def _build_by_quant_type(analysis: DumpAnalysis) -> Sheet | None:
    return _build_shares(analysis, "quant type", quant_type_of)


def _build_by_layer_type(analysis: DumpAnalysis) -> Sheet | None:
    if len({tensor["layer_type"] for tensor in analysis["tensors"]}) < 2:
        return None
    return _build_shares(analysis, "type of layer", lambda tensor: str(tensor["layer_type"]))


def _build_upper_lower(analysis: DumpAnalysis) -> Sheet | None:
    told = dict(list(overflows(analysis).items())[: len(COLORS)])
    if not told:
        return None
    ends = [(each.upper, each.lower) for overs in told.values() for each in overs]
    shares = [share for pair in ends for share in pair if share > 0]
    low, high = min(shares), max(shares)
    floor = low / 4
    even = sum(up > 0 and down > 0 and max(up, down) <= 2 * min(up, down) for up, down in ends)
    title = (
        f"{even} of {counted(len(ends), 'overflow')} of a tensor in a format are on both sides "
        "alike (within a factor of two)"
    )
    made = sheet(7.4, 5.6, title)
    axes = made.figure.subplots()
    axes.plot([floor, high * 2], [floor, high * 2], color=GRAY, linewidth=1)
    colors, markers = format_colors(told), format_markers(told)
    for name, overs in told.items():
        x = [max(each.upper, floor) for each in overs]
        y = [max(each.lower, floor) for each in overs]
        dots(axes, x, y, colors[name], markers[name], s=34, alpha=0.8)
    axes.set(xlim=(floor / 1.5, high * 2), ylim=(floor / 1.5, high * 2))
    share_axis(axes, "x")
    share_axis(axes, "y")
    axes.axvspan(floor / 1.5, floor * 1.5, color=GRAY, alpha=0.12, linewidth=0)
    axes.axhspan(floor / 1.5, floor * 1.5, color=GRAY, alpha=0.12, linewidth=0)
    dress(
        axes, title="gray: none on that side", x="share above the largest value",
        y="share below the negative one",
    )  # fmt: skip
    legend(made, {n: line(colors[n], markers[n], linestyle="none") for n in told})
    return made


def _with(analysis: DumpAnalysis, name: str) -> int:
    return sum(1 for _ in fates(analysis["tensors"], name))


def _build_histogram(analysis: DumpAnalysis) -> Sheet | None:
    told = dict(list(overflows(analysis).items())[: len(COLORS)])
    if not told:
        return None
    name = max(told, key=lambda n: len(told[n]))
    total = _with(analysis, name)
    of_all = f"{len(told[name])} of {counted(total, 'tensor')}"
    title = f"{of_all} saturate cast to {name}, the most of any format"
    made = sheet(8.5, 3.8, title)
    axes = made.figure.subplots()
    shares = {n: [min(max(each.share, 1e-8), 1.0) for each in told[n]] for n in told}
    colors = format_colors(told)
    most = 1.0
    for kind, values in shares.items():
        counts, _ = np.histogram(values, _BINS)
        most = max(most, float(counts.max()))
        axes.stairs(counts, _BINS, color=colors[kind], linewidth=1.6)
        axes.stairs(counts, _BINS, color=colors[kind], alpha=0.15, fill=True)
    everything = [share for values in shares.values() for share in values]
    axes.set_xlim(max(min(everything) / 4, 1e-8), 1)
    axes.set_ylim(0, most * 1.1)
    share_axis(axes)
    whole_numbers(axes, "y", 6)
    dress(axes, x="share of a tensor's values that saturate", y="tensors")
    rest = {n: _with(analysis, n) - len(told[n]) for n in told}
    legend(
        made,
        {f"{n} ({rest[n]} without any)": line(colors[n], linewidth=2) for n in told},
        columns=3,
    )
    return made


def _badness(over: Over) -> tuple[float, float]:
    return over.cost, over.share


def _build_worst(analysis: DumpAnalysis) -> Sheet | None:
    """Tensors that are not finite first, then by the part of the error that saturation has."""
    told = overflows(analysis)
    broken = [t for t in analysis["tensors"] if nonfinite(t)]
    broken = [t for t, _ in worst(broken, lambda t: float(nonfinite(t)), _WORST)]
    by_tensor: dict[tuple[int, int, str], tuple[TensorPortrait, str, Over]] = {}
    for name in told:
        for each in told[name]:
            tensor = each.tensor
            key = tensor["rank"], tensor["order"], tensor["title"]
            if key not in by_tensor or _badness(each) > _badness(by_tensor[key][2]):
                by_tensor[key] = tensor, name, each
    every = sorted(by_tensor.values(), key=lambda item: _badness(item[2]), reverse=True)
    if not every:
        return None
    shown = every[: max(_WORST - len(broken), 1)]
    first, name, over = every[0]
    title = (
        f"{tensor_title(first)} saturates cast to {name}: {percent(over.share)} of its values, "
        f"{percent(over.cost)} of its squared error"
    )
    if broken:
        title = f"{counted(len(broken), 'tensor')} with NaN or Inf; {title}"
    if len(every) > len(shown):
        title += f"; the worst {len(shown)} of {len(every)}"
    made = sheet(10, height_for(len(broken) + len(shown), 0.3), title)
    axes = made.figure.subplots()
    colors = format_colors(told)
    costs = [100.0] * len(broken) + [100 * each.cost for *_, each in shown]
    paint = [WARN] * len(broken) + [colors[name] for _, name, _ in shown]
    bars(axes, costs, range(len(costs)), paint, 0.7)
    words = [f"{counted(nonfinite(t), 'value')} not finite" for t in broken]
    words += [f"{percent(e.share)} of the values" for *_, e in shown]
    for row, (cost, said) in enumerate(zip(costs, words, strict=True)):
        axes.annotate(
            said, (cost, row), (4, 0), textcoords="offset points", va="center", fontsize=SMALL
        )
    axes.set_xlim(0, 135)
    axes.set_xticks(range(0, 101, 20))
    rows_named(axes, row_titles([*broken, *(t for t, *_ in shown)], 62), 62)
    dress(axes, x="part of the squared error that saturated values have (%)", grid="x")
    entries = {n: patch(colors[n]) for n in told if n in {f for _, f, _ in shown}}
    legend(made, {**({"NaN or Inf": patch(WARN)} if broken else {}), **entries})
    return made


def _build_nonfinite(analysis: DumpAnalysis) -> Sheet | None:
    broken = [tensor for tensor in analysis["tensors"] if nonfinite(tensor)]
    shown = [tensor for tensor, _ in worst(broken, lambda tensor: float(nonfinite(tensor)), _WORST)]
    if not shown:
        return None
    total = sum(nonfinite(tensor) for tensor in broken)
    first = min(broken, key=lambda tensor: (tensor["order"], tensor["rank"]))
    title = (
        f"{counted(total, 'value')} in {counted(len(broken), 'tensor')} "
        f"{'is' if total == 1 else 'are'} not finite; the first in {tensor_title(first)}"
    )
    made = sheet(10, height_for(len(shown), 0.5), title)
    axes = made.figure.subplots()
    kinds = {"NaN": ("nan", WARN), "+Inf": ("posinf", COLORS[0]), "−Inf": ("neginf", COLORS[4])}
    for place, (key, color) in enumerate(kinds.values()):
        for row, tensor in enumerate(shown):
            count = int(tensor.get(key) or 0)  # type: ignore[call-overload]
            if count:
                at = row + (place - 1) * 0.27
                bars(axes, [count], [at], color, 0.25)
                axes.annotate(
                    f"{count:,} ({percent(count / max(tensor['elements'], 1))})", (count, at),
                    (4, 0), textcoords="offset points", va="center", fontsize=SMALL,
                )  # fmt: skip
    axes.set_xlim(0.5, max(nonfinite(tensor) for tensor in shown) * 8)
    log_axis(axes, "x")
    rows_named(axes, row_titles(shown, 62), 62)
    dress(axes, x="values", grid="x")
    legend(made, {name: patch(color) for name, (_, color) in kinds.items()})
    return made


draw_by_quant_type = Drawing(_build_by_quant_type)
draw_by_layer_type = Drawing(_build_by_layer_type)
draw_upper_lower = Drawing(_build_upper_lower)
draw_share_histogram = Drawing(_build_histogram)
draw_worst = Drawing(_build_worst)
draw_nonfinite = Drawing(_build_nonfinite)
