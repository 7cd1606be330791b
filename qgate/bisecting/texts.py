"""The answer of a bisection as lines for a terminal and as data."""

from __future__ import annotations

from qgate.bisecting.record import Bisection, CommitName, CommitRun
from qgate.text import beginning, counted, listed, one_line, shortened

SCHEMA = 1
KIND = "qgate bisection"
HEADS = ("commit", "verdict", "red gates", "subject", "site, or why it was skipped")
_LONGEST_SUBJECT, _LONGEST_REASON = 48, 120
_NAMED = 3


def diagnosis(answer: Bisection) -> str:
    """Return the one line that answers: the commit, what turned red and where."""
    if answer.first is None:
        return one_line(answer.problem)
    cause = answer.first.cause(answer.gates)
    why = cause.text if cause else "its gates are red"
    also = f"{_either(answer)}; " if answer.unknown else ""
    return one_line(f"{_title(answer.first.name)} turned red: {also}{why}")


def _either(answer: Bisection) -> str:
    names = listed([name.short for name in answer.unknown], _NAMED)
    return f"or {names} before it, which could not be judged"


def _title(name: CommitName) -> str:
    return f'{name.short} "{shortened(name.subject, _LONGEST_SUBJECT)}"'


def rows(answer: Bisection) -> list[list[str]]:
    """Return a row of a table for each run, the oldest commit first."""
    return [
        [
            run.name.short,
            run.verdict(answer.gates),
            _red_gates(run, answer),
            shortened(run.name.subject, _LONGEST_SUBJECT),
            beginning(_about(run, answer), _LONGEST_REASON),
        ]
        for run in answer.runs
    ]


def _red_gates(run: CommitRun, answer: Bisection) -> str:
    if run.reason:
        return ""
    further_gates = len(run.red - answer.gates)
    more = f" +{counted(further_gates, 'other')}" if further_gates else ""
    return f"{len(run.red & answer.gates)}/{len(answer.gates)}{more}"


def _about(run: CommitRun, answer: Bisection) -> str:
    verdict, cause = run.verdict(answer.gates), run.cause(answer.gates)
    if verdict == "skipped":
        return run.why(answer.gates)
    if verdict == "green" or cause is None:
        return ""
    return f"{cause.site} ({cause.mode})" if cause.site else cause.text


def bisection_data(answer: Bisection) -> dict[str, object]:
    """Return the bisection as JSON has it."""
    first = answer.first
    cause = first.cause(answer.gates) if first else None
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "found": first is not None,
        "diagnosis": diagnosis(answer),
        "commit": first.name.commit if first else None,
        "subject": first.name.subject if first else None,
        "candidates": [name.commit for name in answer.unknown],
        "cause": cause._asdict() if cause else None,
        "gates": sorted(first.red & answer.gates) if first else [],
        "runs": [
            {
                **run.name._asdict(),
                "verdict": run.verdict(answer.gates),
                "red": sorted(run.red & answer.gates),
                "other_red": sorted(run.red - answer.gates),
                "about": _about(run, answer),
            }
            for run in answer.runs
        ],
    }
