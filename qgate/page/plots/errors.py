"""Plots of actual against reference at one site: how large the errors are, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from qgate.charts import svg
from qgate.charts.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    STRIP,
    TOP,
    box,
    brief,
    color,
    group,
    label,
    number,
    numbers,
    path,
    text_width,
)
from qgate.page.plots._findings import (
    channels_finding,
    density_finding,
    histogram_finding,
    magnitude_finding,
    sides,
)
from qgate.results.pictures import ErrorPicture
from qgate.text import rounded_percent

# Pixels at either end of a histogram for what is beyond its bins.
OUTSIDE = 18.0
# The highest bin over the mean of the others, from which on the axis is logarithmic.
PEAKED = 20.0
# A share of error and energy at the ends of the axis that is not drawn.
NOTHING = 1e-3
MOST_BARS = 9
SIDE = BOTTOM - TOP
MOST_SHADES = 6


def error_histogram(picture: ErrorPicture) -> str:
    """Draw the histogram of errors, in different colors below and above zero."""
    bins = picture["bins"]
    edge, counts = bins["edge"], bins["counts"]
    beyond = bool(bins["below"] or bins["above"])
    x = _error_axis(edge, OUTSIDE if beyond else 0.0)
    y = _count_axis([*counts, bins["below"], bins["above"]], TOP + (16 if beyond else 4))
    width = 2 * edge / len(counts)
    pieces: dict[str, list[str]] = {"blue": [], "orange": [], "gray": []}
    for at, count in enumerate(counts):
        middle = -edge + (at + 0.5) * width
        side = "gray" if abs(middle) < 0.25 * width else "blue" if middle < 0 else "orange"
        start, end = (x.place(-edge + index * width) for index in (at, at + 1))
        if not edge:
            side, start, end = "gray", x.place(0) - 10, x.place(0) + 10
        pieces[side].append(svg.bar(start, end, count, y))
    pieces["blue"].append(svg.bar(LEFT, LEFT + OUTSIDE - 6, bins["below"], y))
    pieces["orange"].append(svg.bar(RIGHT - OUTSIDE + 6, RIGHT, bins["above"], y))
    bars = "".join(path("".join(d), fill=color(fill)) for fill, d in pieces.items())
    zero = svg.rule(x.place(0), TOP, "muted")
    names = ""
    if bins["below"]:
        names += label(LEFT, TOP + 9, f"← {svg.short_count(bins['below'])} beyond")
    if bins["above"]:
        names += label(RIGHT, TOP + 9, f"{svg.short_count(bins['above'])} beyond →", "end")
    below, above = sides(bins)
    total = below + above or 1
    legend = svg.legend(
        [
            (svg.swatch("blue"), f"below 0: {rounded_percent(below / total)}"),
            (svg.swatch("orange"), f"above: {rounded_percent(above / total)}"),
        ]
        if bins["edge"]
        else []
    )
    description = (
        f"{sum(counts):,} of {picture['sampled']:,} errors within ±{brief(bins['edge'])}, "
        f"{bins['below']:,} below and {bins['above']:,} above; "
        f"the reference has an rms of {brief(picture['rms'])}."
    )
    return svg.panel(x, y, bars + zero, names + legend, histogram_finding(picture), description)


def _error_axis(edge: float, outside: float) -> svg.Axis:
    """Return an axis from -edge to edge with room at both ends for errors beyond."""
    if not edge:
        return svg.Axis("linear", -1, 1, LEFT, RIGHT, ((0.0, "0"),), "actual − reference")
    inner = svg.linear(-edge, edge, LEFT + outside, RIGHT - outside, "actual − reference")
    reach = edge * (RIGHT - LEFT) / (RIGHT - LEFT - 2 * outside)
    return svg.Axis("linear", -reach, reach, LEFT, RIGHT, inner.ticks, inner.label)


def _count_axis(counts: Sequence[int], top: float) -> svg.Axis:
    """Return an axis of counts, logarithmic where one bin would flatten the others."""
    *lower, highest = sorted(count for count in [0, *counts] if count) or [1]
    if lower and highest >= PEAKED * sum(lower) / len(lower):
        return svg.log_count_axis(highest, BOTTOM, top, "elements (log)")
    return svg.count_axis(highest, BOTTOM, top)


# Where the error sits --------------------------------------------------------------------------


def worst_channels(picture: ErrorPicture) -> str:
    """Draw the channels with most of the squared error, each with its own relative MSE."""
    channels = picture.get("channels") or []
    count = picture.get("channel_count") or len(channels)
    worst = channels[:MOST_BARS]
    names = [f"channel {channel['index']}" for channel in worst]
    start = max([text_width(name) for name in names], default=0) + 10
    high = max([channel["share"] for channel in worst] + [1.0 / max(count, 1)])
    right = RIGHT - 84
    x = svg.shares(high, start, right, "share of the squared error", 4)
    y = svg.Axis("linear", 0, max(len(worst), 1), TOP, BOTTOM)
    pitch = (BOTTOM - TOP) / MOST_BARS
    bars, words = [], ""
    for at, (channel, name) in enumerate(zip(worst, names, strict=True)):
        top = TOP + at * pitch
        if channel["share"] > 0:
            bars.append(box(start, top + 2, x.place(channel["share"]) - start, pitch - 4))
        words += label(start - 5, top + pitch / 2 + 4, name, "end", fill="muted")
        own = channel["relative_mse"]
        text = "no energy" if own is None else brief(own)
        words += label(RIGHT, top + pitch / 2 + 4, text, "end")
    body = path("".join(bars), fill=color("orange"))
    body += svg.rule(x.place(1.0 / max(count, 1)), TOP, "ink", "3 3")
    heads = label(RIGHT, STRIP, "own rel. MSE", "end", fill="muted")
    heads += group(
        svg.stroke_sample("ink", "3 3", 1), transform=f"translate(10 {STRIP - 4:g})"
    ) + label(23, STRIP, f"even: {rounded_percent(1.0 / max(count, 1))} each", fill="muted")
    remainder = 1 - sum(channel["share"] for channel in worst)
    description = (
        f"The {len(worst)} worst of {count:,} channels; all others hold "
        f"{rounded_percent(remainder)}."
    )
    return svg.panel(x, y, body, words + heads, channels_finding(picture), description)


def error_by_magnitude(picture: ErrorPicture) -> str:
    """Draw shares of squared error and energy over the octaves of the reference."""
    octaves = picture["octaves"]
    used = _used(octaves["error"], octaves["energy"])
    edges, (error, energy) = svg.merge_octaves(
        octaves["low"], [octaves["error"], octaves["energy"]], used
    )
    x = svg.octaves(edges[0], edges[-1], LEFT, RIGHT, "|reference| / rms")
    y = svg.shares(1.03 * max([*error, *energy]), BOTTOM, TOP, "")
    gap = min(0.6, (x.place(edges[1]) - x.place(edges[0])) / 10)
    bars = svg.octave_bars(edges, error, x, y, gap)
    steps = [
        (x.place(end), y.place(share))
        for at, share in zip(edges, energy, strict=False)
        for end in (at, at + edges.step)
    ]
    outline = "".join(f"{'L' if at else 'M'}{numbers(point)}" for at, point in enumerate(steps))
    curves = path(bars, fill=color("orange"), data_bars="error") + path(
        outline, stroke=color("blue"), stroke_width=1.8, fill="none", data_line="energy"
    )
    keys = svg.legend(
        [
            (svg.swatch("orange"), "share of squared error"),
            (svg.stroke_sample("blue"), "of energy"),
        ]
    )
    below = f"2^{edges[0] + edges.step}"
    description = (
        f"Octaves of the reference in units of its rms, {brief(picture['rms'])}; the first holds "
        f"all below {below}, zeros too."
    )
    return svg.panel(x, y, curves, keys, magnitude_finding(picture), description)


def _used(error: Sequence[float], energy: Sequence[float]) -> range:
    """Return the range of octaves without ends that hold next to nothing."""
    first, last = 0, len(error)
    while first < last - 1 and max(sum(error[: first + 1]), sum(energy[: first + 1])) < NOTHING:
        first += 1
    while last > first + 1 and max(sum(error[last - 1 :]), sum(energy[last - 1 :])) < NOTHING:
        last -= 1
    return range(first, last)


# Actual against reference -----------------------------------------------------------------------


def density(picture: ErrorPicture) -> str:
    """Draw actual over reference, darker where more values are."""
    cells, size = picture["density"]["cells"], picture["density"]["size"]
    edge = picture["density"]["edge"]
    x = _asinh(edge, LEFT, LEFT + SIDE, "reference / rms")
    y = _asinh(edge, BOTTOM, TOP, "actual / rms")
    triples = sorted(zip(cells[1::3], cells[0::3], cells[2::3], strict=True))
    bounds = shades(max((count for _, _, count in triples), default=1))
    corner = numbers([LEFT + SIDE, TOP])
    diagonal = path(
        f"M{number(LEFT)} {number(BOTTOM)}L{corner}",
        stroke=color("red"),
        stroke_dasharray="4 3",
        fill="none",
    )
    inside = _cells(triples, bounds, size) + diagonal
    description = (
        f"{sum(cells[2::3]):,} elements; both axes in units of the reference's rms, "
        f"{brief(picture['rms'])}."
    )
    key = _key(bounds, LEFT + SIDE + 22)
    return svg.panel(x, y, inside, key, density_finding(picture), description)


def _cells(triples: Sequence[tuple[int, int, int]], bounds: Sequence[int], size: int) -> str:
    """Draw strokes in units of cells, one path per shade, neighbors in a row as one."""
    pieces: list[list[str]] = [[] for _ in bounds]
    for shade, row, first, length in _runs(triples, bounds):
        pieces[shade].append(f"M{first} {row}h{length}")
    strokes = "".join(
        path("".join(pieces[at]), stroke_opacity=_opacity(at, len(bounds)), data_from=bound)
        for at, bound in enumerate(bounds)
    )
    unit = SIDE / size
    move = f"translate({LEFT:g} {BOTTOM - unit / 2:.5g})scale({unit:.5g} {-unit:.5g})"
    blue = color("blue")
    return group(strokes, transform=move, stroke=blue, shape_rendering="crispEdges", fill="none")


def _runs(
    triples: Sequence[tuple[int, int, int]], bounds: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Join neighbors of one shade in a row: shade, row, first column, columns."""
    keyed = [
        (row, column - at, sum(count >= bound for bound in bounds) - 1, column)
        for at, (row, column, count) in enumerate(triples)
    ]
    strokes = []
    for (row, _, shade), run in groupby(keyed, key=lambda cell: cell[:3]):
        columns = [column for *_, column in run]
        strokes.append((shade, row, columns[0], len(columns)))
    return strokes


def _key(bounds: Sequence[int], start: float) -> str:
    words = label(start, TOP + 9, "elements in a cell", fill="muted")
    for at, bound in enumerate(bounds):
        line = TOP + 27 + 16 * at
        upper = bounds[at + 1] - 1 if at + 1 < len(bounds) else None
        text = svg.short_count(bound)
        if upper is None:
            text += " or more"
        elif upper > bound:
            text += f" to {svg.short_count(upper + 1)}"
        words += path(
            box(start, line - 10, 14, 12),
            fill=color("blue"),
            fill_opacity=_opacity(at, len(bounds)),
        )
        words += label(start + 20, line, text)
    line = TOP + 33 + 16 * len(bounds)
    sample = f"M{numbers([start, line])}l14-9"
    words += path(sample, stroke=color("red"), stroke_dasharray="4 3")
    return words + label(start + 20, line, "actual = reference")


def _asinh(edge: float, start: float, end: float, name: str) -> svg.Axis:
    """Return an axis that is linear near zero and logarithmic far from it, as the cells are."""
    reach = math.sinh(edge) or 1.0
    if reach < 2.5:
        ticks = svg.linear(-reach, reach, start, end, most=5).ticks
    else:
        largest = math.floor(math.log10(reach) + 1e-3)
        # As far apart as labels need, and none where they would run into the one of zero.
        room = SIDE / 2 / math.asinh(reach)
        step = max(1, math.ceil(34 / (room * math.log(10))))
        powers = [p for p in range(largest, -1, -step) if room * math.asinh(10.0**p) >= 18]
        above = [(10.0**p, f"{10**p}" if p < 4 else f"1e{p}") for p in powers]
        ticks = (*((-v, f"−{text}") for v, text in above), (0.0, "0"), *above[::-1])
    return svg.Axis("asinh", -reach, reach, start, end, ticks, name)


def shades(most: int) -> list[int]:
    """Return the counts at which a cell gets darker: 1, 3, 10, 30 or 1, 10, 100 or coarser."""
    third = [1]
    while third[-1] * 3 <= most:
        third.append(third[-1] * 3 if str(third[-1])[0] == "1" else third[-1] // 3 * 10)
    if len(third) <= MOST_SHADES:
        return third
    tens = [10**p for p in range(len(str(most)))]
    return tens[:: -(-len(tens) // MOST_SHADES)]


def _opacity(at: int, shade_count: int) -> str:
    return f"{0.28 + 0.72 * at / (shade_count - 1):.2f}" if shade_count > 1 else "1"
