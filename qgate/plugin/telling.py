"""What a run says on the terminal, to GitHub, and in the header of its report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qgate.plugin.dumping import dump_name
from qgate.plugin.options import (
    baselines_of,
    is_given,
    models_of,
    settings_of,
    shown_baselines,
    update_choice,
    value,
)
from qgate.plugin.parts import is_update
from qgate.plugin.selection import Selection
from qgate.text import one_line

if TYPE_CHECKING:
    from qgate.page.terminal import TerminalLine

_MOST = 20
_ANNOTATIONS = 50


@dataclass
class Told:
    """What the summary says beside the records.

    broken    tests whose set-up failed: node → first line
    errors    what could not be written
    crashed   workers that went down
    header    how the run ended, and which other tests failed
    idle      there were gates, and none of them compared anything
    underflow what --watch-underflow saw
    """

    selection: Selection = field(default_factory=Selection)
    broken: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    crashed: set[str] = field(default_factory=set)
    changes: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    underflow: list[str] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    updated: bool = False
    idle: bool = False
    folder: Path | None = None
    written: bool = False
    page: Path | None = None


def header_line(config: pytest.Config) -> str | None:
    """Modes, models, device and baselines; nothing in projects without gates."""
    names = ("mode", "model", "format", "baselines", "reference", "layers", "dump")
    if not (
        any(is_given(config, name) for name in names)
        or settings_of(config).source
        or baselines_of(config).is_dir()
    ):
        return None
    parts = [f"mode {','.join(value(config, 'mode'))}", f"model {', '.join(models_of(config))}"]
    if value(config, "reference") != "fp32":
        parts.append(f"reference {value(config, 'reference')}")
    folder = value(config, "dump")
    if folder is not None:
        parts.append(f"dump {folder} as {dump_name(config, config.invocation_params.dir / folder)}")
    parts += [f"device {value(config, 'device')}", f"baselines {shown_baselines(config)}"]
    if is_update(config):
        dry = config.getoption("qgate_update_dry_run")
        what = "update as a dry run" if dry else "updating baselines"
        parts.append(f"{what} ({update_choice(config)})")
    return f"qgate: {', '.join(parts)}"


def tell(
    reporter: Any, told: Told, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    """The section of the summary."""
    chosen = told.selection
    if chosen.refused:
        for reason in chosen.refused:
            reporter.write_line(one_line(f"ERROR: {reason}"), red=True)
        return
    heard = rows or told.broken or told.header
    if not (heard or chosen.notes or told.errors or told.idle or told.underflow):
        return
    config = reporter.config
    about = ", ".join(f"{name} on {of['device']}" for name, of in sorted(facts["models"].items()))
    reporter.section(one_line(f"qgate: {about or ', '.join(models_of(config))}"))
    width = reporter._tw.fullwidth
    for line in _lines(config, told, rows, width):
        reporter.write_line(line.text, **({line.color: True} if line.color else {}))
    for text in told.errors:
        reporter.write_line(one_line(f"ERROR: {text}"), red=True)
    tell_github(reporter, told, rows, about)


def _lines(
    config: pytest.Config, told: Told, rows: Sequence[Mapping[str, Any]], width: int
) -> list[TerminalLine]:
    from qgate.page.terminal import errors, plain, summary, wrong_lines
    from qgate.results import Tally
    from qgate.results.summary import set_up_lines

    tally = Tally(rows)
    show = summary if rows else wrong_lines
    lines = show(tally, width, told.header)
    lines += errors(_first(set_up_lines(told.broken)))
    return lines + plain(_sentences(config, told), width)


def _sentences(config: pytest.Config, told: Told) -> list[str]:
    """What else there is to say: notes, updates, and where the records are."""
    lines = list(told.selection.notes)
    if told.selection.empty:
        lines.append("no gate ran: no mode asked for fits")
    elif told.idle:
        lines.append("no gate ran: all of them were skipped")
    if told.updated:
        dry = config.getoption("qgate_update_dry_run")
        count = len(told.changes)
        lines.append(f"baselines: {count} entries {'would change' if dry else 'written'}")
        lines += [f"  {line}" for line in _first(told.changes)]
    elif is_update(config):
        lines.append("baselines: nothing written")
    if told.stale:
        named = ", ".join(told.stale)
        lines.append(f"stale until they are refreshed: the accepted errors of {named}")
    lines += [*told.unused, *told.underflow]
    if told.folder is not None and not told.errors:
        folder = os.path.relpath(told.folder, config.invocation_params.dir)
        lines.append(f"records in {folder}/results.jsonl and {folder}/results.csv")
        if told.page is not None:
            lines.append(f"report in {folder}/{told.page.name}")
    return lines


def _first(lines: list[str]) -> list[str]:
    rest = len(lines) - _MOST
    return [*lines[:_MOST], *([f"and {rest} more"] if rest > 0 else [])]


def tell_github(
    reporter: Any, told: Told, rows: Sequence[Mapping[str, Any]], about: str = ""
) -> None:
    """The summary of the step, and an annotation for every test that failed, worst first."""
    from qgate.results import github_annotation, github_error, markdown_summary, worst_first
    from qgate.results.others import other_lines, others_of
    from qgate.results.summary import set_up_lines

    broken = [*set_up_lines(told.broken), *told.errors]
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(markdown_summary(rows, broken=broken, about=about, header=told.header))
        except OSError as error:
            reporter.write_line(f"GITHUB_STEP_SUMMARY could not be written: {error}", red=True)
    if os.environ.get("GITHUB_ACTIONS"):
        worst: dict[str, Mapping[str, Any]] = {}
        for row in worst_first(rows):
            worst.setdefault(row["node"], row)
        other = other_lines(others_of(told.header), _MOST)
        lines = [github_error(text) for text in [*broken, *other]]
        lines += [line for row in worst.values() if (line := github_annotation(row))]
        for line in lines[:_ANNOTATIONS]:
            reporter.write_line(line)


def is_complete(config: pytest.Config, told: Told) -> bool:
    """Whether everything that the options mean ran: only then is anything unused."""
    option = config.option
    narrowed = ("keyword", "markexpr", "lf", "last_failed", "stepwise", "deselect", "ignore",
                "ignore_glob", "maxfail", "splits")  # fmt: skip
    return not (
        any(getattr(option, name, None) for name in narrowed)
        or any("::" in str(arg) for arg in config.args)
        or value(config, "layers") != "all"
        or told.broken
        or told.crashed
    )


def unused_lines(config: pytest.Config, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accepted errors of the modes that ran which nothing measured."""
    from qgate.baselines import Store, unused
    from qgate.results import measured_places

    lines = []
    for model, modes in measured_places(rows).items():
        for mode, keys in unused(Store(baselines_of(config), model), modes).items():
            lines.append(
                f"unused: {len(keys)} accepted errors of {model} {mode}, such as {keys[0]}: "
                "`qgate baselines prune --results qgate-out/results.jsonl` removes them"
            )
    return lines
