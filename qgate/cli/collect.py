"""Run a program unchanged, and collect the tensors of its model into a dump.

  qgate collect -- python train.py --lr 1e-3
  qgate collect --dir dump --level statistics --iterations 3 -- python -m package.train
  qgate collect --dir dump --watch-underflow -- python train.py
  torchrun --nproc-per-node 2 -m qgate collect --dir dump -- train.py

The first model that runs is collected. The dump may be a URL such as s3://bucket/run, which gets
each shard when it is full. The environment variables of Megatron-LM's tensor saver apply, too:
TENSOR_SAVE_DIR, CUSTOM_QUANT_TYPE and CONTROL_ITER where --dir, --quant-type and --iterations are
not given; TENSOR_SAVER_ITERATION and CURRENT_SAMPLE_IDX label the first iteration and sample. With
TENSOR_SAVE_ENABLED=false the program runs and nothing is collected. A program may change its label,
sample and iteration while it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.cli._moved import add_moved
from qgate.cli._project import option_here
from qgate.collecting.settings import CollectSettings, CollectSwitches
from qgate.errors import QgateError
from qgate.settings import add_options, typed_values

if TYPE_CHECKING:
    from torch import nn

    from qgate.collecting import Collector

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")


def arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, CollectSwitches)
    add_options(parser, CollectSettings)
    add = parser.add_argument
    add("--watch-underflow", action="store_true", help="list at the end where quantization "
        "by qgate lost values below the smallest normal number of the format")  # fmt: skip
    add("program", nargs=argparse.REMAINDER, help="-- python FILE or -m MODULE, and its "
        "arguments; `python` may be left out")  # fmt: skip
    add_moved(
        parser,
        {
            "--first-iteration": "the variable TENSOR_SAVER_ITERATION=N",
            "--sample": "the variable CURRENT_SAMPLE_IDX=N",
            "--counted": "counted = N in qgate.toml",
        },
    )


def run(args: argparse.Namespace) -> int:
    from qgate.collecting import FirstModel
    from qgate.collecting.starting import (
        EnvironmentLabels,
        collect,
        is_enabled,
        say_on_stderr,
        settings_of,
    )
    from qgate.dumps.layout import check_store

    program = _program(args.program)
    if program[0] != "-m" and not Path(program[0]).is_file():
        problem = "is a folder" if Path(program[0]).is_dir() else "is not there"
        raise QgateError(f"{program[0]!r} {problem}; name the Python file to run, or -m MODULE.")
    if "TENSOR_SAVE_ENABLED" in os.environ and not is_enabled(os.environ):
        say_on_stderr("TENSOR_SAVE_ENABLED is off: nothing is collected")
        with _watching(args.watch_underflow):
            return _run(program)
    options = _settings(args)
    labels = EnvironmentLabels(os.environ, options)
    refusals: list[QgateError] = []

    def say(text: str) -> None:
        """Print a summary, unless nothing was stored for a reason that is printed anyway."""
        collector = watch.collector
        if not refusals or (collector is not None and collector.account.records):
            say_on_stderr(text)

    settings = {**settings_of(os.environ), "say": say, **options}
    folder = settings.pop("folder")

    def make(model: nn.Module) -> Collector:
        collector = collect(model, folder, **settings)
        collector.follow(labels)
        return collector

    check_store(folder)
    watch = FirstModel(make)
    try:
        with _watching(args.watch_underflow):
            status = _run(program)
    except BaseException as error:
        refusals += [error] if isinstance(error, QgateError) else []
        _stop(watch.collector, type(error).__name__)
        raise
    finally:
        watch.remove()
    if status:
        _stop(watch.collector, f"exit {status}")
    elif watch.collector is not None:
        watch.collector.close()
    elif not watch.found_collector:
        raise QgateError(f"nothing was collected: in {program[0]} no model ran that has {watch}.")
    return status


def _program(words: list[str]) -> list[str]:
    """Return a file or `-m MODULE` with its arguments; this Python runs it, whatever is named."""
    program = words[1:] if words[:1] == ["--"] else words
    if program and _PYTHON.fullmatch(Path(program[0]).name):
        program = program[1:]
        if program and program[0].startswith("-") and program[0] != "-m":
            raise QgateError(
                f"python {program[0]} cannot be collected: name the file to run, or -m MODULE; "
                "options of Python go before qgate, as in python -u -m qgate collect."
            )
    if not program or program == ["-m"]:
        raise QgateError(
            "say what to run: qgate collect -- python train.py, or -- python -m MODULE."
        )
    return program


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `collect` that options set, and the project's settings."""
    counted = option_here("counted")
    values = {**typed_values(args, CollectSwitches), **typed_values(args, CollectSettings)}
    return values if counted is None else {"counted": counted, **values}


def _run(program: list[str]) -> int:
    """Run a program in this process, as `python` would, and return its exit status."""
    before, path = sys.argv, list(sys.path)
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            sys.path.insert(0, str(Path.cwd()))
            _check_module(program[1])
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path.insert(0, str(Path(program[0]).resolve().parent))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except QgateError:  # a refused folder: its message is enough, without a traceback
        raise
    except SyntaxError as error:
        if error.lineno is None:
            raise QgateError(f"{program[0]!r} is no Python program: {error.msg}.") from None
        traceback.print_exc()
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[:] = before, path
    return 0


def _check_module(name: str) -> None:
    """Refuse a module that does not exist; one that fails to import shows its traceback."""
    try:
        exists = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        exists = not f"{name}.".startswith(f"{error.name}.")
    except ValueError:
        exists = False
    if not exists:
        raise QgateError(
            f"there is no module {name!r} to run; `python -m {name}` has to work here. A file "
            "needs no -m."
        )


@contextlib.contextmanager
def _watching(is_on: bool) -> Iterator[None]:
    """Print at the end what quantization lost below the smallest normal number of its formats."""
    if not is_on:
        yield
        return
    from qgate.collecting.starting import say_on_stderr
    from qgate.sweeps.underflow import watch_underflow

    with watch_underflow(lambda _text: None) as watch:
        try:
            yield
        finally:
            for line in watch.lines():
                say_on_stderr(line)


def _stop(collector: Collector | None, why: str) -> None:
    if collector is not None:
        collector.stop(why)
        collector.wait()
