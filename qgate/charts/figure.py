"""The style of all pictures in one place; figures without a display, written whole or not at all.

Colors are those of `palette`; sizes are in points of the figure as it is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qgate.charts.palette import GRAY, WHITE
from qgate.errors import QgateError
from qgate.loading import explained_imports
from qgate.storage.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter
    from PIL.Image import Image

HEADLINE, PANEL, LABEL, TICK, SMALL = 12.0, 9.5, 9.0, 8.5, 8.0
DPI = 110
_GRID, _GRID_WIDTH = 0.22, 0.6
# The level of zlib: twice as fast as usual for files a sixth larger.
_COMPRESSION = 3


def new_figure(width: float, height: float) -> Figure:
    with explained_imports():
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=WHITE)
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.07, hspace=0.04, wspace=0.03)  # type: ignore[union-attr, call-arg]
    return figure


def dress(axes: Axes, *, title: str = "", x: str = "", y: str = "", grid: str = "both") -> None:
    """Style a panel as all panels; `title` is drawn as it is."""
    # At a fixed height: looking for a free one takes a third of the time of a layout.
    axes.set_title(title, fontsize=PANEL, loc="left", y=1.0)
    axes.set_xlabel(x, fontsize=LABEL)
    axes.set_ylabel(y, fontsize=LABEL)
    axes.tick_params(labelsize=TICK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        if type(axis.get_major_formatter()).__name__ == "ScalarFormatter":
            axis.set_major_formatter(_numbers()())
    if grid:
        axes.grid(axis=grid, color=GRAY, alpha=_GRID, linewidth=_GRID_WIDTH)  # type: ignore[arg-type]


def number_names(values: Sequence[float]) -> list[str]:
    """Name ticks with as few digits as distinguish them, each within a thousandth of their step."""
    ticks = [float(value) for value in values]
    steps = [b - a for a, b in pairwise(sorted(ticks)) if b > a]
    near = min(steps, default=0.0) / 1000
    for digits in range(3, 17):
        rounded = [0.0 if abs(v) <= near else float(f"{v:.{digits}g}") for v in ticks]
        if all(abs(a - b) <= near for a, b in zip(rounded, ticks, strict=True)):
            break
    return [_number_name(value) for value in rounded]


def _number_name(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.15g}"
    digits, _, power = f"{value:.15e}".partition("e")
    return f"{float(digits):.15g}e{int(power)}"


@functools.cache
def _numbers() -> type[Formatter]:
    """Return a formatter without a common factor beside the axis, which would cover the title."""
    from matplotlib.ticker import Formatter

    class Numbers(Formatter):
        def __call__(self, value: float, pos: int | None = None) -> str:  # noqa: ARG002
            return number_names([value])[0]

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return number_names(values) if len(values) else []

    return Numbers


def save(figure: Figure, path: Path, *, dpi: float = DPI, image: Image | None = None) -> None:
    """Write a figure, or nothing if the disk is full or the ending is wrong.

    `image` is the same figure where it is rendered already.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    ending = path.suffix.lower().removeprefix(".")
    allowed = FigureCanvasBase.get_supported_filetypes()
    if ending not in allowed:
        raise QgateError(
            f"cannot write a picture to {str(path)!r}; its ending is one of "
            f"{', '.join(sorted('.' + name for name in allowed))}."
        )
    if not path.parent.is_dir():
        raise QgateError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}.")
    with replacing(path) as neighbor:
        if ending == "png":
            image = image or render_image(figure, dpi)
            image.save(neighbor, format="png", dpi=(dpi, dpi), compress_level=_COMPRESSION)
        else:
            figure.savefig(neighbor, format=ending, dpi=dpi)


def render_image(figure: Figure, dpi: float = DPI) -> Image:
    """Render a figure in memory: it is laid out once, where `savefig` draws all of it twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.set_dpi(dpi)
    canvas: Any = FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")
    canvas.draw()
    figure.set_layout_engine(engine)
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
