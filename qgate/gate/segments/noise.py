"""Limits of isolated errors: float noise of each segment, measured on this machine.

The reference runs once more with every tensor that a segment starts from moved at random by a small
relative step. What arrives at the end of the segment says how much of one rounding error gets
there. Sums may be added in any order, as in `qgate.expected.noise`.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from qgate.expected.dispatching import MovedOperators
from qgate.expected.noise import ARITHMETICS, FUNCTION_ROUNDINGS, MARGIN, mover
from qgate.gate.segments.probes import PROBES, massive_probe, probes
from qgate.gate.segments.segments import Segments, SiteError
from qgate.gate.segments.views import Passed, TakenTensors, plain_view
from qgate.models import Model
from qgate.models.refusals import LENGTH_REFUSALS

_STEP = 2.0**-12
"""The relative step: far above the rounding of float32, and small enough to be linear."""
_UNIT = ARITHMETICS["float32"]


@torch.no_grad()
def sensitivities(
    base: Model, sample: Any, *, massive: bool = False, inside: bool = False
) -> dict[str, float]:
    """Return by site how many rounding errors of its inputs arrive at the worst row.

    massive   among massive values
    inside    with those of the operators between
    """
    view = plain_view(base)
    short, name = next(probes(sample))
    if massive:
        short, name = massive_probe(sample), PROBES[5]
    recorder, segments = TakenTensors(copies=True), Segments(base, base, view)
    try:
        with segments.massive(name), recorder.watch(base.module, view.ports):
            outputs = base.outputs(short)
    except LENGTH_REFUSALS:
        if not massive:
            raise
        return {}  # A graph has no sample of one row.
    passed = view.read(recorder.tensors)
    near = mover(_STEP)
    values = {site: [*map(near, tensors)] for site, tensors in passed.forwarded.items()}
    with MovedOperators(near) if inside else nullcontext():
        segments.replay(short, Passed(passed.actual, values), name, outputs)
    return {
        site: math.sqrt(max(errors.worst.error, 0.0)) / _STEP
        for site, errors in segments.errors.items()
    }


@dataclass
class SegmentNoise:
    """Float noise at the sites of a model by basis, measured once on a short sample."""

    sample: Any
    _known: dict[tuple[str, bool, bool], dict[str, float]] = field(default_factory=dict)

    def of(self, base: Model, *, massive: bool = False, inside: bool = False) -> dict[str, float]:
        """Return by site how many rounding errors arrive, usually or among massive values."""
        key = base.basis, massive, inside
        if key not in self._known:
            self._known[key] = sensitivities(base, self.sample, massive=massive, inside=inside)
        return self._known[key]

    def among_massive(self, base: Model) -> dict[str, float]:
        """Return by site how many times the usual noise there is among massive values.

        Operators count: where massive values cancel, their roundings are what is left.
        """
        usual = self.of(base, inside=True)
        return {
            site: noise / max(1.0, usual.get(site, 1.0))
            for site, noise in self.of(base, massive=True, inside=True).items()
        }


def limit_of(errors: SiteError, sensitivity: float) -> float:
    """Return the largest squared error of a row, as a share of its energy, that is float noise.

    A dtype that the mode declares rounds what is stored; sums are added in float32 all the same.
    """
    growth = max(1.0, math.sqrt(errors.longest) / 2)
    amplitude = _UNIT * (MARGIN * growth * sensitivity + FUNCTION_ROUNDINGS)
    amplitude += errors.unit * MARGIN * max(1.0, sensitivity)
    return min(1.0, amplitude * amplitude)
