"""Cost of a mode for the model's own task: the next tokens of held-out text, or its own metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from qgate.capture.next_tokens import are_logits, masked_ids
from qgate.errors import QgateError
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.coverage import row_tokens
from qgate.metrics import sample_part
from qgate.metrics.intervals import mean_interval
from qgate.models.rows import token_ids
from qgate.models.task_metric import TaskMetric, metric_name, task_figures
from qgate.modes import Mode

Notes = Mapping[str, Any]
NO_TASK = "predicts no next tokens and has no metric (qgate.Model(metric=…))"
TASK_METRIC = "task_metric"


def task_row(bench: Bench, mode: Mode) -> tuple[Measured, Notes]:
    """Measure the task of a model in a mode, as a whole and for each sample, with notes on it."""
    metric = bench.model.metric
    if metric is not None:
        return _metric_row(bench, mode, metric)
    values, notes = task_values(bench, mode)
    row = Measured(
        site="logits", layer="", scope="task", values=values, order=0,
        nonfinite=sum(not math.isfinite(v) for v in values.values()),
        positions=tuple(row_tokens(bench.model.inputs)[0]),
        parts={
            sample_part(number): {"bits_per_byte": bits}
            for number, bits in enumerate(notes["bits_per_byte_of_samples"])
        },
    )  # fmt: skip
    return row, notes


def _metric_row(bench: Bench, mode: Mode, metric: TaskMetric) -> tuple[Measured, Notes]:
    """Measure a model's own metric; its site is the name of the metric."""
    model, name = bench.model, metric_name(metric)
    reference = [tensor.float().cpu() for tensor in bench.outputs(None)]
    outputs = [tensor.float().cpu() for tensor in bench.outputs(mode)]
    arguments = {"outputs": outputs, "reference": reference, "inputs": model.inputs}
    figures = task_figures(metric, model.name, mode.name, arguments)
    arguments["outputs"] = reference
    expected = task_figures(metric, model.name, bench.reference_mode, arguments)
    row = Measured(
        site=name, layer="", scope="task", values={TASK_METRIC: figures.figure}, order=0,
        nonfinite=0, gated=(TASK_METRIC,), why={TASK_METRIC: ""},
        parts={sample_part(n): {TASK_METRIC: of} for n, of in enumerate(figures.samples)},
    )  # fmt: skip
    notes = {
        "reference": bench.reference_mode,
        "metric": name,
        "metric_of_samples": [*figures.samples],
        "metric_reference": expected.figure,
    }
    return row, notes


def task_values(bench: Bench, mode: Mode) -> tuple[dict[str, float], Notes]:
    """Measure bits per byte, next-token accuracy and KL divergence to the reference.

    The notes have the bits per byte of each sample, and the loss: the mode's less those of the
    reference, with its 95 % interval. Samples are paired: the interval of the differences is much
    narrower than that of either loss.
    """
    pairs = []
    for sample, actual, reference in zip(
        bench.model.inputs, bench.outputs(mode), bench.outputs(None), strict=True
    ):
        ids = _ids_of(bench, sample)
        if not are_logits(actual, ids):
            raise _no_task(bench)
        ids = masked_ids(ids, sample).cpu()
        pairs.append(_sample(ids, actual.float().cpu(), reference.float().cpu()))
    count = len(pairs)
    bits, bits_reference, accuracy, kl = (
        sum(column) / count for column in zip(*pairs, strict=True)
    )
    lost = [a - b for a, b, _, _ in pairs]
    mean, half = mean_interval(lost)
    values = {"bits_per_byte": bits, "next_token_accuracy": accuracy, "kl_divergence": kl}
    notes = {
        "reference": bench.reference_mode,
        "bits_per_byte_of_samples": [bits_of_sample for bits_of_sample, _, _, _ in pairs],
        "bits_per_byte_reference": bits_reference,
        "lost": mean,
        "lost_95": [mean - half, mean + half],
    }
    return values, notes


def _ids_of(bench: Bench, sample: Any) -> Tensor:
    ids = token_ids(sample)
    if ids is None:
        raise _no_task(bench)
    return ids


def _no_task(bench: Bench) -> QgateError:
    return QgateError(f"{bench.model.name} {NO_TASK}: leave its task suite out, or give it one.")


def _sample(ids: Tensor, actual: Tensor, reference: Tensor) -> tuple[float, float, float, float]:
    """Compare the rows of a sample with the tokens that follow; those below 0 are padding."""
    scored = (ids[..., 1:] >= 0) & (ids[..., :-1] >= 0)
    a, r = (logits[..., :-1, :][scored] for logits in (actual, reference))
    ids = ids[..., 1:][scored]
    with torch.no_grad():
        bits = [float(cross_entropy(x, ids)) / math.log(2) for x in (a, r)]
        hits = float((a.argmax(-1) == ids).double().mean())
        p, q = log_softmax(r.double(), -1), log_softmax(a.double(), -1)
        return bits[0], bits[1], hits, float((p.exp() * (p - q)).sum(-1).mean())
