"""What tells machines apart whose float32 sums differ in their last bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qgate import devices
from qgate.baselines.origin import is_device, kind_of
from qgate.cli import main
from qgate.devices import arithmetic_of
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.metrics import METRICS
from tests.shares import proof

PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "DNNL_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
}
ASK = "import torch; from qgate.devices import arithmetic_of; print(arithmetic_of(torch.device('cpu')))"


def run_alone(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@proof
def test_threads_are_the_same_arithmetic_and_other_instructions_another() -> None:
    arithmetic = arithmetic_of(torch.device("cpu"))
    assert is_device(arithmetic)
    assert kind_of(arithmetic) == "cpu"
    assert run_alone(ASK, OMP_NUM_THREADS="3", MKL_NUM_THREADS="3") == arithmetic
    other = run_alone(ASK, **PLAIN)
    assert other.startswith("cpu-default-")
    assert other.rpartition("-")[2] != arithmetic.rpartition("-")[2]


def test_settings_of_the_caller_are_no_other_arithmetic() -> None:
    arithmetic = arithmetic_of(torch.device("cpu"))
    arithmetic_of.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert arithmetic_of(torch.device("cpu")) == arithmetic


PRIVATE = """
import torch
from torch.utils import backend_registration
from qgate.devices import accelerators, exact_math, resolve
from qgate.errors import QgateError

class Backend(backend_registration._DummyBackendModule):
    count = 2

    def device_count(self):
        return self.count

    def get_amp_supported_dtype(self):
        return [torch.float16]

backend = Backend()
backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=backend)
print(resolve("npu"), resolve("NPU:1"), resolve(torch.device("npu", 0)), resolve("auto").type)
for name in ("npu:2", "sim:0"):
    try:
        resolve(name)
    except QgateError as error:
        print(error)
with torch.autocast("npu", dtype=torch.float16):
    with exact_math():
        print(torch.is_autocast_enabled("npu"))
    print(torch.is_autocast_enabled("npu"))
backend.count = 0
try:
    resolve("npu")
except QgateError as error:
    print(error)
"""


@proof
@pytest.mark.skipif(torch.cuda.is_available(), reason="the texts are those without a CUDA device")
def test_a_device_of_another_maker_is_allowed_once_its_backend_is_there() -> None:
    sees = f"torch {torch.__version__} sees"
    assert run_alone(PRIVATE).splitlines() == [
        "npu npu:1 npu:0 cpu",
        f"device 'npu:2' was asked for, but {sees} cpu, npu:0, npu:1. Use auto or cpu.",
        "unknown device 'sim:0'. Allowed: auto, cpu, cuda, cuda:N, and TYPE or TYPE:N of another "
        f"accelerator that torch knows; {sees} cpu, npu:0, npu:1.",
        "False",
        "True",
        f"device 'npu' was asked for, but {sees} only cpu. Use auto or cpu.",
    ]


@pytest.mark.parametrize(
    ("scope", "matches", "allowed"),
    [
        ("local", True, 0.02),
        ("local", False, 0.05),
        ("carried", False, 0.05),
        ("backward", True, 0.02),
        ("backward", False, 0.1),
    ],
)
def test_errors_have_more_room_where_the_arithmetic_is_another(
    scope: str, matches: bool, allowed: float
) -> None:
    assert Policy().limits_for("x:weight", "int8", scope).tolerance(matches) == allowed


def test_a_single_channel_has_more_room_than_all_of_them() -> None:
    limits = Policy().limits_for("x:output", "int8", "local")
    assert limits.tolerance(False, METRICS.get("relative_mse@worst_channel")) == 0.25
    assert limits.tolerance(True, METRICS.get("relative_mse@worst_channel")) == 0.02
    assert limits.tolerance(False, METRICS.get("relative_mse")) == 0.05


def test_a_single_channel_has_no_more_than_a_share_above_one() -> None:
    policy = Policy.from_table({"regression_other_device": 4.0, "reason": "zones"})
    limits = policy.limits_for("x:output", "5-7", "local")
    assert limits.tolerance(False, METRICS.get("relative_mse@worst_channel")) == 4.0
    assert limits.tolerance(False, METRICS.get("relative_mse")) == 4.0


def test_a_table_wins_over_the_room_of_a_scope() -> None:
    policy = Policy.from_table({"regression_other_device": 0.3})
    assert policy.limits_for("x:weight", "int8", "backward").tolerance(False) == 0.3


@pytest.mark.parametrize(
    ("scope", "metric", "allowed"),
    [
        ("carried", "relative_mse", 0.25),
        ("carried", "relative_mse@worst_sample", 1.0),
        ("local", "relative_mse", 0.5),
        ("task", "kl_divergence", 1.0),
        ("sweep", "saturated_share", 4.0),
        ("backward", "relative_mse", 9.0),
    ],
)
def test_errors_have_more_room_where_the_weights_are_others(
    scope: str, metric: str, allowed: float
) -> None:
    limits = Policy().limits_for("x:output", "int8", scope, other_weights=True)
    for matches in (True, False):
        assert limits.tolerance(matches, METRICS.get(metric)) == allowed
        assert limits.regression_limit(matches) == "regression_across_weights"


def test_the_wider_of_two_rooms_holds_on_another_device_with_other_weights() -> None:
    policy = Policy.from_table({"regression_other_device": 4.0, "reason": "zones"})
    limits = policy.limits_for("x:output", "5-7", "local", other_weights=True)
    assert limits.tolerance(False) == 4.0
    assert limits.tolerance(True) == 0.5
    assert limits.counted_slack(True, 1e-4) == 0.01
    assert Policy().limits_for("x").counted_slack(False, 1e-4) == 2e-4
    assert Policy().limits_for("x").counted_slack(True, 1e-4) == 0


OLD = (
    "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU "
    "driver by downloading and installing a new version."
)
VERSION = torch.__version__
BROKEN = [
    ("13.0", OLD, {}, f"the NVIDIA driver here is made for CUDA 12.8, and torch {VERSION} wants 13.0; update the driver, or install a torch that is built for CUDA 12.8"),
    ("13.0", "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", {}, f"torch {VERSION} cannot use the NVIDIA GPU of this machine: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized; `nvidia-smi` tells if its driver works"),
    (None, "", {}, f"torch {VERSION} is a build for the CPU, though this machine has an NVIDIA GPU; install a build for CUDA, see https://pytorch.org/get-started/locally"),
    ("13.0", "No CUDA GPUs are available", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides all CUDA devices"),
]  # fmt: skip


def broken(
    monkeypatch: pytest.MonkeyPatch, build: str | None, text: str, environment: dict[str, str]
) -> None:
    """Let torch fail on the GPU of this machine."""

    def fail() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("build", "text", "environment", "reason"), BROKEN)
def test_a_gpu_that_torch_cannot_use_is_said_with_what_to_do(
    build: str | None,
    text: str,
    environment: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken(monkeypatch, build, text, environment)
    monkeypatch.setattr(devices, "_DEVICE_FILES", str(tmp_path))
    (tmp_path / "nvidia0").touch()
    with pytest.raises(QgateError) as caught:
        devices.resolve("cuda:1")
    assert str(caught.value) == f"device 'cuda:1' was asked for, but {reason}. Use auto or cpu."
    assert devices.cpu_notice("auto") == f"device auto is the CPU: {reason}."
    assert not devices.cpu_notice("cpu")
    assert devices.resolve("auto").type == "cpu"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    main(["doctor"])
    assert f"gates run on the CPU: {reason}." in capsys.readouterr().out


def test_a_machine_without_a_gpu_has_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_DEVICE_FILES", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for build in ("13.0", None):
        broken(monkeypatch, build, "Found no NVIDIA driver on your system.", {})
        assert not devices.cpu_notice("auto")
        with pytest.raises(QgateError, match=r"but torch .* sees only cpu\. Use auto or cpu\.$"):
            devices.resolve("cuda")
