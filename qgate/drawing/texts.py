"""An analysis in words and numbers: `tensor_stats.txt`, and the terminal's lines of a drawing."""

from __future__ import annotations

import math
import textwrap
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from qgate.drawing.findings import (
    FORMATS_ABOUT,
    DumpFindings,
    findings_of,
    rank_findings,
    summary_line,
    worst_tensors,
)
from qgate.drawing.losses import FormatSummary
from qgate.drawing.page import SECTIONS
from qgate.summaries.reading import (
    figure_of,
    figures_of,
    format_label,
    nonfinite,
    quant_type_of,
    row_titles,
)
from qgate.summaries.record import DumpAnalysis, RankRow, TensorSummary
from qgate.text import brief, counted, decibels, for_terminal, one_line, percent, shortened

if TYPE_CHECKING:
    from qgate.storage.locations import Location

_WIDTH, _MOST_ROWS, _WORST = 100, 40, 20
_FIELDS: dict[str, Callable[[TensorSummary], str]] = {
    "quant type": quant_type_of,
    "layer type": lambda tensor: str(tensor["layer_type"]),
    "operation": lambda tensor: str(tensor["operation"]),
    "name": lambda tensor: str(tensor["name"]),
    "rank": lambda tensor: f"rank {tensor['rank']}",
}


def tensor_stats(analysis: DumpAnalysis, findings: DumpFindings | None = None) -> str:
    """Write an analysis on lines of at most 100 characters, findings first."""
    findings = findings or findings_of(analysis)
    folder = analysis["dump"].get("folder")
    title = f"Statistics{f' of {shortened(folder, 70)}' if folder else ''}"
    sentences = [
        line
        for finding in findings.findings
        for line in _lines_of(finding.text, f"{finding.mark}  ")
    ]
    notes = [line for note in analysis["notes"] for line in _lines_of(note)]
    parts = [
        f"{title}\n{'=' * len(title)}\n{summary_line(analysis)}",
        _section("Findings", sentences),
        _section("Totals", _totals(analysis)),
        _section("Worst tensors", _worst(analysis)),
        *_distributions(analysis),
        _section("Values that are not finite", _nonfinite(analysis)),
        _section("Losses in each format (SQNR)", _formats(findings.formats)),
        _section("Loss scales", _loss_scales(analysis)),
        _section("Ranks", _ranks(analysis)),
        _section("Notes", notes),
    ]
    return for_terminal("\n\n".join(part for part in parts if part)) + "\n"


def finding_lines(findings: DumpFindings) -> list[str]:
    """Write each finding on one line, the broken ones first."""
    return [finding.line() for finding in findings.findings]


def skipped_lines(
    analysis: DumpAnalysis, written: Sequence[Location], *, plots: bool
) -> Iterator[str]:
    """Say what a drawing leaves out: tensors in the notes of the analysis, formats without figures
    (blocks need values, shares need counts), and topics without pictures."""
    for note in analysis["notes"]:
        if "left out" in note or "were looked at" in note or "a share of the elements" in note:
            yield f"tensors   {one_line(note)}"
    tensors = dict.fromkeys(analysis["formats"], 0)
    total = without = 0
    for tensor in analysis["tensors"]:
        total += 1
        without += tensor["source"] != "values"
        for name in tensor.get("formats") or {}:
            tensors[name] = tensors.get(name, 0) + 1
    why = f": {counted(without, 'tensor')} kept without values" if without else ""
    for name, count in tensors.items():
        if count < total:
            of = f"{total - count} of {counted(total, 'tensor')}"
            yield f"formats   {format_label(analysis, name)} in {of}{why}"
    if not plots:
        yield "pictures  all: --no-plots"
        return
    topics = {path.parent.name for path in written if path.suffix == ".png"}
    for topic, (_, why) in SECTIONS.items():
        if topic not in topics:
            yield f"pictures  {topic}: {why}"


# Lines -------------------------------------------------------------------------------------------


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, "-" * len(title), *lines]) if lines else ""


def _lines_of(text: str, first: str = "- ") -> list[str]:
    """Break a sentence into as many lines as it needs."""
    indent = " " * len(first)
    lines = textwrap.wrap(one_line(text), _WIDTH, initial_indent=first, subsequent_indent=indent)
    return lines or [first]


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], sides: str, most: int | None = None
) -> list[str]:
    """Align a table by column, with at most so many rows; no table without rows."""
    if not rows:
        return []
    table = [head, *rows[:most]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in table
    ]
    return [*lines, *([f"and {len(rows) - most} more"] if most and len(rows) > most else [])]


def _brief_or_dash(value: float) -> str:
    return brief(value) if math.isfinite(value) else "-"


# Tensors -----------------------------------------------------------------------------------------


@dataclass
class _Sizes:
    """Numbers of tensors of one group, with the moments of each, to be pooled."""

    tensors: int = 0
    elements: int = 0
    amax: float = -math.inf
    moments: array[float] = field(default_factory=lambda: array("d"))

    def add(self, tensor: TensorSummary) -> None:
        self.tensors += 1
        self.elements += int(tensor.get("elements") or 0)
        amax = figure_of(tensor, "amax")
        self.amax = max(self.amax, amax) if math.isfinite(amax) else self.amax
        weight = figure_of(tensor, "counted") - nonfinite(tensor)
        moments = figure_of(tensor, "mean"), figure_of(tensor, "std"), weight
        if all(map(math.isfinite, moments)) and weight > 0:
            self.moments.extend(moments)

    def pooled(self) -> tuple[float, float]:
        """Return mean and standard deviation of the finite values of all tensors together."""
        if not self.moments:
            return math.nan, math.nan
        means, stds, weights = np.array(self.moments).reshape(-1, 3).T
        weights = weights / weights.sum()
        unit = max(float(np.abs(means).max()), float(stds.max())) or 1.0
        mean = float((means * weights).sum())
        spread = ((stds / unit) ** 2 + ((means - mean) / unit) ** 2) @ weights
        return mean, unit * math.sqrt(float(spread))


def _totals(analysis: DumpAnalysis) -> list[str]:
    tensors = analysis["tensors"]
    if not tensors:
        return []
    whole = _Sizes()
    for tensor in tensors:
        whole.add(tensor)
    size = figure_of(analysis["dump"], "bytes")
    low, high = figures_of(tensors, "min"), figures_of(tensors, "max")
    ends = (
        f"{brief(float(low.min()))} to {brief(float(high.max()))}" if low.size * high.size else ""
    )
    mean, std = whole.pooled()
    zeros = float(figures_of(tensors, "zeros").sum())
    of = sum(figure_of(tensor, "counted") for tensor in tensors if "zeros" in tensor)
    rows = {
        "tensors": f"{whole.tensors:,}",
        "values": f"{whole.elements:,}",
        "bytes": f"{size:,.0f}" if math.isfinite(size) else "",
        "range": ends,
        "mean": brief(mean) if math.isfinite(mean) else "",
        "standard deviation": brief(std) if math.isfinite(std) else "",
        "zeros": f"{zeros:,.0f} ({percent(zeros / of)})" if of else "",
    }
    return [f"{name:<20}{text}" for name, text in rows.items() if text]


def _worst(analysis: DumpAnalysis) -> list[str]:
    """Write the title of each tensor, and below it the worst thing about it."""
    worst = worst_tensors(analysis, _WORST)
    titles = row_titles([bad.tensor for bad in worst], _WIDTH)
    pairs = zip(worst, titles, strict=True)
    return [line for bad, title in pairs for line in (title, f"  {shortened(bad.reason, 98)}")]


def _distributions(analysis: DumpAnalysis) -> list[str]:
    """Make a table by each field, in one pass over the tensors."""
    parts: dict[str, dict[str, _Sizes]] = {title: {} for title in _FIELDS}
    for tensor in analysis["tensors"]:
        for title, value in _FIELDS.items():
            parts[title].setdefault(value(tensor), _Sizes()).add(tensor)
    total = sum(mine.elements for mine in parts["rank"].values()) or 1
    return [
        _section(
            f"By {title}",
            _table(
                [title, "tensors", "values", "share", "amax", "std"],
                [
                    [
                        shortened(name, 34),
                        f"{mine.tensors:,}",
                        f"{mine.elements:,}",
                        percent(mine.elements / total),
                        _brief_or_dash(mine.amax),
                        _brief_or_dash(mine.pooled()[1]),
                    ]
                    for name, mine in sorted(sizes.items(), key=lambda item: -item[1].elements)
                ],
                "<>>>>>",
                _MOST_ROWS,
            ),
        )
        for title, sizes in parts.items()
    ]


def _nonfinite(analysis: DumpAnalysis) -> list[str]:
    broken = sorted((t for t in analysis["tensors"] if nonfinite(t)), key=lambda t: -nonfinite(t))
    rows = [
        [title, *(f"{int(figure_of(tensor, name)):,}" for name in ("nan", "posinf", "neginf"))]
        for tensor, title in zip(broken, row_titles(broken[:_WORST], 72), strict=False)
    ]
    lines = _table(["tensor", "NaN", "+Inf", "-Inf"], rows, "<>>>")
    if len(broken) > _WORST:
        lines.append(f"and {counted(len(broken) - _WORST, 'tensor')} more")
    return lines


# Formats and ranks -------------------------------------------------------------------------------


def _formats(formats: Sequence[FormatSummary]) -> list[str]:
    rows = [
        [
            shortened(row.label, 18),
            *map(decibels, (*row.worst_db, *row.median_db)),
            *map(percent, (row.flushed, row.saturated)),
            row.saturation_text,
        ]
        for row in formats
    ]
    head = [
        "format", "worst", "its rest", "median", "its rest", "flushed", "saturated", "of the error",
    ]  # fmt: skip
    lines = _table(head, rows, "<>>>>>><")
    for number, title in enumerate(row_titles([row.worst for row in formats], 86), 1):
        lines[number] += f"\n  worst: {title}"
    about = f"Worst and median: {FORMATS_ABOUT} Its rest: without massive elements."
    return [*lines, *_lines_of(about, "")] if lines else []


def _loss_scales(analysis: DumpAnalysis) -> list[str]:
    rows = [
        [
            shortened(row["format"], 24),
            *(f"2^{exponent}" for exponent in (row["least"], row["largest"], row["advised"])),
            *(percent(figure_of(row, name)) for name in ("flush", "at_best")),
        ]
        for row in analysis["loss_scales"]
    ]
    head = ["format", "least", "largest", "advised", "flushed without", "flushed with"]
    return _table(head, rows, "<>>>>>")


def _ranks(analysis: DumpAnalysis) -> list[str]:
    ranks = analysis["ranks"]
    if not ranks:
        return []
    out = ranks["stands_out"]

    def order(row: RankRow) -> tuple[bool, float, int]:
        score = figure_of(row, "score")
        return row["rank"] != out, -score if math.isfinite(score) else 1.0, row["rank"]

    rows = [
        [
            f"{row['rank']}{' (stands out)' if row['rank'] == out else ''}",
            f"{row['tensors']:,}",
            f"{row['nonfinite']:,}",
            *(
                _brief_or_dash(figure_of(row, name))
                for name in ("rms", "amax", "distance", "score")
            ),
        ]
        for row in sorted(ranks["rows"], key=order)
    ]
    head = ["rank", "tensors", "not finite", "rms", "amax", "distance", "score"]
    lines = _table(head, rows, "<>>>>>>", _MOST_ROWS)
    for finding in rank_findings(analysis):
        lines += _lines_of(finding.text)
    lines.append(f"weights equal on all ranks: {ranks['equal_weights']}")
    titles = row_titles([{"title": name} for name in ranks["unequal_weights"][:_WORST]], 80)
    return [*lines, *(line for t in titles for line in _lines_of(f"not equal on all ranks: {t}"))]
