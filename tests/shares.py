"""Draw a seeded share of the cases that take long, and run every case on demand.

A test of many slow cases carries `@share(one_in=N, by=(...))`. A run then does one in N of them,
and of every value of what `by` names at least one, so that each format, kind or suite is entered.
Slow tests of a file that carry `@share(one_in=N, group=NAME)` are drawn as the cases of one test.
Of a test without a mark that crosses two tables or more, a run does a sixth once there are more
than a dozen cases, and every row of every table at least once.
A test of seconds that carries `@proof` is one of the proofs, of which a run does one in two dozen. A
file whose tests need one thing that takes long to make carries `pytestmark = slow_file`, and so may
a class: a run does one in twelve of those files, and each that is named; of each of the others it does
the tests that carry `@always`, which are quick, or else one case.

    python -m pytest tests                    a share, that of SEED
    python -m pytest tests --case-seed 9e97   the share of that seed
    python -m pytest tests --every-case       all cases
    python -m pytest tests/x.py               all cases of a test that crosses tables
    python -m pytest tests/x.py::test_y       all cases of a test that is named
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MARK = "share"
TESTS = Path(__file__).parent
SEED = "2026-11-28"
"""Seed of the cases that a run draws: another one with each release, after a run of every case.

A change is judged by cases that its author can run, so the seed is no matter of the commit.
"""


def share(
    one_in: int, *, by: Sequence[str] = (), unit: str = "", group: str = ""
) -> pytest.MarkDecorator:
    """Mark a test of many cases: a run draws one in `one_in`, and one of every value of `by`.

    As `pytestmark` of a file it marks each of its tests by itself, unless they are a `group`. Names
    in `by` are arguments of the test, also `mutant.suite` for an attribute of one, and `test` is its
    name. Cases with the same value of `unit` are drawn together, where they share what takes long.
    """
    mark: pytest.MarkDecorator = getattr(pytest.mark, MARK)(
        one_in, by=tuple(by), unit=unit, group=group
    )
    return mark


CROSSED = 6
"""A run does one in so many cases of a test that crosses tables."""
FEW_CASES = 12
"""Tests of that many cases run whole, unless they are marked."""

_PROOFS = "proofs of all files"
_SLOW_FILES = "files whose tests share what takes long"
proof = share(24, group=_PROOFS)
slow_file = share(12, group=_SLOW_FILES, unit="file")
always = share(1)


def drawn(
    cases: Sequence[dict[str, Any]],
    seed: str,
    one_in: int,
    by: Sequence[str] = (),
    unit: str = "",
) -> list[int]:
    """Return the places of the cases that are drawn, in order."""
    units: dict[Hashable, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        units[_value(case, unit) if unit else index].append(index)
    kinds = {
        key: {(name, _value(cases[case_index], name)) for case_index in places for name in by}
        for key, places in units.items()
    }
    order = list(units)
    random.Random(seed).shuffle(order)
    missing: set[Any] = set().union(*kinds.values()) if kinds else set()
    chosen: list[Hashable] = []
    for key in order:
        if kinds[key] & missing:
            chosen.append(key)
            missing -= kinds[key]
    count = -(-len(order) // one_in)
    unchosen = [key for key in order if key not in chosen]
    chosen += unchosen[: max(0, count - len(chosen))]
    return sorted(drawn_index for key in chosen for drawn_index in units[key])


def _value(case: dict[str, Any], name: str) -> Hashable:
    value = attrgetter(name)(SimpleNamespace(**case))
    return value if isinstance(value, Hashable) else repr(value)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cases of qgate's own tests")
    group.addoption(
        "--every-case",
        action="store_true",
        help="run all cases of tests that take long, not a share of them",
    )
    group.addoption(
        "--case-seed",
        metavar="TEXT",
        help="draw the share of this seed (default: SEED of tests/shares.py)",
    )


def every_case(config: pytest.Config) -> bool:
    return bool(config.getoption("--every-case", default=False))


class Shares:
    """The plugin that draws, and that says how many cases it drew of how many."""

    def __init__(self, config: pytest.Config) -> None:
        config.addinivalue_line(
            "markers",
            f"{MARK}(one_in, by, unit, group): draw one in so many cases (tests/shares.py)",
        )
        if config.option.case_seed is None:  # pytest-xdist gives its workers the options
            config.option.case_seed = SEED
        self.seed: str = config.option.case_seed
        self.counts: dict[str, tuple[int, int]] = {}

    def pytest_report_header(self, config: pytest.Config) -> str:
        if every_case(config):
            return "cases: all"
        return f"cases: a share of those that take long, seed {self.seed} (all: --every-case)"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        tables: dict[str, list[pytest.Item]] = defaultdict(list)
        marks: dict[str, pytest.Mark | None] = {}
        for item in items:
            test = item.nodeid.partition("[")[0]
            for mark in _marks_of(item):
                group = "" if mark is None else mark.kwargs["group"]
                by_file = mark is None or group == _SLOW_FILES
                if _is_named(config, test, by_file):
                    continue
                alone = group and group not in (_PROOFS, _SLOW_FILES)
                name = f"{test.partition('::')[0]}: {group}" if alone else group or test
                if group or hasattr(item, "callspec"):
                    marks[name] = mark
                    tables[name].append(item)
        left_out: set[pytest.Item] = set()
        for name, table in sorted(tables.items(), key=lambda table: table[0] == _SLOW_FILES):
            if marks[name] is None and len(table) <= FEW_CASES:
                continue
            count = len(table)
            if not every_case(config):
                selected = {table[at] for at in _drawn(table, f"{self.seed} {name}", marks[name])}
                if name == _SLOW_FILES:
                    selected |= self._ones_of_files(items, {*table} - selected, left_out)
                left_out |= {*table} - selected
                count = len(selected)
            self.counts[name] = (count, len(table))
        if left_out:
            config.hook.pytest_deselected(items=[item for item in items if item in left_out])
            items[:] = [item for item in items if item not in left_out]

    def _ones_of_files(
        self, items: list[pytest.Item], undrawn: set[pytest.Item], left_out: set[pytest.Item]
    ) -> set[pytest.Item]:
        """Draw one case of each slow file that is not drawn and has no test that always runs."""
        other_paths = {item.path for item in items if item not in undrawn and item not in left_out}
        files: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if item in undrawn and item not in left_out and item.path not in other_paths:
                files[item.path].append(item)
        return {random.Random(f"{self.seed} {path.name}").choice(of) for path, of in files.items()}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["shares"] = self.counts

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.counts.update(getattr(node, "workeroutput", {}).get("shares", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        done = sum(count for count, _ in self.counts.values())
        total = sum(total for _, total in self.counts.values())
        if done < total:
            terminalreporter.write_line(
                f"cases: {done} of {total} of {len(self.counts)} tests that take long; "
                f"these again: --case-seed {self.seed}, all: --every-case"
            )


def _case(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of a case, and the names of its test and file."""
    assert isinstance(item, pytest.Function)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {**params, "test": item.originalname, "file": item.nodeid.partition("::")[0]}


def _marks_of(item: pytest.Item) -> list[pytest.Mark | None]:
    """Return what a test is drawn by: its own mark and that of its file; None for crossed tables."""
    marks = [*item.iter_markers(MARK)]
    if not marks:
        return [None] if len(_tables_of(item)) > 1 else []
    if marks[0].args == always.mark.args:
        return []
    if marks[0].kwargs["group"] == _PROOFS:
        return marks[:1]
    return [marks[0], *(mark for mark in marks[1:] if mark.kwargs["group"] == _SLOW_FILES)]


def _tables_of(item: pytest.Item) -> list[tuple[str, ...]]:
    """Return the arguments of each table that the cases of a test are rows of."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return []
    if not item.path.is_relative_to(TESTS):  # a suite of users
        return []
    tables = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        words = names.split(",") if isinstance(names, str) else names
        tables.append(tuple(word.strip() for word in words))
    of_marks = {name for names in tables for name in names}
    return tables + [(name,) for name in item.callspec.params if name not in of_marks]


def _drawn(table: list[pytest.Item], seed: str, mark: pytest.Mark | None) -> list[int]:
    """Return the places of the cases of a table that are drawn, as its mark says."""
    cases = [_case(item) for item in table]
    if mark is not None:
        of = {key: value for key, value in mark.kwargs.items() if key != "group"}
        return drawn(cases, seed, *mark.args, **of)
    tables = _tables_of(table[0])
    rows = [
        {str(at): tuple(_value(case, name) for name in names) for at, names in enumerate(tables)}
        for case in cases
    ]
    return drawn(rows, seed, CROSSED, [*rows[0]])


def _is_named(config: pytest.Config, table: str, by_file: bool) -> bool:
    """Tell whether the command line names this test by `::`, or its file if that is enough."""
    path, _, test = table.partition("::")
    for argument in config.args:
        file, _, names = argument.partition("::")
        test_name = names.partition("[")[0]
        fits = test == test_name or test.startswith(f"{test_name}::") if test_name else by_file
        if (
            fits
            and (config.invocation_params.dir / file).resolve()
            == (config.rootpath / path).resolve()
        ):
            return True
    return False


def asked_values(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values of an argument in all cases of a file that ask for a fixture."""
    users = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and request.fixturename in item.fixturenames
    ]
    return [case[name] for case in map(_case, users) if name in case]
