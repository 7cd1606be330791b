"""Facts of a run beside its gates: how parts of a run join, and what its end and its page say.

A new fact is one literal here: the terminal, Markdown, the page and merged files follow the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from qgate.results.across_weights import across_weights_texts, add_across_weights
from qgate.results.extent import (
    add_extents,
    cause_text,
    coverage_in,
    covered_texts,
    extent_of,
    extent_text,
    is_partial,
    partial_text,
    shapes_texts,
    undeclared_texts,
)
from qgate.results.met_shapes import shapes_text
from qgate.results.power import DEFECT_WORDS, KINDS, add_power, power_of, power_texts, size_text
from qgate.results.schema import LooserLimit
from qgate.results.tasks import (
    BLIND,
    TASK_HEADS,
    add_tasks,
    task_cells,
    task_texts,
    tasks_of,
    tasks_texts,
)
from qgate.text import counted, listed, shortened, times_figure

Header = Mapping[str, Any]
Tone = Literal["", "note", "warn"]
_LOOSEST, _PLACES, _NAMES = 3, 12, 6
_POWER = (
    "The smallest defect of each kind that the limits in force see at every site, with the site "
    "where they see least."
)
_SHAPES = (
    "The shapes of inputs that each quantized module took in this run, alone and in the model; "
    "modules that met the same stand in one row."
)
_LOOSER = "Limits that are looser than the default, or than a bound set before them"


class FactTable(NamedTuple):
    """A section of a page with one table; a cell is a figure, and what stands small below it.

    total   what the link to the section counts; 0 for nothing
    words   the columns are words, and no figures
    folded  it is no news
    """

    anchor: str
    title: str
    about: str
    heads: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str]]]
    total: int = 0
    words: bool = False
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class RunFact:
    """A fact in the header of a run.

    key      the field of the header; empty for one that is a part of another
    merge    joins what two parts of a run say of it
    lines    its sentences
    brief    its sentences without names, for one who does not ask for all
    tone     a warning, which no plainly green run has, a note, or nothing of both
    table    its section on the page; None where there is nothing to show
    is_long  only who asks for all sees its sentences
    """

    key: str = ""
    merge: Callable[[Any, Any], Any] | None = None
    lines: Callable[[Header], Sequence[str]]
    brief: Callable[[Header], Sequence[str]] | None = None
    tone: Tone | Callable[[Header], Tone] = ""
    table: Callable[[Header], FactTable | None] | None = None
    is_long: bool = False

    def tone_of(self, header: Header) -> Tone:
        """Return the tone of its sentences in one run; none where the header lacks the field."""
        if not isinstance(self.tone, str):
            return self.tone(header)
        return self.tone if not self.key or header.get(self.key) else ""


def fact_tables(header: Header) -> list[FactTable]:
    """Return the sections of the page of a run that have anything to show."""
    tables = (fact.table(header) for fact in RUN_FACTS if fact.table is not None)
    return [table for table in tables if table is not None]


def _plain(*cells: str) -> list[tuple[str, str]]:
    return [(cell, "") for cell in cells]


def _extent_tone(header: Header) -> Tone:
    return "warn" if is_partial(extent_of(header)) else ""


def _extent_lines(header: Header) -> list[str]:
    """Write how many gates were held; a partial run that fails for it has an error that says so."""
    return [] if partial_text(header) else [*filter(None, [extent_text(header)])]


def _brief_extent_lines(header: Header) -> list[str]:
    return [] if partial_text(header) else [*filter(None, [extent_text(header, names=False)])]


def _omitted(header: Header) -> FactTable | None:
    """List the gates that were not held, one row per reason, model and mode."""
    extent = extent_of(header)
    if extent is None or not is_partial(extent):
        return None
    rows = [
        _plain(
            cause_text(group["cause"], group["reason"]),
            " ".join(filter(None, [group["model"], group["mode"]])),
            listed(group["places"], _PLACES),
            f"{group['gates']:,}" if group["gates"] else "–",
        )
        for group in extent["omitted"]
    ]
    judged, gates = extent["judged"], extent["gates"]
    about = f"{judged:,} of {gates:,} gates within the modes asked for were held."
    title = "Gates that were not held" if gates > judged else "What no gate compares"
    heads = "why", "mode", "layers and suites", "gates"
    return FactTable("omitted", title, about, heads, rows, gates - judged, words=True)


def _power(header: Header) -> FactTable | None:
    """List the smallest defects that limits see: one row per mode, one column per kind."""
    modes = power_of(header)
    # A model has one task: text, or a metric of its own.
    measured = {defect["kind"] for mode in modes for defect in mode["defects"]}
    kinds = [kind for kind in KINDS if kind in measured or DEFECT_WORDS[kind].is_usual]
    rows = []
    for mode in modes:
        defects = {defect["kind"]: defect for defect in mode["defects"]}
        cells = [
            (size_text(kind, defects[kind]["size"]), defects[kind]["site"])
            if kind in defects
            else ("–", "")
            for kind in kinds
        ]
        rows.append([(f"{mode['model']} {mode['mode']}", ""), *cells])
    heads = ["mode", *(DEFECT_WORDS[kind].head for kind in kinds)]
    return FactTable("power", "Smallest defects seen", _POWER, heads, rows) if rows else None


def _shapes(header: Header) -> FactTable | None:
    """List the shapes that quantized modules met: rows of those that met the same."""
    rows = [
        [
            (f"{of['model']} {of['mode']}", ""),
            (counted(group["count"], "module"), listed(group["modules"], _NAMES)),
            *_plain(shapes_text(group), ", ".join(group["never"]) or "–"),
        ]
        for of in coverage_in(header)
        for group in of.get("shapes") or []
    ]
    heads = "mode", "modules", "met", "never met"
    about = ("shapes", "Shapes that modules met", _SHAPES)
    return FactTable(*about, heads, rows, words=True) if rows else None


def _tasks(header: Header) -> FactTable | None:
    """List the figures of the task beside the reference's: one row per mode."""
    tasks = tasks_of(header)
    rows = [_plain(f"{task['model']} {task['mode']}", *task_cells(task)) for task in tasks]
    about = ". ".join([*tasks_texts(tasks), f"{BLIND}."])
    title = "The task beside the reference"
    return FactTable("tasks", title, about, ["mode", *TASK_HEADS], rows) if rows else None


# Looser limits ------------------------------------------------------------------------------------


def looser_limits(limits: Iterable[LooserLimit]) -> list[LooserLimit]:
    """Return limits of all processes, each once, the loosest first, shipped ones last."""
    unique: list[LooserLimit] = []
    for limit in limits:
        if limit not in unique:
            unique.append(limit)
    return sorted(unique, key=lambda limit: (limit["shipped"], -_factor(limit)))


def _factor(limit: LooserLimit) -> float:
    """Return how many times looser a limit is; infinite for one that is gone."""
    return math.inf if limit["factor"] is None else limit["factor"]


def looser_texts(header: Header) -> list[str]:
    """Write `2 limits are looser than the default: regression 1 (50x, SOURCE: REASON); ...`.

    Limits of the shipped suites are no news; the page has them.
    """
    limits = [limit for limit in looser_limits(header.get("looser") or []) if not limit["shipped"]]
    if not limits:
        return []
    verb = "is" if len(limits) == 1 else "are"
    more = f"; and {len(limits) - _LOOSEST} more in the report" * (len(limits) > _LOOSEST)
    loosest = "; ".join(
        f"{limit['limit']} {_value_text(limit)} ({_factor_text(limit)}, {limit['source']}: "
        f"{limit['reason'] or 'no reason'})"
        for limit in limits[:_LOOSEST]
    )
    return [f"{counted(len(limits), 'limit')} {verb} looser than the default: {loosest}{more}"]


def _value_text(limit: LooserLimit) -> str:
    return "none" if limit["value"] is None else f"{limit['value']:g}"


def _factor_text(limit: LooserLimit) -> str:
    factor = _factor(limit)
    return f"{times_figure(factor)}x" if math.isfinite(factor) else "no limit"


def _looser(header: Header) -> FactTable | None:
    """List looser limits: those of the project, then those of shipped suites."""
    limits = looser_limits(header.get("looser") or [])
    own = sum(not limit["shipped"] for limit in limits)
    rows = [
        _plain(
            limit["limit"], _value_text(limit), f"{limit['usual']:g}", _factor_text(limit),
            shortened(limit["reason"] or "–", 200), limit["source"], _places_text(limit),
        )
        for limit in limits
    ]  # fmt: skip
    about = f"{_LOOSER}: {own:,} set by this project, {len(rows) - own:,} by the suites of qgate."
    heads = "limit", "value", "usual", "looser by", "reason", "set by", "for"
    title = "Looser limits"
    return FactTable("looser", title, about, heads, rows, own, folded=not own) if rows else None


def _places_text(limit: LooserLimit) -> str:
    """Write the sites, modes, models and scopes of a limit; `all` without any."""
    kinds = (("modes", limit["modes"]), ("models", limit["models"]), ("scopes", limit["scopes"]))
    parts = [f"sites {limit['sites']}" if limit["sites"] else ""]
    parts += [f"{kind} {', '.join(names)}" for kind, names in kinds if names]
    return shortened("; ".join(filter(None, parts)) or "all", 120)


RUN_FACTS: tuple[RunFact, ...] = (
    RunFact(
        key="extent", merge=add_extents, lines=_extent_lines, brief=_brief_extent_lines,
        tone=_extent_tone, table=_omitted,
    ),
    RunFact(
        key="across_weights", merge=add_across_weights, lines=across_weights_texts, tone="warn",
    ),
    RunFact(lines=covered_texts, tone=_extent_tone),
    RunFact(lines=undeclared_texts, tone="note"),
    RunFact(
        key="looser", merge=lambda one, other: looser_limits([*one, *other]),
        tone=lambda header: "warn" if looser_texts(header) else "", lines=looser_texts,
        table=_looser,
    ),
    RunFact(key="power", merge=add_power, lines=power_texts, table=_power),
    RunFact(lines=shapes_texts, table=_shapes, is_long=True),
    RunFact(key="tasks", merge=add_tasks, lines=task_texts, table=_tasks),
)  # fmt: skip
"""All facts, in the order of their sentences."""
