"""Plots of errors: at one site, how large they are and where; and over the depth of a model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from qgate.charts import svg
from qgate.charts.lines import (
    DASH,
    ColoredLines,
    Line,
    color_lines,
    gray_key,
    line_chart,
    position_axis,
    thin_ticks,
)
from qgate.charts.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    STRIP,
    TOP,
    box,
    brief,
    color,
    cut_to_width,
    document,
    group,
    label,
    number,
    numbers,
    path,
    power,
    text_width,
    times,
)
from qgate.page.runs import Growth
from qgate.results.pictures import ErrorBins, ErrorPicture
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


# Findings: the titles of the plots, computed from what is drawn -----------------------------------


# Errors are one-sided from this share on one side, of so many elements at least.
ONE_SIDED, FEW = 0.75, 30
# A tail is worth a title when more than this share is beyond the drawn bins.
BEYOND = 0.01
# Channels stand out when half of the error is in an eighth of them, or nearly all in one.
CROWDED, ALONE = 8, 0.9
# Shares of error and energy differ where their running sums are this far apart.
APART = 0.3
# Actual ends elsewhere than the reference when their largest values differ by this factor.
ENDS_APART = 1.5
WRONG_SIGN, NEAR = 0.01, 0.9


def sides(bins: ErrorBins) -> tuple[int, int]:
    """Count errors below and above zero, without the bins that touch zero from both sides.

    Exact elements fall into the bin right of zero where there are two in the middle, so neither of
    these two counts, unless there is nothing else.
    """
    counts, middle = bins["counts"], len(bins["counts"]) // 2
    odd = len(counts) % 2
    below = bins["below"] + sum(counts[: middle - (not odd)])
    above = bins["above"] + sum(counts[middle + 1 :])
    if not odd and below + above == 0:
        return sum(counts[:middle]), sum(counts[middle:])
    return below, above


def histogram_finding(picture: ErrorPicture) -> str:
    bins = picture["bins"]
    beyond = bins["below"] + bins["above"]
    total = sum(bins["counts"]) + beyond
    lost = picture["sampled"] - total
    if lost > 0:
        return f"{lost:,} of {picture['sampled']:,} elements cannot be compared: not finite"
    if not total:
        return "No errors: nothing was compared"
    if not bins["edge"] and not beyond:
        return f"No error: all {total:,} elements are exact"
    below, above = sides(bins)
    signed = below + above
    if total < FEW:
        elements = "1 element" if total == 1 else f"{total} elements"
        return f"Only {elements}: {below} errors below zero, {above} above"
    share = max(below, above) / signed if signed else 0.0
    side = "below" if below > above else "above"
    if signed >= FEW and signed >= 0.05 * total and share >= ONE_SIDED:
        return f"Errors are one-sided: {rounded_percent(share)} {side} zero"
    if beyond > BEYOND * total:
        return f"{rounded_percent(beyond / total)} of errors are beyond ±{brief(bins['edge'])}"
    if signed < FEW or signed < 0.05 * total:
        bins_inside = 1 if len(bins["counts"]) % 2 else 2
        width = brief(bins_inside * bins["edge"] / len(bins["counts"]))
        return f"{rounded_percent(1 - signed / total)} of errors are within ±{width} of zero"
    return f"Errors are on both sides: {rounded_percent(share)} {side} zero"


def density_finding(picture: ErrorPicture) -> str:
    """Find wrong signs, ends that differ, or the share of values near the diagonal."""
    density = picture["density"]
    size, edge = density["size"], density["edge"]
    columns, rows, counts = (density["cells"][at::3] for at in range(3))
    total = sum(counts)
    if not total:
        return "Actual and reference: nothing was compared"
    if not picture["rms"]:
        same = set(rows) == set(columns) and len(set(rows)) == 1
        return "Actual and reference are zero" if same else "The reference is zero, actual is not"
    if len(set(rows)) == 1 and len(set(columns)) > 1:
        if abs(2 * rows[0] + 1 - size) <= 1:
            return "Actual is zero, or near it, everywhere"
        return f"Actual is constant, near {brief(_middle(rows[0], size, edge))} rms everywhere"
    opposite = sum(
        count
        for column, row, count in zip(columns, rows, counts, strict=True)
        if (2 * column - size + 1) * (2 * row - size + 1) < 0
        and min(abs(2 * column - size + 1), abs(2 * row - size + 1)) > 2
    )
    if opposite >= WRONG_SIGN * total:
        return f"{rounded_percent(opposite / total)} of values have the wrong sign"
    reference, actual = (_reach(cells, size, edge) for cells in (columns, rows))
    if reference >= ENDS_APART * actual and _cells_apart(columns, rows, size) >= 2:
        return f"Actual ends at {brief(actual)} rms, the reference at {brief(reference)}"
    if actual >= ENDS_APART * reference and _cells_apart(rows, columns, size) >= 2:
        return f"Actual reaches {brief(actual)} rms, the reference only {brief(reference)}"
    near = sum(
        count
        for column, row, count in zip(columns, rows, counts, strict=True)
        if abs(column - row) <= 1
    )
    if near >= NEAR * total:
        return f"Actual follows the reference: {rounded_percent(near / total)} near the diagonal"
    return f"Actual strays: only {rounded_percent(near / total)} near the diagonal"


def _middle(cell: int, size: int, edge: float) -> float:
    """Return the value in the middle of a cell; zero for the middle cell of an odd number."""
    return float(f"{math.sinh(edge * (2 * cell + 1 - size) / size):.2g}")


def _reach(cells: Sequence[int], size: int, edge: float) -> float:
    farthest = max(max(cell + 1, size - cell) for cell in cells)
    return float(f"{math.sinh(edge * (2 * farthest - size) / size):.2g}")


def _cells_apart(far: Sequence[int], near: Sequence[int], size: int) -> int:
    ends = [max(max(cell + 1, size - cell) for cell in cells) for cells in (far, near)]
    return ends[0] - ends[1]


def channels_finding(picture: ErrorPicture) -> str:
    channels = picture.get("channels") or []
    count = picture.get("channel_count") or len(channels)
    running = list(accumulate(channel["share"] for channel in channels))
    if not running or running[-1] <= 0:
        return f"No error in any of {count:,} channels"
    if count < 2:
        return "All error is in the only channel"
    if running[0] >= ALONE:
        return f"{rounded_percent(running[0])} of the error is in 1 of {count:,} channels"
    half = next((at for at, share in enumerate(running, 1) if share >= 0.5), None)
    if half is not None and half * CROWDED <= count:
        return f"Half of the error is in {half} of {count:,} channels"
    first = channels[0]["share"]
    return (
        f"No channel stands out: the worst of {count:,} holds {rounded_percent(first)} of the error"
    )


def magnitude_finding(picture: ErrorPicture) -> str:
    octaves = picture["octaves"]
    error, energy, low = octaves["error"], octaves["energy"], octaves["low"]
    if not any(error):
        return "No error at any magnitude"
    if not any(energy):
        return "The reference is zero: all error is at zero"
    running = [list(accumulate(row)) for row in (error, energy)]
    gaps = [e - r for e, r in zip(*running, strict=True)]
    small, large = max(gaps), min(gaps)
    if max(small, -large) < APART:
        return "Error spreads over magnitudes as the energy does"
    if small >= -large:
        at = gaps.index(small)
        error_share, energy_share = running[0][at], running[1][at]
        where, side = _threshold(low + at + 1), "below"
    else:
        at = gaps.index(large)
        error_share, energy_share = running[0][-1] - running[0][at], running[1][-1] - running[1][at]
        where, side = _threshold(low + at + 1), "above"
    size = "small" if side == "below" else "large"
    return (
        f"Error sits in {size} values: {rounded_percent(error_share)} of it {side} {where} rms, "
        f"where {rounded_percent(energy_share)} of the energy is"
    )


def _threshold(octave: int) -> str:
    value = 2.0**octave
    return brief(value) if -4 <= octave <= 13 else power(2, octave)


# Over the depth of a model, by mode: carried, and local to each layer -----------------------------


GROWTH_HEIGHT, GROWTH_BOTTOM = 250.0, 212.0
# A layer that multiplies the carried error by this much is named.
JUMP = 5.0
MOST_LAYERS, MOST_MODES = 400, 60


def error_growth(lines: Sequence[Growth], *, width: float = svg.WIDTH) -> str:
    """Draw relative MSE over the layers of one model, carried solid and local dashed.

    Of many modes only the carried error is drawn: the local ones would hide it.
    """
    layers, rows = align_layers(lines)
    chosen = color_lines(rows)
    colored = list(chosen.colored)
    if chosen.gray:
        colored = [replace(line, beside=()) for line in colored]
    chosen = ColoredLines(colored, chosen.gray[: MOST_MODES - len(colored)])
    x = position_axis(len(layers), colored, width)
    texts, order, name = layer_names(layers, abs(x.place(1) - x.place(0)))
    x = replace(x, ticks=thin_ticks(texts, x, order), label=name)
    y = svg.logarithmic(chosen.values, GROWTH_BOTTOM, svg.TOP, "relative MSE")
    entries = [(svg.stroke_sample("ink"), "carried")]
    if any(value is not None for line in colored for value in line.beside):
        entries.append((svg.stroke_sample("ink", DASH), "local"))
    entries += gray_key(len(rows) - len(colored), "modes")
    nothing = "" if layers else "no layers"
    body = line_chart(chosen, x, y, entries, width=width, nothing=nothing)
    last_values = [(line.name, _last(line)) for line in rows[:8]]
    ends = [f"{name} {'unknown' if v is None else brief(v)}" for name, v in last_values]
    description = (
        f"{len(rows)} mode{'s' * (len(rows) != 1)} over {len(layers)} layers; at the last: "
    )
    return document(
        width, GROWTH_HEIGHT, growth_finding(lines), f"{description}{', '.join(ends)}.", body
    )


def align_layers(lines: Sequence[Growth]) -> tuple[list[str], list[Line]]:
    """Return the layers of all modes in one order, and one line per mode, largest error first.

    A layer with several outputs stands as often as the mode that has most of it has it.
    """
    keyed = [_keys(line.layers[:MOST_LAYERS]) for line in lines]
    order: list[tuple[str, int]] = []
    for keys in sorted(keyed, key=len, reverse=True):
        at = 0
        positions = {key: position for position, key in enumerate(order)}
        for key in keys:
            if key in positions:
                at = order.index(key) + 1
            else:
                order.insert(at, key)
                at += 1
    rows = []
    for line, keys in zip(lines, keyed, strict=True):
        position = {key: at for at, key in enumerate(keys)}
        carried, local = (
            tuple(row[position[key]] if key in position else None for key in order)
            for row in (line.carried, line.local)
        )
        rows.append(Line(line.mode, carried, local))
    ranked = sorted(rows, key=lambda row: (-(_last(row) or 0.0), row.name))
    return [layer for layer, _ in order], ranked


def _keys(layers: Sequence[str]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    keys = []
    for layer in layers:
        keys.append((layer, counts[layer]))
        counts[layer] += 1
    return keys


def _last(line: Line) -> float | None:
    return next((value for value in reversed(line.values) if value is not None), None)


def layer_names(layers: Sequence[str], pitch: float) -> tuple[list[str], list[int], str]:
    """Return short texts of layers, the order in which to write them, and the axis label.

    Most layers differ by a number; it alone is written, and what is around it names the axis. A
    model of several lists, such as an encoder and a decoder, has the names of all of them there.
    """
    parts = [re.fullmatch(r"(.*?)(\d{1,5})(\D*)", layer[:200], re.DOTALL) for layer in layers]
    counts = Counter((part[1], part[3]) for part in parts if part)
    lists = [around for around, count in counts.items() if count > 1]
    texts, numbers = [], []
    for layer, part in zip(layers, parts, strict=True):
        numbered = part is not None and (part[1], part[3]) in lists
        texts.append(part[2] if part and numbered else cut_to_width(layer, 72))
        numbers.append(int(part[2]) if part and numbered else None)
    last = len(layers) - 1
    order = [0, last] if numbers and numbers[0] is None else [last, 0]
    wide = (
        max((text_width(str(number)) for number in numbers if number is not None), default=0.0) + 7
    )
    step = next((number for number in (1, 2, 5, 10, 20, 50) if number * pitch >= wide), 100)
    order += [at for at, number in enumerate(numbers) if number is not None and not number % step]
    order += () if lists else range(len(layers))
    name = _name_of_lists(lists) if lists else "layer"
    return texts, [at for at in dict.fromkeys(order) if 0 <= at <= last], name


def _name_of_lists(lists: Sequence[tuple[str, str]]) -> str:
    """Name the lists of a model, first to last, without what the names of several begin with."""
    names = [f"{before}N{behind}" for before, behind in lists]
    if len(names) == 1:
        return cut_to_width(names[0], 150)
    split = [name.split(".") for name in names]
    shared = 0
    while all(len(parts) > shared + 2 and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    width = max(60, 360 // len(names))
    return ", ".join(cut_to_width(".".join(parts[shared:]), width) for parts in split[:6])


def growth_finding(lines: Sequence[Growth]) -> str:
    layers, rows = align_layers(lines)
    last_values = [(line, _last(line)) for line in rows]
    ends = [(line, value) for line, value in last_values if value is not None]
    if not ends:
        return "No carried errors are known"
    if all(value in (0, None) for line in rows for value in line.values):
        return "No error at any layer"
    worst, most = ends[0]
    name = cut_to_width(worst.name, 130, 13)
    if len(ends) == 1:
        return _finding_of_one(name, worst, layers)
    least, fewest = ends[-1]
    other = cut_to_width(least.name, 130, 13)
    if fewest <= 0:
        return f"{name} ends at {brief(most)}, {other} is exact"
    if most < 1.1 * fewest:
        return f"All {len(ends)} modes end alike, at {brief(most)}"
    return f"{name} ends at {brief(most)}, {times(most / fewest)} as much as {other}"


def _finding_of_one(name: str, line: Line, layers: Sequence[str]) -> str:
    last, at = _last(line) or 0.0, 0
    best = 0.0
    for position in range(1, len(layers)):
        now, before = line.values[position], line.values[position - 1]
        if now and before and now / before > best:
            best, at = now / before, position
    if best >= JUMP:
        layer = cut_to_width(layers[at], 110, 13)
        return f"{name} ends at {brief(last)}; {layer} alone multiplies the error by {brief(best)}"
    measured = sum(value is not None for value in line.values)
    if measured < 3:
        return f"{name} ends at {brief(last)} after {measured} layer{'s' * (measured > 1)}"
    return f"{name} ends at {brief(last)}; no layer alone stands out"
