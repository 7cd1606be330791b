"""What `qgate init` writes is a gate: red, then green, then red where a kernel got worse."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Imported here, since a run in this process forgets what it imported first.
import qgate.analysis
import qgate.gate.measuring.model_gates
import qgate.metrics
import qgate.results  # noqa: F401
from qgate.cli import main
from tests.shares import proof

KERNEL = "clamp(min=1e-12) / 127"
FEW = ("--qgate-layers", "first", "--qgate-samples", "2", "--qgate-seqlen", "32")


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, where commands are run, outside any CI."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    sys.modules.pop("qgate_model", None)


def init(*argv: str) -> int:
    return main(["init", *argv])


def test_the_example_is_the_same_everywhere(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are exact, so that a baseline of one machine is of use on another."""
    from qgate import models

    init()
    monkeypatch.syspath_prepend(repository / "suites")
    sampling = models.Sampling(samples=3, seqlen=40, seed=1)
    model = models.load("qgate_model:build", sampling=sampling)
    assert [tuple(sample.shape) for sample in model.inputs] == [(1, 40)] * 3
    assert model.weights_hash()[:16] == "f8e6de5a9394daff"
    assert model.layers == ("layers.0", "layers.1", "layers.2")


@proof
@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_a_repository_with_tests_options_and_settings_of_its_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Files of the same name, strict settings, an option --mode; run from another folder."""
    root = pytester.mkdir("product")
    (root / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--mode', default='theirs')\n"
    )
    (root / "tests").mkdir()
    (root / "tests" / "test_task.py").write_text(
        "def test_theirs(request):\n    assert request.config.getoption('--mode') == 'theirs'\n"
    )
    (root / "pytest.ini").write_text(
        f"[pytest]\ntestpaths = tests\naddopts = --strict-markers --strict-config --import-mode={mode}\n"
        "filterwarnings = error\n"
    )
    monkeypatch.chdir(root)
    assert init("--into", "gates", "--suites", "layer_outputs,task") == 0
    monkeypatch.chdir(pytester.path)
    run = pytester.runpytest_inprocess
    suites = (f"--rootdir={root}", f"--config-file={root / 'pytest.ini'}", str(root / "gates"))

    result = run(*suites, *FEW, "--qgate-mode", "my_int8")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["2 tests have no accepted errors yet*", "*to record it: pytest product/gates *"]
    )
    run(*suites, *FEW, "--update-baselines")
    result = run(*suites, str(root / "tests"), *FEW)
    result.assert_outcomes(passed=5)
    result = run(*suites, *FEW, "--qgate-mode", "int8")
    result.assert_outcomes(passed=2)

    example = root / "gates" / "qgate_model.py"
    text = example.read_text()
    assert KERNEL in text
    example.write_text(text.replace(KERNEL, "clamp(min=1e-12) / 63"))
    result = run(*suites, *FEW)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "layers.0.up:output (mode my_int8) is wrong: its input and its weight are quantized with*",
            "cause: layers.0.up:output (*, mode my_int8) is wrong: its input and its*",
        ]
    )
    assert sorted(path.name for path in pytester.path.iterdir()) == ["product"]
