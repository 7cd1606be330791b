"""A check in a process of its own, which a kernel may end or never come back from.

The process is a fork, so that lambdas and closures are kernels, too. Where a device is in use here
already, which a fork cannot use, it is a new process, and functions are looked up by their names.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from qgate.device_errors import LostDeviceError, in_sentences
from qgate.engine.sharing import PackedValue
from qgate.errors import QgateError, first_line
from qgate.kernel_checks.kernels import check_kernel
from qgate.kernel_checks.record import CheckFailure, CheckReport
from qgate.kernel_checks.references import in_eval_mode
from qgate.kernel_checks.runs import EXAMPLE
from qgate.kernel_checks.updating import UPDATING
from qgate.kernel_checks.watching import HUNG, TELLING

Function = Callable[..., Any]
ADVICE = "smaller tensors, or those of a device with more memory, such as the CPU"
FURTHER_SECONDS = 10.0
"""Seconds that a process which said its last word has to end."""


class _KernelError(Exception):
    """An exception of a kernel in the other process: its traceback as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_check(
    kernel: Function,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    *,
    timeout: float | None = None,
    isolate: bool = False,
) -> CheckReport:
    """Check a kernel here, or in a process of its own where it may hang or end the process."""
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0
    ):
        raise ValueError(f"timeout {timeout!r} is not allowed; give seconds above zero.")
    if isolate or timeout is not None:
        return _Isolation(kernel, arguments, options, timeout).run()
    name = getattr(kernel, "__name__", "the kernel")
    with in_sentences(name, ADVICE), in_eval_mode(kernel, options["like"]):
        return check_kernel(kernel, arguments, **options)


class _Isolation:
    """One check and the processes that it runs in: one more after each input without an answer."""

    def __init__(
        self,
        kernel: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        timeout: float | None,
    ) -> None:
        self.check = kernel, arguments, options
        self.timeout = timeout
        name = getattr(kernel, "__name__", type(kernel).__name__)
        self.name = "the kernel" if name == "<lambda>" else str(name)
        self.hung: dict[str, str] = {}
        device = options.get("device")
        self.on_device = (device is not None and torch.device(device).type != "cpu") or any(
            isinstance(argument, Tensor) and argument.device.type != "cpu" for argument in arguments
        )
        can_fork = "fork" in multiprocessing.get_all_start_methods()
        self.forks = can_fork and not (self.on_device and torch.cuda.is_initialized())

    def run(self) -> CheckReport:
        while True:
            report = self._attempt()
            if report is not None:
                return report

    def _attempt(self) -> CheckReport | None:
        """Run the check in a new process; None if it has to run once more."""
        context: Any = multiprocessing.get_context("fork" if self.forks else "spawn")
        receiving, sending = context.Pipe(duplex=False)
        if self.forks:
            target: Function = _run_in_fork
            parts: tuple[Any, ...] = (self.check, self.on_device)
        else:
            target, parts = _run_in_new_process, (self._packed(), UPDATING.get())
        process = context.Process(target=target, args=(sending, dict(self.hung), *parts))
        with warnings.catch_warnings():
            # The fork computes in one thread, and only what it is asked for.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sending.close()
        try:
            return self._outcome(process, receiving)
        finally:
            if process.is_alive():
                process.kill()
            process.join()
            receiving.close()

    def _outcome(self, process: Any, receiving: Connection) -> CheckReport | None:
        """Follow a process to its end; CheckFailure if the kernel ended it or hangs."""
        running, last = "", ""
        while True:
            if not receiving.poll(self.timeout if running else None):
                self._no_answer(running)
                return None
            try:
                kind, content, *more = receiving.recv()
            except EOFError:
                process.join(FURTHER_SECONDS)
                raise self._ended(process.exitcode, running, last) from None
            if kind == "call":
                running, last = content, content or last
            elif kind == "no fork":
                self.forks = False
                return None
            elif kind == "lost":
                raise CheckFailure(
                    f"{self.name} stopped the device for {running or last}: {content}",
                    CheckReport(self.name),
                )
            elif kind == "report":
                assert isinstance(content, CheckReport)
                return content
            else:
                raise content from (_KernelError(more[0]) if more and more[0] else None)

    def _no_answer(self, name: str) -> None:
        words = f"no answer within {self.timeout:g} s"
        if name.startswith(EXAMPLE) or name in self.hung:
            raise CheckFailure(f"{self.name} gives {words} for {name}", CheckReport(self.name))
        self.hung[name] = words

    def _ended(self, status: int | None, running: str, last: str) -> Exception:
        """Return the error about a process that ended without a word."""
        ending = f"ended the process (exit status {status})"
        if status is not None and status < 0:
            ending = f"killed the process ({_signal_name(-status)})"
        if running:
            return CheckFailure(f"{self.name} {ending} for {running}", CheckReport(self.name))
        when = f"after it came back for {last}" if last else "before it was called"
        return QgateError(
            f"something else than {self.name} {ending}, {when}: the reference? Call like= with the "
            "arguments alone."
        )

    def _packed(self) -> PackedValue[Any]:
        try:
            return PackedValue(self.check)
        except Exception as error:
            why = (
                "a device is in use in this process already, which a fork of it cannot use"
                if "fork" in multiprocessing.get_all_start_methods()
                else "this system cannot fork processes"
            )
            raise ValueError(
                "isolate=True and timeout= need functions of a module here, no lambdas or "
                f"closures ({first_line(error)}): {why}. Give arguments on the CPU with device=, "
                "before the device is used for the first time, or functions that a new process can "
                "import."
            ) from None


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _run_in_fork(
    sending: Connection,
    hung: Mapping[str, str],
    check: tuple[Function, Sequence[Any], Mapping[str, Any]],
    on_device: bool,
) -> None:
    # Threads of the other process are not here, and OpenMP would wait for them.
    torch.set_num_threads(1)
    is_spoiled = getattr(torch._C, "_cuda_isInBadFork", lambda: False)
    if on_device and is_spoiled():
        sending.send(("no fork", None))
        return
    _run(sending, hung, check)


def _run_in_new_process(
    sending: Connection, hung: Mapping[str, str], packed: PackedValue[Any], updating: bool
) -> None:
    UPDATING.set(updating)
    _run(sending, hung, packed.value())


def _run(
    sending: Connection,
    hung: Mapping[str, str],
    check: tuple[Function, Sequence[Any], Mapping[str, Any]],
) -> None:
    """Run a check and send what comes of it: a report, or an exception."""
    TELLING.set(lambda name: sending.send(("call", name)))
    HUNG.set(hung)
    try:
        message: tuple[Any, ...] = "report", run_check(*check)
    except LostDeviceError as error:
        message = "lost", first_line(error)
    except CheckFailure as failure:
        cause = failure.__cause__
        lines = traceback.format_exception(cause) if cause is not None else []
        message = "failure", failure, "".join(lines)
    except Exception as error:
        message = "failure", error, "".join(traceback.format_exception(error))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(message))
    except Exception:  # of an exception that has no copies
        words = f"{type(message[1]).__name__}: {message[1]}"
        message = "failure", RuntimeError(words), message[-1]
    sending.send(message)
    sending.close()
