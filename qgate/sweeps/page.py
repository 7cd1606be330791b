"""Write the page of a folder of sweeps: what to use first, then every tensor in every format.

Tensors of earlier commands stay on it: their entries are made again from the records in their
folders. Text, data and pictures are in the folders that the page links to, so they have to be moved
together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import quote

from qgate.charts.pages import leading, number, render
from qgate.charts.scale_curves import ScaleCurve, scale_curve
from qgate.charts.svg import LIGHT, STYLE
from qgate.interruptions import raise_interruption
from qgate.metrics import METRICS
from qgate.records import validate
from qgate.storage.access import remove_file, write_text
from qgate.storage.foreign import read_foreign, read_foreign_text
from qgate.sweeps.answers import choice_rows, headline
from qgate.sweeps.findings import EQUAL_DB, KINDS, SweptFormat, entry_of, findings
from qgate.sweeps.record import MX_PREFIX, SweepRecord, SweepView, share_text
from qgate.text import counted

if TYPE_CHECKING:
    from qgate.storage.locations import Location

PAGE, OTHER_PAGE, FAILED_PAGE = "index.html", "qgate-sweep.html", "index-failed.html"
_PICTURES = ("scaling_test", "scaling_summary")
_MOST_EARLIER = 400
_OURS = "<!-- the page of a run of qgate sweep -->"
_FAILED = "<!-- some of its tensors failed -->"
_MOST_ROWS, _MOST_PICTURED, _MOST_FOLDERS, _MOST_OPEN = 2000, 60, 200, 20
_CHOICE_HEAD = ("format", "bits", "scale", "SQNR")
_HEAD = ("tensor", "format", "sweep", "recommended", "SQNR (dB)", "without massive (dB)",
         "usual (dB)", "gap (dB)", "saturated (%)", "energy lost (%)", "flushed (%)")  # fmt: skip
_NARROW = {"tensor": 22, "format": 22, "recommended": 28, "SQNR (dB)": 13, "gap (dB)": 15}


def write_page(
    root: Location,
    entries: Sequence[SweptFormat],
    results: Sequence[tuple[str, str | None]],
    settings: str,
) -> Location:
    """Write the page; `results` are all tensors, with a reason for those that did not pass.

    A page of the same name that qgate did not write stays, and this one gets another name. So does
    the page of a sweep that passed where this one failed; a later one that passes removes it.
    """
    path, failed_page = root / PAGE, root / FAILED_PAGE
    has_failed = any(reason for _, reason in results)
    if path.exists():
        if not _is_marked(path, _OURS):
            path = root / OTHER_PAGE
        elif has_failed and not _is_marked(path, _FAILED):
            path = failed_page
    if not has_failed and _is_marked(failed_page, _FAILED):
        remove_file(root, FAILED_PAGE)
    write_text(path, page(entries, results, settings, *_earlier(root, entries)))
    return path


def _is_marked(path: Location, mark: str) -> bool:
    """Tell if a file is there and has a mark of qgate's."""
    return path.is_file() and mark in read_foreign_text(path, "records", errors="replace")


def _earlier(
    root: Location, entries: Sequence[SweptFormat]
) -> tuple[list[SweptFormat], dict[str, list[str]]]:
    """Return entries of earlier commands, and records that cannot be read, by their folder."""
    own = {(entry["folder"], file) for entry in entries for file in entry["files"]}
    earlier: list[SweptFormat] = []
    unread: dict[str, list[str]] = {}
    records: list[Location] = sorted(root.glob("*/*scaling_*.json"), key=str)
    for path in records:
        if (path.parent.name, path.name) in own:
            continue
        try:
            if len(earlier) == _MOST_EARLIER:
                raise ValueError
            earlier.append(_entry_from(path))
        except Exception:  # a damaged record raises anything
            raise_interruption()
            unread.setdefault(path.parent.name, []).append(path.name)
    return earlier, unread


def _entry_from(path: Location) -> SweptFormat:
    """Make the entry of a sweep from its record, with its files and pictures."""
    record = json.loads(read_foreign(path, "records"))
    validate(record, SweepRecord)
    view, folder = SweepView(record), path.parent
    stems = ("block_scaling",) if view.is_block else ("scaling_results", "scaling", *_PICTURES)
    names = [
        f"{view.stem(stem)}.{ending}"
        for stem in stems
        for ending in ("txt", "json", "csv", "png")
        if (folder / f"{view.stem(stem)}.{ending}").is_file()
    ]
    pictures = {
        name: read_foreign(folder / name, "records") for name in names if name.endswith(".png")
    }
    entry = entry_of(record, folder.name, names, pictures)
    exponents = [entry["exponent"], entry.get("used") or 0.0]
    if not all(map(math.isfinite, [*exponents, *(at for at, _ in entry.get("curve", ()))])):
        raise ValueError(f"{path}: an exponent is no number")
    return entry


def page(
    entries: Sequence[SweptFormat],
    results: Sequence[tuple[str, str | None]],
    settings: str,
    earlier: Sequence[SweptFormat] = (),
    unread: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Render the page of a command, with entries of `earlier` ones and records nobody can read.

    `settings` is `settings_text`.
    """
    formats = list(dict.fromkeys(entry["format"] for entry in entries))
    swept = f"{counted(len(results), 'tensor')} in {', '.join(formats) or 'no format'}"
    before = len({entry["folder"] for entry in earlier})
    more = f"; with {counted(before, 'tensor')} of earlier commands" if before else ""
    rows = sorted([*entries, *earlier], key=_worst_first)
    folders = list(dict.fromkeys(entry["folder"] for entry in rows))
    pictured = [
        (own[0]["tensor"], _link(folder), own[0]["failed"], list(map(_picture, own)))
        for folder in folders[:_MOST_PICTURED]
        if (own := [entry for entry in rows if entry["folder"] == folder])
    ]
    first, tone = headline(entries, results)
    choices = [
        (entry["tensor"], _link(entry["folder"]), choice_rows(entry["choices"]))
        for entry in [*entries, *earlier]
        if entry.get("choices") and not entry["failed"]
    ]
    empty = {name for name, part in (("formats", choices), ("others", unread)) if not part}
    links = [
        ("formats", "Which format", len(choices)),
        ("sweeps", "Sweeps", len(rows)),
        ("metrics", "Every metric", len(METRICS.of("errors"))),
        ("pictures", "Pictures", sum(len(row) for *_, row in pictured)),
        ("words", "What the columns mean", 0),
        ("others", "Other folders", len(unread)),
    ]
    return render(
        "sweeps/page",
        mark=_OURS + (_FAILED if any(reason for _, reason in results) else ""),
        title=leading(first, 110),
        first=leading(first),
        tone=tone,
        plot_style=f"{STYLE}@media print{{.plot{{{LIGHT}}}}}",
        about=f"{swept}; {settings}{more}.",
        findings=findings([*entries, *earlier], results),
        links=[link for link in links if link[0] not in empty],
        choice_head=_CHOICE_HEAD,
        choices=choices[:_MOST_PICTURED],
        head=_HEAD,
        narrow=_NARROW,
        filters=[
            (name, 1 + at, values)
            for at, name in enumerate(_HEAD[1:3])
            if len(values := sorted({_words(entry)[at] for entry in rows[:_MOST_ROWS]})) > 1
        ],
        rows=[_row(entry) for entry in rows[:_MOST_ROWS]],
        unshown=len(rows) - _MOST_ROWS,
        most_open=_MOST_OPEN,
        metrics_about=f"{len(METRICS.of('errors'))} metrics of {counted(len(rows), 'sweep')}",
        metrics=METRICS.of("errors"),
        drawn=pictured,
        tensors=len(folders),
        most_pictured=_MOST_PICTURED,
        others=[
            (folder, [(name, _link(folder, name)) for name in names])
            for folder, names in unread.items()
        ],
        most_others=_MOST_FOLDERS,
    )


def _worst_first(entry: SweptFormat) -> tuple[bool, bool, float]:
    ratio = min(entry["sqnr_db"], entry["rest_db"])
    return not entry["failed"], not math.isnan(ratio), -math.inf if math.isnan(ratio) else ratio


def _row(entry: SweptFormat) -> dict[str, object]:
    """Return the cells of a sweep in both tables."""
    ratios = [entry[name] for name in ("sqnr_db", "rest_db", "production_db")]
    gap = math.nan if entry["failed"] else entry["gap_db"]
    shares = [entry[name] for name in ("overflow", "overflow_energy", "flush")]
    # The levels of a tensor with NaN or infinities are figures of its other values, no advice.
    advice = () if entry["failed"] else (entry["level"], entry.get("mse_cost"))
    recommended = "; ".join(filter(None, advice)) or "–"
    values = {
        metric: entry["metrics"].get(metric.name, math.nan) for metric in METRICS.of("errors")
    }
    return {
        **entry,
        "link": quote(entry["folder"]),
        "words": _words(entry),
        "cells": [
            number(entry["exponent"], recommended),
            *(number(db, "exact" if db == math.inf else f"{db:.2f}") for db in ratios),
            number(gap, f"{gap:+.2f}", bad=gap <= -EQUAL_DB),
            *(
                number(
                    share, share_text(share).removesuffix("%"), bad=not column and entry["severe"]
                )
                for column, share in enumerate(shares)
            ),
        ],
        "metrics": [number(value, metric.cell(value)) for metric, value in values.items()],
        "files": [(file, _short(file), _link(entry["folder"], file)) for file in entry["files"]],
    }


def _words(entry: SweptFormat) -> tuple[str, str]:
    """Name the format and the kind of a sweep."""
    return entry["format"], KINDS.get(entry["kind"], entry["kind"])


def _link(*parts: str) -> str:
    return "/".join(map(quote, parts))


def _short(file: str) -> str:
    """Return the short name of a file among those of its tensor."""
    for start, word in (("scaling_summary", "summary"), ("scaling_test", "plot"),
                        ("block_scaling", "plot")):  # fmt: skip
        if file.removeprefix(MX_PREFIX).startswith(start) and file.endswith(".png"):
            return word
    return file.rpartition(".")[2]


def _picture(entry: SweptFormat) -> dict[str, object]:
    """Return the curve of a sweep with its name, and links to its pictures in files."""
    name = ", ".join(_words(entry))
    # The curve of a tensor with NaN or infinities would recommend a scale for its other values.
    levels = () if entry["failed"] else entry.get("curve", ())
    curve = ScaleCurve(entry["format"], levels, entry["exponent"], entry.get("used"), "in use")
    return {
        "name": name,
        "svg": scale_curve(curve) if levels else "",
        "links": [
            (_link(entry["folder"], file), _short(file), file) for file, *_ in entry["pictures"]
        ],
    }
