"""Smoothing advice: the gain of moving a layer's outliers from activations to weights.

SmoothQuant divides each input channel by s = amax(x)^α / amax(w)^(1 - α) and multiplies the weight
by it: the layer's output stays, and only the quantization error changes. A Hadamard rotation of the
input dimension spreads outliers over all channels. Both are predicted from a few rows, by
quantizing rows and weight as the format would and comparing the layer's output.

The SQNR is that of the mean over tokens of noise / signal, so that a token of a thousand times the
energy of the others does not decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qgate.activation_stats._quantizers import quantizer_of
from qgate.activation_stats.record import EXACT_DB, Smoothed
from qgate.errors import QgateError
from qgate.stats import serial

ALPHAS = tuple(k / 10 for k in range(11))
FORMATS = ("int8", "mxfp8_e4m3", "mxfp4_e2m1")
OUTPUTS = 256
_ROWS = 256


@dataclass(frozen=True)
class SmoothingAdvice:
    """Advice of a layer by format; `block` is the length of a rotation."""

    smoothed: list[Smoothed]
    block: int
    rows: int


def hadamard_block(width: int) -> int:
    """Return the largest power of two that divides it."""
    return width & -width


def rotate(x: Tensor) -> Tensor:
    """Multiply the last dimension by an orthonormal Hadamard matrix, block by block."""
    width, shape, step = x.shape[-1], x.shape, 1
    block = hadamard_block(width)
    while step < block:
        x = x.reshape(-1, width // (2 * step), 2, step)
        x = torch.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], dim=2)
        step *= 2
    return x.reshape(shape) / math.sqrt(block)


def smoothing_advice(
    rows: Tensor,
    weight: Tensor,
    *,
    amax: Tensor | None = None,
    formats: Sequence[str] = FORMATS,
    alphas: Sequence[float] = ALPHAS,
    seed: int = 0,
) -> SmoothingAdvice | None:
    """Advise from input rows [rows, in] and a weight [out, in]; None without comparable outputs.

    `amax` are the largest magnitudes of the input channels of all that flowed, if they are known.
    A layer of many outputs is judged by a seeded 256 of them: rows of a weight are quantized each
    by itself.
    """
    if rows.shape[-1] != weight.shape[-1]:
        raise QgateError(
            f"rows are {rows.shape[-1]} wide, but the weight takes {weight.shape[-1]} features."
        )
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise QgateError(f"smoothing.alphas {alpha!r} is not allowed; it is from 0 to 1.")
    with serial(), torch.no_grad():
        x = rows.detach().cpu().float()[:_ROWS]
        x = x[x.isfinite().all(1)]
        whole = weight.detach().cpu()
        amax_w = whole.abs().amax(0).float()
        chosen = np.random.default_rng([seed, *weight.shape]).permutation(len(whole))[:OUTPUTS]
        w = whole[torch.from_numpy(np.sort(chosen))].float()
        if not (len(x) and len(w) and bool(w.isfinite().all())):
            return None
        y = x @ w.T
        signal = y.double().square().sum(1)
        x, y, signal = x[signal > 0], y[signal > 0], signal[signal > 0]
        if not len(x) or not bool(signal.isfinite().all()):
            return None
        amax_x = x.abs().amax(0)
        amax_x = amax_x if amax is None else torch.maximum(amax_x, amax.float())
        factors = {alpha: _migration(amax_x, amax_w, alpha) for alpha in alphas}
        pairs = {alpha: ((x / s).float(), (w * s).float()) for alpha, s in factors.items()}
        block = hadamard_block(x.shape[-1])
        turned = (rotate(x), rotate(w)) if block > 1 else None
        smoothed = []
        for name in formats:
            q = quantizer_of(name)

            def sqnr_db(x: Tensor, w: Tensor) -> float:
                noise = (q(x) @ q(w).T - y).double().square().sum(1)  # noqa: B023
                share = float((noise / signal).mean())
                if not math.isfinite(share):
                    return -EXACT_DB
                return -10 * math.log10(share) if share > 0 else EXACT_DB

            before = sqnr_db(x, w)
            curve = {alpha: sqnr_db(*pair) for alpha, pair in pairs.items()}
            best = max(curve, key=lambda a: curve[a]) if curve else 0.0
            advice = Smoothed(
                format=q.format.name,
                alpha=float(best),
                before_db=before,
                after_db=curve.get(best, before),
                curve={f"{alpha:g}": value for alpha, value in curve.items()},
            )
            if turned is not None:
                advice["hadamard_db"] = sqnr_db(*turned)
            smoothed.append(advice)
    return SmoothingAdvice(smoothed, block, len(x))


def _migration(amax_x: Tensor, amax_w: Tensor, alpha: float) -> Tensor:
    """Return the factor of each channel; 1 where one side is zero."""
    s = amax_x.double() ** alpha / amax_w.double() ** (1 - alpha)
    good = (amax_x > 0) & (amax_w > 0) & s.isfinite() & (s > 0)
    return torch.where(good, s, 1.0)
