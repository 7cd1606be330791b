"""Faults of a device under gates: after each there is one sentence, nothing is torn, others go on.

The kernel of a small model does what a kernel of a user's can do: it ends its device, asks for more
memory than there is, never returns, or is killed in the middle.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.devices.cases import Case, Cases, Setting

_WAIT_S, _INSIDE = 200, "inside"
_MODEL = """
import copy, os, sys, time
from pathlib import Path
import torch
from torch import nn
import qgate

class Kernel(nn.Module):
    is_own = False

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        fault, _, place = os.environ.get("FAULT", "").partition(" ")
        in_a_test = "PYTEST_CURRENT_TEST" in os.environ
        if self.is_own and fault and (in_a_test or place == "anywhere"):
            break_device(fault, x)
        return torch.tanh(self.up(x))

def break_device(fault, x):
    simulated = sys.modules.get("tests.devices.simulated")
    if fault == "memory":
        torch.empty(1 << 45, device=x.device)
    elif fault == "assert" and simulated is None:
        x[torch.full((1,), len(x) + 10**6, device=x.device)].sum().item()
    elif fault in ("assert", "lost"):
        words = {"assert": "device-side assert triggered", "lost": "unspecified launch failure"}
        if simulated is None:
            raise RuntimeError(f"CUDA error: {words[fault]}")
        simulated.lose(words[fault])
    elif fault == "hang":
        Path("inside").touch()
        if simulated is None:
            torch.cuda._sleep(10**12)
            torch.cuda.synchronize()
        time.sleep(1000)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Kernel(), Kernel(), Kernel()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def quantized(model):
    module = copy.deepcopy(model.module)
    for layer in module.layers:
        layer.up.weight.data.copy_(qgate.quantize(layer.up.weight.data, "int8"))
    module.layers[1].is_own = True
    return module

def build(samples=2):
    torch.manual_seed(0)
    inputs = [torch.randn(4, 32) for _ in range(samples)]
    return qgate.Model(Net(), inputs, name="faulty", modes={"mine": quantized})
"""
_SUITE = """
def test_layer(gate, mode, layer):
    gate.layer(mode, layer)

def test_of_their_own():
    assert True
"""


class Ended(NamedTuple):
    """How a run of pytest ended: its exit status, and what it printed."""

    status: int
    text: str


def _project(setting: Setting, name: str) -> Path:
    """Make a project whose gates are green on this device."""
    home = setting.folder / name.replace(" ", "-")
    shutil.rmtree(home, ignore_errors=True)
    (home / "suites").mkdir(parents=True)
    (home / "faulty.py").write_text(_MODEL, encoding="utf-8")
    (home / "suites" / "test_layer.py").write_text(_SUITE, encoding="utf-8")
    options = '[tool.qgate]\nmodel = "faulty:build"\nmode = "mine,int8"\n'
    (home / "pyproject.toml").write_text(options, encoding="utf-8")
    _run(setting, home, "--update-baselines")
    return home


def _start(
    setting: Setting, home: Path, options: Sequence[str], fault: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "suites", "-q", "-rfE", "--tb=short"]
    command += ["-p", "qgate.plugin", "-p", "no:cacheprovider", "--device", setting.device]
    command += ["-p", "tests.devices.plugin"] if setting.device.startswith("sim") else []
    # A run that a test starts is in no test of its own yet.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        [*command, *options], cwd=home, text=True, env={**ours, "FAULT": fault},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _run(
    setting: Setting, home: Path, *options: str, fault: str = "", number: int | None = None
) -> Ended:
    """Run the gates; with a signal's number, send it once the kernel is in its middle."""
    (home / _INSIDE).unlink(missing_ok=True)
    with _start(setting, home, options, fault) as process:
        try:
            if number is not None:
                end = time.monotonic() + _WAIT_S
                while not (home / _INSIDE).exists() and time.monotonic() < end:
                    time.sleep(0.05)
                process.send_signal(number)
            text, _ = process.communicate(timeout=_WAIT_S)
        finally:
            process.kill()
    return Ended(process.returncode, text)


def _wrong(ended: Ended, status: int, *words: str) -> str:
    """Say what of a run is not as expected: its status, missing words, or raw output."""
    problems = [] if ended.status == status else [f"status {ended.status}, not {status}"]
    problems += [f"no {word!r}" for word in words if word not in ended.text]
    raw = ("Traceback", "INTERNALERROR", "Fatal Python error")
    problems += [word for word in raw if word in ended.text]
    return f"{', '.join(problems)}: {ended.text[-1500:]}" if problems else ""


def _torn(setting: Setting, home: Path) -> str:
    """Say what a run left that is not whole; then the gates must be green again."""
    for file in home.glob("qgate-out*/results.jsonl"):
        try:
            [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            return f"{file.name} is torn: {error}"
    return _wrong(_run(setting, home), 0, "7 passed")


def _fault(name: str, *words: str, workers: int = 0) -> Case:
    def case(setting: Setting) -> str:
        home = _project(setting, f"{name} {workers}")
        options = ["-n", str(workers)] if workers else []
        ended = _run(setting, home, *options, fault=name)
        return _wrong(ended, 1, *words) or _torn(setting, home)

    return case


def _signal(number: int, status: int, *words: str) -> Case:
    def case(setting: Setting) -> str:
        home = _project(setting, f"signal {number}")
        ended = _run(setting, home, fault="hang", number=number)
        return _wrong(ended, status, *words) or _torn(setting, home)

    return case


def _two_runs(setting: Setting) -> str:
    home = _project(setting, "two runs")
    with _start(setting, home, (), "") as first, _start(setting, home, (), "") as second:
        for process in (first, second):
            text, _ = process.communicate(timeout=_WAIT_S)
            if wrong := _wrong(Ended(process.returncode, text), 0, "7 passed"):
                return wrong
    return _torn(setting, home)


_STOPPED = "a kernel stopped the device for this process"


def cases(_: Setting) -> Cases:
    """Return a case for each fault; those of workers need pytest-xdist."""
    listed: dict[str, Case] = {
        "out of memory": _fault("memory", "is too small for", "4 passed"),
        "a device-side assert": _fault("assert", f"{_STOPPED} (device-side assert", "not held: "),
        "a lost device": _fault("lost", f"{_STOPPED} (unspecified launch failure)", "not held: "),
        "a device that is lost while tests are collected": _fault(
            "lost anywhere", f"{_STOPPED} (unspecified launch failure)", "not held: "
        ),
        "a kill in the middle of a kernel": _signal(signal.SIGKILL, -signal.SIGKILL),
        "Ctrl-C in a kernel that hangs": _signal(signal.SIGINT, 2, "KeyboardInterrupt"),
        "two runs on one device": _two_runs,
    }
    if importlib.util.find_spec("xdist"):
        listed["a lost device, other gates in another worker"] = _fault(
            "lost", _STOPPED, "4 passed", workers=1
        )
    return listed
