"""A small share of every campaign, for each change: the same scenarios, few faults of each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.campaigns import clocks, closed, disk, kills, links, pairs, pipes, slow
from tests.campaigns.cases import Benches, Progress, Tally

Campaign = Callable[[Benches, list[str], int, Progress], list[Tally]]

# Of a hundred cases: which campaign, on what, how many.
_SHARE: tuple[tuple[str, Campaign, tuple[str, ...], int], ...] = (
    ("kills", kills.campaign, ("update", "sweep", "report"), 50),
    ("disk", disk.campaign, ("sweep", "report"), 24),
    ("closed", closed.campaign, ("sweep", "report"), 8),
    ("pairs", pairs.campaign, ("report",), 8),
    ("clocks", clocks.campaign, ("sweep", "report"), 7),
    ("slow", slow.campaign, ("sweep",), 3),
    ("pipes", pipes.campaign, ("report",), 3),
    ("links", links.campaign, ("merge results",), 3),
)


def campaign(benches: Benches, _: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    for label, run, names, part in _SHARE:
        group_tallies = run(benches, list(names), max(len(names), part * count // 100), say)
        tallies += [replace(tally, name=f"{label}: {tally.name}") for tally in group_tallies]
    return tallies
