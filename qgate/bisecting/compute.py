"""Search the first red commit, with as few runs as a halving needs."""

from __future__ import annotations

from collections.abc import Callable

from qgate.bisecting.history import CommitRange
from qgate.bisecting.record import Bisection, CommitName, CommitRun
from qgate.errors import QgateError

Measure = Callable[[CommitName], CommitRun]


def bisect(commits: CommitRange, measure: Measure) -> Bisection:
    """Run the good commit, then the bad one, then halve what is between them.

    The good one is first because all others are held against its accepted files. The gates that
    are red at the bad one decide; another gate that is red somewhere does not.
    """
    runs: dict[str, CommitRun] = {}

    def run(commit: str) -> CommitRun:
        runs[commit] = measure(commits.name(commit))
        return runs[commit]

    def end(problem: str = "", first: CommitRun | None = None) -> Bisection:
        ordered = tuple(runs[commit] for commit in commits.in_order(runs))
        unknown = tuple(map(commits.name, commits.unknown())) if first else ()
        return Bisection(ordered, gates, first, unknown, problem)

    good = _judged(run(commits.good), "GOOD")
    bad = _judged(run(commits.bad), "BAD")
    gates = bad.red
    if not gates:
        gates = frozenset(bad.gates)
        return end(f"BAD {bad.name.short} is green: {_count(bad)}")
    if good.verdict(gates) == "red":
        cause = good.cause(gates)
        return end(f"GOOD {good.name.short} is red already: {cause.text if cause else ''}")
    if good.verdict(gates) == "skipped":
        raise QgateError(
            f"GOOD {good.name.short} does not say what was green: {good.why(gates)}. Name a "
            "commit with accepted values for them."
        )
    while (commit := commits.next()) is not None:
        commits.add(commit, run(commit).verdict(gates))
    return end(first=runs[commits.first_red])


def _judged(run: CommitRun, noun: str) -> CommitRun:
    """Refuse an end of the range that has no verdict."""
    if run.reason:
        raise QgateError(
            f"{noun} {run.name.short} has no verdict: {run.reason}. Name a commit whose suites "
            "run, or give the options that they need after `--`."
        )
    return run


def _count(run: CommitRun) -> str:
    states = [*run.gates.values()]
    new = states.count("new")
    more = f", and {new} have no accepted values at GOOD" if new else ""
    return f"{states.count('green')} of {len(states)} gates passed{more}"
