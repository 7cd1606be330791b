"""A run does a share of the slow cases, another one for each seed, and all of them on demand."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests import shares
from tests.warm_workers import forked_workers

FORMATS = ("int8", "mxfp4", "hif8")
CONFTEST = """
from tests.shares import Shares
from tests.shares import pytest_addoption as pytest_addoption

def pytest_configure(config):
    config.pluginmanager.register(Shares(config))
"""
TABLES = f"""
import pytest
from tests.shares import share

@share(5, by=["fmt"])
@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize("fmt", {FORMATS})
def test_slow(fmt, size):
    pass

@pytest.mark.parametrize("size", range(7))
def test_quick(size):
    pass
"""
CASES = [{"fmt": fmt, "size": size} for fmt in FORMATS for size in range(10)]


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_tables=TABLES)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:randomly")
    return pytester


def cases_run(project: pytest.Pytester, *options: str) -> list[str]:
    """Return the names of the slow cases that passed, after checking that all quick ones did."""
    result = project.runpytest_inprocess("-v", *options)
    names = re.findall(r"::(\w+\[\S+\]) PASSED", result.stdout.str())
    assert sum(name.startswith("test_quick") for name in names) in (0, 7)
    return sorted(name for name in names if name.startswith("test_slow"))


def formats_of(names: list[str]) -> set[str]:
    return {fmt for fmt in FORMATS for name in names if fmt in name}


def test_a_run_draws_one_case_in_five_and_each_format(project: pytest.Pytester) -> None:
    first = cases_run(project, "--case-seed", "a")
    assert len(first) == 6
    assert formats_of(first) == {*FORMATS}
    assert cases_run(project, "--case-seed", "a") == first
    assert cases_run(project, "--case-seed", "b") != first


@pytest.mark.parametrize(
    "options",
    [
        ("--every-case",),
        ("test_tables.py::test_slow",),
        ("--case-seed=a", "test_tables.py::test_slow"),
    ],
)
def test_every_case_runs_by_option_or_by_name(
    project: pytest.Pytester, options: tuple[str, ...]
) -> None:
    assert len(cases_run(project, *options)) == 30


def test_a_case_that_is_named_runs_whatever_the_seed(project: pytest.Pytester) -> None:
    for seed in "abcdef":
        name = "test_tables.py::test_slow[mxfp4-7]"
        assert cases_run(project, "--case-seed", seed, name) == ["test_slow[mxfp4-7]"]


def test_the_report_says_how_many_cases_ran_and_how_to_repeat_them(
    project: pytest.Pytester,
) -> None:
    result = project.runpytest_inprocess("--case-seed", "a")
    result.stdout.fnmatch_lines(
        [
            "cases: a share of those that take long, seed a (all: --every-case)",
            "cases: 6 of 30 of 1 tests that take long; these again: --case-seed a, all: --every-case",
            "*13 passed, 24 deselected*",
        ]
    )
    result = project.runpytest_inprocess("--every-case")
    result.stdout.fnmatch_lines(["cases: all", "*37 passed*"])
    result.stdout.no_fnmatch_line("*these again*")


@shares.proof
def test_workers_draw_the_same_cases(project: pytest.Pytester) -> None:
    alone = cases_run(project, "--case-seed", "a")
    options = ["-n", "2", "-v", "--case-seed", "a"]
    with forked_workers(options):
        result = project.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.OK  # workers that collect other cases are an error
    assert sorted(set(re.findall(r"PASSED \S+::(test_slow\[\S+\])", result.stdout.str()))) == alone
    result.stdout.fnmatch_lines(["cases: 6 of 30 *"])


def test_each_case_is_drawn_by_some_seed() -> None:
    covered = {index for seed in range(60) for index in shares.drawn(CASES, str(seed), 5, ["fmt"])}
    assert covered == {*range(30)}


def test_a_share_has_each_value_that_is_to_be_entered() -> None:
    for seed in range(40):
        places = shares.drawn(CASES, str(seed), 100, ["fmt", "size"])
        assert {CASES[index]["fmt"] for index in places} == {*FORMATS}
        assert {CASES[position]["size"] for position in places} == {*range(10)}
        assert len(shares.drawn(CASES, str(seed), 1000)) == 1


def test_cases_of_one_unit_are_drawn_together() -> None:
    places = shares.drawn(CASES, "a", 4, unit="size")
    assert len(places) == 9
    assert len({CASES[index]["size"] for index in places}) == 3


def test_tests_of_a_group_are_drawn_as_cases_of_one(project: pytest.Pytester) -> None:
    proofs = "\n".join(f"@share(4, group='proofs')\ndef test_{n}(): pass" for n in range(8))
    project.makepyfile(test_proofs=f"from tests.shares import share\n{proofs}")
    for options, count in ((["--case-seed", "a"], 2), (["--every-case"], 8)):
        result = project.runpytest_inprocess("test_proofs.py", *options)
        result.assert_outcomes(passed=count, deselected=8 - count)
    named = project.runpytest_inprocess("test_proofs.py::test_3", "--case-seed", "a")
    named.assert_outcomes(passed=1)


def test_proofs_are_drawn_from_all_files_together(project: pytest.Pytester) -> None:
    proofs = "from tests.shares import proof\n@proof\ndef test_proof(): pass"
    project.makepyfile(**{f"test_{name}": proofs for name in "abcdef"})
    names = [f"test_{name}.py" for name in "abcdef"]
    for options, count in ((["--case-seed", "a"], 1), (["--every-case"], 6)):
        result = project.runpytest_inprocess(*names, *options)
        result.assert_outcomes(passed=count, deselected=6 - count)
    named = project.runpytest_inprocess("test_c.py::test_proof", "--case-seed", "a")
    named.assert_outcomes(passed=1)


def test_slow_files_are_drawn_whole_and_run_where_they_are_named(project: pytest.Pytester) -> None:
    slow = "from tests.shares import slow_file\npytestmark = slow_file\n"
    tests = "\n".join(f"def test_{n}(): pass" for n in range(4))
    project.makepyfile(**{f"test_{name}": slow + tests for name in "abcdefghijklmn"})
    some = project.runpytest_inprocess("-v", "-k", "not tables", "--case-seed", "a")
    some.assert_outcomes(passed=2 * 4 + 12, deselected=12 * 3 + len(CASES) + 7)
    counts = Counter(re.findall(r"(test_\w)\.py::test_\d PASSED", some.stdout.str()))
    assert sorted(counts.values()) == [1] * 12 + [4] * 2  # of the others one test
    grouped = "class TestGroup:\n    def test_1(self): pass\n    def test_2(self): pass\n"
    project.makepyfile(test_y=slow + grouped + tests, test_z=slow + grouped + tests)
    names = ["test_b.py", "test_c.py", "test_d.py::test_1"]
    names += ["test_y.py::TestGroup", "test_z.py::TestGroup"]
    named = project.runpytest_inprocess(*names, "--case-seed", "a")
    named.assert_outcomes(passed=4 + 4 + 1 + 2 + 2)


CROSSED = """
import pytest

@pytest.mark.parametrize("size", range(6))
@pytest.mark.parametrize(("fmt", "wide"), [("int8", 1), ("mxfp4", 1), ("mxfp4", 2), ("hif8", 2)])
def test_crossed(fmt, wide, size):
    pass

@pytest.mark.parametrize("size", range(6))
@pytest.mark.parametrize("wide", range(2))
def test_few(wide, size):
    pass

@pytest.mark.parametrize("size", range(24))
def test_one_table(size):
    pass
"""


def test_of_crossed_tables_a_sixth_runs_and_every_row(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(test_crossed=CROSSED)
    monkeypatch.setattr(shares, "TESTS", project.path)
    result = project.runpytest_inprocess("-v", "-k", "crossed", "--case-seed", "a")
    rows = re.findall(r"::test_crossed\[(\w+-\d)-(\d)\] PASSED", result.stdout.str())
    assert {size for _, size in rows} == {*"012345"}
    assert {fmt for fmt, _ in rows} == {"int8-1", "mxfp4-1", "mxfp4-2", "hif8-2"}
    assert 6 <= len(rows) <= 9
    result.assert_outcomes(passed=len(rows) + 12 + 24, deselected=24 - len(rows) + 30 + 7)
    for whole in (["-k", "crossed", "--every-case"], ["test_crossed.py"]):
        result = project.runpytest_inprocess(*whole, "--case-seed", "a")
        assert result.parseoutcomes()["passed"] == 24 + 12 + 24
    monkeypatch.setattr(shares, "TESTS", project.path / "tests")  # cases of suites run whole
    result = project.runpytest_inprocess("-k", "crossed", "--case-seed", "a")
    assert result.parseoutcomes()["passed"] == 24 + 12 + 24


def test_a_slow_file_keeps_its_shares_and_what_always_runs(project: pytest.Pytester) -> None:
    slow = """
import pytest
from tests.shares import always, share, slow_file
pytestmark = slow_file

@always
def test_quick(): pass

@share(4)
@pytest.mark.parametrize("size", range(8))
def test_cases(size): pass
"""
    project.makepyfile(**{f"test_{name}": slow for name in "abcdef"})
    run = project.runpytest_inprocess("-v", "-k", "not tables", "--case-seed", "a")
    assert run.parseoutcomes()["passed"] == 6 + 2
    assert run.stdout.str().count("::test_quick PASSED") == 6
    named = project.runpytest_inprocess("test_a.py", "test_b.py", "--case-seed", "a")
    named.assert_outcomes(passed=2 * (1 + 2), deselected=2 * 6)
    every = project.runpytest_inprocess("-k", "not tables", "--every-case")
    assert every.parseoutcomes()["passed"] == 6 * 9


def test_a_run_without_a_seed_draws_that_of_the_file(project: pytest.Pytester) -> None:
    assert cases_run(project) == cases_run(project, "--case-seed", shares.SEED)
