"""Each promise of docs/threats.md has a module and tests in promises.md, and each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tests" / "promises.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_MODULE = re.compile(r"`(qgate/[\w/]+\.py)`")


def promises(page: str) -> dict[str, list[tuple[str, str]]]:
    """Return the tests of each row of the table of promises."""
    return {cells[0].strip(): _TEST.findall(cells[-1]) for cells in rows_of(page)}


def rows_of(page: str) -> list[list[str]]:
    section = page.partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return rows[1:]


def without_keeper(page: str) -> list[str]:
    """List promises without a module that keeps them, and modules that are not there."""
    problems = []
    for promise, kept_by, _ in rows_of(page):
        modules = _MODULE.findall(kept_by)
        problems += [f"{promise.strip()}: no module"] * (not modules)
        problems += [f"there is no {file}" for file in modules if not (ROOT / file).is_file()]
    return problems


def missing(page: str) -> list[str]:
    """List promises without a test, and tests that are not there."""
    problems = []
    for promise, tests in promises(page).items():
        problems += [f"{promise}: no test"] * (not tests)
        for file, name in tests:
            path = ROOT / file
            names = _functions(path) if path.is_file() else set()
            if not path.is_file() or (name and name not in names):
                problems.append(f"{promise}: there is no {file}::{name}")
    return problems


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_promise_has_its_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(promises(page)) >= 12
    assert missing(page) == []


def test_each_promise_has_the_module_that_keeps_it() -> None:
    assert without_keeper(PAGE.read_text(encoding="utf-8")) == []
    head = "## What is promised\n\n| promise | kept by | held by |\n|---|---|---|\n"
    assert without_keeper(f"{head}| a | none | c |\n") == ["a: no module"]
    gone = without_keeper(f"{head}| a | `qgate/storage/gone.py` | c |\n")
    assert gone == ["there is no qgate/storage/gone.py"]


def test_no_test_of_hostile_input_is_without_a_promise() -> None:
    named = {
        file for tests in promises(PAGE.read_text(encoding="utf-8")).values() for file, _ in tests
    }
    files = [
        *ROOT.glob("tests/campaigns/fuzzing/test_*.py"),
        *ROOT.glob("tests/*/test_hostile_*.py"),
    ]
    assert len(files) >= 6
    assert {path.relative_to(ROOT).as_posix() for path in files} <= named


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("| a promise | none |", "a promise: no test"),
        ("| a promise | `tests/test_nothing.py` |", "there is no tests/test_nothing.py::"),
        (
            "| a promise | `tests/test_threats.py::test_gone` |",
            "there is no tests/test_threats.py::test_gone",
        ),
    ],
)
def test_a_promise_without_its_test_is_named(row: str, told: str) -> None:
    page = f"## What is promised\n\n| promise | test |\n|---|---|\n{row}\n\n## Next\n"
    (problem,) = missing(page)
    assert told in problem
