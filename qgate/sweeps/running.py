"""Run sweeps over files, in this process or by workers, and continue after a kill."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, TypedDict

from qgate._version import __version__
from qgate.dumps.tensor_files import split_spec
from qgate.engine import Failure, Workers, map_items
from qgate.engine.journal import Journal
from qgate.errors import QgateError
from qgate.storage.access import write_bytes, write_text
from qgate.storage.locations import file_key, local_folder, location_of
from qgate.sweeps.answers import answer_lines
from qgate.sweeps.files import folder_for, safe_name, write
from qgate.sweeps.findings import SweptFormat, entry_of
from qgate.sweeps.page import FAILED_PAGE, OTHER_PAGE, PAGE, write_page
from qgate.sweeps.record import SweepView
from qgate.sweeps.requests import FilePart, Swept, parts_of, sweep_part, sweep_whole_part
from qgate.sweeps.settings import SweepSettings
from qgate.sweeps.tables import THICK, THIN, title
from qgate.sweeps.texts import answer, lines
from qgate.text import counted, one_line

if TYPE_CHECKING:
    from qgate.storage.locations import Location


class SweptFile(TypedDict):
    """Results of one file for the summary of a run; an unfinished run stores them."""

    results: list[tuple[str, str | None]]
    """All tensors, with a reason where one did not pass."""
    answers: list[str]
    entries: list[SweptFormat]
    folders: list[str]


@dataclass(frozen=True)
class SweepOutcome:
    """A whole run: all tensors, with a reason for those that failed, and the entries of the page.

    `page` is None where it could not be written, and then the run did not pass.
    """

    passed: bool
    results: list[tuple[str, str | None]]
    entries: list[SweptFormat]
    page: Location | None
    trouble: str = ""
    """Why there is no page."""


class SweepRun:
    """A run of one request over files, with results in one folder.

    `say` prints lines: those of the logs and a summary if `verbose`, else the answer alone, in
    `width` columns.
    """

    def __init__(
        self,
        request: SweepSettings,
        root: Location,
        say: Callable[..., None],
        *,
        verbose: bool = False,
        width: int = 80,
    ) -> None:
        self.request, self.root, self.say, self.width = request, root, say, width
        self.log: Callable[..., None] = say if verbose else lambda *_lines: None
        """Prints what the logs have, too."""
        self.verbose = verbose
        self._used = [root / name for name in (PAGE, OTHER_PAGE, FAILED_PAGE)]
        self._lost = False

    def sweep(
        self, specs: Sequence[str], workers: Workers, step: Callable[[int, int], object]
    ) -> SweepOutcome:
        """Sweep files and write all results."""
        log = self.log
        log(f"Processing {counted(len(specs), 'file')}...", THICK)
        swept: list[SweptFile] = []
        for number, (spec, texts, file) in enumerate(self._files(specs, workers), 1):
            log("", f"[{number}/{len(specs)}] Processing: {one_line(spec)}", THIN, *texts)
            swept.append(file)
            step(number, len(specs))
        results = [result for file in swept for result in file["results"]]
        entries = [entry for file in swept for entry in file["entries"]]
        page: Location | None = None
        trouble = ""
        try:
            page = write_page(self.root, entries, results, settings_text(self.request))
        except OSError as error:
            trouble = f"FAILED: cannot write the page of the results: {error}"
        if self.verbose:
            answers = [text for file in swept for text in file["answers"]]
            self._summarize(results, answers, trouble or f"Page: {page}")
        else:
            self.say(*answer_lines(entries, results, self.width, trouble or str(page)))
        bad = any(reason for _, reason in results)
        return SweepOutcome(not bad and page is not None, results, entries, page, trouble)

    def _summarize(
        self, results: Sequence[tuple[str, str | None]], answers: Sequence[str], end: str
    ) -> None:
        bad = [(name, reason) for name, reason in results if reason]
        self.say("", *title("FINAL SUMMARY"), f"Total tensors: {len(results)}")
        self.say(f"Successful: {len(results) - len(bad)}", f"Failed: {len(bad)}")
        self.say(*([] if bad else ["All tests completed successfully!"]), *answers)
        self.say(*(f"FAILED {name}: {reason}" for name, reason in bad), end)

    def _files(
        self, specs: Sequence[str], workers: Workers
    ) -> Iterator[tuple[str, list[str], SweptFile]]:
        """Yield files in their order, with lines on each; reuse those of an unfinished run.

        The journal is removed when every file has been swept. It stays after a process ended, so
        that the same command tries its files again.
        """
        identity = [__version__, asdict(self.request), specs, str(self.root)]
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            opened = Journal(local_folder(self.root), identity)
        except OSError as error:
            raise QgateError(
                f"results cannot be written to {str(self.root)!r}: {error.strerror or error}. Name "
                "another folder with --output-dir."
            ) from None
        with opened as journal:
            keys = {spec: _key(spec) for spec in specs}
            done = {spec for spec in specs if _is_done(journal, keys[spec])}
            parts = _swept([spec for spec in specs if spec not in done], self.request, workers)
            for spec in specs:
                if spec in done:
                    file: SweptFile = journal.result(keys[spec])
                    self._used += map(location_of, file["folders"])
                    names = [name for name, _ in file["results"]]
                    yield spec, [f"Swept before, and not again: {name}" for name in names], file
                    continue
                file, texts, lost = self._written(next(parts))
                self._lost |= lost
                if not lost:
                    journal.record(keys[spec], file)
                yield spec, texts, file
            if not self._lost:
                journal.finish()

    def _written(self, parts: Iterable[Swept]) -> tuple[SweptFile, list[str], bool]:
        """Write the results of a file; return them, lines, and whether a part of it is lost."""
        file: SweptFile = {"results": [], "answers": [], "entries": [], "folders": []}
        texts: list[str] = []
        lost = False
        for swept in parts:
            lost |= swept.lost
            name, reason = swept.source, swept.failed or ""
            if swept.records:
                try:
                    texts += self._write(swept, file)
                except OSError as error:
                    reason = f"cannot write the results: {error}"
            reason = reason or swept.undrawn
            failed = f"Failed: {one_line(name)}: {reason}"
            texts.append(failed if reason else f"Successfully processed: {one_line(name)}")
            file["results"].append((name, reason or None))
        return file, texts, lost

    def _write(self, swept: Swept, file: SweptFile) -> list[str]:
        """Write the files of a tensor, and return the lines of the logs for the console."""
        name = safe_name(swept.name)
        folder = folder_for(self.root, name, swept.source, self._used)
        self._used.append(folder)
        file["folders"].append(str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        console: list[str] = []
        logs: dict[str, list[str]] = {}
        entries: list[SweptFormat] = []
        pictures_of = swept.pictures or [{} for _ in swept.records]
        for record, pictures in zip(swept.records, pictures_of, strict=True):
            start = _stamp()
            paths = write(folder, record)
            for picture, data in pictures.items():
                write_bytes(folder / picture, data)
                paths.append(folder / picture)
            entries.append(entry_of(record, folder.name, [path.name for path in paths]))
            saved = [f"  {one_line(path)}" for path in paths]
            texts = [*lines(record), "Results saved to:", *saved, ""]
            log = logs.setdefault(f"{SweepView(record).stem(f'scaling_test_{name}')}.log", [])
            log += [f"{start} - {text}" for text in texts]
            console += texts
        for log_name, stamped in logs.items():
            write_text(folder / log_name, "\n".join([*stamped, f"{_stamp()} - end"]) + "\n")
            console.append(f"Log: {one_line(folder / log_name)}")
        file["entries"] += entries
        file["answers"] += [answer(swept.source, record) for record in swept.records]
        return console


def settings_text(request: SweepSettings) -> str:
    """Write the settings that change the results, in the words of the options."""
    parts = [f"{request.levels} levels", f"{request.alignment} alignment"]
    parts += [f"exponents to {request.max_exp:g}"] if request.max_exp is not None else []
    parts += [f"exponents from {request.min_exp:g}"] if request.min_exp is not None else []
    parts += [f"blocks of {request.block} along axis {request.axis}"]
    parts += [f"scales of {request.scale_bits} bits"]
    parts += [f"32-bit tensors and integers rounded to {request.via}"] if request.via else []
    return ", ".join(parts)


def _key(spec: str) -> str:
    path, key = split_spec(spec)
    return f"{file_key(path)} {key or ''}"


def _is_done(journal: Journal, key: str) -> bool:
    """Tell whether a file was swept and passed, and its results still exist."""
    if key not in journal:
        return False
    file: SweptFile = journal.result(key)
    failed = any(reason for _, reason in file["results"])
    return not failed and all(location_of(folder).is_dir() for folder in file["folders"])


def _swept(
    specs: Sequence[str], request: SweepSettings, workers: Workers
) -> Iterator[Iterable[Swept]]:
    """Yield the results of each file, and the parts of it that were lost with a process."""
    if workers.is_here:
        for spec in specs:
            yield sweep_part(FilePart(spec), request)
        return
    pending: deque[list[FilePart]] = deque()

    def parts() -> Iterator[FilePart]:
        for spec in specs:
            pending.append(parts_of(spec))
            yield from pending[-1]

    results = map_items(sweep_whole_part, parts(), workers, shared=request)
    for _ in specs:
        first = next(results)
        yield _joined(pending.popleft(), itertools.chain([first], results))


def _joined(parts: list[FilePart], results: Iterator[list[Swept] | Failure]) -> Iterator[Swept]:
    for part, swept in zip(parts, results, strict=False):
        if isinstance(swept, list):
            yield from swept
        else:
            yield Swept(str(part), str(part), error=swept.reason, lost=True)


def _stamp() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")
