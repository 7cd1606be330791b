"""The page to browse an analysis: findings first, then the worst tensors, then all pictures.

It is one file that needs no network; the pictures lie in the folders beside it. Everything that
comes from the dump is escaped. Scripts only sort: the page is complete without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from qgate.charts.pages import Cell, headline, leading, number
from qgate.charts.reports import PagePicture, Section, SectionTable, report_page
from qgate.drawing.findings import (
    FORMATS_ABOUT,
    DumpFindings,
    findings_of,
    summary_line,
    worst_tensors,
)
from qgate.drawing.losses import FormatSummary
from qgate.summaries.reading import (
    figure_of,
    flushed,
    outliers,
    quant_type_of,
    row_titles,
    saturated,
    saturation_cost,
)
from qgate.summaries.record import DumpAnalysis, FormatOutcome, TensorSummary
from qgate.text import decibels, percent, shortened
from qgate.text.findings import NOTHING, not_drawn, worst_first

_WORST = 60
_NOTHING_BAD = "No tensor is bad in any way that qgate looks for."
_NO_FORMATS = "No tensor has figures of formats: there are statistics only."
_NO_PICTURES = "Pictures were not asked for."
_WORST_HEAD = ("tensor", "what is worst", "quant type", "amax", "rms", "kurtosis",
               "outlier channel", "saturated", "flushed")  # fmt: skip
_FORMAT_HEAD = ("format", "worst tensor", "worst SQNR", "without massive", "median SQNR",
                "without massive", "flushed", "saturated", "of the error")  # fmt: skip
# Folders of pictures in the order of the page, with their titles and what an empty one says.
SECTIONS: dict[str, tuple[str, str]] = {
    "distributions": ("Distributions", "There are no values and no counts, so no distributions."),
    "heatmaps": ("Heat maps", "No tensor has a largest magnitude to map."),
    "comparisons": ("Comparisons", "No figures of formats and no second quant type to compare."),
    "statistics": ("Statistics", "No tensor has moments."),
    "attention_analysis": (
        "Attention",
        "The dump has no tensors of attention layers with finite values.",
    ),
    "quantization_analysis": ("Quantization", "No tensor has moments or figures of formats."),
    "layer_analysis": (
        "Layers, samples, batches",
        "There is only one layer, one type, one sample and one size.",
    ),
    "overflow_analysis": (
        "Overflow",
        "Nothing overflows: all values are finite, and no format that casts values as they are "
        "saturates one. Formats with scales of their own saturate by design, as the table says.",
    ),
    "fp8_analysis": (
        "Two against each other",
        "There are no two quant types or formats to compare.",
    ),
    "bf16_analysis": ("bf16", "No tensor was counted as bf16."),
    "backward_analysis": ("Backward", "The dump has no gradients."),
    "rank_analysis": ("Ranks", "There is only one rank."),
}


def page(
    analysis: DumpAnalysis,
    pictures: Sequence[PagePicture],
    files: Sequence[str],
    *,
    failed: Mapping[str, str] | None = None,
    plots: bool = True,
    findings: DumpFindings | None = None,
) -> str:
    """Render the page with links to `files`; `failed` says why pictures are missing."""
    findings = findings or findings_of(analysis)
    sentences = worst_first([*findings.findings, *not_drawn(failed or {})])
    name = str(analysis["dump"].get("folder") or "a dump")
    first, tone = headline(sentences, name)
    return report_page(
        list(_sections(analysis, findings, pictures, plots)),
        verdict=first, tone=tone, findings=sentences, files=files, notes=analysis["notes"],
        title=leading((sentences or [NOTHING])[0].text, 110), contents="tabs",
        about=f"Analysis of {shortened(name, 90)}: {summary_line(analysis)}",
    )  # fmt: skip


def _sections(
    analysis: DumpAnalysis, findings: DumpFindings, pictures: Sequence[PagePicture], plots: bool
) -> Iterator[Section]:
    by_folder: dict[str, list[PagePicture]] = {folder: [] for folder in ("", *SECTIONS)}
    for picture in pictures:
        by_folder[picture.path.rpartition("/")[0]].append(picture)
    yield Section(anchor="overview", title="Overview", pictures=by_folder[""], empty=_NO_PICTURES)
    worst = _worst_rows(analysis)
    more = len(analysis["tensors"]) - len(worst)
    yield Section(anchor="worst", title="Worst tensors", empty=_NOTHING_BAD, tables=[SectionTable(
        head=_WORST_HEAD, rows=worst, words=3, label="worst tensors",
        more=f"{more:,} more in statistics/tensors.csv." * (more > 0),
    )])  # fmt: skip
    formats = _format_rows(findings.formats)
    yield Section(
        anchor="formats", title="Formats", empty=_NO_FORMATS, about=FORMATS_ABOUT,
        tables=[SectionTable(head=_FORMAT_HEAD, rows=formats, words=2, label="formats")],
    )  # fmt: skip
    for folder, (title, why) in SECTIONS.items():
        own = by_folder[folder]
        yield Section(
            anchor=folder, title=title, total=len(own), pictures=own,
            empty=why if plots else _NO_PICTURES,
        )  # fmt: skip


def _worst_rows(analysis: DumpAnalysis) -> list[list[Cell]]:
    bare = [name for name, edges in analysis["formats"].items() if not edges["scaled"]]
    worst = worst_tensors(analysis, _WORST)
    titles = row_titles([bad.tensor for bad in worst], 120)
    return [
        [
            Cell(title),
            Cell(bad.reason, f"{row:06d}"),
            Cell(shortened(quant_type_of(bad.tensor), 30)),
            *(number(figure_of(bad.tensor, name)) for name in ("amax", "rms", "kurtosis")),
            number(outliers(bad.tensor)),
            _saturated(bad.tensor, bare),
            _most(bad.tensor, flushed, bare),
        ]
        for row, (bad, title) in enumerate(zip(worst, titles, strict=True))
    ]


def _most(
    tensor: TensorSummary, share_of: Callable[[FormatOutcome], float], bare: Sequence[str]
) -> Cell:
    formats = tensor.get("formats") or {}
    shares = [(share_of(formats[name]), name) for name in bare if name in formats]
    share, name = max((item for item in shares if math.isfinite(item[0])), default=(math.nan, ""))
    return number(share, f"{percent(share)} {name}" if share > 0 else "0")


def _saturated(tensor: TensorSummary, bare: Sequence[str]) -> Cell:
    """Name the cast that saturation costs most, with its share of the values."""
    formats = tensor.get("formats") or {}
    costs = [
        (saturation_cost(formats[name]), share, name)
        for name in bare
        if name in formats and (share := saturated(formats[name])) > 0
    ]
    if not costs:
        return _most(tensor, saturated, bare)
    _, share, name = max(costs)
    return number(share, f"{percent(share)} {name}")


def _format_rows(formats: Sequence[FormatSummary]) -> list[list[Cell]]:
    titles = row_titles([row.worst for row in formats], 120)
    return [
        [
            Cell(shortened(row.label, 40)),
            Cell(title),
            *(Cell(decibels(ratio), repr(ratio)) for ratio in (*row.worst_db, *row.median_db)),
            *(number(share, percent(share)) for share in (row.flushed, row.saturated)),
            number(row.saturation_cost, row.saturation_text),
        ]
        for row, title in zip(formats, titles, strict=True)
    ]
