"""The learning curve of a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qgate.charts.figure import LABEL, SMALL, dress, new_figure, save
from qgate.charts.palette import BLUE, GRAY, RED

_SMOOTHED = 20


def draw_curve(
    path: Path, *, title: str, trained: list[float], held_out: dict[int, float],
    compared: dict[str, float],
) -> None:  # fmt: skip
    """Draw bits per byte over steps: batches, held-out text, and simpler models on the latter."""
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    steps = np.arange(1, len(trained) + 1)
    axes.plot(steps, trained, color=BLUE, alpha=0.25, linewidth=0.7)
    width = min(_SMOOTHED, len(trained))
    smooth = np.convolve(trained, np.full(width, 1 / width), "valid")
    axes.plot(
        steps[width - 1 :], smooth, color=BLUE, linewidth=1.5, label=f"training, mean of {width}"
    )
    axes.plot(list(held_out), list(held_out.values()), "o-", color=RED, ms=3, label="held-out text")
    for name, bits in compared.items():
        axes.axhline(bits, color=GRAY, linewidth=1, linestyle="--")
        axes.annotate(
            f"{name} {bits:.2f}", (len(trained), bits), (0, 3), textcoords="offset points",
            ha="right", fontsize=SMALL, color=GRAY,
        )  # fmt: skip
    last = list(held_out.values())[-1]
    axes.annotate(f"{last:.2f}", (list(held_out)[-1], last), (0, 6), textcoords="offset points",
                  ha="right", fontsize=LABEL, color=RED)  # fmt: skip
    axes.set_ylim(0, max(compared.values()) + 1)
    axes.set_xlim(0, len(trained) * 1.01)
    dress(axes, title=title, x="step", y="bits per byte", grid="")
    axes.legend(frameon=False, fontsize=SMALL, loc="upper center")
    save(figure, path)
