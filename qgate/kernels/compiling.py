"""Kernels in CUDA C: compiled by NVRTC, which torch's CUDA builds bring, and started by the driver.

They serve where a block needs a table in shared memory, which Triton has not. Of torch nothing
private is used, and neither a CUDA toolkit nor a header is needed.

A launch goes to torch's current stream of the device, so a CUDA graph may capture it; a kernel is
loaded before, when it is proved. Modules stay until the process ends: nothing is unloaded while
torch shuts down.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LARGE_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WITHOUT_ASKING = 48 * 2**10
_LONG = ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3


def serves(device: torch.device) -> bool:
    """Tell whether a device may have kernels in CUDA C: one of NVIDIA, under Linux.

    Elsewhere the libraries have other names, and Triton's kernels do.
    """
    is_nvidia = torch.version.cuda is not None and torch.version.hip is None
    return device.type == "cuda" and is_nvidia and sys.platform == "linux"


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _WITHOUT_ASKING))


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class CompiledKernel:
    """A function on one device; its arguments are tensors of the device and 64-bit integers."""

    def __init__(self, function: ctypes.c_void_p, context: ctypes.c_void_p, device: torch.device):
        self._function, self._context, self._device = function, context, device
        self._allowed = _WITHOUT_ASKING

    def __call__(
        self, blocks: int, threads: int, *arguments: Tensor | int, shared: int = 0
    ) -> None:
        """Start blocks in torch's current stream, each with so many bytes of shared memory."""
        for argument in arguments:
            if isinstance(argument, Tensor) and not argument.is_contiguous():
                raise ValueError("a kernel got a tensor with gaps: it would read what is in them.")
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        values = (ctypes.c_int64 * len(numbers))(*numbers)
        begin = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(numbers))(*range(begin, begin + 8 * len(numbers), 8))
        is_current = self._device.index == torch.cuda.current_device()
        with contextlib.nullcontext() if is_current else torch.cuda.device(self._device):
            _ask("cuCtxSetCurrent", self._context)
            if shared > self._allowed:
                _ask("cuFuncSetAttribute", self._function, _LARGE_SHARED_MEMORY, shared)
                self._allowed = shared
            stream = torch.cuda.current_stream(self._device).cuda_stream
            _ask(
                "cuLaunchKernel", self._function, blocks, 1, 1, threads, 1, 1, shared,
                ctypes.c_void_p(stream), places, None,
            )  # fmt: skip


@functools.cache
def kernel(file: str, name: str, device: torch.device, **constants: int) -> CompiledKernel:
    """Compile a file of `programs` for a device and return one of its functions."""
    major, minor = torch.cuda.get_device_capability(device)
    binary = compile_source(source(file), f"sm_{major}{minor}", constants)
    with torch.cuda.device(device):
        number, context = ctypes.c_int(), ctypes.c_void_p()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _ask("cuInit", 0)
        _ask("cuDeviceGet", ctypes.byref(number), torch.cuda.current_device())
        # It is the context that torch has on the device; a thread may not have it yet.
        _ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        _ask("cuCtxSetCurrent", context)
        _ask("cuModuleLoadData", ctypes.byref(module), binary)
        _ask("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return CompiledKernel(function, context, device)


def source(file: str) -> str:
    """Return a source with the common beginning of all."""
    programs = resources.files("qgate.kernels.programs")
    return "".join(programs.joinpath(part).read_text("utf-8") for part in ("common.cuh", file))


@functools.cache
def _compiled(text: str, architecture: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    nvrtc = _nvrtc()
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--fmad=false",  # a fused product and sum rounds once where torch rounds twice
        *(f"-D{name}={value}" for name, value in constants),
    ]
    encoded = [option.encode() for option in options]
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"qgate.cu", 0, None, None
    )
    if created:
        raise RuntimeError(f"NVRTC makes no program (error {created})")
    try:
        listed = (ctypes.c_char_p * len(encoded))(*encoded)
        if nvrtc.nvrtcCompileProgram(program, len(encoded), listed):
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC: {log.rstrip(bytes(1)).decode(errors='replace').strip()}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def compile_source(text: str, architecture: str, constants: dict[str, int]) -> bytes:
    """Compile CUDA C for an architecture such as "sm_90"; an error has the compiler's words."""
    return _compiled(text, architecture, tuple(sorted(constants.items())))


def _read(size_of: Callable[..., int], copy: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(max(size.value, 1))
    copy(program, room)
    return room.raw


def nvrtc_name(version: str) -> str:
    """Return the name of NVRTC's library for a version of CUDA."""
    major = version.split(".")[0]
    return f"libnvrtc.so.{'11.2' if major == '11' else major}"


@functools.cache
def _nvrtc() -> Any:
    name = nvrtc_name(str(torch.version.cuda))
    try:
        return ctypes.CDLL(name)
    except OSError:
        # This part of torch knows in which folder NVRTC is.
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        return ctypes.CDLL(name)


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernel.argtypes = _LONG
    return driver


def _ask(function: str, *arguments: object) -> None:
    """Call the driver; raise an error with its words if it refuses."""
    driver = _driver()
    status = getattr(driver, function)(*arguments)
    if status:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(words))
        raise RuntimeError(f"{function}: {(words.value or b'unknown error').decode()} ({status})")
