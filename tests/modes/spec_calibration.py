"""The calibration of static scales, written from the description alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qgate.modes.definition import F32, Arithmetic, Array, Scales, Weights, block, scan

MINMAX = {"s_n": "n", "s_z": "x z", "s_x": "dt B C", "s_d": "delta", "s_o": "h"}  # scale: taps


def minmax_scale(prompts: Sequence[Array], arithmetic: Arithmetic = "fp32") -> float:
    """Largest magnitude of all prompts over 127; in fp16 the maximum and the quotient round too."""
    top = F32(0)
    for values in prompts:
        top = max(top, F32(np.abs(values).max()), F32(1e-5))
    if arithmetic == "fp16":
        return float(max(F32(np.float16(F32(np.float16(top)) / F32(127))), F32(1e-6)))
    return float(max(top / F32(127), F32(1e-6)))


def quantile(values: Array, alpha: float) -> np.float32:
    return np.float32(np.quantile(values.astype(np.float64), alpha))


def percentile_scale(prompts: Sequence[Array], alpha: float) -> float:
    """Moving average (0.01) of the prompts' quantiles over 127: clips even with alpha 1."""
    top = quantile(np.abs(prompts[0]), alpha)
    for values in prompts[1:]:
        top = top + F32(0.01) * (quantile(np.abs(values), alpha) - top)
    return float(max(top / F32(127), F32(1e-6)))


def calibrate(
    layers: Sequence[Weights],
    prompts: Sequence[Array],
    hadamard: Array,
    alpha: float = 0.9995,
    arithmetic: Arithmetic = "fp32",
) -> list[Scales]:
    """Scales of each layer from running the unquantized layers over the prompts' hidden states."""
    layer_scales: list[Scales] = []
    for weights in layers:
        runs = [block("fp32", weights, {}, hidden, hadamard) for hidden in prompts]
        scales = {
            name: minmax_scale([run[site] for run in runs for site in sites.split()], arithmetic)
            for name, sites in MINMAX.items()
        }
        states = []
        for run in runs:
            u, delta, z, b, c = (run[site] for site in ("u", "delta", "z", "B", "C"))
            states.append(scan("loop", u, delta, z, b, c, weights)[1])
        scales["s_u"] = percentile_scale([run["a"] for run in runs], alpha)
        scales["s_u1"] = percentile_scale([run["a"] for run in runs], 1.0)
        scales["s_h"] = percentile_scale(states, alpha)
        layer_scales.append(scales)
        prompts = [run["hidden"] for run in runs]
    return layer_scales


def scales_for(
    weights: Weights, prompts: Sequence[Array], hadamard: Array, alpha: float = 0.9995
) -> Scales:
    return calibrate([weights], prompts, hadamard, alpha)[0]
