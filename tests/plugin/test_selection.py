"""What is selected: modes, layers and models; and what is said where nothing can be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qgate.plugin.settings import options_of
from qgate.project.options import OPTIONS
from tests.plugin.conftest import Run
from tests.plugin.projects import add
from tests.shares import proof


@proof
@pytest.mark.parametrize("wanted", ["2-1", "2-[12]"])
def test_a_mode_that_does_not_fit_one_of_the_models_is_deselected(suites: Run, wanted: str) -> None:
    result = suites("--model", "tiny-llama", "--model", "tiny-mamba", "--mode", wanted, "-k", "2-1")
    result.assert_outcomes(passed=6, deselected=2 if wanted == "2-1" else 8)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [f"2 tests deselected: mode *'{wanted}'* tiny-llama*".replace("[", "?").replace("]", "?")]
    )


@proof
def test_a_mode_that_fits_no_model_leaves_nothing(project: Path, suites: Run) -> None:
    add(project, "test_canary.py")
    (project / "suites" / "test_theirs.py").write_text("def test_it(): pass")
    for workers in ([], ["-n", "2"]):
        result = suites("--mode", "2-1", *workers, alone=bool(workers))
        assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
        assert result.parseoutcomes()["passed"] == 1, "a test that is no gate, which is not green"
        result.stdout.fnmatch_lines(
            ["*2 tests deselected: mode '2-1' does not fit tiny-llama*", "no gate ran: *"]
        )
    result = suites("--mode", "2-1,int8", "--layers", "first")
    result.assert_outcomes(passed=4, deselected=2 + 4)
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("model", "mode", "why"),
    [
        ("tiny-llama", "experts-fp8", "where no module matches *experts*"),
        ("tiny-llama", "experts-*", "where no module matches *experts*"),
        ("tiny-mamba", "served-nvfp4-rotated", "it rotates groups of 16 features, and * has 8."),
    ],
)
def test_a_mode_without_a_place_in_the_model_is_deselected_with_a_word(
    model: str, mode: str, why: str, suites: Run
) -> None:
    result = suites("--model", model, "--mode", mode)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert result.parseoutcomes().keys() == {"deselected"}
    result.stdout.fnmatch_lines([f"*2 tests deselected: mode * does not fit {model}*{why}"])


def test_a_rule_of_a_users_own_that_finds_nothing_is_an_error(project: Path, suites: Run) -> None:
    (project / "conftest.py").write_text(
        "from qgate import Mode, Rule\n"
        "def pytest_qgate_modes(config):\n"
        "    rule = Rule('misspelled', 'int8')\n"
        "    return [Mode('mine', 'mine', rules=(rule,), by_name=True)]\n"
    )
    result = suites("--mode", "mine", "--layers", "first")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["errors"] == 2
    result.stdout.fnmatch_lines(
        ["*rule 'misspelled' * of mode mine decides no site of tiny-llama*"]
    )


def test_an_update_is_refused_in_ci(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")
    result = suites("--update-baselines")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--update-baselines is refused where CI is set*"])
    monkeypatch.setenv("QGATE_ALLOW_CI_UPDATE", "1")
    result = suites("--update-baselines", "--layers", "first", "--allow-partial")
    assert result.ret == pytest.ExitCode.OK
    assert project.joinpath("baselines").is_dir()


@proof
def test_short_names_that_a_conftest_owns_are_left_to_it(
    pytester: pytest.Pytester, project: Path, suites: Run
) -> None:
    (project / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--mode', default='mine')\n"
        "    parser.addoption('--update-baselines', action='store_true')\n"
        "def pytest_report_header(config): return 'theirs: ' + config.getoption('--mode')\n"
    )
    result = suites("--mode", "yours", "--qgate-mode", "int8", "--layers", "last")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["theirs: yours", "*qgate: tiny-llama*"])
    other = ("--qgate-mode", "fp16", "--baselines", "none", "--layers", "last")
    result = suites(*other, "--mode", "yours")
    result.stdout.fnmatch_lines(
        ["*: pytest suites * --model tiny-llama --qgate-mode fp16 --qgate-update-baselines"]
    )
    help_text = str(pytester.runpytest_inprocess("--help").stdout)
    assert "--qgate-mode" in help_text
    assert "--layers" in help_text


def test_an_unrelated_run_imports_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import sys\n"
        "def pytest_unconfigure(config):\n"
        "    heavy = {'torch', 'numpy', 'pandas', 'matplotlib', 'msgspec', 'ctypes',\n"
        "        'urllib.request', 'xml.sax', 'qgate.charts', 'qgate.formats'} & set(sys.modules)\n"
        "    print('heavy:', sorted(heavy), 'plugin:', 'qgate.plugin' in sys.modules)\n"
        "    print('modules of qgate:', sum(name.startswith('qgate') for name in sys.modules))\n"
    )
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*heavy: [[]] plugin: True*"])
    (count,) = re.findall(r"modules of qgate: (\d+)", result.stdout.str())
    assert int(count) <= 64, "each costs an unrelated run of pytest half a millisecond"


def test_options_hooks_markers_and_fixtures_are_listed_with_a_line_each(
    pytester: pytest.Pytester,
) -> None:
    help_output = pytester.runpytest_inprocess("--help").stdout
    text = str(help_output)
    for name in OPTIONS:
        assert len(re.findall(rf"^  --(?:qgate-)?{name}\b(?!-)", text, re.MULTILINE)) == 1
        assert f"  --{name}" in text
    help_output.fnmatch_lines(["*--format=NAMES*"])
    help_output.fnmatch_lines(
        ["*pytest_qgate_models: *", "*pytest_qgate_modes: *", "*pytest_qgate_record: *"]
    )
    markers = pytester.runpytest_inprocess("--markers").stdout
    for marker in ("qgate:*", "qgate_modes(*", "qgate_used_formats: *", "limits(*"):
        markers.fnmatch_lines([f"@pytest.mark.{marker}"])
    lines = pytester.runpytest_inprocess("--fixtures").stdout.str().splitlines()
    for name in ("model", "mode", "fmt", "layer", "gate", "device"):
        (index,) = (
            k
            for k, line in enumerate(lines)
            if line.startswith((f"{name} --", f"{name} [session scope] --"))
        )
        assert lines[index + 1].startswith("    "), name


def test_what_a_failure_repeats_is_every_option_about_the_run(pytester: pytest.Pytester) -> None:
    values = {int: "7", float: "0.5"}
    option_texts = {
        name: "" if option.kind is bool else f" {values.get(option.kind, 'first')}"
        for name, option in OPTIONS.items()
        if option.about == "run"
    }
    assert len(option_texts) >= 10
    other_options = ["--mode=2-1", "--plots=none", "--no-report", "--update-which=all"]
    typed = [f"--{name}{text}".replace(" ", "=") for name, text in option_texts.items()]
    config = pytester.parseconfig(*typed, *other_options)
    options = options_of(config).command().partition(" --")[2].split(" --")
    assert options == [f"{name}{text}" for name, text in option_texts.items()]
