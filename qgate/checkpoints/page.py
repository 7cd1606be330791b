"""The page of a comparison: the diagnosis first, then findings, the map, and all weights.

It is one file that needs no network; everything from the checkpoints is escaped. Scripts only sort
and filter.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from qgate.charts import svg
from qgate.charts.lines import Line, color_lines, line_chart, numbered_axis
from qgate.charts.pages import Cell, Evidence, HeadView, margin_legend, margin_step, number
from qgate.charts.reports import HeatTable, Section, SectionTable, report_page
from qgate.charts.svg import BOTTOM, LEFT, RIGHT, TOP, color, cut_to_width, document, path
from qgate.checkpoints.findings import BETTER_DB, LIMIT_DB, OutlierWeight, find_outliers
from qgate.checkpoints.recipe_texts import fold_numbers, plan_texts, recipe_file_lines
from qgate.checkpoints.record import (
    CheckpointFinding,
    CheckpointRecord,
    ScaleFigures,
    WeightFigures,
    WeightRecord,
    WorstBlock,
    ranked,
    worst_first,
)
from qgate.checkpoints.texts import FORMAT_HEADINGS, distance_text, format_rows, headline, totals
from qgate.text import brief, counted, decibels, percent, shortened

MOST_FINDINGS, MOST_ROWS, MOST_MAPPED, MOST_DRAWN, WORST_DRAWN = 60, 2000, 300, 6, 3
_TABLE = "all-weights"
_HEAD = ("weight", "verdict", "format", "parent by", "method", "over ideal (dB)", "limit (dB)",
         "relative error", "at the ends", "zeros", "scales from", "to", "times ideal")  # fmt: skip
# Together, with the method, no wider than a window of 1400 pixels.
_WIDTHS = {"weight": 16.5, "verdict": 7.1, "format": 8, "parent by": 5, "over ideal (dB)": 5,
           "limit (dB)": 4.5, "relative error": 4.9, "at the ends": 4.5, "zeros": 4.5,
           "scales from": 4.9, "to": 4.9, "times ideal": 4.8}  # fmt: skip
_NARROW = {"weight": 54, "over ideal (dB)": 24, "limit (dB)": 22}
_NARROW_FORMATS = {"format": 34, "tensors": 18, "parameters": 26, "size": 22}
_FIGURES = _HEAD[5:]
_NO_FINDINGS = "Nothing differs from what is declared, and no weight stands out."
_NO_BLOCKS = "There is no parent to draw blocks beside, or no quantized weight."
_MAP = (
    "Each number is the error of a weight over that of an ideal quantizer of its format, in dB; of "
    f"experts the worst one. Colors show it in times the limit of {decibels(LIMIT_DB)}. A cell "
    "links to its weight."
)
_MAP_ALONE = (
    "Without a parent there are no errors: q stands for a quantized weight, = for one that is not."
)
_BLOCKS = (
    "Of the weights with the most error over ideal: the row with the largest error in the block "
    "with the most error."
)
_MOST_NAME, _MOST_WORD = 300, 80
_VERDICTS = {
    "finding": "fail", "stands out": "warn", "as declared": "good", "not quantized": "",
}  # fmt: skip
"""Verdicts of weights, the worst first, with their tones."""
_COUNTED = {"finding": "with a finding", "stands out": "standing out"}

Octaves = tuple[int, tuple[int, ...]]
_WIDTH, _HEIGHT = 440.0, 230.0
_AIR = 0.08

NO_LAYER = "–"
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_KEPT = {"equal": "kept as it is", "cast": "cast", "changed": "changed", "undoes": "changed",
         "unmatched": "no parent"}  # fmt: skip


def page(record: CheckpointRecord, files: Sequence[str]) -> str:
    """Render the page; `files` are beside it."""
    verdict, cause = headline(record)
    outliers = find_outliers(record)
    verdicts = _verdicts(record, outliers)
    return report_page(
        list(_sections(record, outliers, verdicts)),
        verdict=verdict, cause=cause, tone="fail" if record.findings else "good",
        head_view=_head_view(record, Counter(verdicts.values())), files=files, notes=record.notes,
    )  # fmt: skip


def _sections(
    record: CheckpointRecord, outliers: Sequence[OutlierWeight], verdicts: Mapping[str, str]
) -> Iterator[Section]:
    order = list(_VERDICTS)
    weights = sorted(ranked(record.weights), key=lambda weight: order.index(verdicts[weight.name]))
    first = weights[:MOST_ROWS]
    anchors = {weight.name: f"w{at}" for at, weight in enumerate(first)}
    evidence = [*_finding_rows(record, anchors), *_outlier_rows(outliers[:10], anchors)]
    yield Section(
        anchor="findings", title="Findings", total=len(record.findings),
        evidence=evidence[:MOST_FINDINGS], empty=_NO_FINDINGS,
        more=_more(len(evidence) - MOST_FINDINGS, "in findings.csv"),
    )  # fmt: skip
    layers = LayerMap.of(record)
    yield Section(
        anchor="map", title="Layers and tensors", about=_MAP if record.parent else _MAP_ALONE,
        heat=layers.heat_map(anchors, with_legend=record.parent is not None),
        more=_more(len(layers.rows) - MOST_MAPPED, "names of tensors, in weights.csv"),
    )  # fmt: skip
    head = [name for name in _HEAD if name != "method" or any(w.method for w in weights)]
    words = head.index(_FIGURES[0])
    rows = [_row(weight, verdicts[weight.name], words) for weight in first]
    yield Section(
        anchor="weights", title="Weights, worst first", link="Weights", total=len(weights),
        tables=[SectionTable(
            head=head, rows=rows, words=words, label="weights", name=_TABLE,
            anchors=list(anchors.values()), widths=_WIDTHS, narrow=_NARROW,
            filters=list(_filters(rows, head[1:words])),
            more=_more(len(weights) - MOST_ROWS, "in weights.csv"),
        )],
    )  # fmt: skip
    yield Section(
        anchor="blocks", title="The worst blocks", link="Worst blocks", total=len(record.blocks),
        about=_BLOCKS, figures=[block_chart(block) for block in record.blocks], empty=_NO_BLOCKS,
    )  # fmt: skip
    scales = [scale_histogram(title, octaves) for title, octaves in _scales(record)]
    yield Section(
        anchor="scales", title="Where the scales lie", link="Scales", total=len(scales),
        figures=scales, empty="No weight has scales.",
    )  # fmt: skip
    formats = [[Cell(str(cell)) for cell in row] for row in format_rows(record)]
    yield Section(
        anchor="formats", title="What share of the parameters has which format", link="Formats",
        total=len(formats), more=f"{totals(record)}.",
        tables=[SectionTable(
            head=FORMAT_HEADINGS, rows=formats, words=2, label="formats", name="all-formats",
            narrow=_NARROW_FORMATS,
        )],
    )  # fmt: skip
    yield Section(
        anchor="recipe", title="The recipe", link="Recipe", lines=record.recipe,
        folded=f"Declared for {record.method}" if record.method else "Nothing is declared",
        empty="The configuration declares nothing.",
    )  # fmt: skip
    yield Section(
        anchor="stored", title="What is stored", link="Stored",
        folded="Formats by the names of weights, and a file that --recipe takes",
        facts=list(plan_texts(record.weights).items()),
        lines=list(recipe_file_lines(record.written_recipe)), empty="No weight is quantized.",
    )  # fmt: skip


def _more(count: int, where: str) -> str:
    return f"{count:,} more {where}." if count > 0 else ""


def _verdicts(record: CheckpointRecord, outliers: Sequence[OutlierWeight]) -> dict[str, str]:
    """Return the verdict of each weight by its name."""
    words = {True: "as declared", False: "not quantized"}
    verdicts = {weight.name: words[weight.outcome == "quantized"] for weight in record.weights}
    verdicts |= {outlier.weight.name: "stands out" for outlier in outliers}
    subjects = {finding.subject for finding in record.findings}
    return verdicts | {name: "finding" for name in verdicts if name in subjects}


def _head_view(record: CheckpointRecord, counts: Mapping[str, int]) -> HeadView:
    """Return counts that lead to their rows, what was compared, and folded facts."""
    rows = [
        (
            tone,
            counts[verdict],
            _COUNTED.get(verdict, verdict),
            f"#show&{urlencode({'table': _TABLE, 'verdict': verdict})}",
        )
        for verdict, tone in _VERDICTS.items()
        if counts.get(verdict)
    ]
    quantized = sum(weight.outcome == "quantized" for weight in record.weights)
    measured = f"{len(worst_first(record.weights)):,} of {counted(quantized, 'quantized weight')}"
    compared = "scales, codes and formats, without a parent"
    if record.parent:
        compared = f"{measured} with an ideal quantizer of the parent's values"
    return HeadView(
        "failed" if record.findings else "passed",
        rows,
        [(len(record.weights), "tensors")],
        shortened(f"{record.child} beside {record.parent or 'no parent'}", _MOST_NAME),
        [("compared", compared)],
        [
            ("checkpoint", record.child),
            ("parent", record.parent or "none"),
            ("declared for", record.method or "nothing"),
            ("size", totals(record)),
        ],
    )


def _finding_rows(record: CheckpointRecord, anchors: Mapping[str, str]) -> Iterator[Evidence]:
    """Yield one row for each tensor or pattern with findings, the worst first."""
    by_subject: dict[str, list[CheckpointFinding]] = {}
    for finding in record.findings:
        by_subject.setdefault(finding.subject, []).append(finding)
    for subject, (first, *others) in by_subject.items():
        yield Evidence(
            "fail",
            "finding",
            first.cause,
            shortened(subject, _MOST_NAME),
            anchors.get(subject, ""),
            "; ".join(other.cause for other in others),
            *_over_limit(first.over_ideal_db),
        )


def _outlier_rows(
    outliers: Sequence[OutlierWeight], anchors: Mapping[str, str]
) -> Iterator[Evidence]:
    for outlier in outliers:
        name = outlier.weight.name
        subject, link = shortened(name, _MOST_NAME), anchors.get(name, "")
        above, limit = outlier.error_db - outlier.usual_db, outlier.limit_db
        yield Evidence(
            "warn",
            "stands out",
            distance_text(outlier),
            subject,
            link,
            value=decibels(above),
            limit=f"≤ {decibels(limit)}",
            times=above / limit,
        )


def _over_limit(over: float | None) -> tuple[str, str, float | None]:
    """Return value and limit of an error over ideal that is beyond one, and times the limit."""
    if over is None or not math.isfinite(over) or BETTER_DB <= over <= LIMIT_DB:
        return "–", "–", None
    limit, sign = (LIMIT_DB, "≤") if over > LIMIT_DB else (BETTER_DB, "≥")
    return decibels(over), f"{sign} {decibels(limit)}", over / limit


def _filters(
    rows: Sequence[Sequence[Cell]], head: Sequence[str]
) -> Iterator[tuple[str, int, list[str]]]:
    """Yield a choice for each column of words that has several, the first one by verdict."""
    order = list(_VERDICTS)
    for at, name in enumerate(head, 1):
        values = {str(row[at].text) for row in rows if row[at].text}
        if name == "verdict":
            yield name, at, sorted(values, key=order.index)
        elif len(values) > 1:
            yield name, at, sorted(values)


def _scales(record: CheckpointRecord) -> Iterator[tuple[str, Octaves]]:
    """Yield histograms of all scales of each format, then of single weights: those found first."""
    by_format: dict[str, list[Octaves]] = {}
    single: dict[str, ScaleFigures] = {}
    for weight in ranked(record.weights):
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


def _row(weight: WeightRecord, verdict: str, count: int) -> list[Cell]:
    """Return a row with so many words."""
    figures = weight.figures
    cells = [number(math.nan)] * len(_FIGURES) if figures is None else _cells(weight, figures)
    further = (weight.format, weight.matched or weight.outcome, weight.method)[: count - 2]
    words = [Cell(shortened(word, _MOST_WORD)) for word in further]
    return [Cell(weight.name), Cell(verdict, tone=_VERDICTS[verdict]), *words, *cells]


def _cells(weight: WeightRecord, figures: WeightFigures) -> list[Cell]:
    scales, over = figures.scales, _figure(figures.over_ideal_db)
    ratio = _figure(scales.log2_ratio)
    # An error that a method makes has no limit.
    limited = math.isfinite(over) and not weight.method
    step = f"h{margin_step(max(over, 0.0) / LIMIT_DB)}" if limited else ""
    return [
        number(over, f"{over:.2f}", step=step),
        number(LIMIT_DB, f"≤ {LIMIT_DB:g}") if limited else number(math.nan),
        number(_figure(figures.error)),
        number(figures.at_ends_share, percent(figures.at_ends_share)),
        number(figures.zero_share, percent(figures.zero_share)),
        number(_figure(scales.smallest)),
        number(_figure(scales.largest)),
        number(ratio, brief(2.0**ratio)),
    ]


def _figure(value: float | None) -> float:
    return math.nan if value is None else value


def add_octaves(several: Sequence[Octaves]) -> Octaves:
    """Add up counts of scales by octave."""
    low = min(start for start, _ in several)
    high = max(start + len(counts) for start, counts in several)
    total = [0] * (high - low)
    for start, counts in several:
        for at, count in enumerate(counts, start - low):
            total[at] += count
    return low, tuple(total)


def scale_histogram(title: str, octaves: Octaves) -> str:
    """Draw how many scales are in each octave, on a logarithmic axis of counts."""
    low, counts = octaves
    edges, (merged,) = svg.merge_octaves(low, [counts], range(len(counts)))
    x = svg.octaves(edges[0] - 0.5, edges[-1] + 0.5, LEFT, RIGHT, "scale")
    unit = "scales" if edges.step == 1 else f"scales in {edges.step} octaves"
    y = svg.log_count_axis(max(merged), BOTTOM, TOP + 16, unit)
    bars = svg.octave_bars(edges, merged, x, y, 0.5 if len(merged) < 60 else 0.0)
    sheets = path(bars, fill=color("blue"), data_bars="counts")
    text = f"{counted(sum(counts), 'scale')} from 2^{low} to 2^{low + len(counts)}."
    return svg.panel(x, y, sheets, "", title, text)


def block_chart(block: WorstBlock) -> str:
    """Draw what a block stores over its parent's values, column by column."""
    lines = color_lines([Line("stored", block.values), Line("parent", block.parent)])
    values = lines.values or [0.0]
    low, high = min(values), max(values)
    air = _AIR * (high - low) or 1.0
    x = numbered_axis(lines.colored, len(block.values), _WIDTH, "column", block.column)
    y = svg.linear(low - air, high + air, BOTTOM, TOP, "", 5)
    scale = "not finite" if block.scale is None else brief(block.scale)
    error = "not finite" if not block.error else decibels(10 * math.log10(block.error))
    title = f"{cut_to_width(block.name, 300, 13)}, row {block.row}"
    text = f"Scale {scale}; error of the block over its energy {error}."
    body = line_chart(lines, x, y, [("", text)], width=_WIDTH)
    return document(_WIDTH, _HEIGHT, title, text, body)


@dataclass
class MapCell:
    """One place of the map: its weights, of experts all, and what was found of them."""

    weights: list[WeightRecord] = field(default_factory=list)
    findings: list[CheckpointFinding] = field(default_factory=list)

    @property
    def worst(self) -> tuple[WeightRecord, float] | None:
        """Return the weight with the most error over ideal."""
        return next(iter(worst_first(self.weights)), None)

    def view(self, anchors: Mapping[str, str]) -> dict[str, str]:
        """Return text, color, words and link of the cell."""
        step, text, words = "", "=", self._kept()
        if self.worst is not None:
            weight, over = self.worst
            # An error that a method makes has no limit.
            step = f"h{margin_step(0.0 if weight.method else max(over, 0.0) / LIMIT_DB)}"
            text = f"{over:.1f}".replace("-0.0", "0.0").replace("-", "−")
            words = f"{weight.name}: {decibels(over, 2)} over ideal, {weight.format}"
            words += f", {weight.method}" if weight.method else ""
        elif any(weight.outcome == "quantized" for weight in self.weights):
            reason = self.weights[0].method or "no parent to compare with"
            text, words = "q", f"{self.weights[0].format}, {reason}"
        elif not self.weights:
            text = ""
        if self.findings:
            words = "; ".join(f"{cell.subject}: {cell.cause}" for cell in self.findings[:3])
        first = self.findings[0].subject if self.findings else ""
        name = first if first in anchors else self.worst[0].name if self.worst else ""
        return {
            "kinds": f"{step}{' bad' * bool(self.findings)}".strip(),
            "link": f"#{anchors.get(name, 'weights')}",
            "title": words,
            "text": text,
            "heard": "finding" * bool(self.findings),
        }

    def _kept(self) -> str:
        outcomes = dict.fromkeys(_KEPT.get(weight.outcome, "") for weight in self.weights)
        formats = dict.fromkeys(weight.format for weight in self.weights)
        return f"{', '.join(formats)}: {', '.join(filter(None, outcomes))}"


@dataclass
class LayerMap:
    """Rows by the name of a tensor without its layer, columns by the number of a layer."""

    columns: list[str]
    rows: list[tuple[str, list[MapCell | None]]]

    @classmethod
    def of(cls, record: CheckpointRecord) -> LayerMap:
        """Sort weights and findings of tensors into rows and columns."""
        cells: dict[str, dict[str, MapCell]] = {}
        subjects = {weight.name for weight in record.weights} | set(record.unmatched_parents)
        for weight in record.weights:
            _cell(cells, weight.name).weights.append(weight)
        for finding in record.findings:
            if finding.subject in subjects:
                _cell(cells, finding.subject).findings.append(finding)
        columns = {column for row in cells.values() for column in row}
        numbers = sorted(columns - {NO_LAYER}, key=int)
        ordered = [*numbers, *([NO_LAYER] if NO_LAYER in columns else [])]
        names = sorted(cells, key=lambda name: (NO_LAYER in cells[name], name))
        start = _common_start([name for name in names if NO_LAYER not in cells[name]])
        return cls(
            ordered,
            [
                (
                    name.removeprefix(start).removesuffix(".weight"),
                    [cells[name].get(column) for column in ordered],
                )
                for name in names
            ],
        )

    def heat_map(self, anchors: Mapping[str, str], *, with_legend: bool = True) -> HeatTable:
        """Return the cells, with links to rows by `anchors`."""
        rows = [
            (name, "", [None if cell is None else cell.view(anchors) for cell in cells])
            for name, cells in self.rows[:MOST_MAPPED]
        ]
        heads = [
            ("in no layer" if column == NO_LAYER else column, column) for column in self.columns
        ]
        signs = [("bad", "✕", "a finding"), ("", "=", "not quantized")]
        return HeatTable(
            "layers and tensors",
            "error over ideal by tensor and layer",
            heads,
            rows,
            (margin_legend(), signs) if with_legend else ((), ()),
        )


def _cell(cells: dict[str, dict[str, MapCell]], name: str) -> MapCell:
    match = _LAYER.search(name)
    column = match[1] if match else NO_LAYER
    return cells.setdefault(fold_numbers(name), {}).setdefault(column, MapCell())


def _common_start(names: Sequence[str]) -> str:
    """Return what all names begin with, up to the layer."""
    starts = {name.partition(".*.")[0] for name in names}
    return f"{starts.pop()}.*." if len(starts) == 1 else ""
