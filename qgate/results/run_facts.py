"""Facts of a run beside its gates: how parts of a run join, and what its end and its page say.

A new fact is one literal here: the terminal, Markdown, the page and merged files follow the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, get_args

from qgate.records import Meta
from qgate.results.coverage import (
    add_extents,
    cause_text,
    coverage_in,
    covered_texts,
    extent_of,
    extent_text,
    is_partial,
    partial_text,
    shapes_text,
    shapes_texts,
    undeclared_texts,
)
from qgate.results.pictures import Count
from qgate.text import beginning, counted, listed, shortened, times_figure
from qgate.text.wording import brief, percent

# The task beside the reference's ------------------------------------------------------------------

MARGINS: Mapping[str, float] = {"mlperf-99": 0.99, "mlperf-99.9": 0.999}
"""MLPerf's accuracy targets, as shares of the reference's accuracy."""
BLIND = (
    "MLPerf's margins count right answers alone: they do not see those that are lost where others "
    "are gained, nor probabilities that move without changing an answer"
)
TASK_HEADS = (
    "smallest change that shows", "KL (nats)", "99 %", "99.9 %", "another first token",
    "right ones lost", "right ones gained", "perplexity", "accuracy kept", "MLPerf 99 %",
    "MLPerf 99.9 %",
)  # fmt: skip


class TaskSummary(TypedDict):
    """Figures of the task of a model in one mode, beside those of the reference.

    metric            the name of the model's own metric; empty where next tokens are predicted
    detectable        smallest change of the figure (bits per byte, or the metric) that a paired
                      test of these samples tells from none in 80 % of runs
    kl                mean over tokens of KL(reference | mode) in nats, with its standard error
    flips             share of tokens at which another token is the most likely one
    lost, gained      share of tokens that only the reference, or only the mode, predicts first
    kept              accuracy, or the metric, as a share of the reference's; kept_low is the lower
                      end of its 95 % interval, kept_detectable the smallest change that shows
    """

    model: str
    mode: str
    reference: str
    metric: str
    samples: int
    tokens: int
    detectable: NotRequired[float]
    kl: NotRequired[float]
    kl_error: NotRequired[float]
    kl_q99: NotRequired[float]
    kl_q999: NotRequired[float]
    flips: NotRequired[float]
    lost: NotRequired[float]
    gained: NotRequired[float]
    perplexity_ratio: NotRequired[float]
    figure: NotRequired[float]
    figure_reference: NotRequired[float]
    kept: NotRequired[float]
    kept_low: NotRequired[float]
    kept_detectable: NotRequired[float]


def add_tasks(one: Sequence[TaskSummary], other: Sequence[TaskSummary]) -> list[TaskSummary]:
    """Join two parts of a run; each mode of a model has one task."""
    joined = {(task["model"], task["mode"]): task for task in (*one, *other)}
    return [*joined.values()]


def tasks_of(header: Mapping[str, object]) -> list[TaskSummary]:
    """Return what a header says of tasks; nothing in those of earlier versions."""
    return header.get("tasks") or []  # type: ignore[return-value]


def task_texts(header: Mapping[str, object]) -> list[str]:
    """Write what the samples can tell first, then the figures of the first modes."""
    tasks = tasks_of(header)
    if not tasks or header.get("shard"):
        return []
    texts = tasks_texts(tasks)
    texts += [f"{task['mode']}: {', '.join(_figures(task))}" for task in tasks[:_MODES]]
    if len(tasks) > _MODES:
        texts.append(f"+{len(tasks) - _MODES} more modes in the report")
    return texts


def tasks_texts(tasks: Sequence[TaskSummary]) -> list[str]:
    """Say of each model which changes its samples tell from none."""
    models = dict.fromkeys(task["model"] for task in tasks)
    return [_detectable([task for task in tasks if task["model"] == name]) for name in models]


def _detectable(tasks: Sequence[TaskSummary]) -> str:
    """Say which changes the samples of one model tell from none; a range over its modes."""
    first = tasks[0]
    unit = f" of {first['metric']}" if first["metric"] else " bits per byte"
    sizes = [task["detectable"] for task in tasks if "detectable" in task]
    # Where every sample keeps its answers, they do not tell how small a change would show.
    shares = [share for task in tasks if (share := task.get("kept_detectable", 0.0)) > 0]
    tokens = f", {first['tokens']:,} tokens" if first["tokens"] else ""
    samples_text = f"task of {first['model']}, {counted(first['samples'], 'sample')}{tokens}"
    if not sizes:
        return f"{samples_text}: too few samples to tell how small a change would show"
    text = f"{samples_text}: a change of {_range([brief(size, 2) for size in sorted(sizes)])}{unit}"
    if shares:
        accuracy_range = _range([percent(share) for share in sorted(shares)])
        text += f", or of {accuracy_range} of {first['reference']}'s accuracy,"
    return f"{text} would show"


def _range(texts: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))


def _figures(task: TaskSummary) -> Iterator[str]:
    if "kl" in task:
        error = f" ± {brief(task['kl_error'], 2)}" if "kl_error" in task else ""
        tail = f"99 % {brief(task['kl_q99'], 2)}, 99.9 % {brief(task['kl_q999'], 2)}"
        yield f"KL {brief(task['kl'])}{error} nats ({tail})"
    if "flips" in task:
        yield f"another first token at {percent(task['flips'])}"
    if "lost" in task and "gained" in task:
        yield f"right ones {percent(task['lost'])} lost and {percent(task['gained'])} gained"
    if "perplexity_ratio" in task:
        yield f"perplexity x {task['perplexity_ratio']:.4g}"
    if "figure" in task and "figure_reference" in task:
        was = f"{task['figure_reference']:.4g} in {task['reference']}"
        yield f"{task['metric']} {task['figure']:.4g} ({was})"
    if text := margin_text(task):
        yield text


def margin_text(task: TaskSummary) -> str:
    """Say which of MLPerf's margins a mode keeps, and how many flips that does not see."""
    if "kept" not in task:
        return ""
    words = {name: _outcome(task, share) for name, share in MARGINS.items()}
    text = ", ".join(f"{name.removeprefix('mlperf-')} % {word}" for name, word in words.items())
    unseen = _unseen(task) if "kept" in words.values() else ""
    return (
        f"{_of_reference(task['kept'])} of {task['reference']}'s accuracy (MLPerf {text}{unseen})"
    )


def _of_reference(share: float) -> str:
    """Write a share that may be above one."""
    return f"{100 * share:.4g} %"


def _outcome(task: TaskSummary, share: float) -> str:
    if task["kept_low"] >= share:
        return "kept"
    return "not shown" if task["kept"] >= share else "not kept"


def _unseen(task: TaskSummary) -> str:
    hidden = min(task.get("lost", 0.0), task.get("gained", 0.0))
    return f"; blind to {percent(hidden)} that cancel" if hidden else ""


def task_cells(task: TaskSummary) -> list[str]:
    """Write the figures of one mode under `TASK_HEADS`."""
    unit = task["metric"] or "bits per byte"
    kept_text = _of_reference(task["kept"]) if "kept" in task else "–"
    if "kept_detectable" in task:
        kept_text += f" (from {_of_reference(task['kept_low'])})"
    error = f" ± {brief(task['kl_error'], 2)}" if "kl_error" in task else ""
    return [
        f"{brief(task['detectable'], 2)} {unit}" if "detectable" in task else "–",
        f"{brief(task['kl'])}{error}" if "kl" in task else "–",
        *(brief(task[key]) if key in task else "–" for key in ("kl_q99", "kl_q999")),
        *(percent(task[key]) if key in task else "–" for key in ("flips", "lost", "gained")),
        f"x {task['perplexity_ratio']:.4g}" if "perplexity_ratio" in task else "–",
        kept_text,
        *(_outcome(task, share) if "kept" in task else "–" for share in MARGINS.values()),
    ]


def kept_text(task: TaskSummary) -> str:
    """Say how sure it is that a mode keeps a share of the reference's accuracy."""
    if "kept" not in task:
        return ""
    text = f"{_of_reference(task['kept'])} of {task['reference']}'s in the mean"
    if "kept_detectable" not in task:
        return f"{text}, without an interval: it needs figures of several samples"
    text += f", {_of_reference(task['kept_low'])} at the lower end of the 95 % interval"
    text += f"; {task['samples']:,} samples tell changes from {percent(task['kept_detectable'])} on"
    return text + _unseen(task)


# Tests that are no gates: a run in which one of them fails is not green ---------------------------

# Number of failures with a line; the others are counted.
MOST_FAILURES = 200
_LONGEST = 300
NOT_FINISHED = "the run did not come to its end: what it lacks did not pass"


class OtherTests(TypedDict):
    """Tests of the run that are no gates.

    failures  node to first line, of up to 200
    """

    passed: Count
    failed: Count
    skipped: Count
    failures: Annotated[dict[str, str], Meta(max_length=200)]


def other_tests_record(outcomes: Mapping[str, str], lines: Mapping[str, str]) -> dict[str, object]:
    """Return the header's record of outcomes by test, with first lines of failures."""
    words = list(outcomes.values())
    failed = [node for node, outcome in outcomes.items() if outcome == "failed"]
    return {
        **{word: words.count(word) for word in ("passed", "failed", "skipped")},
        "failures": {node: _first_line(lines.get(node, "")) for node in failed[:MOST_FAILURES]},
    }


def add_other_tests(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, object]:
    """Add the records of two workers."""
    failures = {**one["failures"], **other["failures"]}
    return {
        **{word: one[word] + other[word] for word in ("passed", "failed", "skipped")},
        "failures": dict([*failures.items()][:MOST_FAILURES]),
    }


def other_tests_of(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of a header, an empty one for files of earlier versions."""
    return header.get("other") or other_tests_record({}, {})


def is_finished(header: Mapping[str, Any]) -> bool:
    """Tell whether the run came to its end; headers of earlier versions count as ended."""
    return header.get("exit", 0) is not None


def ended_badly(header: Mapping[str, Any]) -> str:
    """Write `pytest ended with exit status 1`; empty for status 0."""
    status = header.get("exit", 0)
    return f"pytest ended with exit status {status}" if status else ""


def other_tests_text(other: Mapping[str, Any]) -> str:
    """Write `2 other tests failed, 331 passed`; empty if none failed."""
    if not other["failed"]:
        return ""
    parts = [f"{other[word]:,} {word}" for word in ("passed", "skipped") if other[word]]
    return ", ".join([f"{counted(other['failed'], 'other test')} failed", *parts])


def other_test_lines(other: Mapping[str, Any], most: int) -> list[str]:
    """Write lines `other test failed: NODE: FIRST LINE`, and the number of the others."""
    lines = [
        f"other test failed: {node}{': ' if why else ''}{why}"
        for node, why in [*other["failures"].items()][:most]
    ]
    remaining = other["failed"] - len(lines)
    return [*lines, *([f"and {remaining:,} more other tests"] if remaining > 0 and most else [])]


def _first_line(text: str) -> str:
    return beginning((text.strip().splitlines() or [""])[0], _LONGEST)


# Errors that are held against those of other weights ----------------------------------------------

_SHOWN = 12


class AcrossWeights(TypedDict):
    """Errors of one model that were held against accepted errors of other weights.

    baseline   folder of the accepted errors
    accepted   hashes of the weights that they are of; empty where they are those that ran
    weights    hash of the weights that ran
    room       least and largest share by which the error of a whole tensor may exceed the accepted
               one, by scope
    left_out   what cannot be compared across weights, and what stands in for it
    """

    model: str
    baseline: str
    accepted: list[str]
    weights: str
    room: dict[str, list[float]]
    left_out: list[str]


def add_across_weights(
    one: Sequence[AcrossWeights], other: Sequence[AcrossWeights]
) -> list[AcrossWeights]:
    """Join what two parts of a run held across weights, by model."""
    by_model: dict[str, AcrossWeights] = {}
    for part in (*one, *other):
        joined = by_model.setdefault(part["model"], {**part, "room": {}, "left_out": []})
        joined["accepted"] = sorted({*joined["accepted"], *part["accepted"]})
        for scope, ends in part["room"].items():
            shares = [*joined["room"].get(scope, ()), *ends]
            joined["room"][scope] = [min(shares), max(shares)]
        joined["left_out"] = sorted({*joined["left_out"], *part["left_out"]})
    return [*by_model.values()]


def across_weights_of(header: Mapping[str, object]) -> list[AcrossWeights]:
    """Return what a header says was held across weights; nothing in those of other runs."""
    return header.get("across_weights") or []  # type: ignore[return-value]


def across_weights_texts(header: Mapping[str, object], folded: bool = True) -> list[str]:
    """Write whose errors were held across weights, with which room, and what was not compared.

    What was not compared is one sentence for each model, or one for each reason.
    """
    return [text for model in across_weights_of(header) for text in _across_texts(model, folded)]


def _across_texts(model: AcrossWeights, folded: bool) -> Iterator[str]:
    name, baseline = model["model"], model["baseline"]
    if not model["accepted"]:
        yield (
            f"not held across weights: the baseline of {name} ({baseline}) is of the weights that "
            "ran, so its errors were held as they always are"
        )
        return
    of = listed([_hash(weights) for weights in model["accepted"]], 3)
    yield (
        f"held across weights: errors of {name} (weights {_hash(model['weights'])}) against the "
        f"baseline of weights {of} ({baseline}){_room_text(model)}"
    )
    left_out = model["left_out"]
    for text in ["; ".join(left_out)] if folded and left_out else left_out:
        yield f"not compared across weights: {text}"


def _room_text(model: AcrossWeights) -> str:
    """Write `, with 25 % to 50 % room (carried), 100 % room (task)`; empty if nothing was held."""
    scopes: dict[str, list[str]] = {}
    for scope, ends in sorted(model["room"].items(), key=lambda room: (room[1], room[0])):
        share = " to ".join(dict.fromkeys(f"{100 * end:g} %" for end in ends))
        scopes.setdefault(share, []).append(scope)
    parts = [f"{share} room ({', '.join(of)})" for share, of in scopes.items()]
    return f", with {', '.join(parts)}" if parts else ""


def _hash(weights: str) -> str:
    return weights if len(weights) <= _SHOWN else f"{weights[:_SHOWN]}…"


# Smallest defects that the limits see -------------------------------------------------------------

DefectKind = Literal["weight", "scale", "channel", "token", "sample", "task", "metric"]
KINDS: tuple[DefectKind, ...] = get_args(DefectKind)
_MODES, _LINES = 3, 4


class DefectWords(NamedTuple):
    """The words of a kind of defect.

    of_task    the size has a unit of its own, and is no share
    is_usual   it has a column also where no mode shows it
    in_brief   the last lines of a run name it
    """

    sentence: str
    head: str
    of_task: bool = False
    is_usual: bool = True
    in_brief: bool = True


DEFECT_WORDS: Mapping[DefectKind, DefectWords] = {
    "weight": DefectWords("each weight of a module off by {}", "each weight of a module"),
    "scale": DefectWords(
        "scales off by one in {} of its blocks", "blocks with a scale off by one", is_usual=False
    ),
    "channel": DefectWords("a channel off by {}", "one channel"),
    "token": DefectWords("a token by {}", "one token"),
    "sample": DefectWords("a sample by {}", "one sample", in_brief=False),
    "task": DefectWords("{} bits per byte", "bits per byte", of_task=True),
    "metric": DefectWords("the task metric by {}", "task metric", True, is_usual=False),
}


class SmallestDefect(TypedDict):
    """The smallest defect of one kind that is red at every site; relative but for the task.

    site   where the limits see least
    """

    kind: DefectKind
    size: Annotated[float, Meta(ge=0)]
    site: str


class ModePower(TypedDict):
    """The smallest defects that the limits in force see in one mode of one model."""

    model: str
    mode: str
    defects: list[SmallestDefect]


def add_power(one: Sequence[ModePower], other: Sequence[ModePower]) -> list[ModePower]:
    """Join two parts of a run: the site that sees least counts."""
    by_mode: dict[tuple[str, str], dict[str, SmallestDefect]] = {}
    for of_mode in (*one, *other):
        largest = by_mode.setdefault((of_mode["model"], of_mode["mode"]), {})
        for defect in of_mode["defects"]:
            before = largest.get(defect["kind"])
            if before is None or before["size"] < defect["size"]:
                largest[defect["kind"]] = defect
    return [
        ModePower(
            model=model, mode=mode, defects=[largest[kind] for kind in KINDS if kind in largest]
        )
        for (model, mode), largest in by_mode.items()
    ]


def power_of(header: Mapping[str, object]) -> list[ModePower]:
    """Return what a header says of the smallest defects; nothing in those of earlier versions."""
    return header.get("power") or []  # type: ignore[return-value]


def power_texts(header: Mapping[str, object]) -> list[str]:
    """Write `smallest defects seen in int8: a channel off by 3 %, ...`, one line for modes with the
    same figures; the modes that see least come first."""
    modes = power_of(header)
    if header.get("shard"):
        return []
    several = len({mode["model"] for mode in modes}) > 1
    names: dict[str, list[str]] = {}
    for mode in sorted(modes, key=_sharpness):
        sizes = {defect["kind"]: defect["size"] for defect in mode["defects"]}
        parts = [
            DEFECT_WORDS[kind].sentence.format(size_text(kind, sizes[kind]))
            for kind in KINDS
            if kind in sizes
        ]
        name = f"{mode['mode']} of {mode['model']}" if several else mode["mode"]
        names.setdefault(", ".join(parts) or "none of any kind", []).append(name)
    lines = [
        f"smallest defects seen in {listed(of_text, _MODES)}: {text}"
        for text, of_text in names.items()
    ]
    more = sum(map(len, [*names.values()][_LINES:]))
    rest = f"smallest defects seen in {counted(more, 'more mode')}: the report lists them"
    return [*lines[:_LINES], *([rest] if more else [])]


def least_power_text(header: Mapping[str, object]) -> str:
    """Write `a channel off by 3 %, a token by 2 %` of the mode that sees least; empty for none.

    What is compared bit for bit sees every change: its figure would say nothing.
    """
    modes = sorted(power_of(header), key=_sharpness)
    if not modes or header.get("shard"):
        return ""
    texts = [
        DEFECT_WORDS[defect["kind"]].sentence.format(size_text(defect["kind"], defect["size"]))
        for defect in modes[0]["defects"]
        if DEFECT_WORDS[defect["kind"]].in_brief and not _is_exact(defect)
    ]
    if not texts:
        return ""
    where = f"in {modes[0]['mode']}, which sees least of {len(modes)} modes: " * (len(modes) > 1)
    return f"would have seen: {where}{', '.join(texts)}"


def _is_exact(defect: SmallestDefect) -> bool:
    """Tell if the smallest change of a float32 is seen."""
    return not DEFECT_WORDS[defect["kind"]].of_task and defect["size"] <= 2.0**-23


def _sharpness(mode: ModePower) -> tuple[float, ...]:
    """Order modes by what they see of each kind, the least first; a kind without a figure is not
    seen at all, but for scales of weights that are held bit for bit."""
    sizes = {defect["kind"]: defect["size"] for defect in mode["defects"]}
    sizes.setdefault("scale", sizes.get("weight", math.inf))
    kinds = (kind for kind in KINDS if not DEFECT_WORDS[kind].of_task)
    return tuple(-sizes.get(kind, math.inf) for kind in kinds)


def size_text(kind: DefectKind, size: float) -> str:
    """Write the size of a defect as a percentage, that of a task in its own unit."""
    if DEFECT_WORDS[kind].of_task:
        return f"{size:.2g}"
    return f"{100 * size:.0f} %" if size >= 0.1 else f"{100 * size:.2g} %"


# Sections of the page -----------------------------------------------------------------------------

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


class LooserLimit(TypedDict):
    """A limit that is looser than the default, or than a bound set before it.

    limit    its name, such as regression, or "absolute relative_mse"
    value    null for a bound of a shipped suite that its copy lacks
    usual    the default, the bound before it, or that of the shipped suite
    factor   how many times looser it is; null where it is infinite
    source   the setting or marker; sites, modes, models, scopes are those it is for, empty for all
    shipped  true for a marker of a suite as qgate ships it
    """

    limit: str
    value: float | None
    usual: float
    factor: float | None
    source: str
    reason: str
    sites: str
    modes: list[str]
    models: list[str]
    scopes: list[str]
    shipped: bool


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


# All facts ----------------------------------------------------------------------------------------

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
