"""What pictures of activations share: panels by kind of module, the layer's number below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qgate.activation_stats.reading import Layers, amax, kinds, name_of, numbers, short_kinds
from qgate.charts.figure import LABEL, PANEL, SMALL, dress
from qgate.charts.sheet import Sheet, legend, line, panels, plain, sheet, whole_numbers
from qgate.summaries.reading import worst

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MOST_PANELS, MOST_ROWS, _FEW = 12, 30, 8


@dataclass(frozen=True)
class Group:
    """Layers side by side on one axis: their places on it, and what they are called below it."""

    title: str
    layers: Layers
    places: list[int]
    label: str
    names: list[str]

    def dress(self, axes: Axes) -> None:
        """Ticks and label of the axis below."""
        axes.set_xlabel(self.label, fontsize=LABEL)
        if self.names:
            axes.set_xticks(self.places, self.names, rotation=20, ha="right", fontsize=SMALL)
        else:
            whole_numbers(axes, most=8)
        low, high = self.places[0], self.places[-1]
        axes.set_xlim(low - 0.6, high + 0.6)


def groups_of(layers: Layers) -> tuple[list[Group], str]:
    """Layers by kind of module, those of the largest magnitudes if there are many, and what is
    left out. Modules that are alone in their kind share an axis."""
    found = kinds(layers)
    alone = [name for name, mine in found.items() if len(mine) == 1]
    made: list[Group] = []
    if len(alone) > 1:
        single = [found.pop(name)[0] for name in alone]
        left = {name: mine for name, mine in found.items() if len(mine) > 1}
        made = [_group("", single[at : at + _FEW]) for at in range(0, len(single), _FEW)]
        found = left
    short = short_kinds(found)
    made = [_group(short[name], mine) for name, mine in found.items()] + made
    more = len(made) - MOST_PANELS
    if more > 0:
        kept = worst(made, lambda group: max(map(amax, group.layers), default=0.0), MOST_PANELS)
        kept_ones = [group for group, _ in kept]
        made = [group for group in made if any(group is each for each in kept_ones)]
    return made, f"{more} more kinds of modules, of smaller values, in the tables" * (more > 0)


def _group(title: str, layers: Layers) -> Group:
    places = numbers(layers)
    if (title and len(layers) > 1) or len(layers) > _FEW:
        if places is not None and places == sorted(places):
            return Group(plain(title, 44), layers, places, "layer", [])
        return Group(plain(title, 44), layers, list(range(len(layers))), "module, in order", [])
    names = [plain(name_of(each, 34), 34) for each in layers]
    return Group("", layers, list(range(len(layers))), "", names)


def grid(made: Sheet, groups: Sequence[Group], columns: int) -> list[Axes]:
    drawn = panels(made, len(groups), columns)
    for axes, group in zip(drawn, groups, strict=True):
        dress(axes, title=group.title, grid="y")
        group.dress(axes)
    return drawn


def grid_sheet(groups: Sequence[Group], title: str, *, each: float = 2.3) -> tuple[Sheet, int]:
    """A sheet for so many panels, and how many go side by side."""
    columns = min(3, len(groups)) if len(groups) != 4 else 2
    rows = -(-len(groups) // columns)
    width = {1: 9.0, 2: 11.0}.get(columns, 13.0)
    return sheet(width, 1.5 + max(each * rows, 3.0), title), columns


def y_label(made: Sheet, drawn: Sequence[Axes], text: str) -> None:
    """One for all panels, in as many lines as the height wants."""
    lines = textwrap.fill(text, max(20, int(made.figure.get_figheight() * 9)))
    if len(drawn) == 1:
        drawn[0].set_ylabel(lines, fontsize=LABEL)
    else:
        made.figure.supylabel(lines, fontsize=PANEL)


def mark(marker: str, color: str, *, hollow: bool = False) -> Artist:
    """A sign for the legend."""
    face = "none" if hollow else color
    return line("none", marker, markerfacecolor=face, markeredgecolor=color)


def key(made: Sheet, entries: Mapping[str, Artist], shown: bool) -> None:
    """The legend, where it is wanted."""
    if shown:
        legend(made, entries)


def shared_limits(drawn: Sequence[Axes]) -> None:
    """The same height for all panels, so that they can be held against each other."""
    told = [axes.get_ylim() for axes in drawn]
    low, high = min(pair[0] for pair in told), max(pair[1] for pair in told)
    for axes in drawn:
        axes.set_ylim(low, high)
