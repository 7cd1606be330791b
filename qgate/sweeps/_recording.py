"""Measure a sweep at every level, and write it as a record with one piece of advice."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from qgate._version import __version__
from qgate.errors import QgateError
from qgate.formats import ElementFormat, Format
from qgate.formats.mx import MxFormat
from qgate.scales.levels import Level
from qgate.stats import Counts, Values, massive_beyond
from qgate.stats.summary import Floats
from qgate.summaries.record import HIDDEN_DB
from qgate.sweeps import advice as advising
from qgate.sweeps._cells import CellEdges, are_worth_cells
from qgate.sweeps._share_sums import ShareSums
from qgate.sweeps._sums import Folded, LevelSums, without_massive
from qgate.sweeps.record import FormatFigures, SweepParameters, SweepRecord, SweptLevel

_OF_TENSOR = (
    "nan", "posinf", "neginf", "zeros", "min", "max", "amax", "amin", "mean", "std",
)  # fmt: skip
Parts = Callable[[CellEdges | None], Iterable[Folded]]
"""Function that yields the magnitudes of a tensor whenever it is called; in cells, given edges."""


def record_of(
    fmt: ElementFormat | MxFormat,
    summary: Counts | Values,
    named: tuple[str, list[int] | None],
    levels: Sequence[Level],
    parts: Parts,
    parameters: SweepParameters,
) -> SweepRecord:
    """Measure a tensor, `named` by its name and shape, at every level, and recommend one."""
    element, is_block = fmt.element, parameters["block"] is not None
    sums = LevelSums(element, levels, summary, parameters["scale_bits"])
    in_cells = sums.base == 0 and are_worth_cells(summary)
    for folded in parts(CellEdges(element, sums.scales_at) if in_cells else None):
        sums.add(folded)
    if sums.n == 0:
        raise QgateError(f"{named[0]}: every block holds NaN or Inf, so there is nothing to sweep.")
    swept_levels = swept(sums, levels, summary, parameters["scale_bits"], is_block)
    record = recorded(fmt, summary, named, swept_levels, int(sums.n), parameters)
    _add_massive(record, sums, summary, parts, in_cells)
    return record


def recorded(
    fmt: Format,
    summary: Counts | Values,
    named: tuple[str, list[int] | None],
    swept_levels: list[SweptLevel],
    used: int,
    parameters: SweepParameters,
) -> SweepRecord:
    """Return the record of levels, with advice; `used` elements are in blocks without NaN."""
    element, is_block = fmt.element, parameters["block"] is not None
    odd = {"NaN": summary.nan, "Inf": summary.posinf + summary.neginf}
    bad = " and ".join(f"{count} {kind}" for kind, count in odd.items() if count)
    rounded = summary.rounded_from
    format_figures: FormatFigures = {
        "name": fmt.name,
        "layout": fmt.layout,
        "bits": fmt.bits,
        "max": element.max,
        "min_normal": element.min_normal,
        "min_subnormal": element.min_subnormal,
        "max_exponent": element.max_exponent,
        "rounding": element.rounding,
    }
    if element.is_codebook:
        format_figures["levels"] = element.values().tolist()
    advice = advising.advise(
        swept_levels,
        block=is_block,
        scale_bits=parameters["scale_bits"],
        usual=parameters["usual"],
    )
    return {
        "kind": "block" if is_block else "tensor",
        "format": format_figures,
        "tensor": {
            "name": named[0],
            "path": None,
            "shape": named[1],
            "dtype": rounded or summary.dtype,
            "sha256": None,
            "elements": summary.n,
            **{key: getattr(summary, key) for key in _OF_TENSOR},
            "rounded_to": summary.dtype if rounded else None,
            **({"poisoned": summary.n - used} if is_block else {}),
        },
        "levels": swept_levels,
        "failed": f"{bad} in the tensor" if bad else None,
        "versions": {
            "qgate": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "parameters": parameters,
        "advice": advice,
    }


def swept(
    sums: LevelSums | ShareSums,
    levels: Sequence[Level],
    summary: Counts | Values,
    scale_bits: int,
    block: bool,
) -> list[SweptLevel]:
    """Return what was measured at each level."""
    energy, finite = sums.r_square or 1.0, summary.finite
    least, largest, limit = summary.min, summary.max, 2 ** (scale_bits - 1) - 1
    figures = (
        sums.saturated, sums.saturated_noise / energy, sums.underflow, sums.flushed,
        sums.flushed_energy / energy, sums.clamped | sums.broken,
    )  # fmt: skip
    units = [1.0 if block else level.factor for level in levels]
    ends = [(least / unit, largest / unit) for unit in units]
    swept_levels = []
    for (
        level,
        scaled,
        rounded,
        metrics,
        overflow,
        overflow_energy,
        underflow,
        flush,
        flush_energy,
        is_clamped,
    ) in zip(
        levels, ends, _rounded(sums.fmt.element, ends), sums.metrics(),
        *(row.tolist() for row in figures), strict=True,
    ):  # fmt: skip
        shares = {
            "overflow": overflow / finite,
            "underflow": underflow / finite,
            "flush": flush / finite,
        }
        integer, factor = level.integer, level.factor
        swept_levels.append(
            {
                "exponent": level.exponent,
                "integer": integer,
                "factor": factor,
                "e8m0": integer and abs(level.exponent) <= limit and not is_clamped,
                "marks": list(level.marks),
                "metrics": metrics,
                "overflow": int(overflow),
                "overflow_share": shares["overflow"],
                "overflow_energy": overflow_energy,
                "underflow": int(underflow),
                "underflow_share": shares["underflow"],
                "flush": int(flush),
                "flush_share": shares["flush"],
                "flush_energy": flush_energy,
                "severity": {kind: advising.severity(share) for kind, share in shares.items()},
                "significant": max(shares["overflow"], shares["underflow"]) > advising.SIGNIFICANT,
                "scaled_min": scaled[0],
                "scaled_max": scaled[1],
                **({} if block else rounded),
            }
        )
    return swept_levels


def _rounded(fmt: ElementFormat, ends: Sequence[tuple[float, float]]) -> list[dict[str, float]]:
    """Round the ends of scaled tensors to values of the format, which keeps their order."""
    rounded = fmt.nearest(torch.tensor(ends, dtype=torch.float64)).tolist()
    return [{"rounded_min": least, "rounded_max": largest} for least, largest in rounded]


def _add_massive(
    record: SweepRecord, sums: LevelSums, summary: Counts | Values, parts: Parts, in_cells: bool
) -> None:
    """Add the SQNR without massive elements at the recommended level: they can hide errors.

    Only a tensor with massive elements needs another pass; else the figure is the SQNR of all.
    """
    index = record["advice"]["recommended"]
    beyond, massive = massive_beyond(summary), None
    if beyond < math.inf and not math.isnan(record["levels"][index]["metrics"]["sqnr_db"]):
        place = slice(index, index + 1)

        def scale_of(exponent: int | None) -> Floats:
            return sums.scales_at(exponent)[place]

        edges = CellEdges(sums.fmt, scale_of, beyond) if in_cells else None
        massive = without_massive(sums.fmt, parts(edges), scale_of, beyond)
    note_massive(record, beyond, massive)


def note_massive(record: SweepRecord, beyond: float, massive: tuple[float, int] | None) -> None:
    """Note the SQNR without massive elements at the recommended level, and how many there are."""
    levels, advice = record["levels"], record["advice"]
    for level in levels:
        level["sqnr_db_without_massive"] = None
    level = levels[advice["recommended"]]
    whole = level["metrics"]["sqnr_db"]
    reduced, elements = (whole, 0) if massive is None else massive
    advice["massive"] = massive and {"beyond": beyond, "elements": elements}
    level["sqnr_db_without_massive"] = reduced
    if whole - reduced > HIDDEN_DB:
        advice["reasons"].append(
            f"SQNR without the {elements} massive elements beyond {beyond:.3g} is {reduced:.2f} "
            "dB: they hide what the others lose."
        )
