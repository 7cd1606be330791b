"""Tokens and channels that stand out: how many, where in the sequence, which they are."""

from __future__ import annotations

from collections import Counter

import numpy as np

from qgate.activation_stats.plots._sheet import MOST_ROWS, grid, groups_of, key, mark
from qgate.activation_stats.reading import (
    Layers,
    Look,
    kind_name,
    leads,
    name_of,
    outlier_layers,
    visible,
)
from qgate.activation_stats.record import ActivationsRecord
from qgate.charts.figure import LABEL, TICK, dress
from qgate.charts.palette import COLORS, GRAY, PALE, WARN
from qgate.charts.sheet import (
    Sheet,
    bars,
    height_for,
    line,
    log_axis,
    note,
    patch,
    rows_named,
    sheet,
    whole_numbers,
)
from qgate.summaries.reading import figure_of, worst
from qgate.text import brief, counted, percent

_BLUE, _ORANGE = COLORS[0], COLORS[1]


def _threshold(layers: Layers) -> float:
    return layers[0]["outliers"]["threshold"]


def draw_outlier_counts(record: ActivationsRecord, look: Look) -> Sheet | None:
    """Outlier tokens per sample, and how near the largest token is to being one."""
    layers = outlier_layers(record)
    if not layers:
        return None
    limit = _threshold(layers)
    near, ratio = (worst(layers, _ratio) or [(layers[0], 0.0)])[0]
    hit = [each for each in layers if sum(each["outliers"]["counts"])]
    most = max(layers, key=lambda each: each["outliers"]["mean_count"])
    if hit:
        title = (
            f"Outlier tokens in {len(hit)} of {counted(len(layers), 'layer')}, most in "
            f"{name_of(most)}: {brief(most['outliers']['mean_count'])} per sample"
        )
    else:
        title = (
            f"No token is above {limit:g} times the median token; the nearest, in "
            f"{name_of(near)}, has {brief(ratio)}"
        )
    groups, _ = groups_of(layers)
    groups = groups[:4]
    made = sheet(6.0 + 2.2 * max(1, len(groups)), 6.2, title)
    drawn = grid(made, [*groups, *groups], len(groups))
    for axes, low, group in zip(drawn, drawn[len(groups) :], groups, strict=False):
        counts = [each["outliers"]["mean_count"] for each in group.layers]
        axes.bar(group.places, counts, width=0.7, color=_ORANGE)
        axes.set_ylim(0, max(1.0, 1.1 * max(each["outliers"]["mean_count"] for each in layers)))
        axes.set_xlabel("")
        axes.tick_params(labelbottom=False)
        axes.set_xticks([]) if group.names else None
        axes.set_ylabel("outlier tokens per sample", fontsize=LABEL)
        ratios = [_ratio(each) for each in group.layers]
        low.plot(
            group.places, ratios, "o-" if not group.names else "o", color=_BLUE, markersize=4.5
        )
        low.axhline(limit, color=WARN, linewidth=1.2, linestyle="--")
        known = [value for value in ratios if value > 0]
        low.set_ylim(min([*known, limit]) / 1.6, max([*known, limit]) * 1.8)
        log_axis(low, "y")
        low.set_ylabel("largest token over median", fontsize=LABEL)
        low.set_title("", loc="left", y=1.0)
    entries = {
        "outlier tokens (mean of samples)": patch(_ORANGE),
        "largest token over the median token": line(_BLUE, "o"),
        f"threshold {limit:g}": line(WARN, linestyle="--"),
    }
    key(made, entries, look.show_legend)
    return made


def _ratio(layer: object) -> float:
    return figure_of(layer["outliers"], "token_ratio")  # type: ignore[index]


def draw_outlier_positions(record: ActivationsRecord, look: Look) -> Sheet | None:
    """The most frequent places against all others, and all of them along the sequence."""
    layers = outlier_layers(record)
    found: Counter[int] = Counter()
    for each in layers:
        found.update({int(place): n for place, n in each["outliers"]["positions"].items()})
    if not found:
        return None
    total = sum(found.values())
    common = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[: look.top_n]
    place, most = common[0]
    title = f"{counted(total, 'outlier token')} of all layers, each at a position of its own"
    if leads(most, total):
        title = (
            f"{percent(most / total)} of {counted(total, 'outlier token')} of all layers are at "
        )
        title += f"position {place}"
    made = sheet(10, 3.4 + max(2.0, 0.3 * (len(common) + 1)), title)
    above, below = made.figure.subplots(
        2, 1, height_ratios=[max(2.0, 0.3 * (len(common) + 1)), 1.6]
    )
    rest = total - sum(count for _, count in common)
    names = [f"position {where}" for where, _ in common]
    values = [count for _, count in common]
    if rest:
        names, values = [*names, f"{len(found) - len(common)} others"], [*values, rest]
    colors = [_ORANGE] * len(common) + [GRAY] * bool(rest)
    bars(above, values, range(len(values)), colors, 0.72)
    rows_named(above, names)
    for row, count in enumerate(values):
        above.text(count, row, f" {count:,} ({percent(count / total)})", va="center", fontsize=TICK)
    above.set_xlim(0, max(values) * 1.2)
    dress(above, x="outlier tokens, of all samples and layers", grid="x")
    whole_numbers(above)
    length = max(max(found) + 1, *(-(-each["tokens"] // max(each["calls"], 1)) for each in layers))
    below.vlines(list(found), 0, list(found.values()), color=_ORANGE, linewidth=1.6)
    below.plot(list(found), list(found.values()), "o", color=_ORANGE, markersize=4)
    below.set_xlim(-0.01 * length - 0.5, 1.01 * length)
    below.set_ylim(bottom=0)
    dress(below, x=f"position in the sequence of {length} tokens, counted from 0", y="tokens")
    whole_numbers(below)
    whole_numbers(below, "y", 4)
    return made


def draw_outlier_tokens(record: ActivationsRecord, look: Look) -> Sheet | None:
    """Which tokens they are, where their texts are known."""
    found: Counter[str] = Counter()
    for each in outlier_layers(record):
        found.update(each["outliers"].get("texts", {}))
    if not found:
        return None
    total = sum(found.values())
    common = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[: look.top_n]
    text, most = common[0]
    many = f"{counted(total, 'outlier token')} of all layers"
    title = f"{many}, each of another text"
    if leads(most, total):
        title = f"{percent(most / total)} of {many} are “{visible(text)}”"
    rest = total - sum(count for _, count in common)
    names, values = [f"“{visible(text)}”" for text, _ in common], [count for _, count in common]
    if rest:
        names, values = [*names, f"{len(found) - len(common)} other texts"], [*values, rest]
    made = sheet(9, height_for(len(values)), title)
    axes = made.figure.subplots()
    bars(axes, values, range(len(values)), [_ORANGE] * len(common) + [GRAY] * bool(rest), 0.72)
    rows_named(axes, names)
    for row, count in enumerate(values):
        axes.text(count, row, f" {count:,}", va="center", fontsize=TICK)
    axes.set_xlim(0, max(values) * 1.12)
    dress(
        axes, x="outlier tokens, of all samples and layers (␣ is a space, ↵ a line end)", grid="x"
    )
    whole_numbers(axes)
    return made


def draw_outlier_channels(record: ActivationsRecord, look: Look) -> Sheet | None:
    """Channels that stand out throughout, apart from single massive activations."""
    layers = [
        each
        for each in record["layers"]
        if "outliers" in each and (each["outliers"]["channels"] or each["outliers"]["massive"])
    ]
    if not layers:
        return None
    shown = _shown(layers)
    made = sheet(12, height_for(len(shown), 0.27, 3.2), _channel_title(layers))
    axes = made.figure.subplots()
    width = max(each["width"] for each in shown)
    for row, each in enumerate(shown):
        axes.plot([0, each["width"] - 1], [row, row], color=PALE, linewidth=0.8, zorder=1)
        told = each["outliers"]
        for channel in told["channels"]:
            size = 18 + 26 * np.log2(max(channel["ratio"], 1.0))
            face = _ORANGE if channel["systematic"] else "none"
            axes.scatter(
                [channel["channel"]], [row], s=size, facecolors=face, edgecolors=_ORANGE,
                linewidths=1.1, zorder=3,
            )  # fmt: skip
        single = sorted({place["channel"] for place in told["massive"] if "channel" in place})
        axes.plot(single, [row] * len(single), "x", color=_BLUE, markersize=7, zorder=4)
    rows_named(axes, [f"{name_of(each, 40)} {each['role']}" for each in shown], 48)
    axes.set_xlim(-0.02 * width - 0.5, 1.02 * width)
    dress(axes, x="channel (the larger a mark, the farther it stands out)", grid="x")
    whole_numbers(axes)
    hidden = len(layers) - len(shown)
    if hidden:
        note(axes, f"{hidden} more layers in the tables", y=1.0)
    entries = {
        "systematic: stands out throughout": mark("o", _ORANGE),
        "in few tokens or samples": mark("o", _ORANGE, hollow=True),
        "massive single activation": mark("x", _BLUE),
    }  # fmt: skip
    key(made, entries, look.show_legend)
    return made


def _shown(layers: Layers) -> Layers:
    """The worst, in the order of the model."""

    def badness(each: object) -> float:
        told = each["outliers"]  # type: ignore[index]
        return 1e9 * bool(told["massive"]) + max(
            (c["ratio"] for c in told["channels"]), default=0.0
        )

    kept = {id(each) for each, _ in worst(layers, badness, MOST_ROWS)}
    return [each for each in layers if id(each) in kept]


def _channel_title(layers: Layers) -> str:
    found: Counter[tuple[str, int]] = Counter()
    most: dict[tuple[str, int], float] = {}
    for each in layers:
        for channel in each["outliers"]["channels"]:
            if channel["systematic"]:
                where = (f"{kind_name(each['module'])} {each['role']}", channel["channel"])
                found[where] += 1
                most[where] = max(most.get(where, 0.0), channel["ratio"])
    massive = sum(1 for each in layers if each["outliers"]["massive"])
    if not found:
        told = "No channel stands out throughout"
        return (
            f"{told}; {counted(massive, 'layer')} with massive single activations"
            if massive
            else told
        )
    (kind, loudest), count = max(found.items(), key=lambda pair: (pair[1], most[pair[0]]))
    several = counted(count, "layer")
    text = (
        f"Channel {loudest} of {kind} stands out throughout in {several}, up to "
        f"{brief(most[kind, loudest])} times the median channel"
    )
    return text + (
        f"; massive single activations in {counted(massive, 'layer')}" if massive else ""
    )
