"""What a mode costs the model's own work: predicting the next token of held-out text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from qgate.errors import QgateError
from qgate.modes import Mode
from qgate.pipeline.gates.bench import Bench

# Two-sided 95 % of Student's t by degrees of freedom; beyond the table, of the normal.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05}  # fmt: skip  # noqa: E501


def task_values(bench: Bench, mode: Mode) -> tuple[dict[str, float], dict[str, Any]]:
    """Bits per byte, next-token accuracy and KL divergence to the reference, and how sure it is.

    What is lost are the mode's bits per byte less those of the reference, which the notes name.
    Samples are paired: the interval is that of the differences, which is much narrower than that of
    either loss.
    """
    pairs = []
    for sample, actual, reference in zip(
        bench.model.inputs, bench.outputs(mode), bench.outputs(None), strict=True
    ):
        if not isinstance(sample, Tensor) or actual.shape[:-1] != sample.shape:
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
    mean = sum(lost) / count
    spread = math.sqrt(sum((d - mean) ** 2 for d in lost) / (count - 1)) if count > 1 else math.inf
    near = max((k for k in _T95 if k <= max(count - 1, 1)), default=1)
    half = (_T95[near] if count <= 30 else 1.96) * spread / math.sqrt(count)
    values = {"bits_per_byte": bits, "next_token_accuracy": accuracy, "kl_divergence": kl}
    notes = {
        "reference": bench.reference_mode,
        "bits_per_byte_reference": bits_reference,
        "lost": mean,
        "lost_95": [mean - half, mean + half],
    }
    return values, notes


def _sample(ids: Tensor, actual: Tensor, reference: Tensor) -> tuple[float, float, float, float]:
    ids, a, r = ids[0, 1:], actual[0, :-1], reference[0, :-1]
    with torch.no_grad():
        bits = [float(cross_entropy(x, ids)) / math.log(2) for x in (a, r)]
        hits = float((a.argmax(-1) == ids).double().mean())
        p, q = log_softmax(r.double(), -1), log_softmax(a.double(), -1)
        return bits[0], bits[1], hits, float((p.exp() * (p - q)).sum(-1).mean())
