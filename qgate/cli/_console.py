"""Options that all commands share on the console: `--quiet`, `--color`, and JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import IO

from qgate.records.plain_data import plain
from qgate.text.printing import print_json as print_escaped

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
_COLOR: ContextVar[str] = ContextVar("color", default="auto")


def add_console_options(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet` and `--color`, which may stand before a command and after it."""
    add = parser.add_argument
    unset = argparse.SUPPRESS  # a default of a command would hide what stands before it
    add("--quiet", action="store_true", default=unset, help="print nothing but errors")
    add("--color", choices=("auto", "always", "never"), default=unset, help="colors on the "
        "console (auto: on a terminal, unless NO_COLOR is set)")  # fmt: skip


@contextlib.contextmanager
def console(args: argparse.Namespace) -> Iterator[None]:
    """Apply `--quiet` and `--color` to what is printed inside."""
    quiet, color = getattr(args, "quiet", False), getattr(args, "color", "auto")
    is_silent = quiet and not getattr(args, "json", False)
    tokens = _QUIET.set(quiet), _COLOR.set(color)
    try:
        with contextlib.ExitStack() as stack:
            if is_silent:
                sink = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123
                stack.enter_context(contextlib.redirect_stdout(sink))
            yield
    finally:
        _QUIET.reset(tokens[0])
        _COLOR.reset(tokens[1])


def is_quiet() -> bool:
    """Tell if progress and notes are unwanted."""
    return _QUIET.get()


def shows_progress(stream: IO[str]) -> bool:
    """Tell if a stream is a terminal whose user wants to see progress."""
    return stream.isatty() and not is_quiet()


def has_colors(on_terminal: bool) -> bool:
    """Tell if colors are printed: by `--color`, else by NO_COLOR, else by FORCE_COLOR."""
    if _COLOR.get() != "auto":
        return _COLOR.get() == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return on_terminal and os.environ.get("TERM") != "dumb"


def add_json(*parsers: argparse.ArgumentParser) -> None:
    """Add `--json` to commands that list or decide something."""
    for parser in parsers:
        parser.add_argument("--json", action="store_true", help="print the result as JSON")


def print_json(content: object) -> None:
    """Print JSON, with NaN and infinities, which it lacks, as texts.

    Values of an object that are iterators are printed one item after the other.
    """
    encode = json.JSONEncoder(indent=1, allow_nan=False).encode

    def indented(value: object, depth: int) -> str:
        return encode(plain(value)).replace("\n", "\n" + depth * " ")

    if not isinstance(content, Mapping):
        print_escaped(indented(content, 0))
        return
    end = "{"
    for name, value in content.items():
        print_escaped(f"{end}\n {encode(name)}: ", end="")
        end = ","
        if isinstance(value, Iterator):
            begin = "["
            for item in value:
                print_escaped(f"{begin}\n  {indented(item, 2)}", end="")
                begin = ","
            print_escaped("[]" if begin == "[" else "\n ]", end="")
        else:
            print_escaped(indented(value, 1), end="")
    print_escaped("\n}")


def table_text(rows: Iterable[Sequence[object]], heads: Sequence[str], *align: str) -> str:
    """Write rows under heads as a table; numbers stay as they are written."""
    from tabulate import tabulate

    return tabulate(rows, headers=heads, disable_numparse=True, colalign=align or None)
