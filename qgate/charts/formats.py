"""A picture of a format: its values, and its resolution at each magnitude."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from qgate.charts.figure import SMALL, dress, new_figure, save
from qgate.charts.palette import BLUE, RED


def draw_values(
    path: Path, *, title: str, values: npt.NDArray[np.float64], min_normal: float, unit: str = ""
) -> None:
    """Draw two panels over log2 of the magnitude: the values themselves, and the largest relative
    error of rounding to the nearest one."""
    x = np.asarray(values)[np.asarray(values) > 0]
    exact = np.log2(x)
    figure = new_figure(8, 4.2)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.4))
    subnormal = x < min_normal
    for pick, color, label in ((~subnormal, BLUE, "normal"), (subnormal, RED, "subnormal")):
        if pick.any():
            width = 1.2 if len(x) < 300 else 0.3
            top.vlines(exact[pick], 0, 1, color=color, linewidth=width, label=label)
    top.set_yticks([])
    top.set_ylim(0, 1)
    counts = f"{title}: {len(x)} positive values, max {x[-1]:g}, smallest {x[0]:g}"
    dress(top, title=counts, grid="")
    middle = (x[:-1] + x[1:]) / 2
    worst = (x[1:] - x[:-1]) / 2 / middle * 100
    bottom.step(
        exact,
        np.append(worst, worst[-1:] if len(worst) else 0.0),
        where="post",
        color=BLUE,
        linewidth=1.3,
    )
    if subnormal.any():
        for axes in (top, bottom):
            axes.axvspan(exact[0] - 0.5, np.log2(min_normal), color=RED, alpha=0.07, linewidth=0)
        top.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=SMALL)
    words = "log2 of the magnitude" + (f", {unit}" if unit else "")
    dress(bottom, x=words, y="largest relative error\nof rounding (%)")
    bottom.set_ylim(bottom=0)
    top.spines["left"].set_visible(False)
    bottom.set_xlim(exact[0] - 0.5, exact[-1] + 0.5)
    save(figure, path)
