"""Faults of one tensor whose exact values are known, whatever made it."""

from __future__ import annotations

import re

from torch import Tensor

from qgate.causes.outputs import describe, describe_ruin, scattered
from qgate.causes.rows import describe_rows
from qgate.expected.noise import Expected

NOISE = 1e-4
"""Share of the RMS of a tensor that sums in float32 may be off."""


def tensor_fault(
    actual: Tensor, expected: Tensor, unquantized: Tensor | None = None, *, noise: float = NOISE
) -> str:
    """Say what is wrong with a tensor whose exact values are known; empty within float noise.

    unquantized  what it would be if nothing were quantized
    noise        share of the RMS that is no fault
    """
    values = expected.detach().double()
    width = float(values.square().mean().sqrt()) * noise
    wrong = ~((actual.double() - values).abs() <= width)
    if not bool(wrong.any()):
        return ""
    noisy = Expected.around(values, width)
    words = describe_ruin(actual, noisy, wrong)
    if not words and unquantized is not None:
        near = (actual.double() - unquantized.double()).abs() <= width
        words = "is not quantized: it is the product of FP32 tensors" if bool(near.all()) else ""
    words = words or describe(actual, noisy, wrong)
    words = words or describe_rows([actual], [expected]) or scattered(wrong)
    return predicate(re.sub(r"\brow", "token", re.sub(r"\bcolumn", "channel", words)))


def predicate(words: str) -> str:
    """Return words that go on after the name of a tensor."""
    if not words:
        return ""
    match = re.match(r"(?:the result )?((?:is|has|rounds|flushes|adds) .*)", words, re.DOTALL)
    return match[1] if match else f"is wrong: {words}"
