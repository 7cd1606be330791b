"""An analysis in words and numbers: `tensor_stats.txt`, and the tables beside it."""

from __future__ import annotations

import math
import textwrap
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qgate.drawing.findings import DumpFinding, Said, rank_findings, said_of, summary_line
from qgate.drawing.tables import formats_csv, groups_csv, tensors_csv
from qgate.drawing.worst import worst_tensors
from qgate.summaries.reading import figure_of, figures_of, nonfinite, quant_type_of, row_titles
from qgate.summaries.record import DumpAnalysis, TensorPortrait
from qgate.text import brief, counted, decibels, one_line, percent, shortened

__all__ = [
    "Said",
    "findings",
    "formats_csv",
    "groups_csv",
    "said_of",
    "tensor_stats",
    "tensors_csv",
]

_WIDTH, _MOST_ROWS, _WORST = 100, 40, 20
_MARKS = {"fail": "BROKEN", "warn": "LOSS  ", "info": "note  "}


def tensor_stats(analysis: DumpAnalysis, said: Said | None = None) -> str:
    """All of it on lines of at most 100 characters, what is wrong first."""
    said = said or said_of(analysis)
    parts = [
        _head(analysis),
        _found(said.findings),
        _totals(analysis),
        _worst(analysis),
        *_distributions(analysis),
        _nonfinite(analysis),
        _formats(said.formats),
        _loss_scales(analysis),
        _ranks(analysis),
        _notes(analysis),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def findings(said: Said) -> list[str]:
    """What was found, one line each, the broken ones first."""
    return [f"{_MARKS[each.level]}  {one_line(each.text)}" for each in said.findings]


_FIELDS: tuple[tuple[str, Callable[[TensorPortrait], str]], ...] = (
    ("quant type", quant_type_of),
    ("layer type", lambda tensor: str(tensor["layer_type"])),
    ("operation", lambda tensor: str(tensor["operation"])),
    ("name", lambda tensor: str(tensor["name"])),
    ("rank", lambda tensor: f"rank {tensor['rank']}"),
)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, "-" * len(title), *lines]) if lines else ""


def _head(analysis: DumpAnalysis) -> str:
    folder = analysis["dump"].get("folder")
    where = f" of {shortened(folder, 70)}" if folder else ""
    title = f"Statistics{where}"
    return f"{title}\n{'=' * len(title)}\n{summary_line(analysis)}"


def _wrapped(text: str, first: str = "- ") -> list[str]:
    """A sentence in as many lines as it needs."""
    rest = " " * len(first)
    return textwrap.wrap(one_line(text), _WIDTH, initial_indent=first, subsequent_indent=rest) or [
        first
    ]


def _found(findings: Sequence[DumpFinding]) -> str:
    lines = [
        line
        for finding in findings
        for line in _wrapped(finding.text, f"{_MARKS[finding.level]}  ")
    ]
    return _section("Findings", lines)


def _totals(analysis: DumpAnalysis) -> str:
    tensors = analysis["tensors"]
    if not tensors:
        return ""
    whole = _Sizes()
    for tensor in tensors:
        whole.add(*_sizes_of(tensor))
    lines = [f"tensors             {whole.tensors:,}", f"values              {whole.elements:,}"]
    size = figure_of(analysis["dump"], "bytes")
    if math.isfinite(size):
        lines.append(f"bytes               {size:,.0f}")
    low, high = figures_of(tensors, "min"), figures_of(tensors, "max")
    if low.size and high.size:
        lines.append(f"range               {brief(float(low.min()))} to {brief(float(high.max()))}")
    mean, std = _pooled(whole.moments)
    if math.isfinite(mean):
        lines.append(f"mean                {brief(mean)}")
    if math.isfinite(std):
        lines.append(f"standard deviation  {brief(std)}")
    zeros = figures_of(tensors, "zeros").sum()
    of = sum(figure_of(t, "counted") for t in tensors if "zeros" in t)
    if of:
        lines.append(f"zeros               {zeros:,.0f} ({percent(float(zeros) / of)})")
    return _section("Totals", lines)


@dataclass
class _Sizes:
    """Numbers of tensors that belong together; moments are kept by tensor, to be pooled."""

    tensors: int = 0
    elements: int = 0
    amax: float = -math.inf
    moments: array[float] = field(default_factory=lambda: array("d"))

    def add(self, elements: int, amax: float, moments: tuple[float, float, float]) -> None:
        self.tensors += 1
        self.elements += elements
        self.amax = max(self.amax, amax) if math.isfinite(amax) else self.amax
        if all(map(math.isfinite, moments)) and moments[2] > 0:
            self.moments.extend(moments)


def _sizes_of(tensor: TensorPortrait) -> tuple[int, float, tuple[float, float, float]]:
    weight = figure_of(tensor, "counted") - nonfinite(tensor)
    moments = figure_of(tensor, "mean"), figure_of(tensor, "std"), weight
    return int(tensor.get("elements") or 0), figure_of(tensor, "amax"), moments


def _pooled(moments: array[float]) -> tuple[float, float]:
    """Mean and standard deviation of the finite values of all tensors together."""
    if not moments:
        return math.nan, math.nan
    means, stds, weights = np.array(moments).reshape(-1, 3).T
    weights = weights / weights.sum()
    unit = max(float(np.abs(means).max()), float(stds.max())) or 1.0
    mean = float((means * weights).sum())
    spread = ((stds / unit) ** 2 + ((means - mean) / unit) ** 2) @ weights
    return mean, unit * math.sqrt(float(spread))


def _worst(analysis: DumpAnalysis) -> str:
    """Two lines of each: what it is, then what is worst."""
    found = worst_tensors(analysis, _WORST)
    lines = []
    for bad, title in zip(found, row_titles([bad.tensor for bad in found], _WIDTH), strict=True):
        lines += [title, f"  {shortened(bad.reason, _WIDTH - 2)}"]
    return _section("Worst tensors", lines)


def _distributions(analysis: DumpAnalysis) -> list[str]:
    """By each field, in one pass over the tensors."""
    parts: list[dict[str, _Sizes]] = [{} for _ in _FIELDS]
    for tensor in analysis["tensors"]:
        told = _sizes_of(tensor)
        for found, (_, value) in zip(parts, _FIELDS, strict=True):
            found.setdefault(value(tensor), _Sizes()).add(*told)
    return [_distribution(title, found) for (title, _), found in zip(_FIELDS, parts, strict=True)]


def _distribution(title: str, parts: Mapping[str, _Sizes]) -> str:
    total = sum(mine.elements for mine in parts.values()) or 1
    rows = []
    for name, mine in sorted(parts.items(), key=lambda item: -item[1].elements):
        std = _pooled(mine.moments)[1]
        rows.append(
            [
                shortened(name, 34),
                f"{mine.tensors:,}",
                f"{mine.elements:,}",
                percent(mine.elements / total),
                brief(mine.amax) if math.isfinite(mine.amax) else "-",
                brief(std) if math.isfinite(std) else "-",
            ]
        )
    head = [title, "tensors", "values", "share", "amax", "std"]
    lines = _columns(head, rows[:_MOST_ROWS], "<>>>>>")
    if len(rows) > _MOST_ROWS:
        lines.append(f"and {len(rows) - _MOST_ROWS} more")
    return _section(f"By {title}", lines)


def _nonfinite(analysis: DumpAnalysis) -> str:
    broken = sorted((t for t in analysis["tensors"] if nonfinite(t)), key=lambda t: -nonfinite(t))
    rows = [
        [title, *(f"{int(figure_of(t, name)):,}" for name in ("nan", "posinf", "neginf"))]
        for t, title in zip(broken, row_titles(broken[:_WORST], 72), strict=False)
    ]
    lines = _columns(["tensor", "NaN", "+Inf", "-Inf"], rows, "<>>>")
    if len(broken) > _WORST:
        lines.append(f"and {counted(len(broken) - _WORST, 'tensor')} more")
    return _section("Values that are not finite", lines)


def _formats(told: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            shortened(row["label"], 18),
            *(
                decibels(row[name])
                for name in ("worst_db", "worst_rest_db", "median_db", "median_rest_db")
            ),
            percent(row["flushed"]),
            percent(row["saturated"]),
            f"{percent(row['saturation'])}{' by design' if row['by_design'] else ''}",
        ]
        for row in told
    ]
    head = [
        "format",
        "worst",
        "its rest",
        "median",
        "its rest",
        "flushed",
        "saturated",
        "of the error",
    ]
    lines = _columns(head, rows, "<>>>>>><")
    titles = row_titles([row["worst"] for row in told], 86)
    for place, title in enumerate(titles, 1):
        lines[place] += f"\n  worst: {title}"
    about = (
        "worst and median SQNR with the format's own scales; without any, cast as it is or with "
        "the one power of two that loses least, whichever is better; rest: without massive "
        "elements. Flushed and saturated are shares of finite values, cast as they are; of the "
        "error: the part of a tensor's squared error that saturated values have, in the mean. A "
        "format with scales of its own may saturate by design: its scale rule leaves the largest "
        "of a block out."
    )
    return _section("Losses in each format (SQNR)", [*lines, *_wrapped(about, "")] if lines else [])


def _loss_scales(analysis: DumpAnalysis) -> str:
    rows = [
        [
            shortened(row["format"], 24),
            f"2^{row['least']}",
            f"2^{row['largest']}",
            f"2^{row['advised']}",
            percent(figure_of(row, "flush")),
            percent(figure_of(row, "at_best")),
        ]
        for row in analysis["loss_scales"]
    ]
    head = ["format", "least", "largest", "advised", "flushed without", "flushed with"]
    return _section("Loss scales", _columns(head, rows, "<>>>>>"))


def _ranks(analysis: DumpAnalysis) -> str:
    ranks = analysis["ranks"]
    if not ranks:
        return ""
    out = ranks["stands_out"]
    rows = [
        [
            f"{row['rank']}{' (stands out)' if row['rank'] == out else ''}",
            f"{row['tensors']:,}",
            f"{row['nonfinite']:,}",
            *(_figure(row, name) for name in ("rms", "amax", "distance", "score")),
        ]
        for row in sorted(ranks["rows"], key=lambda r: (r["rank"] != out, -_score(r), r["rank"]))
    ]
    head = ["rank", "tensors", "not finite", "rms", "amax", "distance", "score"]
    lines = _columns(head, rows[:_MOST_ROWS], "<>>>>>>")
    if len(rows) > _MOST_ROWS:
        lines.append(f"and {len(rows) - _MOST_ROWS} more")
    for finding in rank_findings(analysis):
        lines += _wrapped(finding.text)
    lines.append(f"weights equal on all ranks: {ranks['equal_weights']}")
    titles = row_titles([{"title": name} for name in ranks["unequal_weights"][:_WORST]], 80)
    for title in titles:
        lines += _wrapped(f"not equal on all ranks: {title}")
    return _section("Ranks", lines)


def _score(row: Any) -> float:
    score = figure_of(row, "score")
    return score if math.isfinite(score) else -1.0


def _figure(row: Any, name: str) -> str:
    value = figure_of(row, name)
    return brief(value) if math.isfinite(value) else "-"


def _notes(analysis: DumpAnalysis) -> str:
    return _section("Notes", [line for note in analysis["notes"] for line in _wrapped(note)])


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Aligned by column; nothing without rows."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            f"{text:{side}{w}}" for text, side, w in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
