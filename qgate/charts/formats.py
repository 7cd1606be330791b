"""Where a format's values lie and how fine it is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from qgate.charts.figure import PANEL, SMALL, new_figure, save
from qgate.charts.palette import BLUE, GRAY, RED


def draw_values(
    path: Path, *, title: str, values: npt.NDArray[np.float64], min_normal: float, unit: str = ""
) -> None:
    """Two panels over log2 of the magnitude: the values themselves, and the largest relative error
    that rounding to the nearest one can make."""
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
    top.set_title(
        f"{title}: {len(x)} positive values, max {x[-1]:g}, smallest {x[0]:g}", fontsize=PANEL
    )
    middle = (x[:-1] + x[1:]) / 2
    worst = (x[1:] - x[:-1]) / 2 / middle * 100
    bottom.step(exact, np.append(worst, worst[-1:]), where="post", color=BLUE, linewidth=1.3)
    if subnormal.any():
        left = exact[0]
        for axes in (top, bottom):
            axes.axvspan(left - 0.5, np.log2(min_normal), color=RED, alpha=0.07, linewidth=0)
        top.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=SMALL)
    bottom.set_ylabel("largest relative error\nof rounding (%)")
    bottom.set_xlabel("log2 of the magnitude" + (f", {unit}" if unit else ""))
    bottom.set_ylim(bottom=0)
    bottom.grid(color=GRAY, alpha=0.25, linewidth=0.6)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    top.spines["left"].set_visible(False)
    bottom.set_xlim(exact[0] - 0.5, exact[-1] + 0.5)
    save(figure, path)
