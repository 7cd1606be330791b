"""What a project says in qgate.toml or pyproject.toml, and what its conftest brings by hooks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.conftest import Run, run_alone
from tests.plugin.projects import header, records
from tests.shares import proof

OPTIONS = """model = "tiny-llama"
mode = ["int8"]
layers = "first"
samples = 2
seqlen = 64
calib_samples = 2
calib_seqlen = 64
"""


def settings(project: Path, text: str, file: str = "qgate.toml") -> None:
    with (project / file).open("a") as out:
        out.write(text)


def test_options_of_the_project_hold_where_the_command_line_is_silent(
    pytester: pytest.Pytester, project: Path
) -> None:
    settings(project, f'{OPTIONS}baselines = "kept"\n')
    (project / "baselines").rename(project / "kept")
    result = pytester.runpytest_inprocess("suites")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["qgate: mode int8, model tiny-llama, device auto, baselines kept"])
    result = pytester.runpytest_inprocess("suites", "--mode", "fp16,int8", "--layers", "last")
    result.assert_outcomes(passed=4, deselected=8)  # the command line wins


def test_limits_of_the_project_are_kept_and_told(project: Path, suites: Run) -> None:
    settings(
        project,
        '\n[tool.qgate]\nlayers = "first"\n[tool.qgate.limits]\nabsolute = ["correlation>0.99999"]\n'
        "[[tool.qgate.limits.rules]]\nsites = 'layers\\.9'\nmodels = 'tiny-mamba'\nregression = 0.1\n",
        "pyproject.toml",
    )
    (project / "suites" / "test_own.py").write_text(
        "def test_own(gate, mode, layer): gate.layer(mode, layer)\n"
    )
    result = suites("-rf")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["correlation 0.9* < 0.99999 at * absolute limit*", "*[[]tool.qgate.limits[]]*"]
    )
    assert len(list((project / "suites").glob("test_*.py"))) == 3


@pytest.mark.parametrize("options", [(), ("--baselines", "s3://bucket/base")])
def test_a_url_as_folder_of_baselines_is_one_usage_error(
    pytester: pytest.Pytester, project: Path, options: tuple[str, ...]
) -> None:
    settings(project, 'baselines = "gs://other/base"\n')
    result = pytester.runpytest_inprocess("suites", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "passed" not in result.stdout.str()
    url = options[-1] if options else "gs://other/base"
    words = f"*qgate: the folder of baselines '{url}' is a URL, and has to be a path: *git LFS*"
    result.stderr.fnmatch_lines([words])


def test_two_places_for_settings_are_refused(pytester: pytest.Pytester, project: Path) -> None:
    settings(project, "samples = 2\n")
    settings(project, "\n[tool.qgate]\nsamples = 3\n", "pyproject.toml")
    result = pytester.runpytest_inprocess("suites")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*both *qgate.toml and *pyproject.toml set samples: keep one*"])


def test_options_and_limits_may_stand_in_two_files(
    pytester: pytest.Pytester, project: Path
) -> None:
    settings(project, OPTIONS)
    settings(project, "\n[tool.qgate.limits]\nbudget_db = 0.25\n", "pyproject.toml")
    pytester.runpytest_inprocess("suites").assert_outcomes(passed=2)
    assert [limit["budget_db"] for limit in header(project)["limits"]] == [0.25]


@proof
def test_gates_of_another_project_are_not_run_under_these_settings(
    pytester: pytest.Pytester, project: Path
) -> None:
    inner = project / "pkg"
    inner.mkdir()
    (project / "suites").rename(inner / "suites")
    (project / "baselines").rename(inner / "baselines")
    settings(inner, OPTIONS)
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*is of the project in *pkg, and this run has the settings of *"])
    pytester.runpytest_inprocess("pkg/suites").assert_outcomes(passed=2)
    assert (inner / "qgate-out" / "results.jsonl").is_file()
    (project / "elsewhere").mkdir()
    pytester.chdir()
    result = run_alone(pytester, "../pkg/suites", "--rootdir", str(project))
    assert result.ret == pytest.ExitCode.USAGE_ERROR, "a path that is not there"


def test_a_bad_marker_is_a_usage_error(project: Path, suites: Run) -> None:
    file = project / "suites" / "test_own.py"
    for arguments, words in (("0.5", "without a name"), ("budgetdb=3", "unknown argument")):
        file.write_text(
            f"import pytest\n@pytest.mark.limits({arguments})\n"
            "def test_own(gate, mode, layer): gate.layer(mode, layer)\n"
        )
        result = suites()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert words in str(result.stderr)
        assert "limits marker of test_own" in str(result.stderr)


def test_a_conftest_brings_models_and_modes_and_sees_records(project: Path, suites: Run) -> None:
    (project / "conftest.py").write_text(
        """
import torch, qgate
from qgate.modes import Mode, Rule

def build(samples):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2)]
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(blocks)
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x
    return qgate.Model(Net(), [torch.randn(4, 8) for _ in range(samples)], "theirs")

def pytest_qgate_models(config): return {"mine": build}
def pytest_qgate_modes(config):
    return [Mode("w4_row", "weights in INT4", rules=(Rule(":weight$", "int4", per="row"),))]
def pytest_qgate_record(item, record): record["ticket"] = item.name
"""
    )
    (project / "suites" / "test_task.py").unlink()
    options = ("--model", "mine", "--mode", "w4_row")
    assert suites(*options, "--update-baselines").ret == pytest.ExitCode.OK
    result = suites(*options)
    result.assert_outcomes(passed=2)
    rows = records(project)[1:]
    assert {row["model"] for row in rows} == {"theirs"}
    assert {row["ticket"] for row in rows} == {
        f"test_layer_outputs[mine-w4_row-layers.{k}]" for k in (0, 1)
    }
    collected = suites("--mode", "essential", "--layers", "first", "-q", "--collect-only")
    assert collected.stdout.str().count("tiny-llama-w4_row-layers.0") == 1
