"""What a picture has to keep to be of one style with all others, as far as a machine can tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from qgate.charts.figure import SMALL
from qgate.charts.palette import MAPS, PALETTE

_TOUCH = 1.5


def violations(figure: Figure) -> list[str]:
    """One line for each thing that is not as it should be; the figure is laid out for it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    deviations = [*_titles(figure), *_fonts(figure), *_colors(figure)]
    for axes in figure.axes:
        if axes.get_label() != "<colorbar>":
            deviations += [*_labels(figure, axes), *_empty(axes), *_legend(axes, renderer)]
        deviations += _overlaps(axes, renderer)
    return deviations


def has_data(axes: Axes) -> bool:
    """A panel; a surface has three axes of its own, whose places are not looked at here."""
    has_frame = axes.axison or axes.name == "3d"
    return bool(has_frame and (axes.lines or axes.patches or axes.collections or axes.images))


def _titles(figure: Figure) -> Iterator[str]:
    """The sentence above all panels: a finding has a number, or says that there is none."""
    title = figure.get_suptitle()
    if not re.search(r"\d|\b[Nn]o(ne|thing)?\b", title):
        yield f"title: {title!r} states no finding"


def _fonts(figure: Figure) -> Iterator[str]:
    for text in _shown(figure):
        if text.get_fontsize() < SMALL:
            yield f"font: {text.get_fontsize():g} pt of {text.get_text()!r}"


def _shown(figure: Figure) -> list[Text]:
    texts: Any = figure.findobj(lambda artist: isinstance(artist, Text))
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def _labels(figure: Figure, axes: Axes) -> Iterator[str]:
    """An axis of numbers says what they are; one of names, or without any, speaks for itself."""
    if not has_data(axes):
        return
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        whole = getattr(figure, f"_sup{name}label")
        words = [label.get_text() for label in axis.get_ticklabels() if label.get_visible()]
        side = axis.get_tick_params().get("labelleft" if name == "y" else "labelbottom", True)
        numbers = [word for word in words if re.fullmatch(r"[^a-zA-Z]*\d[^a-zA-Z]*(e-?\d+)?", word)]
        if numbers and side and not axis.label.get_text().strip() and whole is None:
            yield f"label: {name} of {_name(axes)} has {numbers[:3]} and no words"


def _empty(axes: Axes) -> Iterator[str]:
    if axes.axison and not has_data(axes) and not axes.texts:
        yield f"empty: {_name(axes)}"


def _name(axes: Axes) -> str:
    titles = [axes.get_title(side) for side in ("left", "center", "right")]
    return repr(next((title for title in titles if title), axes.get_ylabel() or "a panel"))


# Colors ------------------------------------------------------------------------------------------


def _colors(figure: Figure) -> Iterator[str]:
    strange = {color for axes in figure.axes for color in _used(axes)} - set(PALETTE)
    strange |= {to_hex(text.get_color()) for text in _shown(figure)} - set(PALETTE)
    yield from (f"color: {color} is not of the palette" for color in sorted(strange))
    for axes in figure.axes:
        for mapped in (*axes.images, *axes.collections):
            name = mapped.get_cmap().name
            if mapped.get_array() is not None and name not in MAPS:
                yield f"color: map {name} is not one of {', '.join(MAPS)}"


def _used(axes: Axes) -> Iterator[str]:
    for line in axes.lines:
        joined = str(line.get_linestyle()) not in ("None", "none", "")
        marked = str(line.get_marker()) not in ("None", "none", "")
        yield from _hex([line.get_color()] if joined else [])
        if marked:
            yield from _hex([line.get_markerfacecolor(), line.get_markeredgecolor()])
    # The ends of a bar of colors are of its map.
    for patch in axes.patches if axes.get_label() != "<colorbar>" else ():
        yield from _hex([patch.get_facecolor()] if patch.get_fill() else [])
        yield from _hex([patch.get_edgecolor()] if patch.get_linewidth() else [])
    for collection in axes.collections:
        if collection.get_array() is None and axes.get_label() != "<colorbar>":
            yield from _hex(collection.get_facecolor())
            yield from _hex(collection.get_edgecolor())


def _hex(colors: Any) -> Iterator[str]:
    for color in colors:
        if not (isinstance(color, str) and color == "none") and not _clear(color):
            yield to_hex(color)


def _clear(color: Any) -> bool:
    return not isinstance(color, str) and len(color) == 4 and color[3] == 0


# Places ------------------------------------------------------------------------------------------


def _legend(axes: Axes, renderer: Any) -> Iterator[str]:
    """A legend stands beside the data."""
    legend = axes.get_legend()
    if legend is None or not has_data(axes):
        return
    box, inside = legend.get_window_extent(renderer), axes.get_window_extent(renderer)
    shared = Bbox.intersection(box, inside)
    if shared is not None and shared.height > 0.05 * inside.height and shared.width > 3:
        yield f"legend: over the data of {_name(axes)}"


def _overlaps(axes: Axes, renderer: Any) -> Iterator[str]:
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in _texts(axes)]
    for (one, box), (other, second) in combinations(boxes, 2):
        wide = min(box.x1, second.x1) - max(box.x0, second.x0)
        high = min(box.y1, second.y1) - max(box.y0, second.y0)
        if wide > _TOUCH and high > _TOUCH:
            yield f"overlap: {one!r} and {other!r} in {_name(axes)}"


def _texts(axes: Axes) -> Iterator[Text]:
    """All that is written in and around a panel; ticks only as far as they are shown."""
    if not axes.get_visible():
        return
    texts: list[Text] = list(axes.texts)
    if axes.axison:
        texts += [axes.title, axes._left_title, axes._right_title]  # type: ignore[attr-defined]
        texts += [axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            wide = (high - low) * 1e-6
            places = axis.get_majorticklocs()
            ticks = axis.get_major_ticks(len(places))
            for position, tick in zip(places, ticks, strict=False):
                if low - wide <= position <= high + wide:
                    texts += [label for label in (tick.label1, tick.label2) if label.get_visible()]
    legend = axes.get_legend()
    texts += legend.get_texts() if legend is not None else []
    yield from (text for text in texts if text.get_visible() and text.get_text().strip())
