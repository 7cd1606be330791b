"""The process of a kernel: it has the kernel and its arguments, and nothing that judges it.

Its source is run by `starting.py` in a Python that has not loaded qgate, so this file imports the
standard library and torch alone. It reads requests from standard input and answers on what was
standard output: a header in JSON, then the bytes of tensors. What a kernel does to learn about its
check is seen by an audit hook, which no code can remove, and told in the answer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Header = MutableMapping[str, Any]

READS_STACK = {
    "sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace",
    "sys.setprofile", "sys.monitoring.register_callback",
}  # fmt: skip
READS_ATTRIBUTES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}
READS_MEMORY = {"gc.get_objects", "gc.get_referrers", "gc.get_referents"}
PROCESS_FILES = ("cmdline", "environ", "maps", "mem")
PASSED_ON = {"inspect.py", "traceback.py", "tokenize.py", "linecache.py", "pathlib.py", "os.py"}
"""Files of the standard library that do what their caller wants."""
REFERENCE_CALLED = "qgate.reference"
OWN_CODE = __name__


class WatchedEnvironment(os._Environ):  # type: ignore[type-arg]
    """The environment, which tells of names that only a test run sets."""

    def __getitem__(self, key: str) -> str:
        if isinstance(key, str) and key.startswith(("QGATE_", "PYTEST_")):
            sys.audit("qgate.environment", key)
        return str(super().__getitem__(key))


class KernelWatch:
    """Audit hook: what the kernel's own code does to learn about its check."""

    def __init__(self, file: str, folder: str, reference_file: str, protected: str) -> None:
        self.notices: list[str] = []
        self.active = False
        self.reference_file, self.protected = reference_file, protected
        paths = sysconfig.get_paths()
        libraries = {paths[name] + os.sep for name in ("stdlib", "purelib", "platlib")}
        self.libraries = tuple(path for path in libraries if not file.startswith(path))
        self.own = str(Path(file).parent) + os.sep, folder + os.sep, "<"

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        words = self._words(event, arguments)
        if not words:
            return
        self.active = False  # looking at the stack is an event itself
        line = self._own_line(event)
        self.active = True
        if line:
            self.notices.append(f"{words} ({line})")

    def _words(self, event: str, arguments: tuple[Any, ...]) -> str:
        if event in READS_STACK:
            return f"reads the stack by {event}"
        if event == "object.__getattr__" and arguments[1] in READS_ATTRIBUTES:
            return f"reads the stack by {arguments[1]}"
        if event in READS_MEMORY:
            return f"looks for other objects in memory by {event}"
        if event == REFERENCE_CALLED:
            return "calls the reference"
        if event == "exec" and arguments[0].co_filename == (self.reference_file or None):
            return "loads the file of the reference again"
        if event == "qgate.environment":
            return f"asks the environment for {arguments[0]}"
        if event == "open" and isinstance(arguments[0], str | bytes):
            return self._opening(os.fsdecode(arguments[0]), arguments[2])
        return ""

    def _opening(self, name: str, flags: int) -> str:
        path = os.path.realpath(name)
        if self.reference_file and path == self.reference_file:
            return "opens the file of the reference"
        if path.startswith("/proc/") and path.rpartition("/")[2] in PROCESS_FILES:
            return "reads the state of processes in /proc"
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR)) if isinstance(flags, int) else False
        if writes and path.startswith(self.protected):
            return "writes into the package that judges it"
        return ""

    def _own_line(self, event: str) -> str:
        """Return file and line of the nearest code, if that is not a library's.

        Some files of libraries do what their caller wants; any may call the reference for it.
        """
        passed_on = frozenset() if event == "object.__getattr__" else PASSED_ON
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file != OWN_CODE and not file.startswith("<frozen"):
                if file.startswith(self.own) and not file.startswith(self.libraries):
                    return f"{Path(file).name}, line {frame.f_lineno}"
                if event != REFERENCE_CALLED and Path(file).name not in passed_on:
                    return ""
            frame = frame.f_back  # type: ignore[assignment]
        return ""


class OwnArguments(TorchFunctionMode):
    """Tell of calls of one function of torch with the arguments of the kernel as they are."""

    def __init__(self, function: Callable[..., Any], arguments: list[Any]) -> None:
        super().__init__()
        self.function = function
        self.layouts = [_layout(value) for value in arguments if isinstance(value, Tensor)]

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is self.function:
            self.compare([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def compare(self, values: list[Any]) -> None:
        """Tell of a call if its tensors are the arguments of the kernel."""
        if [_layout(value) for value in values if isinstance(value, Tensor)] == self.layouts:
            sys.audit(REFERENCE_CALLED)


class OwnOperator(TorchDispatchMode):
    """Tell of calls of the one operator that a function of torch is, by any of its names."""

    def __init__(self, calls: OwnArguments, arguments: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules:
            spare_compiler()
        self.operators: list[Any] = []
        self.compare = self._listed
        ones = [torch.ones_like(v) if isinstance(v, Tensor) else v for v in arguments]
        with self, contextlib.suppress(Exception):  # of a function that takes no ones
            calls.function(*ones)
        self.compare = calls.compare
        self.operators = [of for of in self.operators if not of.is_view]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, which takes seconds: see spare_compiler

    def _listed(self, values: list[Any]) -> None:
        """Pass over the tensors of a call that is only listed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self.compare == self._listed:
            self.operators.append(func)
        elif self.operators == [func]:
            self.compare([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))


@functools.cache
def spare_compiler() -> None:
    """Keep the compiler of a kernel from compiling the operators that are watched."""
    watched: Any = OwnOperator
    watched.__torch_dispatch__ = torch.compiler.disable(watched.__torch_dispatch__, recursive=True)


def _layout(value: Tensor) -> tuple[object, ...]:
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype


def read(stream: BinaryIO) -> tuple[Header, list[bytearray]]:
    """Read a header and its blobs; EOFError at the end."""
    size = int.from_bytes(_exactly(stream, 8), "little")
    header: Header = json.loads(_exactly(stream, size))
    return header, [_exactly(stream, length) for length in header["blobs"]]


def write(stream: BinaryIO, header: Header, blobs: list[bytes]) -> None:
    """Write a header and its blobs."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    stream.write(len(text).to_bytes(8, "little") + text)
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def _exactly(stream: BinaryIO, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = stream.read(min(size - len(data), 1 << 24))
        if not part:
            raise EOFError
        data += part
    return data


def bytes_of(value: Tensor) -> bytes:
    """Return the bytes of a tensor of any dtype, in the order of its elements."""
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


class Buffers:
    """Memory that stands for that of the caller: the same there is the same here."""

    MOST = 64

    def __init__(self, device: str) -> None:
        self.device = device
        self.by_key: dict[int, Tensor] = {}

    def view(self, entry: Header, data: bytearray) -> Tensor:
        """Return a tensor of the caller, in memory with the contents of its memory."""
        buffer = self.by_key.pop(entry["key"], None)
        if buffer is None or buffer.numel() != len(data):
            buffer = torch.empty(len(data), dtype=torch.uint8, device=self.device)
        self.by_key[entry["key"]] = buffer
        while len(self.by_key) > self.MOST:
            del self.by_key[next(iter(self.by_key))]
        if data:
            buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))
        empty = torch.empty(0, dtype=getattr(torch, entry["dtype"]), device=self.device)
        return empty.set_(
            buffer.untyped_storage(), entry["offset"], entry["shape"], entry["stride"]
        )


def load_function(module: str, name: str) -> Any:
    """Return what a module, or a file that ends in .py, has under a name with dots."""
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        if spec is None or spec.loader is None:
            raise ImportError(f"there is no file {module!r}")
        value = importlib.util.module_from_spec(spec)
        sys.modules[Path(module).stem] = value
        spec.loader.exec_module(value)
    else:
        value = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(value, part):
            functions = [key for key in vars(value) if callable(getattr(value, key))]
            public = ", ".join(key for key in functions if not key.startswith("_")) or "none"
            raise AttributeError(f"it has no {part!r}; its functions: {public[:200]}")
        value = getattr(value, part)
    return value


def arm(function: Any) -> None:
    """Let every call of a function of Python be an event, whatever name it is called by."""
    function = getattr(function, "forward", function)
    function = getattr(function, "__func__", function)
    if hasattr(function, "__wrapped__"):
        arm(function.__wrapped__)
    code = getattr(function, "__code__", None)
    if code is not None:
        text = f"def called(*_, **__):\n    __import__('sys').audit({REFERENCE_CALLED!r})\n"
        text += "    raise RuntimeError('the kernel called the reference')\n"
        names: Any = {}
        exec(compile(text, OWN_CODE, "exec"), names)
        function.__code__ = names["called"].__code__.replace(co_freevars=code.co_freevars)


class Server:
    """Loads one kernel and calls it with what requests have."""

    def __init__(self, request: Header) -> None:
        self.buffers = Buffers(request["device"])
        self.reference: Callable[..., Any] | None = None
        self.watch = KernelWatch(
            *(request[name] for name in ("file", "folder", "reference_file", "protected"))
        )
        sys.path.insert(0, request["folder"])
        if request["is_torch"]:
            self.reference = load_function(*request["like"])
        elif request["like"]:
            arm(load_function(*request["like"]))
        os.environ.__class__ = WatchedEnvironment
        sys.addaudithook(self.watch)
        self.watch.active = True
        try:
            self.kernel = load_function(*request["kernel"])
        finally:
            self.watch.active = False

    def call(self, request: Header, blobs: list[bytearray]) -> tuple[Header, list[bytes]]:
        """Call the kernel; the answer has its result, what it changed, and what was seen."""
        entries, contents = request["tensors"], blobs[1:]
        tensors = [self.buffers.view(*pair) for pair in zip(entries, contents, strict=True)]
        arguments = [
            tensors[value["tensor"]] if isinstance(value, dict) else value
            for value in request["arguments"]
        ]
        torch.set_rng_state(torch.frombuffer(blobs[0], dtype=torch.uint8).clone())
        header, result = self._outcome(arguments, {entry["key"] for entry in entries})
        answer = [bytes(torch.get_rng_state().numpy().tobytes())]
        header["changed"] = changed = []
        for entry, data in zip(entries, contents, strict=True):
            after = bytes_of(self.buffers.by_key[entry["key"]])
            if after != data:
                changed.append(entry["key"])
                answer.append(after)
        if result is not None:
            answer.append(result)
        header["notices"] = list(dict.fromkeys(self.watch.notices))
        self.watch.notices.clear()
        return header, answer

    def _outcome(self, arguments: list[Any], keys: set[int]) -> tuple[Header, bytes | None]:
        self.watch.active = True
        try:
            if self.reference is None:
                result = self.kernel(*arguments)
            else:
                calls = OwnArguments(self.reference, arguments)
                operator = OwnOperator(calls, arguments)
                with calls, operator:
                    result = self.kernel(*arguments)
        except BaseException as error:
            return {"error": [type(error).__name__, str(error)[:2000]]}, None
        finally:
            self.watch.active = False
        if not isinstance(result, Tensor):
            return {"other": type(result).__name__}, None
        try:
            return self._described(result, keys)
        except Exception as error:
            return {"error": [type(error).__name__, str(error)[:2000]]}, None

    def _described(self, result: Tensor, keys: set[int]) -> tuple[Header, bytes | None]:
        plain = result.detach().as_subclass(Tensor)
        about = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
        for key in keys:
            buffer = self.buffers.by_key[key]
            if plain.numel() and plain.untyped_storage().data_ptr() == buffer.data_ptr():
                where = {"stride": list(plain.stride()), "offset": plain.storage_offset()}
                return {"result": {**about, **where, "key": key}}, None
        return {"result": about}, bytes_of(plain)


def serve() -> None:
    """Answer requests until there are none."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what a kernel prints is no answer
    first, _ = read(requests)
    sys.argv = [first["file"]]
    try:
        server = Server(first)
    except BaseException as error:
        lines = traceback.extract_tb(error.__traceback__)
        own = [line for line in lines if not line.filename.startswith("<")]
        last = f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
        write(answers, {"error": [type(error).__name__, str(error)[:2000], last]}, [])
        return
    notices = list(dict.fromkeys(server.watch.notices))
    server.watch.notices.clear()
    write(answers, {"callable": callable(server.kernel), "notices": notices}, [])
    while True:
        try:
            request, blobs = read(requests)
        except EOFError:
            return
        write(answers, *server.call(request, blobs))


if __name__ == "<kernel process>":
    serve()
