"""Writes all there is to see of a record of activations below one folder or URL.

Each model has its own list of what it wrote, `MODEL-written.json`, made before the files are: the
next run of that model replaces and removes these and no others, also after a kill. Another model
in the same folder gets names of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from qgate.activation_stats.page import EmbeddedPicture, page
from qgate.activation_stats.reading import Look, clean, digest, look_of, model_stem
from qgate.activation_stats.record import ACTIVATIONS, READABLE, ActivationsRecord
from qgate.activation_stats.tables import as_json, csv_files
from qgate.errors import QgateError
from qgate.results.believing import of_type
from qgate.storage.folders import Folder, NotRemovedError, files_in
from qgate.storage.opening import folder_of
from qgate.storage.places import check_writable, place_of, read_bytes
from qgate.storage.writing import local_files, write_text
from qgate.summaries.record import ANALYSES

if TYPE_CHECKING:
    from qgate.storage.places import Place

Progress = Callable[[int, int], None]
RECORD, _LISTED, _KIND = "activations.json", "-written.json", "qgate activation report 1"


class UndrawnError(QgateError):
    """A picture failed, and all else is written."""


def write_report(
    record: ActivationsRecord,
    folder: Place | str,
    look: Look | None = None,
    progress: Progress | None = None,
) -> list[Place]:
    """The paths written, the page first.

    How it looks is what the run was asked for (`record["settings"]`), if not said otherwise.
    `progress` is told how many pictures are done, of how many.
    """
    look = look_of(record["settings"]) if look is None else look
    home = check_folder(folder, look)
    home.make()
    return _Writer(record, home, look, progress).write()


def check_folder(folder: Place | str, look: Look) -> Folder:
    """Refuses what no report can be written to, before anything is computed."""
    place = place_of(folder)
    check_writable(place)
    home, other = folder_of(place), "another folder (--visualization.save_dir)"
    try:
        home.try_writing(f".probe-{time.time_ns()}")
    except NotADirectoryError as error:
        raise QgateError(
            f"{error.filename!r} is a file; give a folder to write to (save_dir)."
        ) from None
    except NotRemovedError as error:
        raise QgateError(
            f"nothing can be removed from {str(place)!r}: {error.strerror}. A report replaces what "
            f"an earlier one wrote: give {other}. {error.filename} is left there."
        ) from None
    except OSError as error:
        raise QgateError(
            f"nothing can be written to {error.filename!r}: {error.strerror}. Give {other}."
        ) from None
    name = look.report_name
    if name != Path(name).name or name.startswith(".") or not name.isprintable():
        raise QgateError(f"output.report_name {name!r} is no plain name of a file.")
    return home


def read_record(path: Place | str) -> ActivationsRecord:
    """A record as `activations.json` keeps it; one of another kind or version is refused."""
    path = place_of(path)
    try:
        text = read_bytes(path, FileNotFoundError).decode("utf-8")
        told = json.loads(text, parse_constant=_no_number)
    except FileNotFoundError:
        raise QgateError(f"there is no record of activations at {str(path)!r}.") from None
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{str(path)!r} is no record of activations: {error}.") from None
    kind = told.get("kind") if isinstance(told, dict) else None
    if kind not in READABLE:
        if isinstance(kind, str) and kind.startswith(ACTIVATIONS.rstrip("0123456789")):
            raise QgateError(
                f"{str(path)!r} was written by another version of qgate: it is a {kind!r}, and "
                f"this one reads {ACTIVATIONS!r}. Use that version, or analyze the model again."
            )
        own = " qgate draw draws it." if kind in ANALYSES else ""
        raise QgateError(
            f"{str(path)!r} is no record of activations: its kind is {kind!r}, not "
            f"{ACTIVATIONS!r}.{own}"
        )
    missing = sorted(ActivationsRecord.__required_keys__ - told.keys())
    if missing:
        raise QgateError(f"{str(path)!r} is damaged: it has no {', '.join(missing)}.")
    told.pop("tables", None)
    try:
        of_type(ActivationsRecord)(told, "")
    except ValueError as error:
        raise QgateError(f"{str(path)!r} is damaged: {error}.") from None
    return cast(ActivationsRecord, told)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


@dataclass(frozen=True)
class _Names:
    """What this model's files are called: its stem, and if the plain names are its own."""

    stem: str
    plain: bool

    def picture(self, name: str, ending: str) -> str:
        return f"{self.stem}-{name}.{ending}"

    def file(self, name: str) -> str:
        return name if self.plain else f"{self.stem}-{name}"

    @property
    def listed(self) -> str:
        return f"{self.stem}{_LISTED}"


class _Writer:
    def __init__(
        self,
        record: ActivationsRecord,
        home: Folder,
        look: Look,
        progress: Progress | None,
    ) -> None:
        from qgate.activation_stats.plots.pictures import pictures

        self.record, self.home, self.look, self.progress = record, home, look, progress
        self.folder = home.place
        wanted = bool(look.pictures) or "html" in look.formats
        self.pictures = pictures(record, look) if wanted else []
        self.texts: dict[str, str] = {}
        if "json" in look.formats:
            self.texts[RECORD] = as_json(record)
        if "csv" in look.formats:
            self.texts |= csv_files(record)
        self.page = (
            f"{look.report_name.removesuffix('.html')}.html" if "html" in look.formats else ""
        )
        self.owners, self.taken = _owners(home), home.names()
        self.names = self._named()

    def write(self) -> list[Place]:
        before = {n for n, model in self.owners.items() if model == self.record["model"]}
        possible = self._possible(self.names)
        self._list({*before, *possible, self.names.listed})
        written: list[str] = []
        for name, text in self.texts.items():
            write_text(self.folder / self.names.file(name), text)
            written.append(self.names.file(name))
        failed: dict[str, str] = {}
        shown = self._draw(written, failed)
        if self.page:
            name = self.names.file(self.page)
            write_text(self.folder / name, page(self.record, shown, written, failed))
            written.insert(0, name)
        kept = {*written, self.names.listed}
        self.home.remove(*sorted(({*before, *possible} - kept) & {*files_in(self.home.fresh())}))
        self._list({*written, self.names.listed})
        if failed:
            first, why = next(iter(failed.items()))
            raise UndrawnError(
                f"{len(failed)} of {len(self.pictures)} pictures could not be drawn, the first is "
                f"{first}: {why}. All else is in {str(self.folder)!r}."
            )
        return [self.folder / name for name in written]

    def _draw(self, written: list[str], failed: dict[str, str]) -> list[EmbeddedPicture]:
        """The pictures one by one, so that there is never more than one in memory."""
        if not self.pictures:
            return []
        from qgate.activation_stats.plots.pictures import write

        shown = []
        for done, each in enumerate(self.pictures):
            files = [self.names.picture(each.name, ending) for ending in self.look.pictures]
            try:
                sheet = each.sheet()
                if sheet is not None:
                    draw = partial(write, sheet, dpi=self.look.dpi, page=bool(self.page))
                    with local_files([self.folder / name for name in files]) as paths:
                        told = draw(paths)
                    written += files
                    file = files[0] if files else each.name
                    shown.append(
                        EmbeddedPicture(each.section, file, sheet.title, each.about, *told)
                    )
            except OSError:
                raise
            except Exception as error:
                failed[each.name] = f"{type(error).__name__}: {error}"
            if self.progress is not None:
                self.progress(done + 1, len(self.pictures))
        return shown

    def _possible(self, names: _Names) -> list[str]:
        told = [names.file(name) for name in (*self.texts, self.page) if name]
        return told + [
            names.picture(each.name, ending)
            for each in self.pictures
            for ending in self.look.pictures
        ]

    def _named(self) -> _Names:
        """Names under which nothing of anybody else lies."""
        model = self.record["model"]
        stem = model_stem(model)
        for one in (stem, f"{clean(stem)}-{digest(model)}"):
            for plain in (True, False):
                names = _Names(one, plain)
                if not any(map(self._foreign, [*self._possible(names), names.listed])):
                    return names
        raise QgateError(
            f"{str(self.folder)!r} has files of another making under every name that {model!r} "
            "could use; give another folder (visualization.save_dir) or model.name."
        )

    def _foreign(self, name: str) -> bool:
        owner = self.owners.get(name)
        if owner is not None:
            return owner != self.record["model"]
        return name in self.taken

    def _list(self, names: Iterable[str]) -> None:
        told = {"kind": _KIND, "model": self.record["model"], "files": sorted(names)}
        write_text(self.folder / self.names.listed, json.dumps(told) + "\n")


def _owners(home: Folder) -> dict[str, str]:
    """Files of earlier reports with their models; only names inside the folder are believed."""
    found: dict[str, str] = {}
    for file in files_in(home):
        if not file.endswith(_LISTED):
            continue
        try:
            told = json.loads(home.read(file).decode("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(told, dict) and told.get("kind") == _KIND:
            files = told["files"] if isinstance(told.get("files"), list) else []
            names = [n for n in files if isinstance(n, str) and n == Path(n).name]
            found |= dict.fromkeys(names, str(told.get("model")))
    return found
