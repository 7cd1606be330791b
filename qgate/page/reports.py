"""Results files as people get them: read once, and written as a page, Markdown, CSV or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qgate.page._sections import comparison_section, trend_section
from qgate.page.comparison_texts import comparison_markdown
from qgate.page.comparisons import RunComparison, Side
from qgate.page.data import comparison_csv, report_json
from qgate.page.history import Point
from qgate.page.pages import page
from qgate.page.runs import Run, run_of_records
from qgate.results.ci import markdown_summary
from qgate.results.pictures import Plots
from qgate.results.reading import read, told_of
from qgate.results.summary import Tally, set_up_lines
from qgate.results.table import to_csv
from qgate.storage.writing import write_text
from qgate.text import one_line

ENDINGS = (".html", ".md", ".csv", ".json")


@dataclass(frozen=True)
class Loaded:
    """A results file, read: what a page shows of it, what tables say, what others compare."""

    path: Path
    run: Run
    tally: Tally
    side: Side | None

    @property
    def broken(self) -> list[str]:
        """What kept gates from comparing, and what could not be written."""
        return [*set_up_lines(self.run.broken), *self.run.errors]


def load(path: Path, name: str, *, compared: bool = False) -> Loaded:
    """Read a file once for all that is made of it."""
    header, records = read(path)
    tally = Tally()
    side = Side(name, header) if compared else None
    watched = tally.watching(records)
    run = run_of_records(header, side.watching(watched) if side else watched, name)
    told = told_of(header, records)
    if side is not None:
        side.header = told
    return Loaded(path, dataclasses.replace(run, torn=records.torn, header=told), tally, side)


def write_report(
    output: Path,
    loaded: Sequence[Loaded],
    *,
    plots: Plots = "worst",
    comparison: RunComparison | None = None,
    history: Sequence[Point] = (),
) -> None:
    """One file; its ending says what it is."""
    match output.suffix.lower():
        case ".html":
            runs = [each.run for each in loaded]
            write_page(output, runs, plots=plots, history=history, comparison=comparison)
        case ".md":
            write_text(output, markdown_report(loaded, comparison))
        case ".json":
            pairs = [(each.run, each.tally) for each in loaded]
            write_text(output, report_json(pairs, comparison, history))
        case _ if comparison is not None:
            write_text(output, comparison_csv(comparison))
        case _:
            to_csv(read(loaded[-1].path)[1], output)


def write_page(
    output: Path,
    runs: Sequence[Run],
    *,
    plots: Plots = "worst",
    history: Sequence[Point] = (),
    comparison: RunComparison | None = None,
) -> None:
    """The page of a run, of several that of the last: one says what a change did by showing what
    came of it. A comparison has to be given, since runs keep only the worst of each gate."""
    sections = []
    if comparison is not None or history:
        if comparison is not None:
            sections.append(comparison_section(comparison))
        if history:
            sections.append(trend_section(history))
    write_text(output, page(runs[-1], plots=plots, sections=sections))


def markdown_report(loaded: Sequence[Loaded], comparison: RunComparison | None = None) -> str:
    """The summary of the last run, and what is different in it; less than a comment may have."""
    last = loaded[-1]
    notes = [*last.broken, *([last.run.torn] if last.run.torn else [])]
    text = markdown_summary(last.tally, broken=notes, about=about(last.run), header=last.run.header)
    return f"{text}\n{comparison_markdown(comparison)}" if comparison is not None else text


def about(run: Run) -> str:
    """`tiny-mamba on cpu, commit 37826b17608f, 2026-11-21T10:48:06+00:00`."""
    header = run.header
    models = ", ".join(header["models"]) or "no model"
    commit = f", commit {str(header['commit'])[:12]}" if header["commit"] else ""
    return one_line(f"{models} on {header['device']}{commit}, {header['started']}")
