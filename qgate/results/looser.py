"""Limits of a run that are looser than the default, for its summary and its page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from qgate.results.schema import LooserLimit
from qgate.text import counted, times_figure

_LOOSEST = 3


def looser_limits(limits: Iterable[LooserLimit]) -> list[LooserLimit]:
    """Return limits of all processes, each once, the loosest first, shipped ones last."""
    unique: list[LooserLimit] = []
    for limit in limits:
        if limit not in unique:
            unique.append(limit)
    return sorted(unique, key=lambda limit: (limit["shipped"], -factor_of(limit)))


def factor_of(limit: LooserLimit) -> float:
    """Return how many times looser a limit is; infinite for one that is gone."""
    return math.inf if limit["factor"] is None else limit["factor"]


def looser_of(header: Mapping[str, object], *, shipped: bool) -> list[LooserLimit]:
    """Return the looser limits of a header: those of shipped suites, or all others."""
    limits: list[LooserLimit] = header.get("looser") or []  # type: ignore[assignment]
    return [limit for limit in looser_limits(limits) if limit["shipped"] is shipped]


def looser_text(header: Mapping[str, object]) -> str:
    """Write `2 limits are looser than the default: regression 1 (50x, SOURCE: REASON); ...`.

    Limits of the shipped suites are no news; the page has them.
    """
    limits = looser_of(header, shipped=False)
    if not limits:
        return ""
    verb = "is" if len(limits) == 1 else "are"
    more = f"; and {len(limits) - _LOOSEST} more in the report" * (len(limits) > _LOOSEST)
    loosest = "; ".join(map(_limit_text, limits[:_LOOSEST]))
    return f"{counted(len(limits), 'limit')} {verb} looser than the default: {loosest}{more}"


def _limit_text(limit: LooserLimit) -> str:
    reason = limit["reason"] or "no reason"
    return (
        f"{limit['limit']} {value_text(limit)} ({factor_text(limit)}, {limit['source']}: {reason})"
    )


def value_text(limit: LooserLimit) -> str:
    """Write the value of a limit, or `none` for one that is gone."""
    return "none" if limit["value"] is None else f"{limit['value']:g}"


def factor_text(limit: LooserLimit) -> str:
    """Write how many times looser a limit is."""
    factor = factor_of(limit)
    return f"{times_figure(factor)}x" if math.isfinite(factor) else "no limit"


def places_text(limit: LooserLimit) -> str:
    """Write the sites, modes, models and scopes of a limit; `all` without any."""
    kinds = (("modes", limit["modes"]), ("models", limit["models"]), ("scopes", limit["scopes"]))
    parts = [f"sites {limit['sites']}" if limit["sites"] else ""]
    parts += [f"{kind} {', '.join(names)}" for kind, names in kinds if names]
    return "; ".join(filter(None, parts)) or "all"
