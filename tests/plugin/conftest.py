"""A project with suites and baselines, and runs of pytest in it.

Runs share this process, where torch is imported already, unless a test wants one of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

# Imported here, since a run in this process forgets what it imported first.
import qgate.analysis
import qgate.metrics
import qgate.pipeline.gates.gating
import qgate.results  # noqa: F401
from tests.pipeline.making import LLAMA, MAMBA, mode_of, session

Run = Callable[..., pytest.RunResult]
SUITES = Path(__file__).parents[2] / "suites"
SHORT = ("--samples=2", "--seqlen=64", "--calib-samples=2", "--calib-seqlen=64")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baselines of both tiny models in modes int8 and, of one, fp16 and 2-1."""
    folder: Path = tmp_path_factory.mktemp("recorded")
    for model, modes in ((LLAMA, ("int8", "fp16")), (MAMBA, ("int8", "2-1"))):
        made = session(folder, model, updating="all")
        for mode in modes:
            found = mode_of(made.bench, mode)
            for layer in made.bench.layers:
                made.layer("layer_outputs", found, layer)
            made.task("task", found)
        made.commit()
    return folder


@pytest.fixture
def project(pytester: pytest.Pytester, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two suites and the recorded baselines, outside any CI."""
    monkeypatch.setenv("COLUMNS", "250")
    shutil.copytree(recorded, pytester.path / "baselines")
    (pytester.path / "suites").mkdir()
    for name in ("test_layer_outputs.py", "test_task.py"):
        shutil.copy(SUITES / name, pytester.path / "suites")
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\naddopts = ['-p', 'no:cacheprovider']")
    return pytester.path


@pytest.fixture
def suites(pytester: pytest.Pytester, project: Path) -> Run:  # noqa: ARG001
    """`pytest suites` with few and short samples, on tiny-llama in mode int8 unless said."""

    def run(*options: str, alone: bool = False) -> pytest.RunResult:
        given = list(options)
        given += [] if "--mode" in given else ["--mode", "int8"]
        given += [] if "--model" in given else ["--model", LLAMA]
        short = [each for each in SHORT if each.partition("=")[0] not in given]
        start = pytester.runpytest_subprocess if alone else pytester.runpytest_inprocess
        return start("suites", *short, *given)

    return run
