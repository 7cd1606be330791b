"""Results files read once, and written as a page, Markdown, CSV or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.loading import LateModule, without_collector
from qgate.page.pages import write_page
from qgate.page.runs import Run, run_of_records
from qgate.results.ci import markdown_summary
from qgate.results.files import effective_header, read, to_csv
from qgate.results.pictures import Plots
from qgate.results.summary import Tally, set_up_lines
from qgate.storage.access import write_text
from qgate.text import one_line

if TYPE_CHECKING:
    from qgate.page import _sections as sections
    from qgate.page import comparison_texts as comparison_texts
    from qgate.page import comparisons as comparisons
    from qgate.page import data as data
    from qgate.page.comparisons import ComparedRun, RunComparison
else:
    sections = LateModule("qgate.page._sections")
    comparison_texts = LateModule("qgate.page.comparison_texts")
    comparisons = LateModule("qgate.page.comparisons")
    data = LateModule("qgate.page.data")


ENDINGS = (".html", ".md", ".csv", ".json")


@dataclass(frozen=True)
class LoadedRun:
    """A results file in memory: its page content, its tally, and what comparisons need of it."""

    path: Path
    run: Run
    tally: Tally
    compared: ComparedRun | None

    @property
    def broken(self) -> list[str]:
        """Return why gates could not compare, and what could not be written."""
        return [*set_up_lines(self.run.broken), *self.run.errors]


def load(
    path: Path, name: str, *, compared: bool = False, brief: bool = False, drawn: bool = True
) -> LoadedRun:
    """Read a results file for what all outputs need; some of them read its records again.

    brief   keep no gates but what failed and what came nearest to its limit
    drawn   False for a run of whose gates no plot is shown
    """
    header, records = read(path, pictures=drawn)
    collected = comparisons.ComparedRun(name, header) if compared else None
    with without_collector():
        seen = collected.collecting(records) if collected else records
        run = run_of_records(header, seen, name, brief=brief)
    header = effective_header(header, records)
    if collected is not None:
        collected.header = header
    run = dataclasses.replace(run, torn=records.torn, header=header)
    return LoadedRun(path, run, run.tally, collected)


def write_report(
    output: Path,
    loaded: Sequence[LoadedRun],
    *,
    plots: Plots = "worst",
    comparison: RunComparison | None = None,
) -> None:
    """Write one file in the format that its ending names."""
    match output.suffix.lower():
        case ".html":
            if comparison is None:
                write_page(output, loaded[-1].run, plots=plots)
            else:
                write_comparison(output, [run.run for run in loaded], comparison, plots=plots)
        case ".md":
            write_text(output, markdown_report(loaded, comparison))
        case ".json":
            pairs = [(run.run, run.tally) for run in loaded]
            write_text(output, data.report_json(pairs, comparison))
        case _ if comparison is not None:
            write_text(output, data.comparison_csv(comparison))
        case _:
            to_csv(read(loaded[-1].path)[1], output)


def write_comparison(
    output: Path, runs: Sequence[Run], comparison: RunComparison, *, plots: Plots = "worst"
) -> None:
    """Write the page of the last run, led by its comparison with the run before.

    The comparison is made before, since runs keep only the worst of each gate.
    """
    section, lead = sections.comparison_section(comparison, runs), comparison_texts.diagnosis
    write_page(output, runs[-1], plots=plots, sections=[section], lead=lead(comparison))


def markdown_report(loaded: Sequence[LoadedRun], comparison: RunComparison | None = None) -> str:
    """Return the summary of the last run and the comparison, short enough for a comment."""
    last = loaded[-1]
    notes = [*last.broken, *([last.run.torn] if last.run.torn else [])]
    text = markdown_summary(last.tally, broken=notes, about=about(last.run), header=last.run.header)
    return (
        f"{text}\n{comparison_texts.comparison_markdown(comparison)}"
        if comparison is not None
        else text
    )


def about(run: Run) -> str:
    """Return `tiny-mamba on cpu, commit 37826b17608f, 2026-11-21T10:48:06+00:00`."""
    header = run.header
    models = ", ".join(header["models"]) or "no model"
    commit = f", commit {str(header['commit'])[:12]}" if header["commit"] else ""
    return one_line(f"{models} on {header['device']}{commit}, {header['started']}")
