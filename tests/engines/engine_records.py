"""A record of a comparison in which every text is one that breaks pages, tables or terminals."""

from __future__ import annotations

import math

from qgate.engines.record import (
    CarryingSample,
    CarryingToken,
    EnginesRecord,
    Estimate,
    LimitedFigure,
    PositionProfile,
    SampleDifferences,
    SiteDifference,
    Spread,
    TokenFigures,
    WeightComparison,
    WeightDifference,
)
from tests.hostile import HOSTILE


def hostile() -> EnginesRecord:
    """Return a record with hostile names, and numbers at the ends."""
    spread = Spread(1e-3, 1e-4, 1e-2, 1e300, 1e300)
    estimate = Estimate(1e-3, 1e-4)
    figures = TokenFigures(
        samples=len(HOSTILE), tokens=10**9, unscored=3, equal_share=0.25, difference=estimate,
        magnitude=spread, k3=Estimate(1e300), ratios=(0.0, 1e300), not_finite=7,
        kl=estimate, kl_spread=spread, flips=estimate, flip_positions=9, half_carried_by=1,
        carriers=tuple(
            CarryingToken(name, at, at, -1.0, -1.0 - 0.1 * at, 0.6 / (1 + at))
            for at, name in enumerate(HOSTILE)
        ),
        worst_samples=tuple(CarryingSample(name, 9, 0.1, 0.9) for name in HOSTILE),
    )  # fmt: skip
    differences = tuple(
        WeightDifference(name, relation, (name, "float32"), error)
        for name in HOSTILE
        for relation, error in (("differs", math.nan), ("rounded", None), ("actual alone", None))
    )
    values = tuple(None if at == 5 else math.sin(at) for at in range(160))
    return EnginesRecord(
        HOSTILE[0],
        HOSTILE[1],
        figures,
        WeightComparison(3, len(HOSTILE), 2 * len(HOSTILE), differences),
        SiteDifference(HOSTILE[2], "local", None, None),
        sites_compared=9,
        sites_differing=4,
        sites=[SiteDifference(name, "carried", 1e300, 1e-300) for name in HOSTILE],
        limits=[LimitedFigure(name, 1e300, 1.0, name) for name in HOSTILE],
        causes=list(HOSTILE),
        notes=list(HOSTILE),
        beyond=list(HOSTILE),
        profile=PositionProfile(7, tuple(abs(v) if v else v for v in values), values),
        sample_lines=[SampleDifferences(name, 3, 0.5, values) for name in HOSTILE[:8]],
    )
