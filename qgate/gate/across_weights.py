"""Rows that are held against accepted errors of other weights, and what of them cannot be.

Relative errors and ratios say what a mode costs; other numbers say what the weights are. What is
left out is named, and what stands in for it.
"""

from __future__ import annotations

from dataclasses import replace

from qgate.gate.checks import NOT_QUANTIZED
from qgate.gate.measured import Measured
from qgate.metrics import METRICS, sample_number

# The note of a record that names what was left out.
NOT_ACROSS_WEIGHTS = "not compared across weights"
REFERENCE = "the stored reference, which is of the other weights"
TASK = (
    "bits per byte and next-token accuracy, which are the weights' own: what a mode loses is held "
    "by its KL divergence to the reference of this run"
)
SAMPLES = "figures of single samples of a task metric: its figure of all is near the accepted one"
INSIDE = (
    "accepted errors of tensors that have an ideal quantizer: the budget holds them at its error "
    "on the tensors of this run"
)
TOKEN = "the worst token of a block, which is another one with other weights"
CHANNEL = "the worst channel of a tensor inside a block, which moves by more than faults do"
MASSIVE = "errors without massive elements, where the accepted ones had no such elements"
EXPONENT = "recommended scale exponents, which follow the magnitudes of the tensors"
STATIC_SCALES = "calibrated scales, which follow the magnitudes of the tensors"
# Figures of a task that say how good the weights are.
_OF_WEIGHTS = ("bits_per_byte", "next_token_accuracy")


def comparable(row: Measured) -> tuple[Measured, list[str]]:
    """Return a row without the numbers that accepted errors of other weights say nothing of.

    The sentences name what was left out.
    """
    if row.about.against_noise:
        return row, []
    accepted, gated = dict(row.accepted or {}), row.gated
    if row.about.is_task:
        must = [metric.name for metric in METRICS.of("task")] if gated is None else gated
        comparable_values = {
            name: value
            for name, value in accepted.items()
            if (METRICS.find(name).base or name) not in _OF_WEIGHTS
            and sample_number(METRICS.find(name).part) is None
        }
        gated = tuple(name for name in must if name not in _OF_WEIGHTS)
        row = replace(row, gated=gated, parts={}, accepted=comparable_values or None)
        return row, [TASK] if {*_OF_WEIGHTS} & {*must} else [SAMPLES]
    if row.about.has_budget and row.ideal is not None:
        texts = dict(row.accepted_texts)
        if accepted:
            # A plan that covers more than the accepted one is another one.
            texts |= dict.fromkeys(row.texts.keys() - texts.keys(), NOT_QUANTIZED)
        row = replace(row, gated=tuple(row.texts), accepted_texts=texts, accepted=None, parts={})
        return row, [INSIDE] if accepted else []
    left_out: dict[str, str] = {}
    if "exponent" in row.values:
        left_out["exponent"] = EXPONENT
    if "static_scale" in row.values:
        left_out["static_scale"] = STATIC_SCALES
    if gated is not None:
        gated = tuple(name for name in gated if name not in left_out)
    present = {METRICS.find(name).part for name in accepted}
    for part in row.parts:
        if part == "worst_token":
            left_out[part] = TOKEN
        elif part == "worst_channel" and row.about.has_budget and "worst_sample" not in row.parts:
            left_out[part] = CHANNEL
        elif part == "without_massive" and accepted and part not in present:
            left_out[part] = MASSIVE
    parts = {part: values for part, values in row.parts.items() if part not in left_out}
    comparable_values = {
        name: value
        for name, value in accepted.items()
        if name not in left_out and METRICS.find(name).part not in left_out
    }
    row = replace(row, gated=gated, parts=parts, accepted=comparable_values or None)
    return row, [*left_out.values()]
