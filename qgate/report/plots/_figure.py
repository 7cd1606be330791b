"""Figures without a display, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError
from qgate.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, RED, GRAY = "#2166ac", "#b2182b", "#8a8a8a"


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path, *, dpi: float = 150) -> None:
    """Write to a neighbor first, so that a full disk or a wrong ending leaves nothing behind."""
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
        figure.savefig(neighbor, format=ending, dpi=dpi)
