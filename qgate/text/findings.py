"""Findings of an analysis: sentences with a level, as terminals, files and pages write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from qgate.text.escaping import one_line

Level = Literal["fail", "warn", "info"]
LEVELS: tuple[Level, ...] = ("fail", "warn", "info")
MARKS: Mapping[Level, str] = {"fail": "BROKEN", "warn": "LOSS", "info": "note"}


class Finding(NamedTuple):
    """One sentence; `fail` breaks a run, `warn` costs accuracy, `info` is good to know.

    cost   the share that is lost: of one level the costly ones come first
    """

    level: Level
    text: str
    cost: float = 0.0

    @property
    def mark(self) -> str:
        """Return the word of its level, all of them as wide as the longest."""
        return f"{MARKS[self.level]:<6}"

    def line(self) -> str:
        """Write `BROKEN  3 values NaN or infinite`."""
        return f"{self.mark}  {one_line(self.text)}"


NOTHING = Finding("info", "Nothing stands out")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings: broken values, then losses, then notes."""
    return sorted(findings, key=lambda finding: (LEVELS.index(finding.level), -finding.cost))


def not_drawn(failed: Mapping[str, str]) -> list[Finding]:
    """Say of each picture that is missing why it could not be drawn."""
    return [Finding("fail", f"{path} could not be drawn: {why}") for path, why in failed.items()]
