"""Every command still prints and writes what is stored of it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from qgate.cli import parser
from tests.golden import running
from tests.golden.cases import GROUPS, STORED
from tests.golden.helping import commands_of

CASES = [(group, step.case) for group, its in GROUPS.items() for step in its.steps]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> functools._lru_cache_wrapper[Path]:
    """Runs a group once, for all tests of its cases."""

    @functools.cache
    def run(group: str) -> Path:
        return running.run_group(group, tmp_path_factory.mktemp("golden") / group)

    return run


@pytest.mark.parametrize(("group", "case"), CASES, ids=[case for _, case in CASES])
def test_the_outputs_are_those_stored(
    outputs: functools._lru_cache_wrapper[Path], group: str, case: str
) -> None:
    found = running.case_differences(case, outputs(group))
    if found:
        pytest.fail(
            f"{running.shown(case, found)}\n"
            f"if this is intended: python -m tests.golden --write {case}",
            pytrace=False,
        )


def test_each_stored_case_is_run() -> None:
    assert sorted(path.name for path in STORED.iterdir()) == sorted(case for _, case in CASES)


# What they print names this machine, or is pytest's; `--help` of all is a case.
WITHOUT_CASE = {"bisect", "completion", "doctor", "help", "run"}


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
