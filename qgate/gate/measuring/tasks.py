"""Cost of a mode for the model's own task: predicting the next token of held-out text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from qgate.errors import QgateError
from qgate.gate.measuring.bench import Bench
from qgate.gate.paired import mean_interval
from qgate.modes import Mode


def task_values(bench: Bench, mode: Mode) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure bits per byte, next-token accuracy and KL divergence to the reference.

    The notes have the bits per byte of each sample, and the loss: the mode's less those of the
    reference, with its 95 % interval. Samples are paired: the interval of the differences is much
    narrower than that of either loss.
    """
    pairs = []
    for sample, actual, reference in zip(
        bench.model.inputs, bench.outputs(mode), bench.outputs(None), strict=True
    ):
        if not isinstance(sample, Tensor) or not _are_logits(actual, sample):
            raise QgateError(
                f"{bench.model.name} predicts no next tokens: the task suite needs token ids in "
                "and logits out. Leave it out with --deselect suites/test_task.py."
            )
        pairs.append(_sample(sample, actual.float().cpu(), reference.float().cpu()))
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


def _are_logits(actual: Tensor, sample: Tensor) -> bool:
    """Tell if an output has a number for each token of the vocabulary; hidden states have not."""
    return actual.shape[:-1] == sample.shape and int(sample.max()) < actual.shape[-1]


def _sample(ids: Tensor, actual: Tensor, reference: Tensor) -> tuple[float, float, float, float]:
    ids, a, r = ids[0, 1:], actual[0, :-1], reference[0, :-1]
    with torch.no_grad():
        bits = [float(cross_entropy(x, ids)) / math.log(2) for x in (a, r)]
        hits = float((a.argmax(-1) == ids).double().mean())
        p, q = log_softmax(r.double(), -1), log_softmax(a.double(), -1)
        return bits[0], bits[1], hits, float((p.exp() * (p - q)).sum(-1).mean())
