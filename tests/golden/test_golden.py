"""Every command still prints and writes what is stored of it."""

from __future__ import annotations

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
    asked = {case.group for case in asked_values(request, "case")}
    folder: Path = tmp_path_factory.mktemp("golden")
    running.run_groups(sorted(asked), folder)
    return folder


@share(12, unit="case.group")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_outputs_are_those_stored(outputs: Path, case: Case) -> None:
    found = running.case_differences(case.name, outputs)
    if found:
        pytest.fail(
            f"{running.shown(case.name, found)}\n"
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
