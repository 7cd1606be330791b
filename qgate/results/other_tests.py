"""Tests of a run that are no gates: a run in which one of them fails is not green.

The header has their counts, and the first line of each failure:
`{"passed": 331, "failed": 1, "skipped": 0, "failures": {NODE: FIRST LINE}}`. A test with a gate
counts here if something other than its gate failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qgate.text import beginning, counted

# Number of failures with a line; the others are counted.
MOST_FAILURES = 200
_LONGEST = 300
NOT_FINISHED = "the run did not come to its end: what it lacks did not pass"


def other_tests_record(outcomes: Mapping[str, str], lines: Mapping[str, str]) -> dict[str, object]:
    """Return the header's record of outcomes by test, with first lines of failures."""
    words = list(outcomes.values())
    failed = [node for node, outcome in outcomes.items() if outcome == "failed"]
    return {
        **{word: words.count(word) for word in ("passed", "failed", "skipped")},
        "failures": {node: _first_line(lines.get(node, "")) for node in failed[:MOST_FAILURES]},
    }


def add_other_tests(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, object]:
    """Add the records of two workers."""
    failures = {**one["failures"], **other["failures"]}
    return {
        **{word: one[word] + other[word] for word in ("passed", "failed", "skipped")},
        "failures": dict([*failures.items()][:MOST_FAILURES]),
    }


def other_tests_of(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of a header, an empty one for files of earlier versions."""
    return header.get("other") or other_tests_record({}, {})


def is_finished(header: Mapping[str, Any]) -> bool:
    """Tell whether the run came to its end; headers of earlier versions count as ended."""
    return header.get("exit", 0) is not None


def ended_badly(header: Mapping[str, Any]) -> str:
    """Write `pytest ended with exit status 1`; empty for status 0."""
    status = header.get("exit", 0)
    return f"pytest ended with exit status {status}" if status else ""


def other_tests_text(other: Mapping[str, Any]) -> str:
    """Write `2 other tests failed, 331 passed`; empty if none failed."""
    if not other["failed"]:
        return ""
    parts = [f"{other[word]:,} {word}" for word in ("passed", "skipped") if other[word]]
    return ", ".join([f"{counted(other['failed'], 'other test')} failed", *parts])


def other_test_lines(other: Mapping[str, Any], most: int) -> list[str]:
    """Write lines `other test failed: NODE: FIRST LINE`, and the number of the others."""
    lines = [
        f"other test failed: {node}{': ' if why else ''}{why}"
        for node, why in [*other["failures"].items()][:most]
    ]
    remaining = other["failed"] - len(lines)
    return [*lines, *([f"and {remaining:,} more other tests"] if remaining > 0 and most else [])]


def _first_line(text: str) -> str:
    return beginning((text.strip().splitlines() or [""])[0], _LONGEST)
