"""Write the page of a folder of sweeps: what to use first, then every tensor in every format.

Tensors of earlier commands stay on it: their entries are made again from the records in their
folders. Text, data and pictures are in the folders that the page links to, so they have to be moved
together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import quote

from qgate.charts.pages import Cell, Link, leading, number
from qgate.charts.reports import FigureGroup, Section, SectionTable, report_page
from qgate.charts.scale_curves import ScaleCurve, scale_curve
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
_MOST_ROWS, _MOST_PICTURED, _MOST_FOLDERS = 2000, 60, 200
_CHOICE_HEAD = ("format", "bits", "scale", "SQNR")
_HEAD = ("tensor", "format", "sweep", "recommended", "SQNR (dB)", "without massive (dB)",
         "usual (dB)", "gap (dB)", "saturated (%)", "energy lost (%)", "flushed (%)",
         "files")  # fmt: skip
# Together no wider than a window of 1400 pixels.
_WIDTHS = {"tensor": 14, "format": 7, "sweep": 6.5, "recommended": 6.9, "SQNR (dB)": 5,
           "without massive (dB)": 5, "usual (dB)": 5, "gap (dB)": 5, "saturated (%)": 6,
           "energy lost (%)": 5, "flushed (%)": 5.2, "files": 9}  # fmt: skip
_NARROW = {"tensor": 22, "format": 22, "recommended": 28, "SQNR (dB)": 13, "gap (dB)": 15}


_TOGETHER = "Text, data and pictures lie in the folders beside this page: keep them together."
_CHOICES = "Each format at its best scale, the highest SQNR first."
_OTHERS = (
    "Records here that this version cannot read, or that are too many. What they say is in their "
    "files and not counted above."
)
_NOTHING_SWEPT = "No tensor could be swept."
_NOTHING_DRAWN = "No tensor has a level with a finite error and a scale to recommend."
_WORDS = (
    ("sweep", "One scale: 2^s for the whole tensor. Block offset: an integer added to every "
     "block's own exponent; 0 is production."),
    ("recommended", "The level with the best composite of MSE, cosine, PSNR, MAE and relative "
     "error among those that scales can hold and that do not saturate much. What it costs against "
     "the best MSE stands beside it from 0.1 dB on."),
    ("SQNR", "10 log10 of the energy of the tensor over that of the error, at the recommended "
     "level; exact: there is no error."),
    ("without massive", "SQNR of all but massive elements: those beyond 20 times the root mean "
     "square of all but the largest 1 in 32."),
    ("usual", "SQNR at the scale that is in use: floor(log2(amax)) - emax of MX formats "
     "(production), amax / max of fp8 and integers, none of formats that are cast."),
    ("gap", "Recommended less usual: what is lost today, or below zero what the recommended level "
     "costs in SQNR."),
    ("saturated", "Finite elements that are above the largest value when rounded without a bound, "
     "at the recommended level."),
    ("energy lost", "The share of the sum of squares that saturation loses."),
    ("flushed", "Elements that were not zero and become zero."),
)  # fmt: skip


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
    """Make the entry of a sweep from its record, with the files beside it."""
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
    entry = entry_of(record, folder.name, names)
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
    first, tone = headline(entries, results)
    html = report_page(
        [*_sections([*entries, *earlier]), *([_unread_section(unread)] if unread else [])],
        verdict=leading(first), tone=tone, title=leading(first, 110),
        findings=findings([*entries, *earlier], results),
        about=f"{swept}; {settings}{more}. {_TOGETHER}",
    )  # fmt: skip
    return f"{html}{_OURS}{_FAILED if any(reason for _, reason in results) else ''}\n"


def _sections(entries: Sequence[SweptFormat]) -> Iterator[Section]:
    rows = sorted(entries, key=_worst_first)
    first = rows[:_MOST_ROWS]
    choices = [entry for entry in entries if entry.get("choices") and not entry["failed"]]
    yield Section(
        anchor="formats", title="Which format", total=len(choices), beside=True, about=_CHOICES,
        tables=[_choice_table(entry) for entry in choices[:_MOST_PICTURED]],
        empty="No tensor was compared in all formats.",
    )  # fmt: skip
    cells = [_row(entry) for entry in first]
    columns = ((name, 1 + at) for at, name in enumerate(_HEAD[1:3]))
    filters = [
        (name, at, values)
        for name, at in columns
        if len(values := sorted({str(row[at].text) for row in cells})) > 1
    ]
    yield Section(
        anchor="sweeps", title="Tensors and formats, worst first", link="Sweeps", total=len(rows),
        empty=_NOTHING_SWEPT,
        tables=[SectionTable(
            head=_HEAD, rows=cells, words=3, label="tensors and formats", name="all-sweeps",
            widths=_WIDTHS, narrow=_NARROW, filters=filters,
            more=f"{len(rows) - len(first):,} more, better ones, in their folders."
            * (len(rows) > len(first)),
        )],
    )  # fmt: skip
    metrics = METRICS.of("errors")
    yield Section(
        anchor="metrics", title="Every metric at the recommended level", link="Every metric",
        total=len(metrics), empty=_NOTHING_SWEPT,
        folded=f"{len(metrics)} metrics of {counted(len(rows), 'sweep')}",
        tables=[SectionTable(
            head=[*_HEAD[:3], *(metric.head for metric in metrics)], words=3,
            about={metric.head: metric.definition for metric in metrics},
            rows=[_metric_row(entry) for entry in first], label="metrics of tensors and formats",
        )],
    )  # fmt: skip
    folders = list(dict.fromkeys(entry["folder"] for entry in rows))
    groups = [
        _curves([entry for entry in rows if entry["folder"] == folder])
        for folder in folders[:_MOST_PICTURED]
    ]
    pictured = (
        f"Of the {_MOST_PICTURED} worst of {counted(len(folders), 'tensor')}; the others are "
        "linked in the table."
    )
    yield Section(
        anchor="pictures", title="Pictures", total=sum(len(group.figures) for group in groups),
        about=pictured if len(folders) > _MOST_PICTURED else "",
        groups=[group for group in groups if group.figures], empty=_NOTHING_DRAWN,
    )  # fmt: skip
    yield Section(anchor="words", title="What the columns mean", facts=_WORDS)


def _choice_table(entry: SweptFormat) -> SectionTable:
    """Return the formats of a tensor, the best first."""
    return SectionTable(
        head=_CHOICE_HEAD, rows=[[*map(Cell, row)] for row in choice_rows(entry["choices"])],
        words=1, label=f"formats for {entry['tensor']}", title=entry["tensor"],
        address=f"{_address(entry['folder'])}/",
    )  # fmt: skip


def _unread_section(unread: Mapping[str, Sequence[str]]) -> Section:
    rows = [
        [Cell(folder), Cell("", links=[Link(name, _address(folder, name)) for name in names])]
        for folder, names in unread.items()
    ]
    left_out = f"{len(rows) - _MOST_FOLDERS:,} more folders." * (len(rows) > _MOST_FOLDERS)
    return Section(
        anchor="others", title="Folders that are not shown", link="Other folders",
        total=len(rows), about=_OTHERS,
        tables=[SectionTable(
            head=("folder", "files"), rows=rows[:_MOST_FOLDERS], words=2, label="other folders",
            more=left_out,
        )],
    )  # fmt: skip


def _worst_first(entry: SweptFormat) -> tuple[bool, bool, float]:
    ratio = min(entry["sqnr_db"], entry["rest_db"])
    return not entry["failed"], not math.isnan(ratio), -math.inf if math.isnan(ratio) else ratio


def _row(entry: SweptFormat) -> list[Cell]:
    ratios = [entry[name] for name in ("sqnr_db", "rest_db", "production_db")]
    gap = math.nan if entry["failed"] else entry["gap_db"]
    shares = [entry[name] for name in ("overflow", "overflow_energy", "flush")]
    # The levels of a tensor with NaN or infinities are figures of its other values, no advice.
    advice = () if entry["failed"] else (entry["level"], entry.get("mse_cost"))
    tensor, folder = entry["tensor"], entry["folder"]
    return [
        Cell(tensor, tensor, links=[Link(tensor, f"{_address(folder)}/")], failure=entry["failed"]),
        *_names(entry),
        number(entry["exponent"], "; ".join(filter(None, advice)) or "–"),
        *(number(db, "exact" if db == math.inf else f"{db:.2f}") for db in ratios),
        number(gap, f"{gap:+.2f}", bad=gap <= -EQUAL_DB),
        *(
            number(share, share_text(share).removesuffix("%"), bad=not column and entry["severe"])
            for column, share in enumerate(shares)
        ),
        Cell("", links=[
            Link(_short(file), _address(folder, file), f"{_short(file)}: {file} of {folder}")
            for file in entry["files"]
        ]),
    ]  # fmt: skip


def _metric_row(entry: SweptFormat) -> list[Cell]:
    values = (
        (metric, entry["metrics"].get(metric.name, math.nan)) for metric in METRICS.of("errors")
    )
    figures = [number(value, metric.cell(value)) for metric, value in values]
    return [Cell(entry["tensor"]), *_names(entry), *figures]


def _names(entry: SweptFormat) -> tuple[Cell, Cell]:
    """Name the format and the kind of a sweep."""
    return Cell(entry["format"]), Cell(_kind(entry))


def _kind(entry: SweptFormat) -> str:
    return KINDS.get(entry["kind"], entry["kind"])


def _address(*parts: str) -> str:
    return "/".join(map(quote, parts))


def _short(file: str) -> str:
    """Return the short name of a file among those of its tensor."""
    for start, word in (("scaling_summary", "summary"), ("scaling_test", "plot"),
                        ("block_scaling", "plot")):  # fmt: skip
        if file.removeprefix(MX_PREFIX).startswith(start) and file.endswith(".png"):
            return word
    return file.rpartition(".")[2]


def _curves(entries: Sequence[SweptFormat]) -> FigureGroup:
    """Draw the sweeps of a tensor; one with NaN or infinities has no scale to recommend."""
    first = entries[0]
    curves = [
        (
            ScaleCurve(e["format"], e["curve"], e["exponent"], e.get("used"), "usual"),
            f"{e['format']}, {_kind(e)}",
        )
        for e in entries
        if e.get("curve") and not e["failed"]
    ]
    return FigureGroup(
        first["tensor"], f"{_address(first['folder'])}/", first["failed"],
        [(scale_curve(curve), name) for curve, name in curves],
    )  # fmt: skip
