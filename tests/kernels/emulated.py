"""Kernels in CUDA C on a CPU: the source compiled by g++ after a header that emulates CUDA."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from qgate.kernels import compiling

HEADER = Path(__file__).with_name("emulated.hpp")
ARGUMENTS = 11
INSTALL = "there is no g++ to emulate kernels with: apt-get install g++"
_FOLDER = tempfile.TemporaryDirectory(prefix="qgate-emulated-")
atexit.register(_FOLDER.cleanup)
Edit = Callable[[str], str]


@functools.cache
def library(text: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile a source and load it."""
    if shutil.which("g++") is None:
        pytest.fail(INSTALL, pytrace=False)
    key = hashlib.sha256(repr((text, constants)).encode()).hexdigest()[:16]
    code, built = (Path(_FOLDER.name) / f"{key}.{end}" for end in ("cpp", "so"))
    code.write_text(f"{HEADER.read_text()}\n{text}")
    options = [f"-D{name}={value}" for name, value in constants]
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off"]
    subprocess.run(["g++", *flags, *options, str(code), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


class EmulatedKernel:
    """It is called as `compiling.CompiledKernel` is; few threads do for a block."""

    def __init__(self, file: str, name: str, edit: Edit, **constants: int) -> None:
        text = resources.files("qgate.kernels.programs").joinpath(file).read_text("utf-8")
        edited = edit(text)
        self._library = library(edited, tuple(sorted(constants.items())))
        self._function = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        self.launches: list[tuple[int, int]] = []

    def __call__(
        self, blocks: int, threads: int, *arguments: Tensor | int, shared: int = 0
    ) -> None:
        assert all(a.is_contiguous() for a in arguments if isinstance(a, Tensor))
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        values = (ctypes.c_int64 * ARGUMENTS)(*numbers)
        self.launches.append((blocks, shared))
        self._library.emulate(self._function, blocks, min(threads, 64), shared, values)


@contextmanager
def emulation(
    shared_memory: int = 227 * 2**10, processors: int = 3, edit: Edit = str
) -> Iterator[None]:
    """Let every device have kernels in CUDA C, as one with so much shared memory has them."""

    def kernel(file: str, name: str, _: torch.device, **constants: int) -> EmulatedKernel:
        return EmulatedKernel(file, name, edit, **constants)

    with mock.patch.multiple(
        compiling,
        kernel=functools.cache(kernel),
        serves=lambda _: True,
        shared_memory=lambda _: shared_memory,
        processors=lambda _: processors,
    ):
        yield
