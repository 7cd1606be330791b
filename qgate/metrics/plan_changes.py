"""Changes of the plan: what quantizes a site is another text than was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class PlanChange(NamedTuple):
    """Sites where one quantizer was accepted and another one is found, of all that have one."""

    accepted: str
    found: str
    sites: int
    of: int
    first: str

    def text(self, subject: str = "") -> str:
        """Write `int4 accepted, int8 found, at all 70 sites`, with the subject of the sites."""
        where = f"{self.sites} of {self.of} sites{subject}, first {self.first}"
        if self.sites == 1:
            where = f"{self.first}{subject}"
        elif self.sites == self.of:
            where = f"all {self.of} sites{subject}"
        return f"{self.accepted} accepted, {self.found} found, at {where}"


def is_plan_change(check: Mapping[str, Any]) -> bool:
    """Tell if a check fails because a site has another quantizer than was accepted."""
    return not check["passed"] and bool(check.get("accepted_text"))


def plan_changes(checks: Iterable[Mapping[str, Any]]) -> list[PlanChange]:
    """Fold failed checks of quantizers to one change for each pair of accepted and found."""
    texts = [check for check in checks if check.get("text")]
    changed: dict[tuple[str, str], list[str]] = {}
    for check in filter(is_plan_change, texts):
        changed.setdefault((check["accepted_text"], check["text"]), []).append(check["site"])
    return merged(
        PlanChange(*pair, len(sites), len(texts), sites[0]) for pair, sites in changed.items()
    )


def merged(changes: Iterable[PlanChange], total: int | None = None) -> list[PlanChange]:
    """Add up changes of the same quantizers, the most frequent first; `total` counts all sites."""
    by_pair: dict[tuple[str, str], PlanChange] = {}
    for change in changes:
        known = by_pair.get(change[:2])
        if known is not None:
            change = known._replace(sites=known.sites + change.sites)
        by_pair[change[:2]] = change if total is None else change._replace(of=total)
    return sorted(by_pair.values(), key=lambda change: (-change.sites, change))
