"""Figures without a display, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, RED, GRAY = "#2166ac", "#b2182b", "#8a8a8a"


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
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
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.close(handle)
    try:
        figure.savefig(name, format=ending, dpi=150)
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
