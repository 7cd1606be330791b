"""Figures of a task beside the reference's: what the samples can tell, KL, flips, margins.

With those along one long text: where a mode stops predicting it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

from qgate.results.pictures import LongTextPicture
from qgate.text import counted, times_figure
from qgate.text.numbers import brief, percent

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
_MODES = 3


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


# One long text ------------------------------------------------------------------------------------

LONG_TEXT = "long_text"
"""The site of a mode's figures along one long text."""
_NOISE_BITS = 1e-4


def predicted_tokens(picture: LongTextPicture) -> int:
    """Count the tokens before the loss leaves the interval of the reference's for good.

    It has left it in a stretch if its mean there is above the 95 % interval of the reference's
    mean, by more than float noise.
    """
    pairs = zip(picture["reference"], picture["half_95"], strict=True)
    highest = [mean + half + _NOISE_BITS for mean, half in pairs]
    within = [b <= high for b, high in zip(picture["bits"], highest, strict=True)]
    last = max((number for number, is_within in enumerate(within, 1) if is_within), default=0)
    return last * picture["stretch"]


def long_text_words(values: Mapping[str, float | None]) -> str:
    """Write how the error grows along a long text, and where the mode stops predicting it."""
    names = ("compared_tokens", "kl_divergence", "error_growth", "predicted_tokens")
    figures = [values.get(name) for name in names]
    if not all(value is not None and math.isfinite(value) for value in figures):
        return ""
    tokens, kl, growth, predicted = (float(value or 0) for value in figures)
    text = f"KL {kl:.1e} along {tokens:,.0f} tokens, {times_figure(2**growth)}x at the end"
    return text if predicted >= tokens else f"{text}, stops predicting at token {predicted:,.0f}"
