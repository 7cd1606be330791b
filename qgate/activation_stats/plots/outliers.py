"""Outlier tokens and channels: their number, positions and texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from qgate.activation_stats.plots._sheet import MOST_ROWS, grid, groups_of, key, mark
from qgate.activation_stats.reading import (
    Layers,
    name_of,
    outlier_layers,
    systematic_channels,
    visible,
    worth_naming,
)
from qgate.activation_stats.record import ActivationsRecord, LayerActivations
from qgate.activation_stats.settings import ViewSettings
from qgate.charts.figure import LABEL, dress
from qgate.charts.palette import COLORS, GRAY, PALE, WARN
from qgate.charts.shapes import bars
from qgate.charts.sheet import (
    Sheet,
    height_for,
    line,
    log_axis,
    name_rows,
    note,
    panels,
    patch,
    sheet,
    whole_numbers,
)
from qgate.summaries.reading import figure_of, worst
from qgate.text import brief, counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE = COLORS[0], COLORS[1]


def _ratio(layer: LayerActivations) -> float:
    return figure_of(layer["outliers"], "token_ratio")


def draw_outlier_counts(record: ActivationsRecord, view: ViewSettings) -> Sheet | None:
    """Draw outlier tokens per sample, and the largest token over the median with the threshold."""
    layers = outlier_layers(record)
    if not layers:
        return None
    limit = layers[0]["outliers"]["threshold"]
    near, ratio = (worst(layers, _ratio) or [(layers[0], 0.0)])[0]
    hit = sum(any(layer["outliers"]["counts"]) for layer in layers)
    most = max(layers, key=lambda layer: layer["outliers"]["mean_count"])
    top = most["outliers"]["mean_count"]
    if hit:
        title = f"Outlier tokens in {hit} of {counted(len(layers), 'layer')}, most in "
        title += f"{name_of(most)}: {brief(top)} per sample"
    else:
        title = f"No token is above {limit:g} times the median token; the nearest, in "
        title += f"{name_of(near)}, has {brief(ratio)}"
    groups = groups_of(layers)[0][:4]
    page = sheet(6.0 + 2.2 * max(1, len(groups)), 6.2, title)
    all_axes = panels(page, 2 * len(groups), len(groups))
    grid(all_axes, [*groups, *groups])
    for axes, low, group in zip(all_axes, all_axes[len(groups) :], groups, strict=False):
        counts = [layer["outliers"]["mean_count"] for layer in group.layers]
        axes.bar(group.ticks, counts, width=0.7, color=_ORANGE)
        axes.set_ylim(0, max(1.0, 1.1 * top))
        axes.set_xlabel("")
        axes.tick_params(labelbottom=False)
        if group.names:
            axes.set_xticks([])
        axes.set_ylabel("outlier tokens per sample", fontsize=LABEL)
        ratios = [_ratio(layer) for layer in group.layers]
        style = "o" if group.names else "o-"
        low.plot(group.ticks, ratios, style, color=_BLUE, markersize=4.5)
        low.axhline(limit, color=WARN, linewidth=1.2, linestyle="--")
        positive = [*(value for value in ratios if value > 0), limit]
        low.set_ylim(min(positive) / 1.6, max(positive) * 1.8)
        log_axis(low, "y")
        low.set_ylabel("largest token over median", fontsize=LABEL)
        low.set_title("", loc="left", y=1.0)
    entries = {
        "outlier tokens (mean of samples)": patch(_ORANGE),
        "largest token over the median token": line(_BLUE, "o"),
        f"threshold {limit:g}": line(WARN, linestyle="--"),
    }
    return key(page, entries, view.show_legend)


def _common(counts: Counter[Any], view: ViewSettings) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[: view.outlier.top_n]


def _common_title(counts: Counter[Any], first: str, different: str) -> str:
    most, total = max(counts.values()), counts.total()
    many = f"{counted(total, 'outlier token')} of all layers"
    if worth_naming(most, total):
        return f"{percent(most / total)} of {many} are {first}"
    return f"{many}, {different}"


def _count_bars(
    axes: Axes,
    counts: Counter[Any],
    common: list[tuple[Any, int]],
    name: Callable[[Any], str],
    other_values: str,
    *,
    share: bool,
) -> None:
    """Draw the most frequent values, and all others in one bar."""
    uncommon = counts.total() - sum(count for _, count in common)
    rows = [(name(one), count, _ORANGE) for one, count in common]
    if uncommon:
        rows.append((f"{len(counts) - len(common)} {other_values}", uncommon, GRAY))
    values = [count for _, count, _ in rows]
    shares = [f" ({percent(count / counts.total())})" if share else "" for count in values]
    texts = [f"{count:,}{part}" for count, part in zip(values, shares, strict=True)]
    bars(axes, values, texts, [color for *_, color in rows])
    name_rows(axes, [words for words, *_ in rows])
    axes.set_xlim(0, max(values) * (1.2 if share else 1.12))
    about = "" if share else " (␣ is a space, ↵ a line end)"
    dress(axes, x=f"outlier tokens, of all samples and layers{about}", grid="x")
    whole_numbers(axes)


def draw_outlier_positions(record: ActivationsRecord, view: ViewSettings) -> Sheet | None:
    """Draw the most frequent positions and all others, and all along the sequence."""
    layers = outlier_layers(record)
    counts: Counter[int] = Counter()
    for layer in layers:
        counts.update({int(position): n for position, n in layer["outliers"]["positions"].items()})
    if not counts:
        return None
    common = _common(counts, view)
    title = _common_title(counts, f"at position {common[0][0]}", "each at a position of its own")
    height = max(2.0, 0.3 * (len(common) + 1))
    page = sheet(10, 3.4 + height, title)
    above, below = page.figure.subplots(2, 1, height_ratios=[height, 1.6])
    _count_bars(above, counts, common, lambda at: f"position {at}", "others", share=True)
    lengths = (-(-layer["tokens"] // max(layer["calls"], 1)) for layer in layers)
    length = max(max(counts) + 1, *lengths)
    below.vlines(list(counts), 0, list(counts.values()), color=_ORANGE, linewidth=1.6)
    below.plot(list(counts), list(counts.values()), "o", color=_ORANGE, markersize=4)
    below.set_xlim(-0.01 * length - 0.5, 1.01 * length)
    below.set_ylim(bottom=0)
    dress(below, x=f"position in the sequence of {length} tokens, counted from 0", y="tokens")
    whole_numbers(below)
    whole_numbers(below, "y", 4)
    return page


def draw_outlier_tokens(record: ActivationsRecord, view: ViewSettings) -> Sheet | None:
    """Draw the texts of outlier tokens."""
    counts: Counter[str] = Counter()
    for layer in outlier_layers(record):
        counts.update(layer["outliers"].get("texts", {}))
    if not counts:
        return None
    common = _common(counts, view)
    title = _common_title(counts, f"“{visible(common[0][0])}”", "each of another text")
    rows = len(common) + (counts.total() > sum(count for _, count in common))
    page = sheet(9, height_for(rows), title)
    axes = page.figure.subplots()
    _count_bars(axes, counts, common, lambda one: f"“{visible(one)}”", "other texts", share=False)
    return page


def draw_outlier_channels(record: ActivationsRecord, view: ViewSettings) -> Sheet | None:
    """Draw systematic channels, others that stand out, and single massive activations."""
    layers = [
        layer
        for layer in record["layers"]
        if "outliers" in layer and (layer["outliers"]["channels"] or layer["outliers"]["massive"])
    ]
    if not layers:
        return None
    # The worst, in the order of the model.
    worst_ids = {id(layer) for layer, _ in worst(layers, _severity, MOST_ROWS)}
    chosen = [layer for layer in layers if id(layer) in worst_ids]
    page = sheet(12, height_for(len(chosen), 0.27, 3.2), _channel_title(layers))
    axes = page.figure.subplots()
    width = max(layer["width"] for layer in chosen)
    for row, layer in enumerate(chosen):
        axes.plot([0, layer["width"] - 1], [row, row], color=PALE, linewidth=0.8, zorder=1)
        outliers = layer["outliers"]
        for channel in outliers["channels"]:
            axes.scatter(
                [channel["channel"]], [row], s=18 + 26 * np.log2(max(channel["ratio"], 1.0)),
                facecolors=_ORANGE if channel["systematic"] else "none", edgecolors=_ORANGE,
                linewidths=1.1, zorder=3,
            )  # fmt: skip
        single = sorted({token["channel"] for token in outliers["massive"] if "channel" in token})
        axes.plot(single, [row] * len(single), "x", color=_BLUE, markersize=7, zorder=4)
    name_rows(axes, [f"{name_of(layer, 40)} {layer['role']}" for layer in chosen], 48)
    axes.set_xlim(-0.02 * width - 0.5, 1.02 * width)
    dress(axes, x="channel (the larger a mark, the farther it stands out)", grid="x")
    whole_numbers(axes)
    if len(layers) > len(chosen):
        note(axes, f"{len(layers) - len(chosen)} more layers in the tables", y=1.0)
    entries = {
        "systematic: stands out throughout": mark("o", _ORANGE),
        "in few tokens or samples": mark("o", _ORANGE, hollow=True),
        "massive single activation": mark("x", _BLUE),
    }
    return key(page, entries, view.show_legend)


def _severity(layer: LayerActivations) -> float:
    outliers = layer["outliers"]
    ratios = [channel["ratio"] for channel in outliers["channels"]]
    return 1e9 * bool(outliers["massive"]) + max(ratios, default=0.0)


def _channel_title(layers: Layers) -> str:
    massive = sum(1 for layer in layers if layer["outliers"]["massive"])
    text = "No channel stands out throughout"
    many = f"; {counted(massive, 'layer')} with massive single activations"
    rows = systematic_channels(layers)
    if rows:
        kind, channel, count, ratio = rows[0]
        text = f"Channel {channel} of {kind} stands out throughout in {counted(count, 'layer')}, "
        text += f"up to {brief(ratio)} times the median channel"
        many = f"; massive single activations in {counted(massive, 'layer')}"
    return text + (many if massive else "")
