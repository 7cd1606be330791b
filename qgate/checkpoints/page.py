"""The page of a comparison: the diagnosis first, then the map, scales, blocks and all weights.

It is one file that needs no network; everything from the checkpoints is escaped. Scripts only sort.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qgate.charts.heat import margin_legend
from qgate.charts.pages import Cell, number, render
from qgate.charts.svg import LIGHT, STYLE
from qgate.checkpoints.findings import LIMIT_DB
from qgate.checkpoints.layer_map import LayerMap
from qgate.checkpoints.outliers import find_outliers
from qgate.checkpoints.plots import Octaves, add_octaves, block_chart, scale_histogram
from qgate.checkpoints.recipe_texts import plan_texts, recipe_file_lines
from qgate.checkpoints.record import CheckpointRecord, ScaleFigures, WeightFigures, WeightRecord
from qgate.checkpoints.tables import ranked
from qgate.checkpoints.texts import FORMAT_HEADINGS, first_line, format_rows, outlier_text, totals
from qgate.text import brief, counted, decibels, percent, shortened

MOST_FINDINGS, MOST_ROWS, MOST_MAPPED, MOST_DRAWN, WORST_DRAWN = 60, 2000, 300, 6, 3
_HEAD = ("weight", "format", "parent by", "method", "over ideal (dB)", "relative error",
         "at the ends", "zeros", "scales from", "to", "times ideal")  # fmt: skip


class WeightRow(NamedTuple):
    """A row of the table of weights: its anchor, its words, and its cells."""

    anchor: str
    name: str
    words: tuple[str, str, str]
    cells: list[Cell]


def page(record: CheckpointRecord, files: Sequence[str]) -> str:
    """Render the page; `files` are beside it."""
    weights = ranked(record)
    rows = [_row(f"w{at}", weight) for at, weight in enumerate(weights[:MOST_ROWS])]
    layers = LayerMap.of(record)
    scales = [scale_histogram(title, octaves) for title, octaves in _scales(record)]
    blocks = [block_chart(block) for block in record.blocks]
    links = [
        ("formats", "Formats", len(format_rows(record))),
        ("map", "Layers and tensors", 0),
        ("scales", "Scales", len(scales)),
        ("blocks", "Worst blocks", len(blocks)),
        ("weights", "Weights", len(weights)),
        ("recipe", "Recipe", 0),
        ("files", "Files", len(files)),
    ]
    first = first_line(record)
    return render(
        "checkpoints/page",
        title=shortened(first, 120),
        plot_style=f"{STYLE}@media print{{.plot{{{LIGHT}}}}}",
        first=first,
        tone="fail" if record.findings else "good",
        about=_about(record),
        findings=_findings(record),
        more_findings=len(record.findings) - MOST_FINDINGS,
        links=links,
        limit=decibels(LIMIT_DB),
        formats=[[Cell(str(cell)) for cell in row] for row in format_rows(record)],
        format_head=FORMAT_HEADINGS,
        totals=totals(record),
        legend=margin_legend(),
        columns=layers.columns,
        map_rows=list(layers.view({row.name: row.anchor for row in rows}))[:MOST_MAPPED],
        more_mapped=len(layers.rows) - MOST_MAPPED,
        has_parent=record.parent is not None,
        scales=scales,
        blocks=blocks,
        head=_HEAD,
        rows=rows,
        more_rows=len(weights) - MOST_ROWS,
        method=record.method,
        recipe=record.recipe,
        written=recipe_file_lines(record.written_recipe),
        plan=list(plan_texts(record.weights).items()),
        files=files,
        notes=record.notes,
    )


def _about(record: CheckpointRecord) -> str:
    beside = f" beside {record.parent}" if record.parent else ", without a parent"
    return f"{record.child}{beside}: {totals(record)}."


def _findings(record: CheckpointRecord) -> list[tuple[str, str]]:
    rows = [("fail", f"{item.subject}: {item.cause}") for item in record.findings[:MOST_FINDINGS]]
    rows += [("warn", outlier_text(item)) for item in find_outliers(record)[:10]]
    return rows or [("info", "Nothing differs from what is declared, and no weight stands out.")]


def _scales(record: CheckpointRecord) -> Iterator[tuple[str, Octaves]]:
    """Yield histograms of all scales of each format, then of single weights: those found first."""
    by_format: dict[str, list[Octaves]] = {}
    single: dict[str, ScaleFigures] = {}
    for weight in ranked(record):
        if weight.figures is not None and weight.figures.scales.octaves is not None:
            by_format.setdefault(weight.format, []).append(weight.figures.scales.octaves)
            single[weight.name] = weight.figures.scales
    for form, octaves in by_format.items():
        yield f"{form}: {counted(len(octaves), 'weight')}", add_octaves(octaves)
    subjects = dict.fromkeys(finding.subject for finding in record.findings)
    chosen = [name for name in subjects if name in single]
    worst = [name for name in single if name not in subjects]
    for name in [*chosen[:MOST_DRAWN], *worst[:WORST_DRAWN]]:
        scales = single[name]
        bad = [f"{count:,} {words}" for count, words in _bad_counts(scales) if count]
        yield ": ".join(filter(None, [name, ", ".join(bad)])), scales.octaves or (0, (0,))


def _bad_counts(scales: ScaleFigures) -> Sequence[tuple[int, str]]:
    """Return how many scales are in no octave, and why."""
    return (scales.not_finite, "not finite"), (scales.zero, "zero"), (scales.negative, "negative")


def _row(anchor: str, weight: WeightRecord) -> WeightRow:
    figures = weight.figures
    cells = [number(math.nan)] * (len(_HEAD) - 4) if figures is None else _cells(weight, figures)
    words = weight.format, weight.matched or weight.outcome, weight.method
    return WeightRow(anchor, weight.name, words, cells)


def _cells(weight: WeightRecord, figures: WeightFigures) -> list[Cell]:
    scales, over = figures.scales, _figure(figures.over_ideal_db)
    ratio = _figure(scales.log2_ratio)
    return [
        number(over, f"{over:.2f}", bad=over > LIMIT_DB and not weight.method),
        number(_figure(figures.error)),
        number(figures.at_ends_share, percent(figures.at_ends_share)),
        number(figures.zero_share, percent(figures.zero_share)),
        number(_figure(scales.smallest)),
        number(_figure(scales.largest)),
        number(ratio, brief(2.0**ratio)),
    ]


def _figure(value: float | None) -> float:
    return math.nan if value is None else value
