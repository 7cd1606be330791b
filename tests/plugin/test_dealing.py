"""Tests dealt to workers of pytest-xdist: the gates of a mode together, and none forgotten."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qgate.plugin import dealing
from tests.plugin.conftest import Run


@dataclass(eq=False)
class Worker:
    """A worker that runs a test once it has the next one, or is told that there is none."""

    name: str
    queue: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    shutting_down: bool = False

    @property
    def gateway(self) -> Any:
        return SimpleNamespace(id=self.name)

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def can_run(self) -> bool:
        return len(self.queue) > (0 if self.shutting_down else 1)


def config_of(folder: Path, workers: int, **options: Any) -> Any:
    values = {"dist": "load", "maxschedchunk": None, "tx": [f"{workers}*popen"], **options}
    return SimpleNamespace(
        stash={dealing._FOLDER: folder},
        getvalue=values.get,
        getoption=values.get,
        workerinput={"qgate_groups": str(folder / "gw0.json")},
    )


def dealt(
    folder: Path, groups: Sequence[str], workers: int, seed: int | None, loses: int | None = None
) -> list[list[str]]:
    """Deal tests to workers, and return the groups of what each ran; with a seed, any is next."""
    draw = random.Random(seed)
    config = config_of(folder, workers)
    dealing.write_groups(config, groups)
    scheduling = dealing.scheduling_of(config, SimpleNamespace(loadsched=lambda *_: None))
    assert scheduling is not None
    nodes = [Worker(f"gw{number}") for number in range(workers)]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, [f"test_{i}" for i in range(len(groups))])
    scheduling.schedule()
    alive = list(nodes)
    for step in itertools.count():
        if step == loses:
            lost = alive.pop()
            scheduling.remove_node(lost)
            new = Worker("gw9")
            nodes.append(new)
            alive.append(new)
            scheduling.add_node(new)
            scheduling.add_node_collection(new, list(scheduling.collection))
            scheduling.schedule()
        able = [node for node in alive if node.can_run]
        if not able:
            break
        node = min(able, key=lambda n: len(n.ran)) if seed is None else draw.choice(able)
        index = node.queue.pop(0)
        node.ran.append(index)
        scheduling.mark_test_complete(node, index, draw.choice([0.0, 1.0]))
    assert not any(node.queue for node in alive), "a worker waits for ever"
    assert not scheduling.has_pending
    return [[groups[index] for index in node.ran] for node in nodes]


MODES = [f"mode {number}" for number in range(7) for _ in range(5)]
OTHERS = [f"other {number}" for number in range(40)]


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 60])
@pytest.mark.parametrize(
    "groups",
    [
        MODES,
        MODES + OTHERS,
        OTHERS[:1] + MODES,
        OTHERS[:3] + MODES + OTHERS,
        ["mode"] * 2,
        MODES[:6],
    ],
    ids=["modes", "modes first", "one before", "both sides", "one mode", "a mode and a test"],
)
def test_each_test_runs_once_and_a_mode_on_one_worker(
    groups: list[str], workers: int, tmp_path: Path
) -> None:
    for seed in range(10):
        ran = dealt(tmp_path, groups, workers, seed)
        assert sorted(itertools.chain(*ran)) == sorted(groups)
        for mode in set(groups) & set(MODES):
            assert sum(mode in of_worker for of_worker in ran) == 1, mode


def test_workers_of_one_speed_run_as_many_tests(tmp_path: Path) -> None:
    counts = [len(ran) for ran in dealt(tmp_path, MODES + OTHERS, 2, None)]
    assert max(counts) - min(counts) <= 2, counts


@pytest.mark.parametrize("step", [0, 1, 7, 30])
def test_what_a_lost_worker_had_is_dealt_again(tmp_path: Path, step: int) -> None:
    for seed in range(10):
        ran = list(itertools.chain(*dealt(tmp_path, MODES + OTHERS, 3, seed, loses=step)))
        # The test that it was at is reported as the one that it crashed in.
        assert len(MODES + OTHERS) - len(ran) <= 1


@pytest.mark.parametrize("written", [None, ["alone", "too"]], ids=["no file", "no groups"])
def test_without_groups_tests_are_dealt_as_pytest_xdist_does(
    written: list[str] | None, tmp_path: Path
) -> None:
    config = config_of(tmp_path, 2)
    if written is not None:
        dealing.write_groups(config, written)
    scheduling = dealing.scheduling_of(config, SimpleNamespace(loadsched=lambda *_: None))
    assert scheduling is not None
    nodes = [Worker("gw0"), Worker("gw1")]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, [f"test_{i}" for i in range(80)])
    scheduling.schedule()
    assert [node.queue for node in nodes] == [[*range(10)], [*range(10, 20)]]


@pytest.mark.parametrize("options", [{"dist": "worksteal"}, {"maxschedchunk": 3}])
def test_another_way_that_was_asked_for_stays(options: dict[str, Any], tmp_path: Path) -> None:
    assert dealing.scheduling_of(config_of(tmp_path, 2, **options), None) is None


def test_a_run_with_workers_measures_each_mode_in_one_of_them(suites: Run) -> None:
    result = suites("--mode", "int8,fp16", "-n", "2", "-v", alone=True)
    result.assert_outcomes(passed=12)
    workers: dict[str, set[str]] = {}
    for line in result.outlines:
        if match := re.search(r"\[(gw\d)\].*\[tiny-llama-(int8|fp16)", line):
            workers.setdefault(match[2], set()).add(match[1])
    assert sorted(workers) == ["fp16", "int8"]
    assert len(set.union(*workers.values())) == 2
    assert all(len(of_mode) == 1 for of_mode in workers.values()), workers
