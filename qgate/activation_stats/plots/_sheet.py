"""Sheets of panels by kind of module, with the numbers of layers below."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qgate.activation_stats.reading import Layers, amax, kinds, name_of, numbers, short_kinds
from qgate.charts.figure import LABEL, PANEL, SMALL, dress
from qgate.charts.sheet import (
    Sheet,
    columns_for,
    legend,
    line,
    panels,
    plain,
    sheet,
    whole_numbers,
)
from qgate.summaries.reading import worst

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MOST_PANELS, MOST_ROWS, _FEW = 12, 30, 8


@dataclass(frozen=True)
class Group:
    """Layers side by side on one axis, with their ticks and names below."""

    title: str
    layers: Layers
    ticks: list[int]
    label: str = ""
    names: Sequence[str] = ()


def groups_of(layers: Layers) -> tuple[list[Group], str]:
    """Group layers by kind of module, and note the kinds that are left out: of many, those of small
    magnitudes. Modules that are alone in their kind share an axis."""
    by_kind = kinds(layers)
    alone = [mine[0] for mine in by_kind.values() if len(mine) == 1]
    if len(alone) > 1:
        by_kind = {name: mine for name, mine in by_kind.items() if len(mine) > 1}
    short = short_kinds(by_kind)
    groups = [_group(short[name], mine) for name, mine in by_kind.items()]
    if len(alone) > 1:
        groups += [_group("", alone[at : at + _FEW]) for at in range(0, len(alone), _FEW)]
    more = len(groups) - MOST_PANELS
    if more > 0:
        largest = worst(groups, lambda g: max(map(amax, g.layers), default=0.0), MOST_PANELS)
        chosen = {id(group) for group, _ in largest}
        groups = [group for group in groups if id(group) in chosen]
    return groups, f"{more} more kinds of modules, of smaller values, in the tables" * (more > 0)


def _group(title: str, layers: Layers) -> Group:
    ticks = numbers(layers)
    if (title and len(layers) > 1) or len(layers) > _FEW:
        if ticks is not None and ticks == sorted(ticks):
            return Group(plain(title, 44), layers, ticks, "layer")
        return Group(plain(title, 44), layers, list(range(len(layers))), "module, in order")
    names = [plain(name_of(layer, 34), 34) for layer in layers]
    return Group("", layers, list(range(len(layers))), "", names)


def grid(all_axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Give each panel the title of its group, and ticks and label below."""
    for axes, group in zip(all_axes, groups, strict=True):
        dress(axes, title=group.title, x=group.label, grid="y")
        if group.names:
            axes.set_xticks(group.ticks, group.names, rotation=20, ha="right", fontsize=SMALL)
        else:
            whole_numbers(axes, most=8)
        axes.set_xlim(group.ticks[0] - 0.6, group.ticks[-1] + 0.6)


def panel_sheet(
    count: int,
    title: str,
    *,
    widths: Sequence[float] = (9.0, 11.0, 13.0),
    base: float = 1.5,
    row_height: float = 2.3,
    least: float = 0.0,
    columns: int = 0,
) -> tuple[Sheet, list[Axes]]:
    """Make a sheet of panels, as wide as its columns need."""
    columns = columns or columns_for(count)
    page = sheet(widths[columns - 1], base + max(row_height * -(-count // columns), least), title)
    return page, panels(page, count, columns)


def group_sheet(groups: Sequence[Group], title: str) -> tuple[Sheet, list[Axes]]:
    page, all_axes = panel_sheet(len(groups), title, least=3.0)
    grid(all_axes, groups)
    return page, all_axes


def y_label(page: Sheet, all_axes: Sequence[Axes], text: str) -> None:
    """Write one label for all panels, in lines that fit the height."""
    lines = textwrap.fill(text, max(20, int(page.figure.get_figheight() * 9)))
    if len(all_axes) == 1:
        all_axes[0].set_ylabel(lines, fontsize=LABEL)
    else:
        page.figure.supylabel(lines, fontsize=PANEL)


def mark(marker: str, color: str, *, hollow: bool = False) -> Artist:
    """Return a sign for the legend."""
    face = "none" if hollow else color
    return line("none", marker, markerfacecolor=face, markeredgecolor=color)


def key(page: Sheet, entries: Mapping[str, Artist], enabled: bool) -> Sheet:
    """Add the legend, if it is switched on."""
    if enabled:
        legend(page, entries)
    return page


def shared_limits(all_axes: Sequence[Axes]) -> None:
    """Give all panels the same limits, so that they can be compared."""
    limits = [axes.get_ylim() for axes in all_axes]
    for axes in all_axes:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
