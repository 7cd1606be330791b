"""Suites with 22 hostile names in what they measure: none of them is obeyed or begins a line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.hostile import TOGETHER
from tests.hostile_files import assert_calm, assert_calm_files, write_all
from tests.plugin.conftest import SUITES
from tests.shares import share

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")
OUTPUT = ("--junitxml=qgate-out/junit.xml", "-p", "no:cacheprovider")
RUNS = {
    "dumps": ("test_dump_overflow.py", "test_dump_distributions.py", "--dump=dump", "--format=int8"),
    "checkpoints": ("test_checkpoint.py", "--checkpoint=checkpoints/child", "--parent=checkpoints/parent"),
    "engines": ("test_engines.py", "--engines", "engines/trainer.npz", "engines/rollout.npz",
                "--engines-weights", "checkpoints/parent", "checkpoints/child"),
    "models": ("test_layer_outputs.py", "--model=hostile_model.py:build", f"--mode=int8,{TOGETHER[9]}",
               "--samples=2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("hostile")
    write_all(folder)
    return folder


@share(4)
@pytest.mark.parametrize("run", RUNS)
def test_no_name_of_a_suite_is_obeyed(
    run: str, inputs: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First without accepted errors, then an update of them."""
    shutil.copytree(inputs, pytester.path, dirs_exist_ok=True)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    for path in SUITES.glob("test_*.py"):
        shutil.copy(path, pytester.path)
    before = set(pytester.path.rglob("*"))
    for more in (("-v",), ("--update-baselines",)):
        result = pytester.runpytest_inprocess(*RUNS[run], *OUTPUT, *more)
        assert result.ret != pytest.ExitCode.INTERNAL_ERROR
        assert_calm("\n".join(result.outlines), f"{run} {more} printed")
        assert_calm("\n".join(result.errlines), f"{run} {more} said")
    assert_calm_files(set(pytester.path.rglob("*")) - before)
