"""Describe a figure of matplotlib by what is drawn: texts, scales, limits and data, in lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.golden.summaries import FEW, array_text, number_text, scalar_text, texts_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure_lines(figure: Figure) -> Iterator[str]:
    """All of a figure: its own texts and legends, then its axes in the order they were made."""
    for text in [*figure.texts, *([figure._suptitle] if figure._suptitle else [])]:  # type: ignore[attr-defined]
        yield from _text_lines("title" if text is figure._suptitle else "text", text.get_text())  # type: ignore[attr-defined]
    for legend in figure.legends:
        yield from _legend_lines(legend)
    for number, axes in enumerate(figure.axes, 1):
        yield f"axes {number}"
        yield from (f"  {line}" for line in axes_lines(axes))


def axes_lines(axes: Axes) -> Iterator[str]:
    for where in ("left", "center", "right"):
        yield from _text_lines("title", axes.get_title(where))  # type: ignore[arg-type]
    names = ("x", "y", "z") if hasattr(axes, "get_zlim") else ("x", "y")
    for name in names:
        yield from _axis_lines(axes, name)
    for line in axes.lines:
        data = ", ".join(f"{n} {_values(v)}" for n, v in zip("xy", line.get_data(), strict=True))
        marker = "" if line.get_marker() in ("None", None, "") else f" marker {line.get_marker()}"
        style = "" if line.get_linestyle() == "-" else f" style {line.get_linestyle()}"
        yield f"line {_color(line.get_color())}{style}{marker}{_label(line)}: {data}"
    yield from _patch_lines(axes)
    for collection in axes.collections:
        yield from _collection_lines(collection)
    for image in axes.images:
        low, high = image.get_clim()
        limits = f"{number_text(low)} to {number_text(high)}" if low is not None else "none"
        name = f"{image.get_cmap().name}, {type(image.norm).__name__} {limits}"
        values = np.ma.asarray(image.get_array()).astype(np.float64).filled(np.nan)
        yield f"image {name}, extent {_values(image.get_extent())}: {array_text(values)}"
    for text in axes.texts:
        yield from _text_lines(f"text at {_values(text.get_position())}", text.get_text())
    for table in axes.tables:
        cells = sorted(table.get_celld().items())
        yield from _text_lines("table", " | ".join(cell.get_text().get_text() for _, cell in cells))
    if (legend := axes.get_legend()) is not None:
        yield from _legend_lines(legend)


def _axis_lines(axes: Axes, name: str) -> Iterator[str]:
    axis: Any = getattr(axes, f"{name}axis")
    if not axes.axison and not axis.get_label_text():
        return
    limits = getattr(axes, f"get_{name}lim")()
    ticks = [label.get_text() for label in axis.get_ticklabels() if label.get_text()]
    tick_text = ", ".join(ticks) if len(ticks) <= 4 * FEW else texts_text(ticks)
    label = axis.get_label_text().replace("\n", " ⏎ ")
    yield f"{name} {scalar_text(label)} {axis.get_scale()} {_values(limits)}: {tick_text}"


def _patch_lines(axes: Axes) -> Iterator[str]:
    """Bars, spans and boxes: rectangles of a color together, other shapes by their corners."""
    from matplotlib.patches import Rectangle

    groups: dict[str, list[list[float]]] = {}
    for patch in axes.patches:
        kind = type(patch).__name__
        key = f"{kind} {_color(patch.get_facecolor())}{_label(patch)}"
        if isinstance(patch, Rectangle):
            box = [patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()]
            groups.setdefault(key, []).append([float(value) for value in box])
        else:
            corners = patch.get_path().vertices
            groups.setdefault(key, []).append(np.asarray(corners, np.float64).ravel().tolist())
    for key, boxes in groups.items():
        if len({len(box) for box in boxes}) > 1 or not key.startswith("Rectangle"):
            yield f"{key}: {len(boxes)} shapes {array_text([v for box in boxes for v in box])}"
            continue
        columns = zip(("x", "y", "width", "height"), np.transpose(boxes), strict=True)
        yield f"{key}: " + ", ".join(f"{name} {array_text(values)}" for name, values in columns)


def _collection_lines(collection: Any) -> Iterator[str]:
    kind = type(collection).__name__
    faces = [_color(face) for face in _rows(collection.get_facecolor())]
    edges = [_color(edge) for edge in _rows(collection.get_edgecolor())]
    colors = [*dict.fromkeys(faces or edges)]
    color_text = " ".join(colors) if len(colors) <= FEW else f"{len(colors)} colors"
    parts = []
    if (
        offsets := np.ma.asarray(collection.get_offsets()).filled(np.nan)
    ).size > 2 or offsets.any():
        parts += [f"{n} {_values(v)}" for n, v in zip("xy", np.transpose(offsets), strict=True)]
    if "PathCollection" not in kind:
        paths = collection.get_paths()
        corners = [np.asarray(path.vertices, np.float64).ravel() for path in paths]
        joined = np.concatenate(corners) if corners else np.zeros(0)
        parts.append(f"{len(paths)} shapes {array_text(joined)}")
    if (values := collection.get_array()) is not None:
        filled = np.ma.asarray(values).astype(np.float64).filled(np.nan)
        parts.append(f"values {array_text(filled)}")
    yield f"{kind} {color_text}{_label(collection)}: {', '.join(parts)}"


def _legend_lines(legend: Any) -> Iterator[str]:
    title = legend.get_title().get_text()
    names = [text.get_text().strip() for text in legend.get_texts()]
    yield f"legend {scalar_text(title) if title else ''}: {' | '.join(names)}".replace("\n", " ⏎ ")


def _text_lines(kind: str, text: str) -> Iterator[str]:
    if text:
        yield f"{kind}: {text}".replace("\n", " ⏎ ")


def _rows(colors: Any) -> Iterable[Any]:
    return np.atleast_2d(colors) if len(colors) else []


def _values(values: Any) -> str:
    array = np.asarray(values)
    if array.dtype.kind not in "biufM":
        return texts_text([str(value) for value in array.ravel()]) if array.size else "[]"
    return array_text(array)


def _color(color: Any) -> str:
    from matplotlib.colors import to_hex

    return to_hex(color, keep_alpha=True).removesuffix("ff") if len(color) else "none"


def _label(artist: Any) -> str:
    label = str(artist.get_label() or "")
    return "" if label.startswith("_") or not label else f" {scalar_text(label)}"
