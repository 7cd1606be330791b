"""Errors that ideal quantizers make at the sites of a mode, and the quantizers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from qgate.expected.distances import relative_error
from qgate.gate.measuring.ideals import fit_kernels, ideal_tensors
from qgate.models import Model
from qgate.modes import Calibration, Quantized


@dataclass
class IdealErrors:
    """Relative MSE of an ideal quantizer by site, its name, and what it does not explain."""

    errors: dict[str, float] = field(default_factory=dict)
    quantizers: dict[str, str] = field(default_factory=dict)
    unexplained: dict[str, str] = field(default_factory=dict)


def ideal_errors(
    quantized: Quantized,
    meant: Quantized,
    base: Model,
    flowing: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    scales: Calibration | None,
) -> IdealErrors:
    """Return the errors of ideal quantizers of `meant` on the tensors that the reference makes."""
    tensors = ideal_tensors(meant.mode, meant.plan, base, flowing, scales)
    ideal = IdealErrors(
        {site: relative_error(tensors[site], flowing[site]) for site in tensors if site in flowing},
        {entry.site: entry.does for entry in quantized.plan.entries},
    )
    if meant is quantized or not quantized.mode.own:
        return ideal
    # A kernel quantizes inside: only what it returns can be looked at.
    ideal.errors = {site: e for site, e in ideal.errors.items() if site.endswith(":output")}
    ideal.quantizers = dict.fromkeys(ideal.errors, meant.mode.name)
    if meant.mode.choices is None:
        quantizers, convention = meant.plan.quantizers(), quantized.mode.convention
        fits = fit_kernels(base, quantizers, flowing, actual, convention)
        ideal.errors |= {site: fit.error for site, fit in fits.items()}
        ideal.quantizers |= {site: fit.name(meant.mode.name) for site, fit in fits.items()}
        ideal.unexplained = {
            site: fit.reason(meant.mode.name) for site, fit in fits.items() if not fit.explains
        }
    return ideal
