"""Commands, checks and models of adopters on the simulated device."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate import capture, modes
from qgate.testing import CheckFailure, check, check_kernel, check_relations
from tests.devices import commands, simulated
from tests.devices.cases import Setting
from tests.devices.journal import Journal
from tests.devices.lanes import ROOT
from tests.shares import share

SIM = "sim:0"
COMMANDS = {
    "capture": commands.capture,
    "activations": commands.activations,
    "collect": commands.collect,
    "sweeps": commands.sweeps,
    "sweep of a saved tensor": commands.sweep_of_saved_tensor,
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@share(10)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_what_it_writes_on_the_cpu(name: str, tmp_path: Path) -> None:
    setting = Setting(SIM, 1, tmp_path, Journal(tmp_path / "journal.jsonl"))
    with simulated.divisions() as lines:
        assert not COMMANDS[name](setting)
    assert lines == Counter()


def test_check_holds_a_cast_of_the_device() -> None:
    x = numbers(16, 64).to(SIM)
    for name in ("mxfp8", "int8", "nvfp4", "hif4"):
        check(qgate.quantize(x, name), x, format=name)
    wrong = qgate.quantize(x, "mxfp8")
    wrong[3, 5] += 1
    with pytest.raises(CheckFailure, match="1 of 1,024"):
        check(wrong, x, format="mxfp8")


def right(x: Tensor, w: Tensor) -> Tensor:
    return linear(qgate.quantize(x, "mxfp8"), qgate.quantize(w, "mxfp8"))


def plain(x: Tensor, w: Tensor) -> Tensor:
    return linear(qgate.quantize(x, "mxfp8"), w)


def late(x: Tensor, w: Tensor) -> Tensor:
    """Take scales that are on the CPU, as in the first bug that a GPU showed."""
    return right(x, w) * torch.ones(20)


@share(6)
@pytest.mark.parametrize(
    ("kernel", "words"), [(right, ""), (plain, "argument 1"), (late, "same device")]
)
def test_check_kernel_on_the_device(kernel: Callable[..., Tensor], words: str) -> None:
    def run() -> None:
        check_kernel(
            kernel, numbers(24, 64), numbers(20, 64) / 8, like=linear,
            inputs={0: "mxfp8", 1: "mxfp8"}, device=SIM,
        )  # fmt: skip

    if not words:
        run()
        return
    with pytest.raises((CheckFailure, RuntimeError, qgate.QgateError), match=words):
        run()


def test_check_relations_of_a_kernel_on_the_device() -> None:
    check_relations(linear, numbers(24, 64).to(SIM), numbers(20, 64).to(SIM), like=linear)


def adopted(path: str) -> qgate.Model:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "docs" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: qgate.Model = module.build(samples=1)
    return model


@share(4)
@pytest.mark.parametrize("path", ["examples/my_model.py", "recipes/convnet.py"])
def test_a_model_of_the_documents_has_the_errors_of_the_cpu(path: str) -> None:
    """Layer by layer, from the errors of a mode; codes tip over where inputs differ by one bit."""
    runs = []
    with simulated.divisions() as lines:
        for device in ("cpu", SIM):
            model = adopted(path)
            model.module.to(device)
            quantized = modes.apply(modes.modes_of(model, "int8")[0], model)
            errors = capture.compare_runs(quantized.model, model)
            runs.append({site: error.metric("relative_mse") for site, error in errors.items()})
    cpu_errors, device_errors = runs
    assert cpu_errors.keys() == device_errors.keys()
    assert device_errors == pytest.approx(cpu_errors, rel=0.05)
    assert lines == Counter()
