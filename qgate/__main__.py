"""The `qgate` command, also as `python -m qgate`: it answers Ctrl-C before it imports the rest."""

from __future__ import annotations

import importlib
import os
import signal
from typing import NoReturn


def _end(_number: int, _frame: object) -> NoReturn:
    """End at once: nothing is begun yet, and an exception would be lost in half an import."""
    os.write(2, b"\nqgate: interrupted\n")
    os._exit(130)


def main() -> int:
    """Run one command of the command line."""
    usual = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, _end)
    command_line = importlib.import_module("qgate.cli")
    call = command_line.parse_call()
    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status: int = command_line.run_call(call)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
