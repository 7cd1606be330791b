"""Tests of a run that are no gates: a run in which one of them fails is not green either.

The header has how many there were, and of those that failed the first line of each:
`{"passed": 331, "failed": 1, "skipped": 0, "failures": {NODE: FIRST LINE}}`. A test that has a gate
is among them if it failed by something else than its gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qgate.text import one_line

# Failures that are told one by one; the rest is counted.
MOST = 200
_LONGEST = 300
NOT_FINISHED = "the run did not come to its end: what it lacks did not pass"


def told_others(outcomes: Mapping[str, str], lines: Mapping[str, str]) -> dict[str, Any]:
    """What a header keeps of test → passed, failed or skipped, and of the lines of the failed."""
    found = list(outcomes.values())
    failed = [node for node, outcome in outcomes.items() if outcome == "failed"]
    return {
        **{word: found.count(word) for word in ("passed", "failed", "skipped")},
        "failures": {node: _cut(lines.get(node, "")) for node in failed[:MOST]},
    }


def joined_others(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Those of two workers."""
    failures = {**one["failures"], **other["failures"]}
    return {
        **{word: one[word] + other[word] for word in ("passed", "failed", "skipped")},
        "failures": dict([*failures.items()][:MOST]),
    }


def others_of(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of a header; files of earlier versions know of none."""
    return header.get("other") or told_others({}, {})


def is_finished(header: Mapping[str, Any]) -> bool:
    """Whether the run came to its end, as far as its header knows that it has one."""
    return header.get("exit", 0) is not None


def ended_badly(header: Mapping[str, Any]) -> str:
    """Where pytest was red at its end: `pytest ended with exit status 1`; else empty."""
    status = header.get("exit", 0)
    return f"pytest ended with exit status {status}" if status else ""


def others_text(other: Mapping[str, Any]) -> str:
    """`2 other tests failed, 331 passed`; empty where none failed."""
    if not other["failed"]:
        return ""
    rest = [f"{other[word]:,} {word}" for word in ("passed", "skipped") if other[word]]
    count = other["failed"]
    return ", ".join([f"{count:,} other test{'' if count == 1 else 's'} failed", *rest])


def other_lines(other: Mapping[str, Any], most: int) -> list[str]:
    """`other test failed: NODE: FIRST LINE`, and how many more there are."""
    lines = [
        f"other test failed: {node}{': ' if why else ''}{why}"
        for node, why in [*other["failures"].items()][:most]
    ]
    rest = other["failed"] - len(lines)
    return [*lines, *([f"and {rest:,} more other tests"] if rest > 0 and most else [])]


def _cut(text: str) -> str:
    shown = one_line((text.strip().splitlines() or [""])[0])
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
