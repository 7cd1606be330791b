"""What a recommended level keeps without massive elements: they alone can make an SQNR."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from qgate.formats import ElementFormat
from qgate.stats import Counts, Values, massive_beyond, serial
from qgate.summaries.record import HIDDEN_DB
from qgate.sweeps._sums import Folded

FIELD = "sqnr_db_without_massive"


def tell_massive(
    record: dict[str, Any],
    fmt: ElementFormat,
    summary: Counts | Values,
    parts: Callable[[], Iterable[Folded]],
) -> None:
    """Add to a record of a sweep its SQNR without massive elements, at the recommended level.

    `parts` are the magnitudes once more. They are gone through only where there are massive
    elements; elsewhere the figure is that of the whole.
    """
    levels, advice = record["levels"], record["advice"]
    for each in levels:
        each[FIELD] = None
    level = levels[advice["recommended"]]
    whole = level["metrics"]["sqnr_db"]
    level[FIELD], advice["massive"] = whole, None
    beyond = massive_beyond(summary)
    if beyond == math.inf or math.isnan(whole):
        return
    rest, elements = _rest(fmt, parts(), level, record["parameters"]["scale_bits"], beyond)
    level[FIELD] = rest
    advice["massive"] = {"beyond": beyond, "elements": elements}
    if whole - rest > HIDDEN_DB:
        advice["reasons"].append(
            f"SQNR without the {elements} massive elements beyond {beyond:.3g} is {rest:.2f} dB: "
            "they hide what the others lose."
        )


def _rest(
    fmt: ElementFormat,
    parts: Iterable[Folded],
    level: dict[str, Any],
    scale_bits: int,
    beyond: float,
) -> tuple[float, int]:
    """Return the SQNR of what is not beyond, and count what is."""
    # In units near what is left, no square overflows.
    base = math.frexp(beyond)[1]
    limit = 2 ** (scale_bits - 1) - 1
    signal = noise = elements = 0.0
    for folded in parts:
        own, scale = 0, float(level["factor"])
        if folded.exponent is not None:
            own = folded.exponent
            scale = 2.0 ** (min(max(own + level["exponent"], -limit), limit) - own)
        weights = folded.positive + folded.negative
        kept = int(np.searchsorted(np.ldexp(folded.sizes, own), beyond, side="right"))
        elements += float(weights[kept:].sum())
        sizes, weights = folded.sizes[:kept], weights[:kept]
        with serial():
            rounded = fmt.nearest(torch.from_numpy(sizes / scale)).numpy() * scale
        true = np.ldexp(sizes, own - base)
        signal += float(np.square(true) @ weights)
        noise += float(np.square(np.ldexp(rounded, own - base) - true) @ weights)
    if noise == 0:
        return math.inf, int(elements)
    return (10 * math.log10(signal / noise) if signal else -math.inf), int(elements)
