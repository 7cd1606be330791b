"""Cost of a mode for the model's own task: the next tokens of held-out text, or its own metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qgate.capture.next_tokens import are_logits, masked_ids
from qgate.errors import QgateError
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.coverage import row_tokens
from qgate.loading import LateModule
from qgate.metrics import sample_part
from qgate.metrics.intervals import grouped_mean, mean_interval
from qgate.models.rows import token_ids
from qgate.models.task_metric import TaskFigures, TaskMetric, metric_name, task_figures
from qgate.modes import Mode
from qgate.results.run_facts import TaskSummary, kept_text

if TYPE_CHECKING:
    from qgate.engines import compute as compute
    from qgate.engines import record as record
    from qgate.engines import scored as engines_scored
    from qgate.engines.compute import TokenValues
    from qgate.engines.record import Estimate, TokenFigures
    from qgate.engines.scored import LogitRows, Pair
else:
    compute = LateModule("qgate.engines.compute")
    record = LateModule("qgate.engines.record")
    engines_scored = LateModule("qgate.engines.scored")


Notes = Mapping[str, Any]
NO_TASK = "predicts no next tokens and has no metric (qgate.Model(metric=…))"
TASK_METRIC, KEPT = "task_metric", "accuracy_kept"
_LIMITED = {
    "perplexity_ratio": "perplexity_ratio", "token_flips": "flips", "tokens_lost": "lost",
    "tokens_gained": "gained", "kl_q99": "kl_q99", "kl_q999": "kl_q999", KEPT: "kept_low",
}  # fmt: skip
"""Figures of a summary by the metrics that absolute limits name."""
_NATS = math.log(2)
"""Nats of one bit."""


def task_row(bench: Bench, mode: Mode) -> tuple[Measured, Notes, TaskSummary]:
    """Measure the task of a model in a mode, as a whole and for each sample, with notes on it."""
    metric = bench.model.metric
    if metric is not None:
        return _metric_row(bench, mode, metric)
    values, notes, figures = task_values(bench, mode)
    nonfinite = sum(not math.isfinite(v) for v in values.values())
    summary = _summary(bench, mode)
    if figures is not None:
        _summarize(summary, figures)
    row = Measured(
        site="logits", layer="", scope="task", values=values | _limited(summary), order=0,
        nonfinite=nonfinite,
        positions=tuple(row_tokens(bench.model.inputs)[0]),
        parts={
            sample_part(number): {"bits_per_byte": bits}
            for number, bits in enumerate(notes["bits_per_byte_of_samples"])
        },
        why={KEPT: kept_text(summary)},
    )  # fmt: skip
    return row, notes, summary


def _metric_row(
    bench: Bench, mode: Mode, metric: TaskMetric
) -> tuple[Measured, Notes, TaskSummary]:
    """Measure a model's own metric; its site is the name of the metric."""
    model, name = bench.model, metric_name(metric)
    reference = [tensor.float().cpu() for tensor in bench.outputs(None)]
    outputs = [tensor.float().cpu() for tensor in bench.outputs(mode)]
    arguments = {"outputs": outputs, "reference": reference, "inputs": model.inputs}
    figures = task_figures(metric, model.name, mode.name, arguments)
    arguments["outputs"] = reference
    expected = task_figures(metric, model.name, bench.reference_mode, arguments)
    summary = _summary(bench, mode, name)
    _summarize_metric(summary, figures, expected)
    values = {TASK_METRIC: figures.figure} | _limited(summary)
    row = Measured(
        site=name, layer="", scope="task", values=values, order=0,
        nonfinite=0, gated=(TASK_METRIC,), why={TASK_METRIC: "", KEPT: kept_text(summary)},
        parts={sample_part(n): {TASK_METRIC: of} for n, of in enumerate(figures.samples)},
    )  # fmt: skip
    notes = {
        "reference": bench.reference_mode,
        "metric": name,
        "metric_of_samples": [*figures.samples],
        "metric_reference": expected.figure,
    }
    return row, notes, summary


def _summary(bench: Bench, mode: Mode, metric: str = "") -> TaskSummary:
    return TaskSummary(
        model=bench.model.name, mode=mode.name, reference=bench.reference_mode, metric=metric,
        samples=len(bench.model.inputs), tokens=0,
    )  # fmt: skip


def task_values(bench: Bench, mode: Mode) -> tuple[dict[str, float], Notes, TokenFigures | None]:
    """Measure bits per byte, next-token accuracy and KL divergence to the reference.

    The notes have the bits per byte of each sample, and the loss: the mode's less those of the
    reference, with its 95 % interval. Samples are paired: the interval of the differences is much
    narrower than that of either loss. There are no figures of tokens if a number is not finite.
    """
    means: list[tuple[float, float, float, float]] = []
    pairs: list[Pair] = []
    values: list[TokenValues] = []
    for sample, actual, reference in zip(
        bench.model.inputs, bench.outputs(mode), bench.outputs(None), strict=True
    ):
        ids = _ids_of(bench, sample)
        if not are_logits(actual, ids):
            raise _no_task(bench)
        ids = masked_ids(ids, sample).cpu()
        rows = [*_row_pairs(ids, actual.float().cpu(), reference.float().cpu(), len(pairs))]
        tokens = [compute.token_values(*pair) for pair in rows]
        means.append(_means(tokens))
        pairs += rows
        values += tokens
    count = len(means)
    bits, bits_reference, accuracy, kl = (
        sum(column) / count for column in zip(*means, strict=True)
    )
    mean, half = mean_interval([a - b for a, b, _, _ in means])
    measured = {"bits_per_byte": bits, "next_token_accuracy": accuracy, "kl_divergence": kl}
    notes = {
        "reference": bench.reference_mode,
        "bits_per_byte_of_samples": [bits_of_sample for bits_of_sample, _, _, _ in means],
        "bits_per_byte_reference": bits_reference,
        "lost": mean,
        "lost_95": [mean - half, mean + half],
    }
    is_finite = all(math.isfinite(value) for value in (*measured.values(), bits_reference))
    return measured, notes, compute.figures_of(pairs, values) if is_finite else None


def _ids_of(bench: Bench, sample: Any) -> Tensor:
    ids = token_ids(sample)
    if ids is None:
        raise _no_task(bench)
    return ids


def _no_task(bench: Bench) -> QgateError:
    return QgateError(f"{bench.model.name} {NO_TASK}: leave its task suite out, or give it one.")


def _row_pairs(ids: Tensor, actual: Tensor, reference: Tensor, first: int) -> Iterator[Pair]:
    """Pair the logits of each row with the tokens that follow; those below 0 are padding."""
    length = ids.shape[-1]
    for number, (row, *sides) in enumerate(
        zip(
            ids.reshape(-1, length),
            *(logits.reshape(-1, length, logits.shape[-1]) for logits in (actual, reference)),
            strict=True,
        ),
        first,
    ):
        is_scored = (row[1:] >= 0) & (row[:-1] >= 0)
        if not is_scored.any():
            continue
        tokens = torch.cat([row[:1].clamp(min=0), row[1:][is_scored]]).numpy()
        one, other = (
            engines_scored.scored(str(number), tokens, logits=_reader(side[:-1][is_scored]))
            for side in sides
        )
        yield one, other


def _reader(logits: Tensor) -> LogitRows:
    """Return a reader of the logits that predict the tokens from one position up to another."""
    return lambda start, stop: logits[start - 1 : stop - 1]


def _means(rows: Sequence[TokenValues]) -> tuple[float, float, float, float]:
    """Return the bits of each side, the accuracy and the KL of a sample; NaN without a token."""
    if not rows:
        return (math.nan,) * 4
    actual, reference, right, kl = (
        float(np.concatenate([getattr(row, name)[1:] for row in rows]).mean())
        for name in ("actual", "reference", "actual_right", "kl")
    )
    return -actual / _NATS, -reference / _NATS, right, kl


def _limited(summary: TaskSummary) -> dict[str, float]:
    """Return the figures that absolute limits may be about, by metric."""
    return {
        metric: summary[key]  # type: ignore[literal-required]
        for metric, key in _LIMITED.items()
        if key in summary
    }


def _summarize(summary: TaskSummary, figures: TokenFigures) -> None:
    summary["tokens"] = figures.tokens
    summary["perplexity_ratio"] = figures.perplexity_ratio
    if figures.difference.detectable is not None:
        summary["detectable"] = figures.difference.detectable / _NATS
    if figures.kl is not None and figures.kl_spread is not None:
        summary["kl"] = figures.kl.mean
        summary["kl_q99"], summary["kl_q999"] = figures.kl_spread.q99, figures.kl_spread.q999
        if figures.kl.standard_error is not None:
            summary["kl_error"] = figures.kl.standard_error
    for name, share in (
        ("flips", figures.flips), ("lost", figures.lost), ("gained", figures.gained),
    ):  # fmt: skip
        if share is not None:
            summary[name] = share.mean  # type: ignore[literal-required]
    _add_kept(summary, figures.kept)


def _summarize_metric(summary: TaskSummary, figures: TaskFigures, expected: TaskFigures) -> None:
    """Add what a mode keeps of the reference's figure, where that is above 0."""
    summary["figure"], summary["figure_reference"] = figures.figure, expected.figure
    if figures.samples and expected.samples:
        changes = [a - b for a, b in zip(figures.samples, expected.samples, strict=True)]
        change = compute.estimate_of(grouped_mean(changes, [1] * len(changes)))
        if change.detectable is not None:
            summary["detectable"] = change.detectable
    if not expected.figure > 0:
        return
    if figures.samples and expected.samples:
        _add_kept(summary, compute.estimate_of(grouped_mean(figures.samples, expected.samples)))
    else:
        _add_kept(summary, record.Estimate(figures.figure / expected.figure))


def _add_kept(summary: TaskSummary, kept: Estimate | None) -> None:
    if kept is not None:
        summary["kept"] = kept.mean
        summary["kept_low"] = kept.mean - (kept.half_interval or 0.0)
        if kept.detectable is not None:
            summary["kept_detectable"] = kept.detectable
