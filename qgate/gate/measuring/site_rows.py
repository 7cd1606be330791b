"""Rows of the sites of one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from qgate.gate.measured import Measured
from qgate.gate.measuring.site_errors import Pairs, site_errors
from qgate.modes.plan import Plan, PlanEntry

# Heads have a row each; of the many channels of a state there is one row.
_MOST_SCALES = 64
_NO_VALUES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class ModelSites:
    """Sites of a model: their places in the order of execution, and their layers."""

    order: Mapping[str, int]
    layer_of: Callable[[str], str]

    def place(self, site: str) -> int:
        """Return the place of a site in the order of execution; 0 for what is none."""
        return self.order.get(site, 0)

    def row(
        self,
        site: str,
        scope: str,
        order: int,
        values: Mapping[str, float] = _NO_VALUES,
        **details: Any,
    ) -> Measured:
        """Return a row whose values need no accepted ones, unless `details` say so."""
        plain = {"nonfinite": 0, "gated": (), **details}
        return Measured(
            site=site, layer=self.layer_of(site), scope=scope, order=order, values=values, **plain
        )

    def local(self, site: str, order: int, pairs: Pairs, **details: Any) -> Measured:
        """Return the row of an error that is made at a site, with its ideal among `details`."""
        return site_errors(site, self.layer_of(site), "local", order, pairs, **details)

    def isolated(
        self,
        site: str,
        order: int,
        error: float,
        worst: float,
        limit: float,
        reason: str = "",
        **details: Any,
    ) -> Measured:
        """Return the row of an error that float noise limits: in the mean, and of a token."""
        details |= {"floor": limit, "parts": {"worst_token": {"relative_mse": worst}}}
        why = {"isolated": reason} if reason else None
        return self.row(site, "isolated", order, {"relative_mse": error}, why=why, **details)


def static_rows(plan: Plan, sites: ModelSites) -> list[Measured]:
    """Return the scales that calibration samples decided, in the order of the plan."""
    return [
        sites.row(site, "static", sites.place(entry.site), {"static_scale": scale}, gated=None)
        for entry in plan.entries
        for site, scale in _scales(entry)
    ]


def _scales(entry: PlanEntry) -> Iterator[tuple[str, float]]:
    scales = entry.calibrated
    if len(scales) > _MOST_SCALES:
        logs = [math.log(scale) if scale > 0 else -math.inf for scale in scales]
        yield entry.site, math.exp(sum(logs) / len(logs))
        return
    for number, scale in enumerate(scales):
        yield entry.site if len(scales) == 1 else f"{entry.site}[{number}]", scale
