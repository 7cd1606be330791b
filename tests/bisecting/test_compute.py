"""The search for the first red commit, with verdicts that are known beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from qgate.bisecting.compute import bisect
from qgate.bisecting.history import CommitRange
from qgate.bisecting.record import Bisection, CommitCause, CommitName, CommitRun
from qgate.bisecting.texts import bisection_data, diagnosis, rows
from qgate.errors import QgateError
from qgate.storage.git import GitRepository
from tests.bisecting.conftest import History

CAUSE = CommitCause("layers.0:output (m, mode int8) is wrong", "layers.0:output", "m", "int8")
OTHER = CommitCause("layers.9:output (m, mode fp8) is wrong", "layers.9:output", "m", "fp8")


def run_of(name: CommitName, verdict: str) -> CommitRun:
    """A run in which gate `g` is red or green; `also` is red by another gate than that."""
    match verdict:
        case "broken":
            return CommitRun(name, reason="ImportError: nowhere")
        case "red":
            gates = {"g": "red", "h": "green"}
            return CommitRun(name, gates, [(CAUSE, frozenset("g"))])
        case "also":
            return CommitRun(name, {"g": "green", "h": "red"}, [(OTHER, frozenset("h"))])
        case "new" | "absent":
            return CommitRun(name, {"g": "new"} if verdict == "new" else {"h": "green"})
    return CommitRun(name, {"g": "green", "h": "green"})


def search(good: str, bad: str, verdicts: Mapping[str, str]) -> tuple[Bisection, list[str]]:
    """The answer, and the subjects of the commits that were run; they are green by default."""
    asked: list[str] = []

    def measure(name: CommitName) -> CommitRun:
        asked.append(name.subject)
        return run_of(name, verdicts.get(name.subject, "green"))

    return bisect(CommitRange(GitRepository.around(Path()), good, bad), measure), asked


def test_every_first_red_commit_is_found_in_log2_runs(history: History) -> None:
    count = 17
    commits = [history.commit(str(number)) for number in range(count)]
    for first in range(1, count):
        red = {str(number): "red" for number in range(first, count)}
        answer, asked = search(commits[0], commits[-1], red)
        assert answer.first is not None
        assert answer.first.name == CommitName(commits[first], str(first))
        assert answer.unknown == ()
        assert len(asked) == len(set(asked)) <= 2 + math.ceil(math.log2(count))
        assert diagnosis(answer).startswith(f'{commits[first][:12]} "{first}" turned red: layers.0')


def test_a_fault_of_a_merged_branch_is_found_there(history: History) -> None:
    good = history.commit("base")
    history.git("switch", "--quiet", "--create", "side")
    history.commit("side 1")
    fault = history.commit("side 2")
    history.git("switch", "--quiet", "main")
    history.commit("main 1")
    history.git("merge", "--quiet", "--no-ff", "--message", "merge", "side")
    history.commit("main 2")
    answer, _ = search(good, "main", dict.fromkeys(["side 2", "merge", "main 2"], "red"))
    assert answer.first is not None
    assert answer.first.name.commit == fault


VERDICTS: dict[str, tuple[dict[str, str], str, list[str]]] = {
    # the verdicts of five commits, the first red one, and those that may be it as well
    "a broken commit is passed by": ({"2": "broken", "3": "red", "4": "red"}, "3", ["2"]),
    "so is one without the gate": ({"1": "absent", "2": "red", "3": "red", "4": "red"}, "2", ["1"]),
    "and one without accepted values": ({"1": "new", "2": "red", "3": "red", "4": "red"}, "2", ["1"]),
    "a broken one beside a green one is no candidate": (
        {"1": "broken", "3": "red", "4": "red"}, "3", []),
    "all between may be broken": (
        {"1": "broken", "2": "broken", "3": "broken", "4": "red"}, "4", ["1", "2", "3"]),
    "another red gate is none of this search": ({"1": "also", "2": "also", "4": "red"}, "4", []),
}  # fmt: skip


@pytest.mark.parametrize(("verdicts", "first", "unknown"), VERDICTS.values(), ids=VERDICTS)
def test_commits_without_a_verdict_are_named(
    history: History, verdicts: Mapping[str, str], first: str, unknown: list[str]
) -> None:
    commits = [history.commit(str(number)) for number in range(5)]
    answer, asked = search(commits[0], commits[-1], verdicts)
    assert answer.first is not None
    assert answer.first.name.subject == first
    assert [name.subject for name in answer.unknown] == unknown
    data, line = bisection_data(answer), diagnosis(answer)
    assert data["candidates"] == [commits[int(name)] for name in unknown]
    assert all(commits[int(name)][:12] in line for name in unknown)
    table = {row[3]: row for row in rows(answer)}
    assert [*table] == sorted(asked), "runs are listed in the order of history"
    for name, row in table.items():
        is_skipped = verdicts.get(name) in ("broken", "new", "absent")
        assert (row[1] == "skipped") is is_skipped
        assert bool(row[4]) is (is_skipped or row[1] == "red")


def test_ends_that_do_not_differ_are_said_and_searched_no_further(history: History) -> None:
    commits = [history.commit(str(number)) for number in range(9)]
    answer, asked = search(commits[0], commits[-1], {})
    assert answer.first is None
    assert diagnosis(answer) == f"BAD {commits[8][:12]} is green: 2 of 2 gates passed"
    assert [row[1] for row in rows(answer)] == ["green", "green"]
    again, _ = search(commits[0], commits[-1], {str(number): "red" for number in range(9)})
    assert diagnosis(again).startswith(f"GOOD {commits[0][:12]} is red already: layers.0:output")
    assert asked == ["0", "8"]


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("broken", "red", "GOOD .* has no verdict: ImportError"),
        ("green", "broken", "BAD .* has no verdict: ImportError"),
        ("new", "red", "GOOD .* does not say what was green: 1 of the red gates have no accepted"),
        ("absent", "red", "GOOD .* does not say what was green: it holds none"),
    ],
)
def test_ends_without_a_verdict_are_errors(
    history: History, good: str, bad: str, words: str
) -> None:
    commits = [history.commit(str(number)) for number in range(3)]
    verdicts = {"0": good, "2": bad}
    with pytest.raises(QgateError, match=words):
        search(commits[0], commits[-1], verdicts)


def test_revisions_are_checked(history: History, tmp_path: Path) -> None:
    history.commit("0")
    history.git("switch", "--quiet", "--create", "side")
    history.commit("side")
    history.git("switch", "--quiet", "main")
    history.commit("1")
    repository = GitRepository.around(Path())
    for good, bad, words in (
        ("nothing", "main", "'nothing' is no commit"),
        ("--all", "main", "'--all' is no commit"),
        ("main", "main", "the same commit"),
        ("side", "main", "'side' is no ancestor of 'main'"),
        ("main", "main~1", "no ancestor"),
    ):
        with pytest.raises(QgateError, match=words):
            CommitRange(repository, good, bad)
    with pytest.raises(QgateError, match="is in no git repository: run this in a clone"):
        GitRepository.around(tmp_path)
