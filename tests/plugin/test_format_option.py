"""The pytest plugin, run in a pytest of its own."""

from __future__ import annotations

import pytest

from qgate.formats import names
from tests.shares import proof

pytestmark = pytest.mark.filterwarnings("default")


def test_fmt_runs_a_test_for_every_format(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(fmt): print('format', fmt)")
    result = pytester.runpytest("-s")
    result.assert_outcomes(passed=len(names()))
    result.stdout.fnmatch_lines([f"*format {name}*" for name in names()])


def test_format_selects_by_name_and_alias_each_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(fmt): pass")
    result = pytester.runpytest("--format", "MXFP8,hifp8,hif8", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_it?mxfp8_e4m3? PASSED*", "*test_it?hif8? PASSED*"])


def test_unknown_format_is_a_usage_error_in_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(fmt): pass")
    result = pytester.runpytest("--format", "mxfp9")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --format mxfp9: unknown format 'mxfp9'. Did you mean*"])


@pytest.mark.parametrize(
    ("option", "hint"),
    [("--modee", "--mode"), ("--qgate-sampels", "--qgate-samples"), ("--zzz", None)],
)
def test_an_unknown_option_gets_the_nearest_name(
    pytester: pytest.Pytester, option: str, hint: str | None
) -> None:
    result = pytester.runpytest(option, "int8")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"unrecognized arguments: {option}" in result.stderr.str()
    hints = [line.strip() for line in result.stderr.lines if "did you mean" in line]
    assert hints == ([f"did you mean: {hint} for {option}"] if hint else [])


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\n@pytest.mark.parametrize('fmt', [1, 2])\ndef test_it(fmt): pass",
        "import pytest\n@pytest.mark.parametrize('a, fmt', [(1, 2), (3, 4)])\ndef test_it(a, fmt): pass",
        "import pytest\n@pytest.mark.parametrize(['a', 'fmt'], [(1, 2), (3, 4)])\ndef test_it(a, fmt): pass",
        "import pytest\n@pytest.mark.parametrize(argnames='fmt', argvalues=[1, 2])\ndef test_it(fmt): pass",
        "import pytest\n@pytest.fixture(params=[1, 2])\ndef fmt(request): return 3\ndef test_it(fmt): assert fmt == 3",
    ],
    ids=["mark", "mark-of-two", "mark-list", "mark-keywords", "own-fixture"],
)  # fmt: skip
def test_other_peoples_fmt_is_left_alone(pytester: pytest.Pytester, source: str) -> None:
    pytester.makepyfile(source)
    pytester.runpytest().assert_outcomes(passed=2)


@proof
def test_an_option_named_format_of_somebody_else_wins(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--format')")
    pytester.makepyfile("def test_it(fmt): pass")
    result = pytester.runpytest_subprocess("--qgate-format", "int8")
    result.assert_outcomes(passed=1)
