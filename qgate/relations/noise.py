"""Limits of relations: what another order of summation makes of the same numbers, site by site.

The model runs once more unquantized with every tensor that a site gets moved at random by a small
relative step. What arrives at the next site says how much of one rounding error gets there. Sums
are added in any order, as in `qgate.expected.noise`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.expected.noise import ARITHMETICS, FUNCTION_ROUNDINGS, MARGIN, moved
from qgate.models import Model, Site
from qgate.relations.recording import FedRun, Pass, record

_STEP = 2.0**-12
"""The relative step: far above the rounding of float32, and small enough to be linear."""
ROUNDINGS = 2.0
"""Roundings of a tensor to a narrow dtype, all the other way, that another kernel may make."""
QUIET = 0.01
"""Share of the mean energy of tokens that counts as energy of a quiet one."""


@dataclass(frozen=True)
class FloatNoise:
    """The largest relative errors that float noise makes, by site.

    sensitivities  how many rounding errors of the inputs arrive at the worst token
    longest        terms of the longest sum
    unit           the unit roundoff of the dtype in which tensors are handed on
    """

    sensitivities: Mapping[str, float]
    longest: int
    unit: float = 0.0

    def limit(self, site: str, terms: int = 0) -> float:
        """Return the largest error of a token, relative to its root mean square.

        `terms` are those of a sum that is longer than any of the rows measured.
        """
        sensitivity = self.sensitivities.get(site, 1.0)
        growth = max(1.0, math.sqrt(max(self.longest, terms)) / 2)
        amplitude = ARITHMETICS["float32"] * (MARGIN * growth * sensitivity + FUNCTION_ROUNDINGS)
        return amplitude + self.unit * ROUNDINGS * max(1.0, sensitivity)


def token_errors(actual: Tensor, expected: Tensor, usual: float | None = None) -> Tensor:
    """Return the relative error of each token; infinite where only one of both is a number.

    `usual` is the mean energy of tokens, where there are too few here to tell it.
    """
    if actual is expected or torch.equal(actual, expected):
        return torch.zeros(len(actual), dtype=torch.float64)
    first, second = (t.reshape(len(t), -1).double() for t in (actual, expected))
    same = first.isnan() & second.isnan() | (first == second)
    squares = (first - second).masked_fill_(same, 0.0).square_().sum(1)
    energy = second.nan_to_num(0.0, 0.0, 0.0).square().sum(1)
    mean = energy.mean() if usual is None else usual
    floor = (energy + QUIET * mean).clamp_min_(torch.finfo(torch.float64).tiny)
    return (squares / floor).sqrt_().nan_to_num_(math.inf, math.inf, math.inf).cpu()


def mean_energy(tokens: Tensor) -> float:
    """Return the mean energy of tokens, (rows, tokens, …)."""
    energy = tokens.nan_to_num(0.0, 0.0, 0.0).double().square().sum()
    return float(energy) / max(1, tokens.shape[0] * tokens.shape[1])


def measure_noise(base: Model, sites: Sequence[Site], whole: Pass, unit: float) -> FloatNoise:
    """Measure on the unquantized model what arrives of rounding errors, with every site fed."""
    recording = record(base, sites, whole)
    sensitivities: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)

    def judge(site: str, actual: Tensor, expected: Tensor, _call: Pass) -> None:
        worst = float(token_errors(actual, expected).max()) / _STEP
        sensitivities[site] = max(worst, sensitivities.get(site, 0.0))

    def change(tensor: Tensor) -> Tensor:
        result: Tensor = moved(tensor, _STEP, generator)
        return result

    FedRun(base, sites, recording, judge, change=change).run(iter([whole]))
    longest = max([whole.tokens, *(site.width for site in sites)])
    return FloatNoise(sensitivities, longest, unit)
