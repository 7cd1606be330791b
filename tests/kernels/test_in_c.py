"""The kernels in CUDA C, emulated on the CPU: their bits, planted faults, and what replaces them.

The emulation runs the source itself, threads and barriers and all. What the driver and NVRTC do
with it is seen on a device only, by tests/kernels/test_cuda.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.kernels import cases, comparing, compiling, proving, reductions
from qgate.kernels.proving import KernelWarning
from qgate.stats import _device_pass
from qgate.stats._error_pass import SHIFT
from qgate.stats.error_stats import errors
from qgate.stats.value_counts import counts
from tests.kernels import checks
from tests.kernels.emulated import emulation
from tests.shares import proof, share

BF16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof on fewer numbers, spread over all there are."""
    every = cases.numbers
    monkeypatch.setattr(cases, "numbers", lambda dtype: every(dtype)[::9])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU have kernels."""
    monkeypatch.setattr(proving, "_verdicts", {})
    monkeypatch.setattr(proving, "serves", lambda device: device == CPU)
    monkeypatch.setattr(_device_pass, "serves", lambda *_: True)


@share(6)
@pytest.mark.parametrize("name", checks.IN_C)
@pytest.mark.usefixtures("few")
def test_the_kernel_gives_the_definitions_bits(name: str) -> None:
    with emulation():
        assert checks.IN_C[name](CPU) == ""


@pytest.mark.parametrize(("kilobytes", "parts"), [(227, 2), (163, 2), (99, 4), (64, 4), (48, 8)])
def test_counters_are_as_many_as_fit(kilobytes: int, parts: int) -> None:
    """The less shared memory, the more often the tensor is read."""
    x = cases.bell_curve(BF16, count=300_001)[1:]
    with emulation(kilobytes * 2**10, processors=3):
        shared_counts = reductions.count_in_shared_memory(x)
        launches = compiling.kernel("counting.cu", "count_16_bits", CPU).launches
    assert torch.equal(shared_counts, reductions.count_by_torch(x))
    assert launches == [(3 * parts, 4 * 2**16 // parts)]


FAULTS = {
    "count bf16 in C": [
        ("k < head + n - tail", "k < head"),  # the last numbers
        ("word >> shift) &", "word >> shift / 2) &"),
        ("(k + share * 256) & (counters - 1)", "k & (counters - 2)"),
    ],
    "errors bf16 in C": [
        ("x[2 * k] + x[2 * k + 1]", "x[k] + x[k + half]"),  # another order
        ("off_a * off_r", "fma(off_a, off_r, sum.co[k]) - sum.co[k]"),
        ("of.begin + row + threadIdx.x % 32 * COLUMNS", "of.begin + row + threadIdx.x % 32"),
        ("zeros += good && key == 0", "zeros += key == 0"),
        ("counts[(2 + i) * tiles] = count", "counts[(2 + (i < 6 ? i ^ 1 : i)) * tiles] = count"),
        ("(int)0x8FFFFFFFu", "(int)0x0FFFFFFFu"),
    ],
    "merged bf16 in C": [
        ("x[m] += x[m + half]", "x[m] = x[2 * m] + x[2 * m + 1]"),  # another order
        ("bit = groups / 2", "bit = groups / 4"),
        ("a.place < b.place", "a.place > b.place"),
        ("counts[tile] < (room < TILE ? room : TILE)", "counts[tile] < TILE"),
        ("- mean_r) + sums[3", "- mean_r) - sums[3"),
        ("return 0.0;", "return 9e99;"),
    ],
}


@share(16)
@pytest.mark.parametrize(
    ("name", "right", "wrong"), [(name, *fault) for name in FAULTS for fault in FAULTS[name]]
)
@pytest.mark.usefixtures("few")
def test_a_planted_fault_is_found(name: str, right: str, wrong: str) -> None:
    def plant(text: str) -> str:
        assert right in text
        return text.replace(right, wrong)

    with emulation(edit=plant):
        assert re.search("differ|wrong", checks.IN_C[name](CPU))


@proof
@pytest.mark.usefixtures("here", "few")
def test_counts_and_errors_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Triton's kernels nor torch are asked."""
    x = cases.bell_curve(BF16, count=70_001)
    y = x * 1.01
    with monkeypatch.context() as patch:
        patch.setattr(proving, "serves", lambda _: False)
        cpu_counts, expected = counts(x), errors(y, x, worst=9)
    for name in ("count_by_kernel", "largest_by_kernel"):
        monkeypatch.delattr(reductions, name)
    monkeypatch.setattr(comparing, "compare_by_kernel", None)
    with emulation(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counts(x) == cpu_counts
        assert checks.errors_apart(errors(y, x, worst=9), expected) == ""


@pytest.mark.usefixtures("here", "few")
def test_a_source_that_does_not_compile_is_told_of_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("NVRTC: invalid value for --gpu-architecture (-arch)\nand more")

    x = cases.bell_curve(BF16, count=3000)
    monkeypatch.setattr(reductions, "count_by_kernel", reductions.count_by_torch)
    monkeypatch.setattr(comparing, "compare_by_kernel", comparing.compare_by_torch)
    with emulation(), monkeypatch.context() as patch:
        patch.setattr(compiling, "kernel", refuse)
        with warnings.catch_warnings(
            record=True, action="always", category=KernelWarning
        ) as caught:
            first_counts, compared = counts(x), errors(x * 2, x)
            assert counts(x) == first_counts
    texts = [str(warning.message) for warning in caught]
    assert all("invalid value for --gpu-architecture (-arch))" in text for text in texts)
    assert len(texts) == 3, "each kernel is told of once"
    assert "counts of bfloat16 tensors on cpu with a Triton kernel, which is slower" in texts[0]
    assert "errors of bfloat16 tensors against bfloat16 ones on cpu with a Triton" in texts[1]
    assert "totals of errors on cpu with torch alone" in texts[2]
    assert np.array_equal(first_counts.counts, reductions.count_by_torch(x).numpy())
    assert compared.sums.count == 3000


@pytest.mark.usefixtures("here", "few")
def test_a_device_with_little_shared_memory_uses_triton() -> None:
    with emulation(99 * 2**10):
        assert not comparing.fits_shared_memory(CPU, SHIFT)
    with emulation(163 * 2**10):
        assert comparing.fits_shared_memory(CPU, SHIFT)
        assert not comparing.fits_shared_memory(CPU, SHIFT - 1)


def test_every_difference_of_float32_has_its_counter() -> None:
    """The largest and the smallest difference there are have the ends of the window."""
    low, room = comparing.key_window(SHIFT)
    tiny, huge = 2.0**-149, 2 * torch.finfo(torch.float32).max
    keys = np.array([tiny, huge]).view(np.int64) >> SHIFT
    assert keys.tolist() == [low, low + room - 1]


# NVRTC -------------------------------------------------------------------------------------------


def nvrtc(status: int, options: list[bytes]) -> Any:
    """A compiler that returns `status`, its log or a binary."""

    def size(_: object, reference: Any) -> int:
        reference._obj.value = 5
        return 0

    def text(words: bytes) -> Any:
        return lambda _, room: setattr(room, "value", words) or 0

    def compile(_: object, count: int, listed: Any) -> int:
        options.extend(listed[:count])
        return status

    return SimpleNamespace(
        nvrtcCreateProgram=lambda *_: 0, nvrtcCompileProgram=compile, nvrtcDestroyProgram=lambda _: 0,
        nvrtcGetProgramLogSize=size, nvrtcGetProgramLog=text(b"oops"),
        nvrtcGetCUBINSize=size, nvrtcGetCUBIN=text(b"code"),
    )  # fmt: skip


def test_a_source_is_compiled_without_fused_products(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[bytes] = []
    monkeypatch.setattr(compiling, "_nvrtc", lambda: nvrtc(0, options))
    assert compiling.compile_source("right", "sm_90", {"B": 2, "A": 1}) == b"code\0"
    assert options == [b"--gpu-architecture=sm_90", b"--std=c++17", b"--fmad=false", b"-DA=1", b"-DB=2"]  # fmt: skip
    compiling.compile_source("right", "sm_90", {"A": 1, "B": 2})
    assert len(options) == 5, "what was compiled is not compiled again"


def test_an_error_has_the_compilers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_nvrtc", lambda: nvrtc(6, []))
    with pytest.raises(RuntimeError, match=r"^NVRTC: oops$"):
        compiling.compile_source("wrong", "sm_90", {})


def test_an_error_has_the_drivers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(status: int, reference: Any) -> None:
        reference._obj.value = ctypes.c_char_p(f"number {status}".encode()).value

    driver = SimpleNamespace(cuThis=lambda *_: 209, cuGetErrorString=words, cuThat=lambda *_: 0)
    monkeypatch.setattr(compiling, "_driver", lambda: driver)
    with pytest.raises(RuntimeError, match=r"^cuThis: number 209 \(209\)$"):
        compiling._ask("cuThis", 1, 2)
    compiling._ask("cuThat")


def test_a_tensor_with_gaps_is_refused() -> None:
    kernel = compiling.CompiledKernel(ctypes.c_void_p(), ctypes.c_void_p(), CPU)
    with_gaps: Tensor = torch.ones(4, 4)[:, 0]
    with pytest.raises(ValueError, match="with gaps"):
        kernel(1, 32, with_gaps)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_have_none(device: str) -> None:
    assert not compiling.serves(torch.device(device))


@pytest.mark.parametrize(("platform", "serves"), [("linux", True), ("win32", False)])
def test_only_linux_has_them(monkeypatch: pytest.MonkeyPatch, platform: str, serves: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(sys, "platform", platform)
    assert compiling.serves(torch.device("cuda:1")) is serves


def test_the_compiler_has_the_name_of_its_cuda() -> None:
    names = {version: compiling.nvrtc_name(version) for version in ("11.8", "12.6", "13.0")}
    assert names == {
        "11.8": "libnvrtc.so.11.2", "12.6": "libnvrtc.so.12", "13.0": "libnvrtc.so.13",
    }  # fmt: skip


def test_a_kernel_is_loaded_and_started_in_the_context_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the driver is asked for another device than the first, in torch's current stream."""
    calls: list[tuple[str, tuple[object, ...]]] = []

    def ask(function: str, *arguments: object) -> None:
        calls.append((function, arguments))
        if function == "cuDevicePrimaryCtxRetain":
            arguments[0]._obj.value = 77  # type: ignore[attr-defined]

    stream = SimpleNamespace(cuda_stream=5)
    for name, value in {
        "get_device_capability": lambda _: (9, 0),
        "current_device": lambda: 1,
        "current_stream": lambda device: stream if device.index == 1 else None,
        "device": lambda _: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(compiling, "_ask", ask)
    monkeypatch.setattr(compiling, "_nvrtc", lambda: nvrtc(0, []))
    kernel = compiling.kernel.__wrapped__("counting.cu", "count_8_bits", torch.device("cuda:1"))
    assert [name for name, _ in calls] == [
        "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
        "cuModuleLoadData", "cuModuleGetFunction",
    ]  # fmt: skip
    assert calls[1][1][1] == 1
    calls.clear()
    for _ in range(2):
        kernel(3, 32, torch.ones(4), 9, shared=2**17)
    launch = ["cuCtxSetCurrent", "cuLaunchKernel"]
    assert [name for name, _ in calls] == [launch[0], "cuFuncSetAttribute", launch[1], *launch]
    assert calls[0][1][0].value == 77  # type: ignore[attr-defined]
    assert calls[2][1][1:8] == (3, 1, 1, 32, 1, 1, 2**17)
    assert calls[2][1][8].value == stream.cuda_stream  # type: ignore[attr-defined]
