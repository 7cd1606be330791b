"""Writes all there is to see of an analysis below one folder or URL.

`written.json` lists what a run writes before it writes it: the next one overwrites and removes
these files and no others, also after a kill.
"""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.drawing.page import LinkedPicture, page
from qgate.drawing.tables import TABLES
from qgate.drawing.texts import Said, said_of, tensor_stats
from qgate.engine import Failure, Workers, outcomes, workers_of
from qgate.errors import QgateError
from qgate.results.rows import as_json, is_on_disk
from qgate.storage.opening import folder_of
from qgate.storage.places import check_writable, is_taken, place_of
from qgate.storage.writing import (
    local_files,
    remove_file,
    write_bytes,
    write_parts,
    write_text,
)
from qgate.summaries.record import DumpAnalysis

if TYPE_CHECKING:
    from qgate.storage.places import Place

Progress = Callable[[int, int], None]
RECORD, LISTED, PAGE, STATISTICS = "analysis.json", "written.json", "index.html", "tensor_stats.txt"
_KIND = "qgate dump drawing 1"
_TEXTS = (PAGE, STATISTICS, RECORD, *(f"statistics/{name}" for name in TABLES))


def draw_analysis(
    analysis: DumpAnalysis,
    folder: Place | str,
    workers: Workers | int = 1,
    plots: bool = True,
    progress: Progress | None = None,
    *,
    dpi: float | None = None,
    said: Said | None = None,
) -> list[Place]:
    """Record, texts, tables, pictures and the page; the paths written, the page first.

    `progress` is told how many pictures are done, of how many; `said` is what was found, where that
    is known already.
    """
    from qgate.drawing.plots.pictures import PICTURES

    folder = place_of(folder)
    check_folder(folder)
    folder_of(folder).make()
    before = _listed(folder)
    possible = [*_TEXTS, *(picture.path for picture in PICTURES)]
    _list(folder, sorted({*before, *possible}))
    write_parts(folder / RECORD, chain(as_json(analysis), ["\n"]))
    said = said or said_of(analysis)
    write_text(folder / STATISTICS, tensor_stats(analysis, said))
    folder_of(folder / "statistics").make()
    for name, table in TABLES.items():
        write_parts(folder / "statistics" / name, table(analysis))
    titles: dict[str, str] = {}
    failed: dict[str, str] = {}
    if plots:
        for done, (path, title, reason) in enumerate(_drawn(analysis, folder, workers, dpi), 1):
            if reason:
                failed[path] = reason
            elif title:
                titles[path] = title
            if progress is not None:
                progress(done, len(PICTURES))
    shown = [
        LinkedPicture(
            picture.path, titles[picture.path], picture.about, *_size(folder / picture.path)
        )
        for picture in PICTURES
        if picture.path in titles
    ]
    text = page(analysis, shown, _TEXTS[1:], failed=failed, drawn=plots, said=said)
    write_text(folder / PAGE, text)
    written = [*_TEXTS, *(picture.path for picture in shown)]
    _remove(folder, {*before, *possible} - set(written))
    _list(folder, sorted(written))
    if failed:
        path, reason = next(iter(failed.items()))
        raise QgateError(
            f"{len(failed)} of {len(PICTURES)} pictures could not be drawn, the first is {path}: "
            f"{reason}. All others are in {str(folder)!r}."
        )
    return [folder / name for name in written]


def check_folder(folder: Place | str) -> None:
    """Refuses a folder that holds a file of another making under a name that is needed."""
    from qgate.drawing.plots.pictures import PICTURES

    folder = place_of(folder)
    check_writable(folder)
    if folder.exists() and not folder.is_dir():
        raise QgateError(f"{str(folder)!r} is a file; give a folder to draw to.")
    names = [*_TEXTS, *(picture.path for picture in PICTURES)]
    _refuse_foreign(folder, names, _listed(folder))


# What a run may touch ----------------------------------------------------------------------------


def _listed(folder: Place) -> list[str]:
    """What an earlier run wrote; only paths that stay inside the folder are believed."""
    path = folder / LISTED
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or told.get("kind") != _KIND:
        raise QgateError(f"{str(path)!r} is not of an earlier drawing; give another folder.")
    files = told["files"] if isinstance(told.get("files"), list) else []
    names = [name for name in files if isinstance(name, str)]
    return [name for name in names if _inside(name)]


def _inside(name: str) -> bool:
    parts = name.split("/")
    return (
        len(parts) <= 2 and all(part not in ("", ".", "..") for part in parts) and "\\" not in name
    )


def _refuse_foreign(folder: Place, possible: Sequence[str], before: Sequence[str]) -> None:
    for name in possible:
        if name not in before and is_taken(folder / name):
            raise QgateError(
                f"{str(folder / name)!r} is there and was not drawn by qgate; give another folder."
            )


def _list(folder: Place, names: Sequence[str]) -> None:
    write_text(folder / LISTED, json.dumps({"kind": _KIND, "files": list(names)}, indent=0) + "\n")


def _remove(folder: Place, names: set[str]) -> None:
    for name in sorted(names):
        path = folder / name
        remove_file(path)
        if path.parent != folder:
            folder_of(path.parent).remove_empty()


# Pictures ----------------------------------------------------------------------------------------

Drawn = tuple[str, str, str]


def _drawn(
    analysis: DumpAnalysis, folder: Place, workers: Workers | int, dpi: float | None
) -> Iterator[Drawn]:
    """Path, title and reason of failure of each picture, as they get done.

    Processes that cannot start or die, as under a script without a main guard, leave their pictures
    to this one.
    """
    from qgate.drawing.plots.pictures import PICTURES

    folders = {picture.folder for picture in PICTURES} - {""}
    for name in folders:
        folder_of(folder / name).make()
    left = [picture.path for picture in PICTURES]
    asked = workers_of(workers)
    seen_there = asked.is_local or not is_on_disk(analysis)
    if seen_there and not asked.is_here:
        with contextlib.closing(
            outcomes(_draw_elsewhere, list(left), workers, shared=(analysis, dpi))
        ) as done:
            for found in done:
                if isinstance(found, Failure):
                    break
                told, data = found
                left.remove(told[0])
                if data:
                    write_bytes(folder / told[0], data)
                yield told
    for path in left:
        with local_files([folder / path]) as (file,):
            told = _draw(analysis, file, path, dpi)
        yield told
    for name in folders:
        folder_of(folder / name).remove_empty()


def _draw(analysis: DumpAnalysis, file: Path, path: str, dpi: float | None) -> Drawn:
    """Draw one picture; what goes wrong in it is told, but for what the disk has to say."""
    from qgate.drawing.plots.pictures import picture_at

    draw = picture_at(path).draw
    try:
        more = {} if dpi is None else {"dpi": dpi}
        return path, draw(file, analysis, **more), ""
    except OSError:
        raise
    except Exception as error:
        return path, "", f"{type(error).__name__}: {error}"


def _draw_elsewhere(path: str, shared: tuple[DumpAnalysis, float | None]) -> tuple[Drawn, bytes]:
    """One picture as bytes: where it belongs is not for a worker to know."""
    analysis, dpi = shared
    with tempfile.TemporaryDirectory() as made:
        target = Path(made) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        told = _draw(analysis, target, path, dpi)
        return told, target.read_bytes() if told[1] else b""


def _size(path: Place) -> tuple[int, int]:
    """Of a PNG, from its head."""
    with path.open("rb") as file:
        width, height = struct.unpack(">II", file.read(24)[16:])
    return width, height
