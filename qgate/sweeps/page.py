"""The page of a run of `qgate sweep`: findings first, then every tensor in every format.

It is about the tensors of one run. Folders that other runs left beside them are only linked to:
what they were asked, and whether it still holds, is not known here. Text, data and pictures lie in
the folders the page links to, so it moves with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from qgate.charts.page_parts import (
    contents,
    document,
    empty,
    figures,
    finding_list,
    head_cells,
    image,
    scroll,
    section,
)
from qgate.metrics import METRICS
from qgate.storage.writing import write_text
from qgate.sweeps.findings import EQUAL_DB, KINDS, SweptFormat, findings
from qgate.sweeps.record import MX_PREFIX, share_text
from qgate.text import counted, shortened
from qgate.text import for_html as text

if TYPE_CHECKING:
    from qgate.storage.places import Place

PAGE, OTHER_PAGE = "index.html", "qgate-sweep.html"
_OURS = "<!-- the page of a run of qgate sweep -->"
_MOST_ROWS, _MOST_PICTURED, _MOST_OTHERS = 2000, 60, 200
_HEAD = ("tensor", "format", "sweep", "recommended", "SQNR (dB)",
         "without massive (dB)", "usual (dB)", "gap (dB)",
         "saturated (%)", "energy lost (%)", "flushed (%)", "files")  # fmt: skip
_STYLE = """
td.files a { display: inline-block; margin-right: .7em; }
th, td, td.text:nth-child(2) { min-width: 0; } tbody th { min-width: 14rem; }
td.number { white-space: nowrap; }
td.fail { font-weight: 600; }
@media (max-width: 600px) { tbody th { min-width: 9rem; } figure { padding: 4px; } }
"""


def write_page(
    root: Place,
    entries: Sequence[SweptFormat],
    results: Sequence[tuple[str, str | None]],
    asked: str,
) -> Place:
    """The page in its root; `results` are all tensors, with a reason where one did not pass.

    A page of the same name that somebody else put there stays, and ours gets another name.
    """
    place = root / PAGE
    if place.exists() and not (place.is_file() and _OURS in _read(place)):
        place = root / OTHER_PAGE
    write_text(place, page(entries, results, asked, _others(root, entries)))
    return place


def _read(place: Place) -> str:
    return str(place.read_text(encoding="utf-8", errors="replace"))


def _others(root: Place, entries: Sequence[SweptFormat]) -> dict[str, list[str]]:
    """Results in the root that are not of this run, by their folder."""
    mine = {each["folder"] for each in entries}
    found: dict[str, list[str]] = {}
    records: list[Place] = sorted(root.glob("*/*scaling_*.json"), key=str)
    for path in records:
        if path.parent.name not in mine:
            found.setdefault(path.parent.name, []).append(path.name)
    return found


def page(
    entries: Sequence[SweptFormat],
    results: Sequence[tuple[str, str | None]],
    asked: str,
    others: Mapping[str, Sequence[str]],
) -> str:
    bad = sum(1 for _, reason in results if reason)
    formats = list(dict.fromkeys(each["format"] for each in entries))
    told = f"{counted(len(results), 'tensor')} in {', '.join(formats) or 'no format'}"
    title = f"Sweep: {counted(bad, 'tensor')} of {len(results)} failed" if bad else f"Sweep: {told}"
    rows = sorted(entries, key=_worst_first)
    pictured = _pictured(rows)
    about = (
        f"{told}; {asked}. Text, data and pictures lie in the folders beside this page: keep them "
        "together."
    )
    parts = [
        _OURS,
        f"<h1>{text(title)}</h1>",
        f"<p class='about'>{text(about)}</p>",
        f"<h2 id='findings'>Findings</h2>\n{finding_list(findings(entries, results))}",
        contents(
            [
                ("sweeps", "Sweeps", len(entries)),
                ("metrics", "Every metric", len(METRICS.of("errors"))),
                ("pictures", "Pictures", sum(len(each["pictures"]) for each in pictured)),
                ("words", "What the columns mean", 0),
                *([("others", "Other runs", len(others))] if others else []),
            ]
        ),
        section("sweeps", "Tensors and formats, worst first", _table(rows)),
        section("metrics", "Every metric at the recommended level", _metrics(rows)),
        section("pictures", "Pictures", _pictures(rows, pictured)),
        section("words", "What the columns mean", _WORDS),
        section("others", "Folders of other runs", _links(others)) if others else "",
    ]
    return document(title, parts, style=_STYLE)


def _worst_first(each: SweptFormat) -> tuple[bool, bool, float]:
    ratio = min(each["sqnr_db"], each["rest_db"])
    return not each["failed"], not math.isnan(ratio), -math.inf if math.isnan(ratio) else ratio


# The table ---------------------------------------------------------------------------------------


def _table(rows: Sequence[SweptFormat]) -> str:
    if not rows:
        return empty("No tensor could be swept.")
    body = "\n".join(map(_row, rows[:_MOST_ROWS]))
    more = len(rows) - _MOST_ROWS
    rest = f"<p class='about'>{more:,} more, better ones, in their folders.</p>" if more > 0 else ""
    heads = head_cells(_HEAD[:-1], 3) + f"<th scope='col' class='text'>{_HEAD[-1]}</th>"
    table = (
        f"<table class='sortable'>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
        "</table>"
    )
    return f"{scroll(table, 'tensors and formats')}\n{rest}"


def _row(each: SweptFormat) -> str:
    name = f"<a href='{_link(each['folder'])}/'>{text(each['tensor'])}</a>"
    if each["failed"]:
        name += f" <span class='fail'>{text(each['failed'])}</span>"
    links = " ".join(_file(each["folder"], file) for file in each["files"])
    cells = [
        _cell(
            "; ".join(filter(None, (each["level"] or "–", each.get("mse_cost")))), each["exponent"]
        ),
        *(_cell(_decibels(value), value) for value in (each["sqnr_db"], each["rest_db"])),
        _cell(_decibels(each["production_db"]), each["production_db"]),
        _cell(f"{each['gap_db']:+.2f}", each["gap_db"], bad=each["gap_db"] <= -EQUAL_DB),
        _cell(_share(each["overflow"]), each["overflow"], bad=each["severe"]),
        _cell(_share(each["overflow_energy"]), each["overflow_energy"]),
        _cell(_share(each["flush"]), each["flush"]),
    ]
    words = "".join(
        f"<td class='text'>{text(word)}</td>"
        for word in (each["format"], KINDS.get(each["kind"], each["kind"]))
    )
    return (
        f"<tr><th scope='row' class='text' data-key='{text(each['tensor'])}'>{name}</th>{words}"
        f"{''.join(cells)}<td class='files'>{links}</td></tr>"
    )


def _metrics(rows: Sequence[SweptFormat]) -> str:
    """All metrics of all sweeps; what they mean is in the heads."""
    known = METRICS.of("errors")
    if not rows:
        return empty("No tensor could be swept.")
    heads = head_cells(("tensor", "format", "sweep"), 3) + "".join(
        f"<th scope='col' title='{text(each.definition)}'>{text(each.head)}</th>" for each in known
    )
    body = "\n".join(
        f"<tr><th scope='row' class='text'>{text(each['tensor'])}</th>"
        f"<td class='text'>{text(each['format'])}</td>"
        f"<td class='text'>{text(KINDS.get(each['kind'], each['kind']))}</td>"
        + "".join(
            _cell(metric.cell(value), value)
            for metric in known
            for value in [each["metrics"].get(metric.name, math.nan)]
        )
        + "</tr>"
        for each in rows[:_MOST_ROWS]
    )
    table = (
        f"<table class='sortable'>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
        "</table>"
    )
    return scroll(table, "metrics of tensors and formats")


def _file(folder: str, file: str) -> str:
    said = text(f"{_short(file)}: {file} of {folder}")
    return f"<a href='{_link(folder, file)}' aria-label='{said}'>{text(_short(file))}</a>"


def _cell(shown: str, value: float, *, bad: bool = False) -> str:
    shown = "–" if math.isnan(value) else shown
    kind = "number fail" if bad else "number"
    return f"<td class='{kind}' data-key='{value!r}'>{text(shown)}</td>"


def _decibels(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.2f}"


def _share(value: float) -> str:
    return share_text(value).removesuffix("%")


def _link(*parts: str) -> str:
    return text("/".join(quote(part) for part in parts))


def _short(file: str) -> str:
    """What tells the files of a tensor apart."""
    for start, word in (("scaling_summary", "summary"), ("scaling_test", "plot"),
                        ("block_scaling", "plot")):  # fmt: skip
        if file.removeprefix(MX_PREFIX).startswith(start) and file.endswith(".png"):
            return word
    return file.rpartition(".")[2]


def _links(others: Mapping[str, Sequence[str]]) -> str:
    items = "\n".join(
        f"<li>{text(folder)}: "
        + " ".join(f"<a href='{_link(folder, name)}'>{text(name)}</a>" for name in names)
        + "</li>"
        for folder, names in list(others.items())[:_MOST_OTHERS]
    )
    more = len(others) - _MOST_OTHERS
    rest = f"<p class='about'>{more:,} more folders.</p>" if more > 0 else ""
    about = (
        "Not of this run: other tensors, or swept earlier. What they say is in their files and "
        "not counted above."
    )
    return f"<p class='about'>{about}</p>\n<ul>\n{items}\n</ul>{rest}"


# Pictures ----------------------------------------------------------------------------------------


def _pictured(rows: Sequence[SweptFormat]) -> list[SweptFormat]:
    """The sweeps of the worst tensors, as many as a page can hold."""
    shown = list(dict.fromkeys(each["folder"] for each in rows))[:_MOST_PICTURED]
    return [each for folder in shown for each in rows if each["folder"] == folder]


def _pictures(rows: Sequence[SweptFormat], pictured: Sequence[SweptFormat]) -> str:
    drawn = [
        image(
            "/".join(map(quote, (each["folder"], name))),
            f"{shortened(each['tensor'], 60)}: {each['format']}, "
            f"{KINDS.get(each['kind'], each['kind'])} {each['level']}",
            name,
            width,
            height,
        )
        for each in pictured
        for name, width, height in each["pictures"]
    ]
    if not drawn:
        return empty("Pictures were not asked for, or none could be drawn.")
    tensors = len({each["folder"] for each in rows})
    some = (
        f"<p class='about'>Of the {_MOST_PICTURED} worst of {tensors:,} tensors; the others are "
        "linked in the table.</p>"
        if tensors > _MOST_PICTURED
        else ""
    )
    return f"{some}{figures(drawn)}"


def _defined(words: Iterable[tuple[str, str]]) -> str:
    items = "\n".join(f"<dt>{text(term)}</dt><dd>{text(means)}</dd>" for term, means in words)
    return f"<dl>\n{items}\n</dl>"


_WORDS = _defined(
    (
        ("sweep", "One scale: 2^s for the whole tensor. Block offset: an integer added to every "
                  "block's own exponent; 0 is production."),
        ("recommended", "The level with the best composite of MSE, cosine, PSNR, MAE and relative "
                        "error among those that scales can hold and that do not saturate much. "
                        "What it costs against the best MSE stands beside it from 0.1 dB on."),
        ("SQNR", "10 log10 of the energy of the tensor over that of the error, at the recommended "
                 "level; exact: there is no error."),
        ("without massive", "SQNR of all but massive elements: those beyond 20 times the root mean "
                            "square of all but the largest 1 in 32."),
        ("usual", "SQNR at the scale that is in use: floor(log2(amax)) - emax of MX formats "
                  "(production), amax / max of fp8 and integers, none of formats that are cast."),
        ("gap", "Recommended less usual: what is lost today, or below zero what the recommended "
                "level costs in SQNR."),
        ("saturated", "Finite elements that are above the largest value when rounded without a "
                      "bound, at the recommended level."),
        ("energy lost", "The share of the sum of squares that saturation loses."),
        ("flushed", "Elements that were not zero and become zero."),
    )
)  # fmt: skip
