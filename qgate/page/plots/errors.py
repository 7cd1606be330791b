"""The pictures of actual against reference at one site: how large the errors are, and where."""

from __future__ import annotations

from collections.abc import Sequence

from qgate.page.plots import _axes
from qgate.page.plots._axes import BOTTOM, HEIGHT, LEFT, RIGHT, STRIP, TOP, WIDTH
from qgate.page.plots._findings import channels_finding, histogram_finding, magnitude_finding, sides
from qgate.page.plots.svg import (
    box,
    brief,
    color,
    document,
    group,
    label,
    numbers,
    path,
    text_width,
)
from qgate.results.pictures import ErrorPicture
from qgate.text import rounded_percent

# Bars of one pixel at least: a bin with few elements is not an empty one.
LEAST_BAR = 1.2
# Pixels at either end of a histogram for what is beyond its bins.
OUTSIDE = 18.0
# The highest bin over the mean of the others, from which on the axis is logarithmic.
PEAKED = 20.0
# A share of error and energy at the ends of the axis that is not drawn.
NOTHING = 1e-3
MOST_BARS = 9


def error_histogram(picture: ErrorPicture) -> str:
    """How often which error: below zero and above it in colors of their own."""
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
        left, right = (x.place(-edge + place * width) for place in (at, at + 1))
        if not edge:
            side, left, right = "gray", x.place(0) - 10, x.place(0) + 10
        pieces[side].append(_bar(left, right, count, y))
    pieces["blue"].append(_bar(LEFT, LEFT + OUTSIDE - 6, bins["below"], y))
    pieces["orange"].append(_bar(RIGHT - OUTSIDE + 6, RIGHT, bins["above"], y))
    bars = "".join(path("".join(d), fill=color(fill)) for fill, d in pieces.items())
    zero = path(f"M{numbers([x.place(0), TOP])}V{BOTTOM:g}", stroke=color("muted"))
    names = ""
    if bins["below"]:
        names += label(LEFT, TOP + 9, f"← {_axes.short_count(bins['below'])} beyond")
    if bins["above"]:
        names += label(RIGHT, TOP + 9, f"{_axes.short_count(bins['above'])} beyond →", "end")
    below, above = sides(bins)
    total = below + above or 1
    legend = _axes.legend(
        [
            (_axes.swatch("blue"), f"below 0: {rounded_percent(below / total)}"),
            (_axes.swatch("orange"), f"above: {rounded_percent(above / total)}"),
        ]
        if bins["edge"]
        else []
    )
    said = (
        f"{sum(counts):,} of {picture['sampled']:,} errors within ±{brief(bins['edge'])}, "
        f"{bins['below']:,} below and {bins['above']:,} above; "
        f"the reference has an rms of {brief(picture['rms'])}."
    )
    body = _axes.frame(x, y, bars + zero) + names + legend
    return document(WIDTH, HEIGHT, histogram_finding(picture), said, body)


def _error_axis(edge: float, outside: float) -> _axes.Axis:
    """From -edge to edge, with room at both ends for what is beyond."""
    if not edge:
        return _axes.Axis("linear", -1, 1, LEFT, RIGHT, ((0.0, "0"),), "actual − reference")
    inner = _axes.linear(-edge, edge, LEFT + outside, RIGHT - outside, "actual − reference")
    reach = edge * (RIGHT - LEFT) / (RIGHT - LEFT - 2 * outside)
    return _axes.Axis("linear", -reach, reach, LEFT, RIGHT, inner.ticks, inner.label)


def _count_axis(counts: Sequence[int], top: float) -> _axes.Axis:
    """Logarithmic where one bin is so much higher than the others that these would be flat."""
    *others, highest = sorted(count for count in [0, *counts] if count) or [1]
    if others and highest >= PEAKED * sum(others) / len(others):
        return _axes.tallied(highest, BOTTOM, top, "elements (log)")
    return _axes.counted(highest, BOTTOM, top)


def _bar(left: float, right: float, count: float, y: _axes.Axis) -> str:
    """From the base line up; nothing where there is nothing."""
    if not count > 0:
        return ""
    base, top = y.start, y.place(count)
    top = min(top, base - LEAST_BAR)
    return box(left, top, right - left, base - top)


# Where the error sits --------------------------------------------------------------------------


def worst_channels(picture: ErrorPicture) -> str:
    """The channels with most of the squared error; each with its own relative MSE."""
    channels = picture.get("channels") or []
    count = picture.get("channel_count") or len(channels)
    shown = channels[:MOST_BARS]
    names = [f"channel {channel['index']}" for channel in shown]
    left = max([text_width(name) for name in names], default=0) + 10
    high = max([channel["share"] for channel in shown] + [1.0 / max(count, 1)])
    right = RIGHT - 84
    x = _axes.shares(high, left, right, "share of the squared error", 4)
    y = _axes.Axis("linear", 0, max(len(shown), 1), TOP, BOTTOM)
    pitch = (BOTTOM - TOP) / MOST_BARS
    bars, words = [], ""
    for at, (channel, name) in enumerate(zip(shown, names, strict=True)):
        top = TOP + at * pitch
        if channel["share"] > 0:
            bars.append(box(left, top + 2, x.place(channel["share"]) - left, pitch - 4))
        words += label(left - 5, top + pitch / 2 + 4, name, "end", fill="muted")
        own = channel["relative_mse"]
        text = "no energy" if own is None else brief(own)
        words += label(RIGHT, top + pitch / 2 + 4, text, "end")
    drawn = path("".join(bars), fill=color("orange"))
    even = x.place(1.0 / max(count, 1))
    drawn += path(
        f"M{numbers([even, TOP])}V{BOTTOM:g}", stroke=color("ink"), stroke_dasharray="3 3"
    )
    heads = label(RIGHT, STRIP, "own rel. MSE", "end", fill="muted")
    heads += group(
        _axes.stroke_sample("ink", "3 3", 1), transform=f"translate(10 {STRIP - 4:g})"
    ) + label(23, STRIP, f"even: {rounded_percent(1.0 / max(count, 1))} each", fill="muted")
    rest = 1 - sum(channel["share"] for channel in shown)
    said = f"The {len(shown)} worst of {count:,} channels; all others hold {rounded_percent(rest)}."
    body = _axes.frame(x, y, drawn) + words + heads
    return document(WIDTH, HEIGHT, channels_finding(picture), said, body)


def error_by_magnitude(picture: ErrorPicture) -> str:
    """The share of the squared error in each octave of the reference, beside that of its square."""
    octaves = picture["octaves"]
    used = _used(octaves["error"], octaves["energy"])
    edges, (error, energy) = _axes.merged(
        octaves["low"], [octaves["error"], octaves["energy"]], used
    )
    x = _axes.octaves(edges[0], edges[-1], LEFT, RIGHT, "|reference| / rms")
    y = _axes.shares(1.03 * max([*error, *energy]), BOTTOM, TOP, "")
    bars, steps = [], []
    for at, place in enumerate(edges[:-1]):
        left, right = x.place(place), x.place(place + edges.step)
        gap = min(0.6, (right - left) / 10)
        bars.append(_bar(left + gap, right - gap, error[at], y))
        steps += [(left, y.place(energy[at])), (right, y.place(energy[at]))]
    outline = "".join(f"{'L' if at else 'M'}{numbers(point)}" for at, point in enumerate(steps))
    drawn = path("".join(bars), fill=color("orange"), data_bars="error") + path(
        outline, stroke=color("blue"), stroke_width=1.8, fill="none", data_line="energy"
    )
    keys = _axes.legend(
        [
            (_axes.swatch("orange"), "share of squared error"),
            (_axes.stroke_sample("blue"), "of energy"),
        ]
    )
    below = f"2^{edges[0] + edges.step}"
    said = (
        f"Octaves of the reference in units of its rms, {brief(picture['rms'])}; the first holds "
        f"all below {below}, zeros too."
    )
    body = _axes.frame(x, y, drawn) + keys
    return document(WIDTH, HEIGHT, magnitude_finding(picture), said, body)


def _used(error: Sequence[float], energy: Sequence[float]) -> range:
    """The octaves without those at either end that together hold next to nothing of both."""
    first, last = 0, len(error)
    while first < last - 1 and max(sum(error[: first + 1]), sum(energy[: first + 1])) < NOTHING:
        first += 1
    while last > first + 1 and max(sum(error[last - 1 :]), sum(energy[last - 1 :])) < NOTHING:
        last -= 1
    return range(first, last)
