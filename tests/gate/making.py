"""Measured sites with good defaults, for the tests of the gate."""

from __future__ import annotations

from typing import Any

from qgate.gate import Limits, Measured, Verdict, judge
from qgate.gate.policy import Bound

IDEAL = {"relative_mse": 1e-4}
ACCEPTED = {"relative_mse": 1e-4, "one_minus_correlation": 5e-5}


def measured(site: str = "layers.0:output", mse: Any = 1e-4, **given: Any) -> Measured:
    """A site that passes: its errors are the accepted and the ideal ones."""
    fields: dict[str, Any] = {
        "layer": site.rpartition(":")[0],
        "scope": "local",
        "values": {"relative_mse": mse, "one_minus_correlation": 5e-5},
        "order": 0,
        "nonfinite": 0,
        "ideal": IDEAL,
        "quantizer": "mxfp8_e4m3",
        "accepted": ACCEPTED,
    }
    return Measured(site=site, **{**fields, **given})


def carried(site: str = "layers.0:output", mse: Any = 1e-4, **given: Any) -> Measured:
    return measured(site, mse, **{"scope": "carried", "ideal": None, **given})


def verdict(
    *sites: Measured, bound: Bound | None = None, same: bool = True, **given: Any
) -> Verdict:
    absolute = {bound.metric: bound} if bound else {}
    limits = Limits(absolute=absolute, **given)
    return judge(sites, lambda _: limits, same)
