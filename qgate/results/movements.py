"""Values beside the accepted ones, with the direction and the size of each change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from qgate.metrics import METRICS
from qgate.results.checks import binding, change_of, is_counted
from qgate.results.kinds import limit_kind_of
from qgate.results.schema import Record

# What a regression may be on the same device: within it, two values are called equal.
EQUAL = 0.02
# Relative errors below it are what float32 leaves, and differ from device to device.
NOISE = 1e-9


class Movement(NamedTuple):
    """A value beside an earlier one: the accepted one, or that of another run.

    title    the name of the accepted errors that it belongs to
    outcome  failed, new, worse, better, moved, or equal
    change   the change as text, such as `+12 %`; empty where there is none
    size     how far it went, as the magnitude of a logarithm
    """

    model: str
    mode: str
    title: str
    site: str
    scope: str
    metric: str
    old: float | None
    new: float | None
    outcome: str
    change: str
    size: float

    @property
    def order(self) -> tuple[Any, ...]:
        """Return a key that sorts failures first, then what moved most."""
        return (self.outcome != "failed", -self.size, self.model, self.mode, self.site, self.scope)


class Movements:
    """Movements of the records of a run, of each record the metric that moved most."""

    def __init__(self, records: Iterable[Record]) -> None:
        """Note what moved in each record; a repeated test counts once."""
        names = ("node", "suite", "model", "mode", "site", "scope")
        self._by_comparison = {
            tuple(str(record[name]) for name in names): movement_of(record)
            for record in filter(is_counted, records)
        }

    def of(self, *outcomes: str) -> list[Movement]:
        """Return the movements with these outcomes, failures and large ones first."""
        chosen = (move for move in self._by_comparison.values() if move.outcome in outcomes)
        return sorted(chosen, key=lambda move: move.order)


def movement_of(record: Mapping[str, Any]) -> Movement:
    """Return what moved most at one comparison; if it failed, what decided that."""
    checks = [check for check in record["checks"] if limit_kind_of(check["kind"]).is_accepted]
    moved = [move for check in checks if (move := _moved(record, check)).old is not None]
    if not record["passed"] and (check := binding(record)) is not None:
        decided = _moved(record, check)
        outcome = "new" if limit_kind_of(check["kind"]).is_new else "failed"
        return decided._replace(outcome=outcome)
    most = max(moved, key=lambda move: move.size, default=None)
    return most or _moved(record, {})


def _moved(record: Mapping[str, Any], check: Mapping[str, Any]) -> Movement:
    metric = str(check.get("metric", ""))
    old, new = check.get("against"), check.get("value")
    if old is None:
        old = (record["accepted"] or {}).get(metric)
    outcome, change, size = movement(metric, old, new)
    model, mode, site, scope = (str(record[n]) for n in ("model", "mode", "site", "scope"))
    title = str(record.get("title", record["mode"]))
    return Movement(model, mode, title, site, scope, metric, old, new, outcome, change, size)


def movement(metric: str, old: float | None, new: float | None) -> tuple[str, str, float]:
    """Compare two values of a metric: worse, better, moved or equal; the change as text; its size.

    The change of a logarithm is that of the sizes or energies that it stands for.
    """
    about = METRICS.find(metric)
    if old is None or new is None:
        return ("equal" if old == new else "moved"), "", 0.0 if old == new else math.inf
    if old == new or (about.relative and max(abs(old), abs(new)) < NOISE):
        return "equal", "", 0.0
    text, ratio = change_of(metric, old, new)
    size = abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf
    if size <= math.log1p(EQUAL):
        return "equal", text, size
    if about.direction not in ("lower", "higher"):
        return "moved", text, size
    is_worse = (new > old) == (about.direction == "lower")
    return ("worse" if is_worse else "better"), text, size
