"""Kernels that end their process or never come back: a failure of the check, and life goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import qgate
from qgate.device_errors import DeviceMemoryError
from qgate.kernel_checks import isolation
from qgate.kernel_checks.updating import UPDATING
from qgate.testing import CheckFailure, check_kernel
from tests.shares import proof, share

X, W = torch.randn(12, 32), torch.randn(6, 32)
OPTIONS: dict[str, Any] = {"like": linear, "relations": ["odd", "permuted"]}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")


def _kill(number: int) -> None:
    # Without the traceback that pytest's faulthandler prints.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@share(4)
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: _kill(signal.SIGFPE), "killed the process (SIGFPE)"),
        (lambda: _kill(signal.SIGSEGV), "killed the process (SIGSEGV)"),
        (lambda: os._exit(3), "ended the process (exit status 3)"),
        (lambda: sys.exit(0), "ended the process (exit status 0)"),
    ],
)
@pytest.mark.parametrize("rows", [12, 3])
def test_a_kernel_that_ends_its_process_is_a_failure(end: Any, words: str, rows: int) -> None:
    def fragile(x: Tensor, w: Tensor) -> Tensor:
        if len(x) == rows:
            end()
        return linear(x, w)

    where = "the example" if rows == 12 else "3 of 12 along dimension 0 of argument 0"
    with pytest.raises(CheckFailure) as failure:
        check_kernel(fragile, X, W, isolate=True, **OPTIONS)
    assert failure.value.cause == f"fragile {words} for {where}"


def test_a_lost_device_is_a_failure_and_only_that_of_the_other_process() -> None:
    def asserting(x: Tensor, w: Tensor) -> Tensor:
        if len(x) == 3:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return linear(x, w)

    words = r"^asserting stopped the device for 3 of 12 along dimension 0 of argument 0: "
    with pytest.raises(CheckFailure, match=words):
        check_kernel(asserting, X, W, isolate=True, **OPTIONS)


def test_a_hang_at_the_example_is_a_failure() -> None:
    start = time.monotonic()
    with pytest.raises(CheckFailure) as failure:
        check_kernel(lambda _x, _w: time.sleep(60), X, W, timeout=0.3, **OPTIONS)
    assert failure.value.cause == "the kernel gives no answer within 0.3 s for the example"
    assert time.monotonic() - start < 20


def test_a_hang_at_derived_inputs_is_a_refusal_of_each() -> None:
    def hanging(x: Tensor, w: Tensor) -> Tensor:
        if len(x) == 3 or len(w) == 3:
            time.sleep(60)
        return linear(x, w)

    report = check_kernel(hanging, X, W, timeout=1, **OPTIONS)
    assert report.left_out == {
        "3 of 12 along dimension 0 of argument 0": "no answer within 1 s",
        "3 of 6 along dimension 0 of argument 1": "no answer within 1 s",
    }
    assert "12 in another order along dimension 0 of argument 0" in report.held


def test_a_hang_in_a_repetition_is_a_failure() -> None:
    calls = [0]

    def late(x: Tensor, w: Tensor) -> Tensor:
        calls[0] += torch.equal(x, X)
        if calls[0] == 3:
            time.sleep(60)
        return linear(x, w)

    with pytest.raises(
        CheckFailure, match=r"^late gives no answer within 1 s for the example, run [23]$"
    ):
        check_kernel(late, X, W, timeout=1, like=linear, relations=["odd"])


def test_an_isolated_check_gives_the_same_report() -> None:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return linear(qgate.quantize(x, "mxfp8"), w)

    options = {**OPTIONS, "inputs": {0: "mxfp8"}}
    in_process, isolated = (
        check_kernel(kernel, X, W, isolate=isolate, **options) for isolate in (False, True)
    )
    assert in_process == isolated


def test_failures_and_errors_come_back_as_they_are() -> None:
    with pytest.raises(
        CheckFailure, match=r"^the kernel is wrong: argument 0 is counted twice"
    ) as failure:
        check_kernel(lambda x, w: 2 * linear(x, w), X, W, isolate=True, **OPTIONS)
    assert failure.value.report.name == "the kernel"
    with pytest.raises(ValueError, match=r"unknown relation 'ood'"):
        check_kernel(linear, X, W, like=linear, relations=["ood"], isolate=True)

    def hungry(_x: Tensor, _w: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(DeviceMemoryError, match="is too small for hungry"):
        check_kernel(hungry, X, W, isolate=True, **OPTIONS)

    def dividing(x: Tensor, _w: Tensor) -> Tensor:
        return x * (1 // (len(x) // len(X) - 1))

    words = "dividing raised ZeroDivisionError for the example: "
    with pytest.raises(CheckFailure, match=words) as failure:
        check_kernel(dividing, X, W, isolate=True, **OPTIONS)
    assert "return x * (1 // (len(x) // len(X) - 1))" in str(failure.value.__cause__)


def test_accepted_values_are_written_by_the_other_process(tmp_path: Path) -> None:
    token = UPDATING.set(True)
    try:
        check_kernel(linear, X, W, accept=tmp_path / "one.json", isolate=True, **OPTIONS)
    finally:
        UPDATING.reset(token)
    assert check_kernel(linear, X, W, accept=tmp_path / "one.json", isolate=True, **OPTIONS).held


def ending_at_three(x: Tensor, w: Tensor) -> Tensor:
    if len(x) == 3:
        _kill(signal.SIGFPE)
    return linear(x, w)


@proof
def test_where_a_device_is_in_use_a_new_process_imports_the_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    words = r"^ending_at_three killed the process \(SIGFPE\) for 3 of 12 along dimension 0 of argument 0$"
    with pytest.raises(CheckFailure, match=words):
        check_kernel(ending_at_three, X, W, isolate=True, **OPTIONS)
    with pytest.raises(ValueError, match=r"need functions of a module here, no lambdas"):
        check_kernel(lambda x, w: linear(x, w), X, W, isolate=True, **OPTIONS)


@pytest.mark.parametrize("timeout", [0, -1, True, float("nan"), "5"])
def test_a_timeout_is_seconds(timeout: Any) -> None:
    with pytest.raises(ValueError, match="give seconds above zero"):
        check_kernel(linear, X, W, like=linear, timeout=timeout)


def test_a_reference_that_ends_the_process_is_not_the_kernel_s_failure() -> None:
    def like(_x: Tensor, _w: Tensor) -> Tensor:
        os._exit(7)

    with pytest.raises(
        qgate.errors.QgateError, match=r"something else than linear ended the process"
    ):
        check_kernel(linear, X, W, like=like, isolate=True)
