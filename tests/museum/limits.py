"""Limits of published tests: what each of them says about a result beside its reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def cosine(actual: Tensor, reference: Tensor) -> float:
    x, y = actual.double().flatten(), reference.double().flatten()
    return float(x @ y / (x.norm() * y.norm()))


def calc_diff(actual: Tensor, reference: Tensor) -> float:
    """Return DeepGEMM's difference: 1 - 2 sum(xy) / sum(x² + y²)."""
    x, y = actual.double(), reference.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def matched_share(actual: Tensor, reference: Tensor, atol: float, rtol: float) -> float:
    x, y = actual.double(), reference.double()
    return float(((x - y).abs() <= atol + rtol * y.abs()).double().mean())


def sqnr_db(actual: Tensor, reference: Tensor) -> float:
    x, y = actual.double(), reference.double()
    return float(20 * torch.log10(y.norm() / (x - y).norm()))


def pearson(actual: Tensor, reference: Tensor) -> float:
    x, y = actual.double().flatten(), reference.double().flatten()
    return cosine(x - x.mean(), y - y.mean())


def relative_rms(actual: Tensor, reference: Tensor) -> float:
    x, y = actual.double(), reference.double()
    return float((x - y).norm() / y.norm())


def is_close(actual: Tensor, reference: Tensor, rtol: float, atol: float) -> bool:
    """Say what torch.testing.assert_close says."""
    try:
        torch.testing.assert_close(actual.float(), reference.float(), rtol=rtol, atol=atol)
    except AssertionError:
        return False
    return True


@dataclass(frozen=True)
class Limit:
    """One published rule: its heading, who uses it, and whether a result passes."""

    name: str
    used_by: str
    passes: Callable[[Tensor, Tensor], bool]


LIMITS = (
    Limit("cos > 0.97", "flashinfer mm_fp4", lambda x, y: cosine(x, y) > 0.97),
    Limit("cos > 0.95", "common", lambda x, y: cosine(x, y) > 0.95),
    Limit("cos > 0.9", "flashinfer bmm_mxfp8", lambda x, y: cosine(x, y) > 0.9),
    Limit(
        "95 % matched",
        "flashinfer-bench FP8 experts",
        lambda x, y: matched_share(x, y, 0.1, 0.85) >= 0.95,
    ),
    Limit("SQNR ≥ 18 dB", "torchao", lambda x, y: sqnr_db(x, y) >= 18),
    Limit("SQNR ≥ 13 dB", "torchao", lambda x, y: sqnr_db(x, y) >= 13),
    Limit("PCC > 0.99", "common", lambda x, y: pearson(x, y) > 0.99),
)

CALC_DIFF, LLAMA, OWN = "calc_diff", "llama.cpp", "its own test"
LARGEST_DIFF = {"FP8": 0.001, "mixed": 0.01, "FP4": 0.02}
"""DeepGEMM's limits of calc_diff by the formats of the two inputs."""
LLAMA_TOTAL, LLAMA_DOT = 0.0030, 0.03
"""Largest errors of llama.cpp's quantize-fns: of a cast, and of a dot product per term."""
LLAMA_RMS = math.sqrt(0.1**2 + 2.0**2 / 2)
"""RMS of the values that llama.cpp's test draws, 0.1 + 2 cos(i)."""


def deepgemm_passes(actual: Tensor, reference: Tensor, formats: list[str]) -> bool:
    """Apply calc_diff with the limit of as many 4-bit inputs as there are."""
    narrow = sum(any(word in name for word in ("fp4", "int4", "hif4")) for name in formats)
    kind = "FP8" if not narrow else "FP4" if narrow == len(formats) else "mixed"
    return calc_diff(actual, reference) < LARGEST_DIFF[kind]


def llama_passes(actual: Tensor, reference: Tensor, terms: int, sizes: tuple[float, float]) -> bool:
    """Apply llama.cpp's rule with values brought to the size of those in its test.

    A cast (no terms) has the norm of its error over the number of values, in rows of 4,096 as there;
    a product the error of each element per term. `sizes` are the RMS of both arguments.
    """
    difference = (actual - reference).double()
    if terms == 0:
        rms = float(difference.square().mean().sqrt()) * LLAMA_RMS / sizes[0]
        return rms / math.sqrt(4096) <= LLAMA_TOTAL
    unit = LLAMA_RMS**2 / (sizes[0] * sizes[1])
    return float(difference.abs().max()) * unit / terms <= LLAMA_DOT
