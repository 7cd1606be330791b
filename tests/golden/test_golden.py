"""Every command still prints and writes what is stored of it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from qgate.cli import parser
from tests.golden import running
from tests.golden.cases import GROUPS, STORED
from tests.golden.helping import commands_of
from tests.shares import asked_values, share


class Case(NamedTuple):
    group: str
    name: str


CASES = [Case(group, step.case) for group, its in GROUPS.items() for step in its.steps]


@pytest.fixture(scope="module")
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the groups of all cases that are asked for, once."""
    groups = {case.group for case in asked_values(request, "case")}
    folder: Path = tmp_path_factory.mktemp("golden")
    running.run_groups(sorted(groups), folder)
    return folder


@share(12, unit="case.group")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_outputs_are_those_stored(outputs: Path, case: Case) -> None:
    by_file = running.case_differences(case.name, outputs)
    if by_file:
        pytest.fail(
            f"{running.shown(case.name, by_file)}\n"
            f"if this is intended: python -m tests.golden --write {case.name}",
            pytrace=False,
        )


def test_each_stored_case_is_run() -> None:
    assert sorted(path.name for path in STORED.iterdir()) == sorted(case.name for case in CASES)


# What they print names this machine, or is pytest's; `--help` of all is a case.
WITHOUT_CASE = {"doctor", "help", "run"}


def test_each_command_has_a_case() -> None:
    lines = [" ".join(step.command) for its in GROUPS.values() for step in its.steps]
    missing = [
        command
        for command in sorted({*commands_of(parser())} - WITHOUT_CASE)
        if not any(line.startswith(f"qgate {command}") for line in lines)
    ]
    assert not missing


def test_what_is_stored_stays_small() -> None:
    assert sum(path.stat().st_size for path in STORED.rglob("*") if path.is_file()) < 3_000_000


def end_of(case: str) -> list[str]:
    """Return what a stored run of suites says of its gates at its end."""
    lines = (STORED / case / "console.txt").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if "= qgate: " in line) + 1
    end = re.compile("=+ short test summary|[0-9]+ (passed|failed)\\b.* in <seconds>")
    return list(itertools.takewhile(lambda line: not end.match(line), lines[start:]))


LONGEST = {
    **dict.fromkeys(("fault-stack", "fault-filters-first", "suites-llama"), 6),
    **{f"fault-{model}-40": 6 for model in ("stack", "filters", "attention")},
    **{f"fault-{model}_one": 12 for model in ("stack", "filters", "attention")},
    "fault-filters_one-40": 12,
    "fault-attention_one-40": 15,
    "fault-filters_one-k": 12,
}


@pytest.mark.parametrize("case", LONGEST)
def test_a_run_says_what_it_found_in_a_few_lines(case: str) -> None:
    lines = end_of(case)
    columns = next(
        step.columns for its in GROUPS.values() for step in its.steps if step.case == case
    )
    assert 3 <= len(lines) <= LONGEST[case]
    too_long = [line for line in lines if len(line) > columns and ": python " not in line]
    assert not too_long


@pytest.mark.parametrize("case", ["fault-stack_two", "fault-stack_two-40", "fault-stack_two-x"])
def test_each_fault_has_a_block_that_names_it(case: str) -> None:
    text = " ".join(line.strip() for line in end_of(case))
    assert "cause: layers.0.up:output (stack, mode mine) is wrong: each of its input and" in text
    assert ("failed: layers.2.down:output" in text) == (case != "fault-stack_two-x")


def test_a_sweep_of_one_tensor_is_short() -> None:
    lines = (STORED / "sweep-usual" / "console.txt").read_text(encoding="utf-8").splitlines()
    assert lines.index("--- exit 0") <= 15
