"""The tables of a sweep: one line per level for the screen, all figures for the results file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from qgate.metrics import METRICS, Metric
from qgate.sweeps._text_parts import DASHES
from qgate.sweeps.record import (
    Level,
    Record,
    exponent_text,
    factor_text,
    metric,
    number,
    offset_text,
    share_text,
    usual_kind,
)

_COLUMNS = 6
_MARKS = (
    ("production", "prod"),
    ("amax", "amax"),
    ("cast", "cast"),
    ("maximum", "max"),
    ("minimum", "min"),
)
_USUAL = {
    "production": "prod: the exponent of MX's floor rule.",
    "amax": "amax: the scale amax / max.",
    "cast": "cast: the plain cast, scale 2^0.",
}


def level_rows(record: Record) -> list[str]:
    """One line per level; the marks at its end are explained in the heading."""
    levels = record["levels"]
    block = record["kind"] == "block"
    factors = [factor_text(level) for level in levels]
    if block:
        factors = [
            f"{offset_text(level['exponent']):>3} = {factor}"
            for level, factor in zip(levels, factors, strict=True)
        ]
    what = "offset = factor" if block else "factor"
    wide = max([len(what), *map(len, factors)])
    steps = 2 * len(str(len(levels))) + 1
    body = [
        "OFFSETS:" if block else "SCALING LEVELS:",
        "  SQNR and PSNR in dB; overflow, flushed: shares of the elements; energy: share of the",
        "  tensor's energy (sum of squares) that saturation loses.",
        "  rec: recommended. prod: the offset in use, 0."
        if block
        else f"  rec: recommended. {_USUAL[usual_kind(record)]} max, min: ends of the alignment.",
    ]
    if not all(level["e8m0"] for level in levels):
        body.append("  not E8M0: not an E8M0 scale; the curve between the exponents one can use.")
    head = f"{'':{steps}}  {what:{wide}}   SQNR      MSE   cosine   PSNR overflow energy flushed"
    body += [DASHES, head]
    for index, level in enumerate(levels):
        marks = ["rec"] if index == record["advice"].get("recommended") else []
        marks += [brief for mark, brief in _MARKS if mark in level["marks"]]
        marks += [] if level["e8m0"] else ["not E8M0"]
        step = f"{index + 1}/{len(levels)}"
        row = (
            f"{step:>{steps}}  {factors[index]:{wide}} {_cell(metric(level, 'sqnr_db'), '.2f'):>6}"
            f" {_cell(metric(level, 'mse'), '.2e'):>8} {_cell(metric(level, 'cosine'), '.6f'):>8}"
            f" {_cell(metric(level, 'psnr_db'), '.2f'):>6} {_percent(level['overflow_share']):>8}"
            f" {_percent(level['overflow_energy']):>6} {_percent(level['flush_share']):>7}"
        )
        body.append(f"{row} {' '.join(marks)}".rstrip())
    return body


def _cell(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else str(value)


def _percent(share: object) -> str:
    percent = number(share) * 100
    if percent < 0.01:
        return "<0.01%" if percent > 0 else "0%"
    return f"{percent:.2f}%" if percent < 9.995 else f"{percent:.1f}%"


def _metric_cells(metrics: Sequence[Metric]) -> dict[str, Callable[[Level], str]]:
    """The columns of metrics; a sweep has each of them at every level."""

    def column(each: Metric) -> Callable[[Level], str]:
        return lambda level: each.cell(metric(level, each.name))

    return {each.head: column(each) for each in metrics}


def _error_tables() -> list[tuple[str, dict[str, Callable[[Level], str]]]]:
    """The errors in units of the data and what has none, in tables that fit a screen."""
    tables: list[tuple[str, dict[str, Callable[[Level], str]]]] = []
    scaled = [each for each in METRICS.of("errors") if each.degree]
    ratios = [each for each in METRICS.of("errors") if not each.degree]
    for caption, metrics in (("ERRORS:", scaled), ("RATIOS AND SCORE:", ratios)):
        for start in range(0, len(metrics), _COLUMNS):
            tables.append((caption, _metric_cells(metrics[start : start + _COLUMNS])))
    tables[-1][1]["score"] = lambda level: _cell(number(level["score"]), ".4f").replace("nan", "-")
    return tables


def _loss_cells(kind: str, *, energy: bool) -> dict[str, Callable[[Level], str]]:
    cells: dict[str, Callable[[Level], str]] = {
        kind: lambda level: str(level[kind]),
        "share": lambda level: share_text(level[f"{kind}_share"]),
        "severity": lambda level: str(level["severity"][kind]),
    }
    if energy:
        cells["energy lost"] = lambda level: share_text(level[f"{kind}_energy"])
    return cells


_LOSSES = {
    "OVERFLOW, AND THE SHARE OF THE ENERGY THAT SATURATION LOSES:": ("overflow", True),
    "UNDERFLOW (below the smallest normal value):": ("underflow", False),
    "FLUSH TO ZERO, AND THE SHARE OF THE ENERGY IT LOSES:": ("flush", True),
}


def metric_tables(record: Record) -> list[str]:
    """All figures of all levels, in tables that fit a screen."""
    from tabulate import tabulate

    block = record["kind"] == "block"
    body: list[str] = []
    for caption, columns in (
        *_error_tables(),
        *((words, _loss_cells(kind, energy=lost)) for words, (kind, lost) in _LOSSES.items()),
    ):
        rows = [
            [
                (offset_text if block else exponent_text)(level["exponent"]),
                *(cell(level) for cell in columns.values()),
            ]
            for level in record["levels"]
        ]
        heads = ["offset" if block else "exponent", *columns]
        align = ["right"] * len(heads)
        text = tabulate(rows, heads, disable_numparse=True, colalign=align if rows else None)
        body += [caption, "", *text.splitlines(), ""]
    return body
