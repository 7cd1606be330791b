"""The page to browse an analysis: findings first, then the worst tensors, then all pictures.

It is one file that needs no network; pictures lie beside it, in the folders it names. Everything
that came from the dump is escaped, and all of it is there without scripts: they only sort.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qgate.charts.page_parts import (
    Cell,
    contents,
    document,
    empty,
    finding_list,
    image,
    number,
    section,
    sortable,
)
from qgate.charts.page_parts import figures as figure_grid
from qgate.drawing.findings import Said, said_of, summary_line
from qgate.drawing.worst import worst_tensors
from qgate.summaries.reading import (
    figure_of,
    flushed,
    outliers,
    quant_type_of,
    row_titles,
    saturated,
    saturation_cost,
)
from qgate.summaries.record import FOLDERS, DumpAnalysis, TensorPortrait
from qgate.text import decibels, percent, shortened
from qgate.text import for_html as text

_WORST = 60
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


@dataclass(frozen=True)
class LinkedPicture:
    """A picture that was drawn: its path from the page, its sentence, and its size in pixels."""

    path: str
    title: str
    about: str
    width: int
    height: int


def page(
    analysis: DumpAnalysis,
    pictures: Sequence[LinkedPicture],
    files: Sequence[str],
    *,
    failed: Mapping[str, str] | None = None,
    drawn: bool = True,
    said: Said | None = None,
) -> str:
    """The whole page; `files` are linked to, `failed` says why pictures are missing."""
    said = said or said_of(analysis)
    by_folder: dict[str, list[LinkedPicture]] = {folder: [] for folder in ("", *FOLDERS)}
    for picture in pictures:
        by_folder[picture.path.rpartition("/")[0]].append(picture)
    name = str(analysis["dump"].get("folder") or "a dump")
    parts = [
        f"<h1>Analysis of <span class='name'>{text(shortened(name, 90))}</span></h1>",
        f"<p class='about'>{text(summary_line(analysis))}</p>",
        _findings(said, failed or {}),
        _contents(by_folder),
        *(_figure(picture) for picture in by_folder[""]),
        _worst(analysis),
        _formats(said),
        *(_folder(folder, by_folder[folder], drawn) for folder in FOLDERS),
        _files(files),
        _notes(analysis),
    ]
    return document(f"Analysis of {shortened(name, 60)}", parts)


def _findings(said: Said, failed: Mapping[str, str]) -> str:
    rows = [(finding.level, finding.text) for finding in said.findings]
    rows += [("fail", f"{path} could not be drawn: {reason}") for path, reason in failed.items()]
    rows.sort(key=lambda row: ("fail", "warn", "info").index(row[0]))
    return f"<h2 id='findings'>Findings</h2>\n{finding_list(rows)}"


def _contents(by_folder: Mapping[str, Sequence[LinkedPicture]]) -> str:
    links = [("worst", "Worst tensors", 0), ("formats", "Formats", 0)]
    links += [(folder, SECTIONS[folder][0], len(by_folder[folder])) for folder in FOLDERS]
    links += [("files", "Files", 0)]
    return contents(links)


def _figure(picture: LinkedPicture) -> str:
    return image(picture.path, picture.title, picture.about, picture.width, picture.height)


def _folder(folder: str, pictures: Sequence[LinkedPicture], drawn: bool) -> str:
    title, why = SECTIONS[folder]
    if pictures:
        return section(folder, title, figure_grid([_figure(picture) for picture in pictures]))
    return section(folder, title, empty(why if drawn else "Pictures were not asked for."))


# Tables ------------------------------------------------------------------------------------------


def _most(tensor: TensorPortrait, what: Any, bare: Sequence[str]) -> Cell:
    told = tensor.get("formats") or {}
    found = [(what(told[name]), name) for name in bare if name in told]
    found = [(share, name) for share, name in found if math.isfinite(share)]
    if not found:
        return number(math.nan)
    share, name = max(found)
    return (f"{percent(share)} {name}" if share > 0 else "0"), repr(share)


def _saturated(tensor: TensorPortrait, bare: Sequence[str]) -> Cell:
    """The cast that saturation costs most, with its share of the values."""
    told = tensor.get("formats") or {}
    found = [
        (saturation_cost(told[name]), share, name)
        for name in bare
        if name in told and (share := saturated(told[name])) > 0
    ]
    if not found:
        return _most(tensor, saturated, bare)
    _, share, name = max(found)
    return f"{percent(share)} {name}", repr(share)


def _worst(analysis: DumpAnalysis) -> str:
    bad = worst_tensors(analysis, _WORST)
    if not bad:
        why = "No tensor has anything to complain about that was looked at."
        return section("worst", "Worst tensors", empty(why))
    bare = [name for name, edges in analysis["formats"].items() if not edges["scaled"]]
    rows: list[list[Cell]] = []
    titles = row_titles([found.tensor for found in bad], 120)
    for place, (found, title) in enumerate(zip(bad, titles, strict=True)):
        tensor = found.tensor
        rows.append(
            [
                (title, None),
                (found.reason, f"{place:06d}"),
                (shortened(quant_type_of(tensor), 30), None),
                number(figure_of(tensor, "amax")),
                number(figure_of(tensor, "rms")),
                number(figure_of(tensor, "kurtosis")),
                number(outliers(tensor)),
                _saturated(tensor, bare),
                _most(tensor, flushed, bare),
            ]
        )
    head = [
        "tensor", "what is worst", "quant type", "amax", "rms", "kurtosis",
        "outlier channel", "saturated", "flushed",
    ]  # fmt: skip
    more = len(analysis["tensors"]) - len(bad)
    rest = f"<p class='about'>{more:,} more in statistics/tensors.csv.</p>" if more > 0 else ""
    return section("worst", "Worst tensors", f"{sortable(head, rows, 3, 'worst tensors')}\n{rest}")


def _formats(said: Said) -> str:
    titles = row_titles([row["worst"] for row in said.formats], 120)
    rows: list[list[Cell]] = [
        [
            (shortened(row["label"], 40), None),
            (title, None),
            *(
                (decibels(row[name]), repr(row[name]))
                for name in ("worst_db", "worst_rest_db", "median_db", "median_rest_db")
            ),
            number(row["flushed"], percent(row["flushed"])),
            number(row["saturated"], percent(row["saturated"])),
            number(
                row["saturation"],
                f"{percent(row['saturation'])}{' by design' if row['by_design'] else ''}",
            ),
        ]
        for row, title in zip(said.formats, titles, strict=True)
    ]
    head = [
        "format", "worst tensor", "worst SQNR", "without massive", "median SQNR",
        "without massive", "flushed", "saturated", "of the error",
    ]  # fmt: skip
    body = (
        sortable(head, rows, 2, "formats")
        + "<p class='about'>SQNR with the format's own scales; without any, cast as it is or with "
        "the one power of two that loses least, whichever is better. Massive elements are few and "
        "more than 20 times the rms of the rest: they can hide what the others lose. Flushed and "
        "saturated: shares of finite values, cast as they are where a format has no scales; of the "
        "error: the part of a tensor's squared error that saturated values have, in the mean. A "
        "format with scales of its own may saturate by design: its scale rule leaves the largest "
        "of a block out.</p>"
        if rows
        else empty("No tensor has figures of formats: there are statistics only.")
    )
    return section("formats", "Formats", body)


def _files(files: Sequence[str]) -> str:
    items = "\n".join(f"<li><a href='{text(name)}'>{text(name)}</a></li>" for name in files)
    return section("files", "Files", f"<ul>\n{items}\n</ul>")


def _notes(analysis: DumpAnalysis) -> str:
    items = "\n".join(f"<li>{text(note)}</li>" for note in analysis["notes"])
    return section("notes", "Notes", f"<ul>\n{items}\n</ul>") if items else ""
