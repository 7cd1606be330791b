"""Start processes out of one that has loaded torch, instead of each by itself.

They are forks of a server that does nothing else, so that none inherits threads; all else is as
users have it: what they get is pickled, and what they import after torch they import themselves.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

PRELOADED = (
    "torch", "torch._dynamo", "numpy", "msgspec", "safetensors.torch", "qgate.formats.quantizer", "qgate.sweeps.running",
    "qgate.drawing.tensor_pass", "qgate.drawing.plots.pictures", "qgate.comparing.dump_comparison",
)  # fmt: skip


class WarmProcess(ForkServerProcess):
    """A process with the environment of the moment it was made, not that of the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess  # type: ignore[assignment]


def context() -> WarmContext:
    warm_context = WarmContext()
    warm_context.set_forkserver_preload(list(PRELOADED))
    return warm_context


def stand_in() -> SimpleNamespace:
    """Return what `qgate.engine._backends` takes for `multiprocessing`."""
    return SimpleNamespace(
        get_context=lambda _method: context(), parent_process=multiprocessing.parent_process
    )


class WarmPython:
    """`subprocess.Popen([sys.executable, *arguments])`, in a fork that has loaded torch."""

    def __init__(self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._arguments = [*arguments]
        self._folder = Path(tempfile.mkdtemp())
        streams = [str(self._folder / name) for name in ("out", "err")]
        process_args = (self._arguments, str(cwd), dict(environment), *streams)
        self._process = context().Process(target=_run_python, args=process_args)
        self._process.start()

    def finish(self) -> subprocess.CompletedProcess[str]:
        self._process.join()
        status = self._process.exitcode or 0
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._folder)
        return subprocess.CompletedProcess(self._arguments, status, out, err)


def run_python(
    *arguments: str, cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return WarmPython(arguments, cwd, environment).finish()


def _run_python(
    arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str
) -> NoReturn:
    for number, path in enumerate((out, err), 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if "OMP_NUM_THREADS" in environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    status = 1
    try:
        _run_main(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:  # as Python ends: threads first, then what is registered with atexit
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_main(arguments: list[str]) -> None:
    """Do what `python -m NAME …`, `python -c CODE …` or `python SCRIPT …` does."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]
    option, *more = arguments
    if option == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        sys.argv = more
        runpy._run_module_as_main(more[0])  # type: ignore[attr-defined]
        return
    if option == "-c":
        code, name, folder, sys.argv = more[0], "<string>", "", ["-c", *more[1:]]
    else:
        code, name, sys.argv = Path(option).read_text(), option, arguments
        folder = str(Path(option).resolve().parent)
        main.__file__ = option
    sys.path.insert(0, folder)
    exec(compile(code, name, "exec"), main.__dict__)
