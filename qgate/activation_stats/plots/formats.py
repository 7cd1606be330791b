"""What number formats lose of every layer, what smoothing gains, which layers are sensitive."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from qgate.activation_stats.plots._sheet import key, mark
from qgate.activation_stats.reading import (
    EXACT_DB,
    GAIN_DB,
    Layers,
    Look,
    Loss,
    common_start,
    format_names,
    kind_name,
    kinds,
    loss_of,
    losses,
    name_of,
    numbers,
    of_role,
    short_kinds,
    target_value,
    worst_format,
)
from qgate.activation_stats.record import (
    ActivationsRecord,
    LayerActivations,
    Proposal,
    Sensitive,
    Smoothed,
)
from qgate.charts.figure import SMALL, dress
from qgate.charts.palette import BLACK, COLORS, GRAY, MAP, PALE, WARN, WHITE
from qgate.charts.sheet import (
    MARKERS,
    Sheet,
    color_bar,
    colors_for,
    columns_for,
    dots,
    height_for,
    line,
    panels,
    patch,
    plain,
    rows_named,
    sheet,
    whole_numbers,
)
from qgate.summaries.reading import Floats, worst
from qgate.text import counted, decibels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cells = list[list[Loss | None]]
_MOST_KINDS, _MOST_ROWS = 24, 14
_GRAY, _GREEN, _BLUE, _ORANGE = GRAY, COLORS[2], COLORS[0], COLORS[1]


def draw_losses(record: ActivationsRecord, role: str, look: Look) -> Sheet | None:
    """Kinds of modules by layers, one map per format, all on one scale."""
    layers = [each for each in of_role(record, role) if losses(each)]
    names = [n for n in format_names(record) if any(n in losses(each) for each in layers)]
    if not names:
        return None
    found = kinds(layers)
    kept = dict(list(found.items())[:_MOST_KINDS])
    columns = _columns(list(kept.values()))
    shown = {name: _map(list(kept.values()), name, columns) for name in names}
    maps = {name: _worse(cells) for name, cells in shown.items()}
    finite = np.concatenate([each[np.isfinite(each)] for each in maps.values()])
    bad, (name, loss) = min(
        ((each, worst) for each in layers if (worst := worst_format(each))),
        key=lambda pair: pair[1][1].worse,
    )
    title = f"{name} has the lowest SQNR, of the {role} of {name_of(bad, 60)}: {loss}"
    wide = columns_for(len(names)) if len(columns) <= 16 else min(2, len(names))
    rows = -(-len(names) // wide)
    height = max(1.1, 0.3 * len(kept) + 0.75)
    made = sheet(13.0, 1.2 + height * rows, title)
    low = 5.0 * math.floor(float(finite.min(initial=1e9)) / 5.0) if finite.size else 0.0
    high = max(float(finite.max(initial=30.0)), low + 10.0)
    drawn = panels(made, len(names), wide)
    image = None
    for place, (axes, format_name) in enumerate(zip(drawn, names, strict=True)):
        cells = maps[format_name]
        image = axes.imshow(
            np.where(np.isfinite(cells), cells, np.where(np.isposinf(cells), high, np.nan)),
            aspect="auto", interpolation="nearest", cmap=MAP, vmin=low, vmax=high,
        )  # fmt: skip
        if len(columns) * wide <= 30:
            _write(axes, shown[format_name], low, high)
        dress(axes, title=plain(format_name, 40), x="layer" if len(columns) > 1 else "", grid="")
        short = list(short_kinds(kept).values())
        told = short if place % wide == 0 else [""] * len(short)
        axes.set_yticks(range(len(told)), [plain(each, 28) for each in told], fontsize=SMALL)
        step = max(1, -(-len(columns) // 10))
        at = range(0, len(columns), step)
        axes.set_xticks(list(at), [str(columns[k]) if len(columns) > 1 else "" for k in at])
        axes.spines[["left", "bottom"]].set_visible(False)
    if image is not None:
        color_bar(made, image, drawn, "SQNR (dB), the worse: dark is lost")
    if _any_differs(shown.values()):
        key(made, {"40/9: with/without massive elements": patch("none")}, look.show_legend)
    if len(found) > len(kept):
        drawn[-1].set_xlabel(f"{len(found) - len(kept)} more kinds of modules in the tables")
    return made


def _columns(told: list[Layers]) -> list[int]:
    """Numbers of layers, or places where they have none of their own."""
    if all(numbers(mine) is not None for mine in told if len(mine) > 1):
        found = {n for mine in told if len(mine) > 1 for n in (numbers(mine) or [])}
        return sorted(found) or [0]
    return list(range(max(map(len, told))))


def _map(told: list[Layers], name: str, columns: list[int]) -> Cells:
    cells: Cells = [[None] * len(columns) for _ in told]
    at = {number: place for place, number in enumerate(columns)}
    for row, mine in enumerate(told):
        own = numbers(mine) if len(mine) > 1 else [columns[0]]
        for place, each in enumerate(mine):
            column = at.get(own[place], place) if own is not None else place
            if len(mine) == 1 and each["layer"] in at:
                column = at[each["layer"]]
            cells[row][column] = losses(each).get(name)
    return cells


def _worse(cells: Cells) -> Floats:
    return np.array([[math.nan if loss is None else loss.worse for loss in row] for row in cells])


def _any_differs(maps: Iterable[Cells]) -> bool:
    return any(loss is not None and loss.differs for m in maps for row in m for loss in row)


def _write(axes: Axes, cells: Cells, low: float, high: float) -> None:
    for row, losses_there in enumerate(cells):
        for column, loss in enumerate(losses_there):
            if loss is not None:
                dark = loss.worse < low + 0.6 * (high - low)
                color = WHITE if dark else BLACK
                text = _cell_text(loss)
                axes.text(column, row, text, ha="center", va="center", fontsize=SMALL, color=color)


def _cell_text(loss: Loss) -> str:
    """Whole decibels; both figures where they are not the same."""
    both = (loss.sqnr_db, loss.rest_db) if loss.differs else (loss.sqnr_db,)
    shown = ["exact" if db == math.inf else f"{db:.0f}" for db in both]
    return "/".join(dict.fromkeys(shown))


# Smoothing ---------------------------------------------------------------------------------------


Advice = tuple[LayerActivations, Smoothed]


def _smoothed(record: ActivationsRecord) -> dict[str, list[Advice]]:
    found: dict[str, list[Advice]] = {}
    for each in record["layers"]:
        for advice in each.get("smoothing", []):
            found.setdefault(advice["format"], []).append((each, advice))
    return found


def draw_alphas(record: ActivationsRecord, look: Look) -> Sheet | None:
    """SQNR by migration strength, a line per layer, the best of each marked."""
    found = _smoothed(record)
    found = {name: told for name, told in found.items() if any(a["curve"] for _, a in told)}
    if not found:
        return None
    name, layer, advice = _best_gain(found)
    gain = advice["after_db"] - advice["before_db"]
    title = f"Smoothing gains at most {gain:.1f} dB"
    if gain >= GAIN_DB:
        title = f"Smoothing gains most in {name}: {gain:+.1f} dB for {name_of(layer, 56)} at α "
        title += f"{advice['alpha']:g}"
    shown = list(
        dict.fromkeys(kind_name(each["module"]) for told in found.values() for each, _ in told)
    )
    short = short_kinds(shown)
    colors = colors_for(shown)
    columns = min(3, len(found)) if len(found) != 4 else 2
    rows = -(-len(found) // columns)
    made = sheet({1: 9.0, 2: 11.0}.get(columns, 13.0), 1.6 + 3.0 * rows, title)
    for axes, (format_name, told) in zip(
        panels(made, len(found), columns), found.items(), strict=True
    ):
        for each, one in told:
            points = sorted((float(alpha), value) for alpha, value in one["curve"].items())
            color = colors[kind_name(each["module"])]
            axes.plot(*zip(*points, strict=True), "-", color=color, linewidth=0.9, alpha=0.7)
            best = [one["curve"].get(f"{one['alpha']:g}", one["after_db"])]
            axes.plot([one["alpha"]], best, "o", color=color, markersize=4,
                      markeredgecolor=WHITE, markeredgewidth=0.3)  # fmt: skip
        axes.margins(y=0.08)
        dress(
            axes,
            title=plain(format_name, 40),
            x="migration strength α",
            y="SQNR of the output (dB)",
        )
    shown = shown[: len(COLORS)]
    entries = {short[each]: line(colors[each]) for each in shown}
    key(made, {**entries, "best α": mark("o", _GRAY)}, look.show_legend)
    return made


def _best_gain(found: dict[str, list[Advice]]) -> tuple[str, LayerActivations, Smoothed]:
    told = [(name, each, one) for name, mine in found.items() for each, one in mine]
    return max(told, key=lambda t: t[2]["after_db"] - t[2]["before_db"])


def draw_smoothing(record: ActivationsRecord, look: Look) -> Sheet | None:
    """Before, smoothed, rotated: the layers that gain most from either."""
    found = _smoothed(record)
    if not found:
        return None

    def gain(pair: Advice) -> float:
        _, one = pair
        return float(max(one["after_db"], one.get("hadamard_db", -1e9)) - one["before_db"])

    kept = {
        name: [pair for pair, _ in worst(told, gain, _MOST_ROWS)] for name, told in found.items()
    }
    told = [pair for mine in found.values() for pair in mine]
    rotated = [p for p in told if p[1].get("hadamard_db", -1e9) > p[1]["after_db"]]
    better = ""
    if rotated:
        better = f"; a Hadamard rotation gains more in {len(rotated)} of {len(told)} cases"
    name, layer, one = _best_gain(found)
    title = f"{name_of(layer, 50)} in {name}: {one['before_db']:.1f} dB as it is, "
    title += f"{one['after_db']:.1f} dB smoothed{better}"
    columns = min(3, len(kept))
    rows = -(-len(kept) // columns)
    most = max(len(mine) for mine in kept.values())
    made = sheet({1: 9.0, 2: 13.0}.get(columns, 15.0), 1.5 + (0.9 + 0.42 * most) * rows, title)
    series = (("as it is", "before_db", _GRAY), ("smoothed", "after_db", _BLUE),
              ("Hadamard rotation", "hadamard_db", _ORANGE))  # fmt: skip
    modules = [each["module"] for each, _ in told]
    start = common_start(modules)
    for axes, (format_name, mine) in zip(
        panels(made, len(kept), columns), kept.items(), strict=True
    ):
        told_ones: list[dict[str, Any]] = [dict(one) for _, one in mine]
        for place, (_, field, color) in enumerate(series):
            at = [
                (row + 0.26 * (place - 1), one[field])
                for row, one in enumerate(told_ones)
                if field in one
            ]
            if at:
                axes.barh([p for p, _ in at], [v for _, v in at], height=0.24, color=color)
        rows_named(axes, [each["module"][len(start) :] or each["module"] for each, _ in mine], 30)
        dress(axes, title=plain(format_name, 40), x="predicted SQNR of the output (dB)", grid="x")
    key(made, {name: patch(color) for name, _, color in series}, look.show_legend)
    return made


# Sensitivity -------------------------------------------------------------------------------------


def draw_sensitivity(record: ActivationsRecord, format_name: str, look: Look) -> Sheet | None:
    """Layers quantized alone, the most harmful first, and where a proposal cuts."""
    told = [each for each in record["sensitivity"] if each["format"] == format_name]
    told = [each for each in told if "sqnr_db" in each]
    if not told:
        return None
    told.sort(key=lambda each: (each["sqnr_db"], each["module"]))
    proposals = [each for each in record["proposals"] if each["format"] == format_name]
    keep = set(proposals[0]["keep"]) if proposals else set()
    shown = told[:40]
    made = sheet(10, height_for(len(shown), 0.25, 3.0), _sensitive_title(told, proposals))
    axes = made.figure.subplots()
    for row, each in enumerate(shown):
        color = _ORANGE if each["module"] in keep else _BLUE
        own = loss_of(each, "local_sqnr_db")
        if own is not None:
            local = min(own.worse, 120.0)
            axes.plot(
                [local, min(each["sqnr_db"], 120.0)],
                [row, row],
                color=PALE,
                linewidth=1,
                zorder=1,
            )
            dots(axes, [local], [row], _GRAY, MARKERS[3], s=16)
        dots(axes, [min(each["sqnr_db"], 120.0)], [row], color, "o", s=34)
    cut = max((row for row, each in enumerate(shown) if each["module"] in keep), default=-1)
    if 0 <= cut < len(told) - 1:
        axes.axhline(cut + 0.5, color=WARN, linewidth=1.1, linestyle="--")
    start = common_start([each["module"] for each in told])
    rows_named(axes, [each["module"][len(start) :] or each["module"] for each in shown], 44)
    more = f" ({len(told) - len(shown)} less sensitive ones in the tables)" * (
        len(told) > len(shown)
    )
    dress(
        axes, title=plain(f"only this layer in {format_name}{more}", 100), x="SQNR (dB)", grid="x"
    )
    entries = {"of the model's output": mark("o", _BLUE)}
    if any("local_sqnr_db" in each for each in shown):
        entries["of the layer, or without massive elements"] = mark(MARKERS[3], _GRAY)
    if keep:
        entries["kept in higher precision"] = mark("o", _ORANGE)
        if 0 <= cut < len(told) - 1:
            entries["cut of the proposal"] = line(WARN, linestyle="--")
    key(made, entries, look.show_legend)
    return made


def _sensitive_title(told: list[Sensitive], proposals: list[Proposal]) -> str:
    first = told[0]
    text = f"{first['format']} hurts most in {name_of(first, 56)}: "
    text += f"{decibels(first['sqnr_db'])} of the output"
    if not proposals:
        return text
    best = proposals[0]
    if not best["keep"] and best["reached"]:
        return f"{text}; all {len(told)} quantized reach {best['target']}"
    kept = counted(len(best["keep"]), "layer")
    if best["reached"]:
        return f"{text}; {kept} of {len(told)} kept reach {best['target']}"
    return f"{text}; {best['target']} is not reached, not even with {kept} kept"


def draw_proposal(record: ActivationsRecord, format_name: str, look: Look) -> Sheet | None:
    """How the model gets better with every layer that is kept."""
    told = [
        each
        for each in record["proposals"]
        if each["format"] == format_name and len(each["curve"]) > 1
    ]
    if not told:
        return None
    first = told[0]
    made = sheet(
        9,
        1.4 + 2.9 * len(told),
        f"{format_name}: {counted(len(first['keep']), 'layer')} kept give "
        f"{target_value(first, first['value'])}, none kept "
        f"{target_value(first, first['all_quantized'])} ({first['target']})",
    )
    for axes, each in zip(panels(made, len(told), 1), told, strict=True):
        # All layers kept is no error at all: as a point it would flatten all others.
        seen = [point for point in each["curve"] if point[1] < EXACT_DB] or each["curve"]
        axes.plot(*zip(*seen, strict=True), "o-", color=_BLUE, markersize=5)
        if each["value"] < EXACT_DB:
            axes.plot([len(each["keep"])], [each["value"]], "o", color=_ORANGE, markersize=9)
        unit = "SQNR of the output (dB)" if "dB" in each["target"] else "loss"
        dress(axes, title=plain(each["target"], 60), x="layers kept in higher precision", y=unit)
        whole_numbers(axes)
    key(
        made,
        {
            "measured": line(_BLUE, "o"),
            "proposed": mark("o", _ORANGE),
        },
        look.show_legend,
    )
    return made
