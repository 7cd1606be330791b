"""The page to browse an analysis: findings first, then the worst tensors, then all pictures.

It is one file that needs no network; pictures lie beside it, in the folders it names. Everything
that came from the dump is escaped, and all of it is there without scripts: they only sort.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from qgate.report._escaping import one_line
from qgate.report.dumps._findings import findings, format_rows, summary_line, worst_tensors
from qgate.report.dumps._page_style import SCRIPT, STYLE
from qgate.report.dumps._reading import (
    brief,
    decibels,
    figure_of,
    flushed,
    outliers,
    percent,
    quant_type_of,
    saturated,
    shortened,
    tensor_place,
    tensor_title,
)
from qgate.results.portraits import FOLDERS, DumpAnalysis, TensorPortrait

_WORST = 60
_BADGES = {"fail": "broken", "warn": "loss", "info": "note"}
_SECTIONS: dict[str, tuple[str, str]] = {
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
        "All values are finite, and none is too large for any of the formats.",
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
class Shown:
    """A picture that was drawn: its path from the page, its sentence, and its size in pixels."""

    path: str
    title: str
    about: str
    width: int
    height: int


def page(
    analysis: DumpAnalysis,
    pictures: Sequence[Shown],
    files: Sequence[str],
    *,
    failed: Mapping[str, str] | None = None,
    drawn: bool = True,
) -> str:
    """The whole page; `files` are linked to, `failed` says why pictures are missing."""
    by_folder: dict[str, list[Shown]] = {folder: [] for folder in ("", *FOLDERS)}
    for picture in pictures:
        by_folder[picture.path.rpartition("/")[0]].append(picture)
    name = str(analysis["dump"].get("folder") or "a dump")
    parts = [
        f"<h1>Analysis of <span class='name'>{_text(shortened(name, 90))}</span></h1>",
        f"<p class='about'>{_text(summary_line(analysis))}</p>",
        _findings(analysis, failed or {}),
        _contents(by_folder),
        *(_figure(picture) for picture in by_folder[""]),
        _worst(analysis),
        _formats(analysis),
        *(_folder(folder, by_folder[folder], drawn) for folder in FOLDERS),
        _files(files),
        _notes(analysis),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n"
        f"<title>Analysis of {_text(shortened(name, 60))}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(part for part in parts if part)}\n</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return escape(one_line(value))


def _findings(analysis: DumpAnalysis, failed: Mapping[str, str]) -> str:
    rows = [(finding.level, finding.text) for finding in findings(analysis)]
    rows += [("fail", f"{path} could not be drawn: {reason}") for path, reason in failed.items()]
    rows.sort(key=lambda row: ("fail", "warn", "info").index(row[0]))
    items = "\n".join(
        f"<li class='{level}'><b>{_BADGES[level]}</b> <span>{_text(text)}</span></li>"
        for level, text in rows
    )
    return f"<h2 id='findings'>Findings</h2>\n<ul class='findings'>\n{items}\n</ul>"


def _contents(by_folder: Mapping[str, Sequence[Shown]]) -> str:
    links = [("worst", "Worst tensors", 0), ("formats", "Formats", 0)]
    links += [(folder, _SECTIONS[folder][0], len(by_folder[folder])) for folder in FOLDERS]
    links += [("files", "Files", 0)]
    items = "\n".join(
        f"<a href='#{anchor}'>{_text(title)}{f' <small>{count}</small>' if count else ''}</a>"
        for anchor, title, count in links
    )
    return f"<nav aria-label='Contents'>\n{items}\n</nav>"


def _figure(picture: Shown) -> str:
    path, title = escape(picture.path), _text(picture.title)
    return (
        f"<figure>\n<figcaption><b>{title}</b> <span>{_text(picture.about)}</span></figcaption>\n"
        f"<a href='{path}'><img src='{path}' alt='{title}' width='{picture.width}' "
        f"height='{picture.height}' loading='lazy'></a>\n</figure>"
    )


def _folder(folder: str, pictures: Sequence[Shown], drawn: bool) -> str:
    title, why = _SECTIONS[folder]
    if pictures:
        body = "\n".join(_figure(picture) for picture in pictures)
        body = f"<div class='figures'>\n{body}\n</div>"
    else:
        body = f"<p class='empty'>{_text(why if drawn else 'Pictures were not asked for.')}</p>"
    return f"<section id='{folder}'>\n<h2>{_text(title)}</h2>\n{body}\n</section>"


# Tables ------------------------------------------------------------------------------------------

Cell = tuple[str, float | str | None]


def _table(head: Sequence[str], rows: Iterable[Sequence[Cell]], words: int) -> str:
    """The first `words` columns are texts, the others numbers; sorted by a click on their heads."""
    heads = "".join(
        f"<th scope='col' class='{'text' if i < words else 'number'}'>"
        f"<button type='button'>{_text(name)}</button></th>"
        for i, name in enumerate(head)
    )
    lines = []
    for row in rows:
        cells = []
        for place, (shown, key) in enumerate(row):
            tag, kind = ("th scope='row'", "text") if place == 0 else ("td", "text")
            kind = kind if place < words else "number"
            value = "" if key is None or key == shown else f" data-key='{_text(key)}'"
            cells.append(f"<{tag} class='{kind}'{value}>{_text(shown)}</{tag.split()[0]}>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return (
        "<div class='scroll' tabindex='0' role='region' aria-label='table'>\n"
        f"<table class='sortable'>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _number(value: float, shown: str | None = None) -> Cell:
    """A number in a cell; what does not exist sorts last."""
    if math.isnan(value):
        return "–", "nan"
    return (brief(value) if shown is None else shown), repr(value)


def _most(tensor: TensorPortrait, what: Any, bare: Sequence[str]) -> Cell:
    told = tensor.get("formats") or {}
    found = [(what(told[name]), name) for name in bare if name in told]
    found = [(share, name) for share, name in found if math.isfinite(share)]
    if not found:
        return _number(math.nan)
    share, name = max(found)
    return (f"{percent(share)} {name}" if share > 0 else "0"), repr(share)


def _worst(analysis: DumpAnalysis) -> str:
    bad = worst_tensors(analysis, _WORST)
    if not bad:
        why = "No tensor has anything to complain about that was looked at."
        return (
            f"<section id='worst'>\n<h2>Worst tensors</h2>\n<p class='empty'>{why}</p>\n</section>"
        )
    bare = [name for name, edges in analysis["formats"].items() if not edges["scaled"]]
    rows: list[list[Cell]] = []
    for place, found in enumerate(bad):
        tensor = found.tensor
        rows.append(
            [
                (tensor_title(tensor, 80), None),
                (tensor_place(tensor), None),
                (found.reason, f"{place:06d}"),
                (shortened(quant_type_of(tensor), 30), None),
                _number(figure_of(tensor, "amax")),
                _number(figure_of(tensor, "rms")),
                _number(figure_of(tensor, "kurtosis")),
                _number(outliers(tensor)),
                _most(tensor, saturated, bare),
                _most(tensor, flushed, bare),
            ]
        )
    head = [
        "tensor", "module or order", "what is worst", "quant type", "amax", "rms", "kurtosis",
        "outlier channel", "saturated", "zeroed",
    ]  # fmt: skip
    more = len(analysis["tensors"]) - len(bad)
    rest = f"<p class='about'>{more:,} more in statistics/tensors.csv.</p>" if more > 0 else ""
    table = _table(head, rows, 4)
    return f"<section id='worst'>\n<h2>Worst tensors</h2>\n{table}\n{rest}\n</section>"


def _formats(analysis: DumpAnalysis) -> str:
    rows: list[list[Cell]] = [
        [
            (shortened(row["format"], 40), None),
            (tensor_title(row["worst"], 80), None),
            (decibels(row["worst_db"]), repr(row["worst_db"])),
            (decibels(row["median_db"]), repr(row["median_db"])),
            _number(row["saturated"], percent(row["saturated"])),
            _number(row["flushed"], percent(row["flushed"])),
        ]
        for row in format_rows(analysis)
    ]
    head = ["format", "worst tensor", "worst SQNR", "median SQNR", "saturated", "zeroed"]
    body = (
        _table(head, rows, 2)
        + "<p class='about'>SQNR with the format's own scales; without any, cast as it is or with "
        "one power of two that fits, whichever is better. "
        "Saturated and zeroed: shares of all values, cast as they are where a format has no "
        "scales.</p>"
        if rows
        else "<p class='empty'>No tensor has figures of formats: there are statistics only.</p>"
    )
    return f"<section id='formats'>\n<h2>Formats</h2>\n{body}\n</section>"


def _files(files: Sequence[str]) -> str:
    items = "\n".join(f"<li><a href='{escape(name)}'>{_text(name)}</a></li>" for name in files)
    return f"<section id='files'>\n<h2>Files</h2>\n<ul>\n{items}\n</ul>\n</section>"


def _notes(analysis: DumpAnalysis) -> str:
    items = "\n".join(f"<li>{_text(note)}</li>" for note in analysis["notes"])
    if not items:
        return ""
    return f"<section id='notes'>\n<h2>Notes</h2>\n<ul>\n{items}\n</ul>\n</section>"
