"""Ctrl-C and SIGTERM of a command, also where a library takes them for an error of its own.

Python raises what a signal means wherever it stands. That may be in a method that C++ calls to look
at an argument, and torch clears any exception there: the signal is lost, and what was read is said
to be damaged. Whoever goes on after an error calls `raise_interruption()` first.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from types import FrameType


def raised_by_users() -> tuple[type[BaseException], ...]:
    """Return what a model or a function of a user's raises.

    argparse ends the program with SystemExit, and a helper of tests may call `pytest.skip`.
    """
    outcomes = sys.modules.get("_pytest.outcomes")
    return (Exception, SystemExit, *([] if outcomes is None else [outcomes.OutcomeException]))


class _Heard:
    """Number of the signal that asked this process to end; 0 while none did."""

    number = 0


def _end(number: int, _frame: FrameType | None = None) -> None:
    _Heard.number = number
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def raise_interruption() -> None:
    """Raise again what a signal meant that was heard and lost."""
    if _Heard.number:
        _end(_Heard.number)


@contextlib.contextmanager
def ended_by_signals(
    numbers: Collection[int] = (signal.SIGTERM, signal.SIGINT),
) -> Iterator[None]:
    """Let SIGTERM end the body as Ctrl-C does, with its temporary files removed, and lose neither.

    Whoever handles them already keeps them, as do threads but the first, where none are heard.
    """
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: handler
        for number, handler in usual.items()
        if is_main and number in numbers and signal.getsignal(number) == handler
    }
    for number in before:
        signal.signal(number, _end)
    try:
        yield
        raise_interruption()
    except Exception:
        raise_interruption()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _Heard.number = 0
