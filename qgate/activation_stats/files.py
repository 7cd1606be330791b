"""Writes page, pictures and tables of a record of activations below one folder or URL.

Each model has a list of its files, `MODEL-written.json`, written before they are: the next run of
that model replaces and removes these and no others, also after a kill. Another model in the same
folder gets names of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from qgate.activation_stats.page import page
from qgate.activation_stats.reading import clean, digest, model_stem
from qgate.activation_stats.record import ACTIVATIONS, ActivationsRecord
from qgate.activation_stats.settings import ActivationSettings, report_settings
from qgate.activation_stats.tables import as_json, csv_files
from qgate.charts.reports import PagePicture
from qgate.errors import QgateError
from qgate.interruptions import raise_interruption
from qgate.storage.access import folder_of, local_files, write_text
from qgate.storage.folders import Folder, NotRemovedError, files_in
from qgate.storage.foreign import read_foreign_text
from qgate.storage.locations import check_writable, location_of
from qgate.storage.written_files import list_of, list_text
from qgate.summaries.reading import check_analysis

if TYPE_CHECKING:
    from qgate.activation_stats.plots.pictures import ActivationPicture
    from qgate.storage.locations import Location

Progress = Callable[[int, int], None]
RECORD, _LISTED, _KIND = "activations.json", "-written.json", "qgate activation report 1"


class UndrawnError(QgateError):
    """A picture failed, and the other files are written."""


def write_report(
    record: ActivationsRecord,
    folder: Location | str,
    options: ActivationSettings | None = None,
    progress: Progress | None = None,
) -> list[Location]:
    """Write the files of a report, and return their paths, the page first.

    The options default to those of the run (`record["settings"]`). `progress` gets the number of
    pictures that are done, and of all.
    """
    options = report_settings(record["settings"]) if options is None else options
    home = check_folder(folder, options)
    home.make()
    return _Writer(record, home, options, progress).write()


def check_folder(folder: Location | str, options: ActivationSettings) -> Folder:
    """Refuse a folder that no report can be written to, before the run."""
    location = location_of(folder)
    check_writable(location)
    home, other = folder_of(location), "another folder (--visualization.save_dir)"
    try:
        home.try_writing(f".probe-{time.time_ns()}")
    except NotADirectoryError as error:
        raise QgateError(
            f"{error.filename!r} is a file; give a folder to write to (save_dir)."
        ) from None
    except NotRemovedError as error:
        raise QgateError(
            f"nothing can be removed from {str(location)!r}: {error.strerror}. A report replaces "
            f"what an earlier one wrote: give {other}. {error.filename} is left there."
        ) from None
    except OSError as error:
        raise QgateError(
            f"nothing can be written to {error.filename!r}: {error.strerror}. Give {other}."
        ) from None
    name = options.output.report_name
    if name != Path(name).name or name.startswith(".") or not name.isprintable():
        raise QgateError(f"output.report_name {name!r} is no plain name of a file.")
    return home


def read_record(path: Location | str) -> ActivationsRecord:
    """Read a record from `activations.json`; another kind or version is refused."""
    path = location_of(path)
    try:
        text = read_foreign_text(path, "records")
        content = json.loads(text, parse_constant=_no_number)
    except FileNotFoundError:
        raise QgateError(f"there is no record of activations at {str(path)!r}.") from None
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{str(path)!r} is no record of activations: {error}.") from None
    check_analysis(
        content, str(path), ActivationsRecord, ACTIVATIONS, what="record of activations",
        subject="model",
    )  # fmt: skip
    content.pop("tables", None)
    return cast(ActivationsRecord, content)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


class _Writer:
    """Writes the files of one model. Names begin with its stem, and a hash of the model where these
    names are taken; `plain` names have no stem."""

    def __init__(
        self,
        record: ActivationsRecord,
        home: Folder,
        options: ActivationSettings,
        progress: Progress | None,
    ) -> None:
        from qgate.activation_stats.plots.pictures import pictures

        self.record, self.home, self.options, self.progress = record, home, options, progress
        self.folder = home.location
        output = options.output
        needs_pictures = bool(output.pictures) or "html" in output.formats
        self.pictures = pictures(record, options.visualization) if needs_pictures else []
        self.texts: dict[str, str] = {}
        if "json" in output.formats:
            self.texts[RECORD] = as_json(record)
        if "csv" in output.formats:
            self.texts |= csv_files(record)
        page = f"{output.report_name.removesuffix('.html')}.html"
        self.page = page if "html" in output.formats else ""
        self.owners, existing = _owners(home), home.names()
        model = record["model"]
        stem = model_stem(model)
        for self.stem in (stem, f"{clean(stem)}-{digest(model)}"):
            for self.plain in (True, False):
                names = {*self._possible(), self._listed}
                if not any(self.owners.get(n, model) != model for n in names) and not any(
                    n in existing and n not in self.owners for n in names
                ):
                    return
        raise QgateError(
            f"{str(self.folder)!r} has files of another making under every name that {model!r} "
            "could use; give another folder (visualization.save_dir) or model.name."
        )

    @property
    def _listed(self) -> str:
        return f"{self.stem}{_LISTED}"

    def _named(self, name: str) -> str:
        return name if self.plain else f"{self.stem}-{name}"

    def _picture_files(self, picture: ActivationPicture) -> list[str]:
        return [f"{self.stem}-{picture.name}.{ending}" for ending in self.options.output.pictures]

    def _possible(self) -> list[str]:
        names = [self._named(name) for name in (*self.texts, self.page) if name]
        return names + [name for picture in self.pictures for name in self._picture_files(picture)]

    def write(self) -> list[Location]:
        before = {n for n, model in self.owners.items() if model == self.record["model"]}
        possible = self._possible()
        self._list({*before, *possible, self._listed})
        written: list[str] = []
        for name, text in self.texts.items():
            write_text(self.folder / self._named(name), text)
            written.append(self._named(name))
        failed: dict[str, str] = {}
        pictures = self._draw(written, failed)
        if self.page:
            name = self._named(self.page)
            write_text(self.folder / name, page(self.record, pictures, written, failed))
            written.insert(0, name)
        current = {*written, self._listed}
        self.home.remove(*sorted(({*before, *possible} - current) & {*files_in(self.home.fresh())}))
        self._list(current)
        if failed:
            first, why = next(iter(failed.items()))
            raise UndrawnError(
                f"{len(failed)} of {len(self.pictures)} pictures could not be drawn, the first is "
                f"{first}: {why}. All else is in {str(self.folder)!r}."
            )
        return [self.folder / name for name in written]

    def _draw(self, written: list[str], failed: dict[str, str]) -> dict[str, list[PagePicture]]:
        """Draw the pictures one by one, so that memory holds one at a time."""
        pictures: dict[str, list[PagePicture]] = {}
        for done, picture in enumerate(self.pictures, 1):
            files = self._picture_files(picture)
            try:
                sheet = picture.sheet()
                if sheet is not None:
                    with local_files([self.folder / name for name in files]) as paths:
                        picture.write(sheet, paths, dpi=self.options.visualization.dpi)
                    written += files
                    if self.page:
                        file = files[0] if files else ""
                        about = (file, sheet.title, picture.about, sheet.svg(), sheet.width)
                        pictures.setdefault(picture.section, []).append(PagePicture(*about))
            except OSError:
                raise
            except Exception as error:
                raise_interruption()
                failed[picture.name] = f"{type(error).__name__}: {error}"
            if self.progress is not None:
                self.progress(done, len(self.pictures))
        return pictures

    def _list(self, names: Iterable[str]) -> None:
        text = list_text(_KIND, names, model=self.record["model"])
        write_text(self.folder / self._listed, text)


def _owners(home: Folder) -> dict[str, str]:
    """Return the model of each file of earlier reports; only names inside the folder count."""
    owners: dict[str, str] = {}
    for file in files_in(home):
        if not file.endswith(_LISTED):
            continue
        try:
            listed = list_of(home.read(file).decode("utf-8"), _KIND)
        except (OSError, UnicodeDecodeError):
            continue
        if listed is not None:
            owners |= dict.fromkeys(listed.files, listed.model)
    return owners
