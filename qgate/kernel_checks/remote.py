"""A kernel in a process of its own, which has neither the reference nor what judges the kernel."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from qgate.kernel_checks.kernel_process import Header, read, write
from qgate.kernel_checks.starting import PACKAGE
from qgate.text import one_line


class KernelCheatError(BaseException):
    """An attempt of a kernel to learn about its check, which is no refusal of an input."""


class KernelEndedError(BaseException):
    """The end of a kernel's process, or its silence; no refusal of an input, either."""


class KernelLoadError(Exception):
    """An error of the file of a kernel when it is loaded."""


@dataclass(frozen=True)
class CallableSpec:
    """A function by name: `module:function`, or `FILE.py:function`.

    text    as it was typed
    module  the module, or the absolute path of the file
    name    the function in it, with dots
    file    the file that has it; empty for builtin ones
    """

    text: str
    module: str
    name: str
    file: str = ""

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass
class RemoteKernel:
    """A kernel to call as a function; each call gets copies of its arguments, in the same layout.

    seconds  that a call may take
    current  the input that it is called for, which errors name
    """

    spec: CallableSpec
    seconds: float
    process: subprocess.Popen[bytes]
    current: str = "the example"
    calls: int = 0

    @property
    def __name__(self) -> str:
        return self.spec.short

    def __call__(self, *arguments: Any) -> Any:
        """Call the kernel; its exceptions are raised here by the names of their types."""
        self.calls += 1
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        numbers = iter(range(len(tensors)))
        request: Header = {
            "tensors": [_layout(tensor) for tensor in tensors],
            "arguments": [
                {"tensor": next(numbers)} if isinstance(value, Tensor) else value
                for value in arguments
            ],
        }
        state = torch.get_rng_state()
        blobs = [_bytes(state), *(_bytes(_storage(tensor)) for tensor in tensors)]
        header, parts = self.ask(request, blobs)
        try:
            return self._outcome(header, parts, {_key(tensor): tensor for tensor in tensors})
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise KernelEndedError(
                f"gives an answer that cannot be read for {self.current} ({one_line(error)[:80]})"
            ) from None

    def _outcome(self, header: Header, parts: list[bytearray], by_key: dict[int, Tensor]) -> Any:
        """Return or raise what an answer says, after what the kernel changed is written back."""
        self.hold_notices(header["notices"])
        torch.set_rng_state(torch.frombuffer(parts[0], dtype=torch.uint8).clone())
        for key, part in zip(header["changed"], parts[1:], strict=False):
            _storage(by_key[key]).copy_(torch.frombuffer(part, dtype=torch.uint8))
        if "error" in header:
            kind, text = header["error"]
            raise _type(kind, RuntimeError)(text)
        if "other" in header:
            return None if header["other"] == "NoneType" else _type(header["other"], object)()
        return _result(header["result"], by_key, parts[-1])

    def hold_notices(self, notices: list[str]) -> None:
        """Raise KernelCheatError for the first thing that a kernel must not do."""
        if notices:
            raise KernelCheatError(one_line(str(notices[0]))[:200])

    def ask(self, request: Header, blobs: list[bytes]) -> tuple[Header, list[bytearray]]:
        """Send a request and wait for its answer, no longer than a call may take."""
        silent = threading.Event()

        def end() -> None:
            silent.set()
            self.process.kill()

        timer = threading.Timer(self.seconds, end)
        timer.daemon = True
        timer.start()
        try:
            write(_stream(self.process.stdin), request, blobs)
            return read(_stream(self.process.stdout))
        except (OSError, EOFError, ValueError, MemoryError):
            if silent.is_set():
                words = f"gives no answer within {self.seconds:g} s for {self.current}"
            else:
                status = self.process.wait()
                words = f"ended its process (exit status {status}) for {self.current}"
            raise KernelEndedError(words) from None
        finally:
            timer.cancel()


def load_kernel(
    process: subprocess.Popen[bytes],
    spec: CallableSpec,
    like: CallableSpec,
    *,
    device: str,
    seconds: float,
    watches_torch: bool,
) -> RemoteKernel:
    """Load a kernel in its process; KernelLoadError says why it cannot be.

    watches_torch  True if a reference of torch must not be called with the kernel's own arguments
    """
    is_torch = like.module.partition(".")[0] == "torch"
    kernel = RemoteKernel(spec, seconds, process, current="its file")
    header = kernel.ask(
        {
            "kernel": [spec.module, spec.name],
            "file": spec.file,
            "folder": str(Path.cwd()),
            "device": device,
            "like": [like.module, like.name] if watches_torch or not is_torch else None,
            "is_torch": is_torch and watches_torch,
            "reference_file": like.file,
            "protected": str(PACKAGE),
        },
        [],
    )[0]
    if "error" in header:
        kind, text, line = header["error"]
        raise KernelLoadError(one_line(f"{kind}: {text}{f' ({line})' if line else ''}")[:400])
    kernel.hold_notices(header["notices"])
    if not header["callable"]:
        raise KernelLoadError(f"{spec.name} is no function")
    kernel.current = "the example"
    return kernel


def _stream(stream: Any) -> BinaryIO:
    assert stream is not None
    result: BinaryIO = stream
    return result


def _storage(tensor: Tensor) -> Tensor:
    """Return all of the memory that a tensor lies in, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()


def _layout(tensor: Tensor) -> Header:
    return {
        "key": _key(tensor),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
    }


def _result(about: Header, by_key: dict[int, Tensor], data: bytearray) -> Tensor:
    """Make the tensor that an answer describes, in the memory of an argument if it lies there."""
    dtype = getattr(torch, about["dtype"])
    if "key" in about:
        storage = by_key[about["key"]].untyped_storage()
        return torch.empty(0, dtype=dtype).set_(
            storage, about["offset"], about["shape"], about["stride"]
        )
    if not data:
        return torch.empty(about["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(about["shape"])


def _type(name: str, base: type) -> Any:
    """Return a type with the name of one in the kernel's process."""
    word = "".join(c for c in str(name)[:80] if c.isalnum() or c == "_")
    return type(word or "Unknown", (base,), {})
