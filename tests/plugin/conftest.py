"""A project with suites and baselines, and runs of pytest in it.

Runs share this process, where torch is imported already, unless a test wants one of its own.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

# Imported here, since a run in this process forgets what it imported first.
import qgate.analysis
import qgate.formats.engine.effects
import qgate.gate.measuring.model_gates
import qgate.metrics
import qgate.plugin.html_columns
import qgate.plugin.records
import qgate.plugin.sessions
import qgate.plugin.summary
import qgate.results  # noqa: F401
from qgate.gate import Policy
from qgate.gate.measuring.model_gates import ModelGates
from qgate.modes.setups import ModelSetup
from tests.campaigns.forked import ran
from tests.gate.benches import LLAMA, MAMBA, mode_of
from tests.gate.benches import SHORT as SAMPLING
from tests.plugin.projects import SUITES as SUITES
from tests.plugin.projects import begin
from tests.plugin.shared_bench import SharedBench
from tests.plugin.subjects import Gates, Subject
from tests.warm_workers import forked_workers

Run = Callable[..., pytest.RunResult]
SHORT = ("--samples=2", "--seqlen=64", "--calib-samples=2", "--calib-seqlen=64")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no line of a run be wrapped."""
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture(autouse=True)
def measured_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a shipped mode of a shipped model once for all runs of this process."""
    if "measured_anew" not in request.fixturenames:
        monkeypatch.setattr("qgate.plugin.sessions.Bench", SharedBench)


@pytest.fixture
def measured_anew() -> None:
    """For a test that changes how modes are measured, or that counts how often."""


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baselines of both tiny models in modes int8 and, of one, fp16 and 2-1."""
    folder: Path = tmp_path_factory.mktemp("recorded")
    for model, modes in ((LLAMA, ("int8", "fp16")), (MAMBA, ("int8", "2-1"))):
        bench = SharedBench(ModelSetup(model, sampling=SAMPLING))
        model_gates = ModelGates(bench, folder, Policy(), updating="all", plots="worst")
        for mode in modes:
            bench_mode = mode_of(model_gates.bench, mode)
            for layer in model_gates.bench.layers:
                model_gates.layer("layer_outputs", bench_mode, layer)
            model_gates.task("task", bench_mode)
        model_gates.commit()
    return folder


@pytest.fixture
def project(pytester: pytest.Pytester, recorded: Path) -> Path:
    """A folder with two suites and the recorded baselines, outside any CI."""
    shutil.copytree(recorded, pytester.path / "baselines")
    return begin(pytester, "test_layer_outputs.py", "test_task.py")


@pytest.fixture(scope="session")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Give projects of one name the same baselines, which the first of them records."""
    recordings: dict[str, Path] = {}

    def record(name: str, project: Path, run: Callable[[], pytest.RunResult]) -> None:
        if name in recordings:
            shutil.copytree(recordings[name], project / "baselines", dirs_exist_ok=True)
            return
        result = run()
        assert result.ret == pytest.ExitCode.OK, result.stdout.str()
        recordings[name] = tmp_path_factory.mktemp("kept") / "baselines"
        shutil.copytree(project / "baselines", recordings[name])

    return record


@pytest.fixture
def house(pytester: pytest.Pytester, subject: Subject) -> Path:
    """A project with the suites of a subject, which is beside them."""
    begin(pytester, *subject.suites)
    (pytester.path / "qgate.toml").write_text("")
    subject.write(pytester.path)
    return pytester.path


@pytest.fixture
def gates(pytester: pytest.Pytester, house: Path) -> Gates:  # noqa: ARG001
    def run(*options: str, at: str = "suites") -> pytest.RunResult:
        start = run_alone if "-n" in options else type(pytester).runpytest_inprocess
        return start(pytester, at, *options)

    return run


@pytest.fixture
def accepted(
    recorded_once: Callable[..., None], house: Path, gates: Gates, subject: Subject
) -> None:
    def update() -> pytest.RunResult:
        return gates(*subject.options, "--update-baselines")

    recorded_once(subject.suites[0], house, update)


def run_alone(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run pytest in a process of its own, which has torch already: a fork of this one.

    Its workers are forks as well.
    """
    begun = time.monotonic()
    paths = [pytester.path / name for name in ("stdout", "stderr")]

    def verb() -> int:
        for number, path in enumerate(paths, 1):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, number)
            os.close(handle)
        with forked_workers(options):
            return int(pytest.main([f"--basetemp={pytester.path / 'runpytest-0'}", *options]))

    status = ran(verb, pytester.path).status
    out, err = (path.read_text(encoding="utf-8").splitlines() for path in paths)
    print(*out, *err, sep="\n")
    return pytest.RunResult(status, out, err, time.monotonic() - begun)


@pytest.fixture
def suites(pytester: pytest.Pytester, project: Path) -> Run:  # noqa: ARG001
    """`pytest suites` with few and short samples, on tiny-llama in mode int8 unless said."""

    starts = {True: run_alone, False: type(pytester).runpytest_inprocess}

    def run(
        *options: str, alone: bool = False, paths: Sequence[str] = ("suites",)
    ) -> pytest.RunResult:
        chosen = list(options)
        chosen += [] if "--mode" in chosen else ["--mode", "int8"]
        chosen += [] if "--model" in chosen else ["--model", LLAMA]
        short = [option for option in SHORT if option.partition("=")[0] not in chosen]
        return starts[alone](pytester, *paths, *short, *chosen)

    return run
