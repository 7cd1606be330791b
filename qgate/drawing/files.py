"""Write a drawing of an analysis: record, texts, tables, pictures and page below a folder or URL.

`written.json` lists the files of a run before it writes them: the next run overwrites and removes
these files and no others, also after a kill.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qgate.charts.reports import PagePicture
from qgate.drawing.findings import DumpFindings, findings_of
from qgate.drawing.page import page
from qgate.drawing.tables import TABLES
from qgate.drawing.texts import tensor_stats
from qgate.engine import Failure, Workers, map_items, workers_of
from qgate.errors import QgateError
from qgate.interruptions import raise_interruption
from qgate.results.rows import as_json, is_on_disk
from qgate.storage.access import (
    check_no_links,
    folder_of,
    local_files,
    remove_file,
    write_bytes,
    write_parts,
    write_text,
)
from qgate.storage.files import scratch_folder
from qgate.storage.foreign import read_foreign_text
from qgate.storage.locations import check_writable, location_of, name_exists
from qgate.storage.written_files import list_of, list_text
from qgate.summaries.record import DumpAnalysis

if TYPE_CHECKING:
    from qgate.drawing.plots.pictures import DumpPicture
    from qgate.storage.locations import Location

Progress = Callable[[int, int], None]
RECORD, LISTED, PAGE, STATISTICS = "analysis.json", "written.json", "index.html", "tensor_stats.txt"
OVERVIEW = "quick_analysis.png"
OTHER_NAMES = {"attention_analysis": "attention_maps"}
"""Folders whose pictures are also written under the name of megatron-tensor-saver's first plots."""
_KIND = "qgate dump drawing 1"
_TEXTS = (PAGE, STATISTICS, RECORD, *(f"statistics/{name}" for name in TABLES))


class PictureOutcome(NamedTuple):
    """A picture by its path: title and SVG where there was something to draw, or why it failed."""

    path: str
    title: str = ""
    failure: str = ""
    svg: str = ""
    width: int = 0


def draw_analysis(
    analysis: DumpAnalysis,
    folder: Location | str,
    workers: Workers | int = 1,
    plots: bool = True,
    progress: Progress | None = None,
    *,
    dpi: float | None = None,
    findings: DumpFindings | None = None,
) -> list[Location]:
    """Write record, texts, tables, pictures and the page; return the paths, the page first.

    `progress` gets the number of pictures that are done, and of all; `findings` saves computing
    them again.
    """
    folder = location_of(folder)
    check_folder(folder)
    folder_of(folder).make()
    pictures, copies = _pictures(), _copies()
    possible = {*_earlier_files(folder), *_TEXTS, *(picture.path for picture in pictures), *copies}
    _write_list(folder, possible)
    write_parts(folder / RECORD, chain(as_json(analysis), ["\n"]))
    findings = findings or findings_of(analysis)
    write_text(folder / STATISTICS, tensor_stats(analysis, findings))
    folder_of(folder / "statistics").make()
    for name, table in TABLES.items():
        write_parts(folder / "statistics" / name, table(analysis))
    drawings: list[PictureOutcome] = []
    for drawing in _draw_pictures(analysis, folder, workers, dpi) if plots else ():
        drawings.append(drawing)
        if progress is not None:
            progress(len(drawings), len(pictures))
    outcomes = {drawing.path: drawing for drawing in drawings if drawing.title}
    failed = {drawing.path: drawing.failure for drawing in drawings if drawing.failure}
    linked = [
        PagePicture(p.path, outcome.title, p.about, outcome.svg, outcome.width)
        for p in pictures
        if (outcome := outcomes.get(p.path)) is not None
    ]
    text = page(analysis, linked, _TEXTS[1:], failed=failed, plots=plots, findings=findings)
    write_text(folder / PAGE, text)
    copies = {copy: path for copy, path in copies.items() if path in outcomes}
    for copy, path in copies.items():
        folder_of((folder / copy).parent).make()
        write_bytes(folder / copy, (folder / path).read_bytes())
    written = [*_TEXTS, *(picture.path for picture in linked), *copies]
    for name in sorted(possible - set(written)):
        remove_file(folder, name)
        if (folder / name).parent != folder:
            folder_of((folder / name).parent).remove_empty()
    _write_list(folder, written)
    if failed:
        path, reason = next(iter(failed.items()))
        raise QgateError(
            f"{len(failed)} of {len(pictures)} pictures could not be drawn, the first is {path}: "
            f"{reason}. All others are in {str(folder)!r}."
        )
    return [folder / name for name in written]


def draw_overview(
    analysis: DumpAnalysis, folder: Location | str, findings: DumpFindings
) -> Location:
    """Write the overview on one page and the texts; return the path of the picture.

    Other files of an earlier drawing stay.
    """
    folder = location_of(folder)
    check_folder(folder)
    folder_of(folder).make()
    _write_list(folder, {*_earlier_files(folder), OVERVIEW, STATISTICS})
    write_text(folder / STATISTICS, tensor_stats(analysis, findings))
    with local_files([folder / OVERVIEW]) as (file,):
        _picture(OVERVIEW).draw(file, analysis)
    return folder / OVERVIEW


def _pictures() -> tuple[DumpPicture, ...]:
    from qgate.drawing.plots import pictures

    return pictures.PICTURES


def _picture(path: str) -> DumpPicture:
    return next(picture for picture in _pictures() if picture.path == path)


def _copies() -> dict[str, str]:
    """Return the second path of pictures that are written twice, with their first one."""
    return {
        f"{OTHER_NAMES[picture.folder]}/{picture.path.rpartition('/')[2]}": picture.path
        for picture in _pictures()
        if picture.folder in OTHER_NAMES
    }


# The files of earlier runs -----------------------------------------------------------------------


def check_folder(folder: Location | str) -> None:
    """Refuse a folder in which a file has the name of a drawing's file but is not qgate's."""
    folder = location_of(folder)
    check_writable(folder)
    if folder.exists() and not folder.is_dir():
        raise QgateError(f"{str(folder)!r} is a file; give a folder to draw to.")
    earlier = _earlier_files(folder)
    own = [*_TEXTS, *(picture.path for picture in _pictures()), *_copies()]
    check_no_links(folder, {name.rpartition("/")[0] for name in [*earlier, *own]})
    for name in own:
        if name not in earlier and name_exists(folder / name):
            raise QgateError(
                f"{str(folder / name)!r} exists and was not drawn by qgate; give another folder."
            )


def _earlier_files(folder: Location) -> list[str]:
    """List the files of an earlier run; paths that leave the folder do not count."""
    path = folder / LISTED
    if not path.exists():
        return []
    listed = list_of(read_foreign_text(path, "lists of files", errors="replace"), _KIND, folders=1)
    if listed is None:
        raise QgateError(f"{str(path)!r} is not from an earlier drawing; give another folder.")
    return listed.files


def _write_list(folder: Location, names: set[str] | list[str]) -> None:
    write_text(folder / LISTED, list_text(_KIND, names))


# Pictures ----------------------------------------------------------------------------------------


def _draw_pictures(
    analysis: DumpAnalysis, folder: Location, workers: Workers | int, dpi: float | None
) -> Iterator[PictureOutcome]:
    """Draw pictures, and yield the outcome of each.

    If processes cannot start or die, as under a script without a main guard, this process draws
    their pictures.
    """
    pending = [picture.path for picture in _pictures()]
    folders = {picture.folder for picture in _pictures()} - {""}
    for name in folders:
        folder_of(folder / name).make()
    engine = workers_of(workers)
    if not engine.is_here and (engine.is_local or not is_on_disk(analysis)):
        with contextlib.closing(
            map_items(_draw_elsewhere, list(pending), workers, shared=(analysis, dpi))
        ) as pictures:
            for outcome in pictures:
                if isinstance(outcome, Failure):
                    break
                picture, data = outcome
                pending.remove(picture.path)
                if data:
                    write_bytes(folder / picture.path, data)
                yield picture
    for path in pending:
        with local_files([folder / path]) as (file,):
            picture = _draw(analysis, file, path, dpi)
        yield picture
    for name in folders:
        folder_of(folder / name).remove_empty()


def _draw(analysis: DumpAnalysis, file: Path, path: str, dpi: float | None) -> PictureOutcome:
    """Draw one picture and return its errors; those of the disk are raised."""
    try:
        sheet = _picture(path).draw.sheet(analysis)
        if sheet is None:
            return PictureOutcome(path)
        sheet.save(file, **({} if dpi is None else {"dpi": dpi}))
        return PictureOutcome(path, sheet.title, svg=sheet.svg(), width=sheet.width)
    except OSError:
        raise
    except Exception as error:
        raise_interruption()
        return PictureOutcome(path, failure=f"{type(error).__name__}: {error}")


def _draw_elsewhere(
    path: str, shared: tuple[DumpAnalysis, float | None]
) -> tuple[PictureOutcome, bytes]:
    """Draw one picture as bytes: a worker may not reach the folder."""
    analysis, dpi = shared
    with scratch_folder() as folder:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        picture = _draw(analysis, target, path, dpi)
        return picture, target.read_bytes() if picture.title else b""
