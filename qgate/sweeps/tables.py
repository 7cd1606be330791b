"""Write the tables of a sweep: a line per level for the screen, all figures for the file."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable

from qgate.metrics import METRICS, Metric
from qgate.sweeps.record import SweepView, SweptLevel, factor_text, metric, number, share_text

THICK, THIN, DASHES = "=" * 80, "-" * 80, "-" * 40
_WIDTH, _COLUMNS = 94, 6
_MARKS = {
    "production": "prod", "amax": "amax", "cast": "cast", "own": "own",
    "maximum": "max", "minimum": "min",
}  # fmt: skip
_USUAL = {
    "production": "prod: the exponent of MX's floor rule.",
    "amax": "amax: the scale amax / max.",
    "cast": "cast: the plain cast, scale 2^0.",
}
Columns = dict[str, Callable[[SweptLevel], str]]


def title(text: str) -> list[str]:
    return [THICK, text, THICK]


def heading(text: str) -> list[str]:
    return [text, DASHES]


def item(text: str, indent: int = 0, hang: int = 2) -> list[str]:
    """Wrap one statement; lines after the first are indented further."""
    first = " " * indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def level_rows(view: SweepView) -> list[str]:
    """Write one line per level; the heading explains the marks at its end."""
    levels = view.levels
    factors = [factor_text(level) for level in levels]
    if view.is_block:
        factors = [f"{view.at(level):>3} = {factor_text(level)}" for level in levels]
    column = "offset = factor" if view.is_block else "factor"
    wide = max([len(column), *map(len, factors)])
    steps = 2 * len(str(len(levels))) + 1
    body = [
        "OFFSETS:" if view.is_block else "SCALING LEVELS:",
        "  SQNR and PSNR in dB; overflow, flushed: shares of the elements; energy: share of the",
        "  tensor's energy (sum of squares) that saturation loses.",
        f"  rec: recommended. {_MARKS[view.usual_kind]}: the offset in use, 0."
        if view.is_block
        else f"  rec: recommended. {_USUAL[view.usual_kind]} max, min: ends of the alignment.",
    ]
    if not all(level["e8m0"] for level in levels):
        body.append("  not E8M0: not an E8M0 scale; the curve between the exponents one can use.")
    head = f"{'':{steps}}  {column:{wide}}   SQNR      MSE   cosine   PSNR overflow energy flushed"
    body += [DASHES, head]
    for index, level in enumerate(levels):
        marks = ["rec"] if level is view.best else []
        marks += [brief for mark, brief in _MARKS.items() if mark in level["marks"]]
        marks += [] if level["e8m0"] else ["not E8M0"]
        row = (
            f"{f'{index + 1}/{len(levels)}':>{steps}}  {factors[index]:{wide}}"
            f" {_cell(metric(level, 'sqnr_db'), '.2f'):>6}"
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


def _metric_column(definition: Metric) -> Callable[[SweptLevel], str]:
    return lambda level: definition.cell(metric(level, definition.name))


def _loss_columns(kind: str) -> Columns:
    columns: Columns = {
        kind: lambda level: str(level[kind]),
        "share": lambda level: share_text(level[f"{kind}_share"]),
        "severity": lambda level: str(level["severity"][kind]),
    }
    if kind != "underflow":
        columns["energy lost"] = lambda level: share_text(level[f"{kind}_energy"])
    return columns


def _tables() -> list[tuple[str, Columns]]:
    """Return captions and columns of the tables of all figures, no wider than a screen."""
    tables: list[tuple[str, Columns]] = []
    errors = METRICS.of("errors")
    for caption, metrics in (
        ("ERRORS:", [error for error in errors if error.degree]),
        ("RATIOS AND SCORE:", [error for error in errors if not error.degree]),
    ):
        for start in range(0, len(metrics), _COLUMNS):
            columns = metrics[start : start + _COLUMNS]
            tables.append((caption, {error.head: _metric_column(error) for error in columns}))
    tables[-1][1]["score"] = lambda level: _cell(number(level["score"]), ".4f").replace("nan", "-")
    return [
        *tables,
        (
            "OVERFLOW, AND THE SHARE OF THE ENERGY THAT SATURATION LOSES:",
            _loss_columns("overflow"),
        ),
        ("UNDERFLOW (below the smallest normal value):", _loss_columns("underflow")),
        ("FLUSH TO ZERO, AND THE SHARE OF THE ENERGY IT LOSES:", _loss_columns("flush")),
    ]


def metric_tables(view: SweepView) -> list[str]:
    """Write all figures of all levels."""
    from tabulate import tabulate

    body: list[str] = []
    for caption, columns in _tables():
        rows = [
            [view.at(level), *(cell(level) for cell in columns.values())] for level in view.levels
        ]
        heads = [view.word, *columns]
        align = ["right"] * len(heads)
        text = tabulate(rows, heads, disable_numparse=True, colalign=align)
        body += [caption, "", *text.splitlines(), ""]
    return body
