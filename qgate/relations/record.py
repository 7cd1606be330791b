"""The record of a model's relations: what agreed, what did not, and what could not be asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from qgate.charts.overviews import Overview, Overviewed
from qgate.errors import CopyableError
from qgate.text import lines_for_terminal

RELATIONS = {
    "repeat": "three calls on one input agree within float noise",
    "after others": "a call after other requests gives the bits of the first one",
    "restart": "the mode built again gives the same bits",
    "process": "another process gives the same bits",
    "alone": "a row alone gives what it gives beside others",
    "others": "a row gives the same beside more, fewer and louder others",
    "permuted": "rows in another order give the same",
    "padded right": "a row gives the same with padding behind it",
    "padded left": "a row gives the same with padding before it",
    "prefix": "the first tokens give the same without those behind them, across tile borders",
    "decoded": "behind prefills of several lengths, up to the context declared, tokens decoded one "
    "by one give what one pass over a long text gives",
    "chunked": "a prefill in chunks with the cache gives what one pass gives",
    "stepwise": "token by token with the cache gives what one pass gives",
    "warm prefix": "a prefix whose cache is kept gives what it gives computed anew",
    "reused cache": "requests in turn, each with its cache, give what each gives alone",
    "split K": "sums of a linear layer over parts of K add up to the whole",
    "split N": "outputs of a linear layer in parts of N are those of the whole",
}
"""Relations that a model is asked for, by name."""
REPEAT = "repeat"
LEFT = "padded left"
DECODED = "decoded"
EXACT = (REPEAT, "after others", "restart", "process")
"""Relations of one and the same computation: bit for bit, if calls on one input agree so."""


@dataclass(frozen=True)
class Disagreement:
    """Values of one site that differ from those of the same tokens computed another way.

    way      words for how they were computed: "row 2 alone"
    after    the sites before it, which agree
    wrong    tokens (or rows) that differ, of how many `compared`
    error    relative error of the worst of them; `limit` is the largest that float noise makes
    cause    what else is known of it
    """

    relation: str
    way: str
    site: str
    after: tuple[str, ...]
    wrong: int
    compared: int
    where: str
    error: float
    limit: float
    cause: str = ""

    @property
    def words(self) -> str:
        """Return by how much which tokens differ, and what is known of the cause."""
        if not self.limit:
            size = "other bits"
            size += "" if math.isnan(self.error) else f" ({self.error:.2g} off)"
        else:
            size = f"{self.error:.2g} off (float noise {self.limit:.1g})"
        text = f"{size} {self.way}, at {self.where} ({self.wrong} of {self.compared})"
        return f"{text}; {self.cause}" if self.cause else text

    def __str__(self) -> str:
        return f"{self.relation}: {self.site} is {self.words}"


@dataclass(repr=False)
class RelationReport(Overviewed):
    """The record of one subject.

    name           the subject
    sites          site → values compared there, in the order of the model
    agreed           relation → how many ways were compared
    disagreements  the first of each relation and site
    left_out       what could not be asked, with the reason
    limits         site → the largest relative error that float noise makes
    errors         site → the largest relative error seen, where all ways agree
    """

    name: str
    sites: dict[str, int] = field(default_factory=dict)
    agreed: dict[str, int] = field(default_factory=dict)
    disagreements: list[Disagreement] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def count(self, site: str, values: int) -> None:
        """Note that many values of a site as compared."""
        self.sites[site] = self.sites.get(site, 0) + values

    def add(self, other: RelationReport) -> None:
        """Add what was compared of other rows of the same subject."""
        for site, values in other.sites.items():
            self.count(site, values)
        for relation, ways in other.agreed.items():
            self.agreed[relation] = self.agreed.get(relation, 0) + ways
        self.disagreements += other.disagreements
        self.left_out |= other.left_out
        self.limits = other.limits | self.limits
        for site, error in other.errors.items():
            self.errors[site] = max(error, self.errors.get(site, 0.0))

    def agree(self, relation: str) -> None:
        """Note one more way in which a relation holds."""
        self.agreed[relation] = self.agreed.get(relation, 0) + 1

    @property
    def broken(self) -> list[str]:
        """Return the relations that do not hold, in the order in which they were asked."""
        return list(dict.fromkeys(d.relation for d in self.disagreements))

    def first_of(self, relation: str) -> Disagreement:
        """Return the disagreement of a relation that stands first in the model."""
        order = {site: index for index, site in enumerate(self.sites)}
        of_relation = [d for d in self.disagreements if d.relation == relation]
        return min(of_relation, key=lambda d: order.get(d.site, len(order)))

    def overview(self) -> Overview:
        """Describe the subject: what does not hold, and its sites, nearest to the limit first."""
        first, *lines = str(self).splitlines()
        wrong = [str(self.first_of(relation)) for relation in self.broken]
        sites = sorted(self.sites, key=lambda site: -(self._figures(site)[2] or 0.0))
        lines = [*wrong, *(line.strip() for line in lines)]
        return Overview(first, sites, self._site_row, "site", lines, "times the limit")

    def _figures(self, site: str) -> tuple[float | None, float | None, float | None]:
        """Return the largest error at a site, its limit, and how many times the limit it is."""
        wrong = [d.error for d in self.disagreements if d.site == site]
        error, limit = max(wrong, default=self.errors.get(site)), self.limits.get(site)
        return error, limit, error / limit if error is not None and limit else None

    def _site_row(self, site: str) -> dict[str, object]:
        wrong = [d for d in self.disagreements if d.site == site]
        error, limit, times = self._figures(site)
        return {"site": site, "broken": ", ".join(dict.fromkeys(d.relation for d in wrong)),
                "error": error, "limit": limit, "times the limit": times}  # fmt: skip

    def __str__(self) -> str:
        ways = sum(self.agreed.values())
        lines = [f"{self.name}: {ways} ways to compute the same, at {len(self.sites)} sites"]
        lines += [f"  {relation}: {count}" for relation, count in self.agreed.items()]
        lines += [f"  left out: {name} ({reason})" for name, reason in self.left_out.items()]
        return lines_for_terminal(lines)


class RelationFailure(CopyableError, AssertionError):
    """A relation that does not hold: the first line names relation, site and tokens."""

    def __init__(self, report: RelationReport) -> None:
        self.report = report
        firsts = [report.first_of(relation) for relation in report.broken]
        lines = [f"{report.name} is wrong: {firsts[0]}", *(f"  {more}" for more in firsts[1:])]
        super().__init__(lines_for_terminal(lines))


def where(places: Sequence[tuple[int, int, int, int]], tokens: int) -> str:
    """Write rows and tokens, each as a range."""
    if not places:
        return "whole rows"
    rows = sorted({row for row, *_ in places})
    words = f"row {rows[0]}" if len(rows) == 1 else f"rows {', '.join(map(str, rows))}"
    if tokens == 1:
        return words
    listed = sorted({token for _, token, *_ in places})
    first, last = listed[0], listed[-1]
    if first == last:
        return f"{words}, token {first}"
    are_all = len(listed) == last - first + 1
    return f"{words}, {'' if are_all else f'{len(listed)} of '}tokens {first} to {last}"
