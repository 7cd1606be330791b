"""`pytest suites` on the simulated device holds what a CPU accepted, and says where it must not.

The models are the last blocks of the shipped ones, with few and short samples: `python -m tests.devices
sim` runs all modes of the whole models with the baselines of this repository.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

# Imported here, so that a run in a fork of this process has them.
import qgate.analysis
import qgate.gate.measuring.bench
import qgate.plugin.records
import qgate.plugin.sessions
import qgate.plugin.summary  # noqa: F401
from qgate import modes
from qgate.gate.measuring import model_subject
from tests.campaigns.forked import Ended, ran
from tests.devices import simulated
from tests.devices.lanes import ROOT
from tests.shares import proof, share, slow_file

pytestmark = slow_file

FAMILIES = {"tiny-llama": "other", "tiny-mamba": "mamba"}
CASES = [(model, mode.name) for model, of in FAMILIES.items() for mode in modes.select("all", of)]
SUITES = ("gradients", "layer_outputs", "outputs", "reference", "task")
SHORT = ("--samples=2", "--seqlen=24", "--calib-samples=2", "--calib-seqlen=24", "--no-report")
CONFTEST = """
from dataclasses import replace
from qgate.models import Sampling, load

def pytest_qgate_models(config):
    def build(name):
        def model(samples, seqlen, calib_samples, calib_seqlen):
            whole = load(name, sampling=Sampling(samples, seqlen, calib_samples, calib_seqlen))
            blocks, layers = whole.layers[0].rpartition(".")[0], whole.layers[:1]
            del whole.module.get_submodule(blocks)[:-1]
            whole.module.config = replace(whole.module.config, n_layer=1)
            return replace(whole, layers=layers, name=f"small-{name}")
        return model
    return {f"small-{name}": build(name) for name in ("tiny-llama", "tiny-mamba")}
"""
LINES = "lines.json"
# Lines of qgate that divide a tensor by a number, with the reason.
EXCEPTIONS: dict[str, str] = {}


def suites(
    folder: Path, device: str, *options: str, fault: Callable[[], None] | None = None
) -> Ended:
    """Run pytest in a project, in a process of its own; `lines.json` has the lines that divide."""

    def verb() -> int:
        words = [f"suites/test_{name}.py" for name in SUITES]
        words += ["-p", "qgate.plugin", "-p", "no:cacheprovider", "-q", "--tb=short"]
        words += ["--device", device, *SHORT, *options]
        with simulated.divisions() as lines:
            status = int(pytest.main(words))
        Path(LINES).write_text(json.dumps(lines))
        return status

    return ran(verb, folder, fault)


def accepted_by_the_cpu(folder: Path, model: str, mode: str) -> None:
    shutil.copytree(ROOT / "suites", folder / "suites")
    (folder / "pyproject.toml").write_text("")
    (folder / "conftest.py").write_text(CONFTEST)
    ended = suites(folder, "cpu", "--model", f"small-{model}", "--mode", mode, "--update-baselines")
    assert ended.status == 0, ended.said


@share(60)
@pytest.mark.parametrize(("model", "mode"), CASES)
def test_a_mode_that_a_cpu_accepted_is_green(tmp_path: Path, model: str, mode: str) -> None:
    accepted_by_the_cpu(tmp_path, model, mode)
    ended = suites(tmp_path, "sim", "--model", f"small-{model}", "--mode", mode)
    assert ended.status == 0, ended.said
    lines = json.loads((tmp_path / LINES).read_text())
    assert lines.keys() <= EXCEPTIONS.keys()


def divided_as_before() -> None:
    """Divide by numbers in all files that used to."""
    files = [module for name, module in sys.modules.items() if name.startswith("qgate.")]
    changed = [file for file in files if hasattr(file, "divided")]
    assert len(changed) > 5
    for file in changed:
        file.divided = lambda x, by: x / by  # type: ignore[attr-defined]


def references_of_the_device() -> None:
    """Ask a tensor for its numbers without copying it to the CPU."""
    cat = torch.cat

    class Torch:
        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        @staticmethod
        def cat(tensors: list[Tensor]) -> Tensor:
            joined = cat(tensors)
            joined.cpu = lambda: joined  # type: ignore[method-assign]
            return joined

    model_subject.torch = Torch()  # type: ignore[attr-defined]


@proof
@pytest.mark.parametrize("mode", ["2-1", "3", "5-3", "5-4", "5-6", "5-7"])
def test_a_division_by_a_number_is_red(tmp_path: Path, mode: str) -> None:
    """The scales of two weights of this block are one bit off if they are."""
    accepted_by_the_cpu(tmp_path, "tiny-mamba", mode)
    options = ("--model", "small-tiny-mamba", "--mode", mode)
    ended = suites(tmp_path, "sim", *options, fault=divided_as_before)
    assert ended.status == 1, ended.said
    assert "follows another convention: scale amax" in ended.said, ended.said
    lines = json.loads((tmp_path / LINES).read_text())
    assert any(line.startswith("modes/simulated/") for line in lines), lines


@proof
def test_references_that_stay_on_the_device_are_red(tmp_path: Path) -> None:
    accepted_by_the_cpu(tmp_path, "tiny-llama", "int8")
    options = ("--model", "small-tiny-llama", "--mode", "int8", "-k", "reference")
    ended = suites(tmp_path, "sim", *options, fault=references_of_the_device)
    assert ended.status == 1
    assert "can't convert sim:0 device type tensor to numpy" in ended.said
