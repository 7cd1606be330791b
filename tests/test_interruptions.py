"""Ctrl-C and SIGTERM end a command also where a library clears the exception that they raise."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qgate.cli import main
from qgate.dumps import DumpWriter
from qgate.interruptions import ended_by_signals, raise_interruption
from tests.dumps.making import record

SIGNALS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Handle signals as a program does that was started in a terminal."""
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before:
        signal.signal(number, handler)


class Signalled:
    """Object whose length torch asks for; a signal comes meanwhile."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        signal.raise_signal(self.number)
        return 1

    def __getitem__(self, index: int) -> float:
        return 1.0


def lose(number: int) -> None:
    with pytest.raises(RuntimeError, match="could not determine the shape"):
        torch.asarray(Signalled(number))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_torch_clears_is_raised_where_it_is_asked_for(number: int) -> None:
    reached: list[str] = []

    def work() -> None:
        with ended_by_signals():
            lose(number)
            raise_interruption()
            reached.append("the next tensor")

    with pytest.raises(SIGNALS[number]):
        work()
    assert not reached


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("ends_in_an_error", [False, True])
def test_a_signal_that_nobody_asks_for_ends_the_command_at_its_end(
    number: int, ends_in_an_error: bool
) -> None:
    def work() -> None:
        with ended_by_signals():
            lose(number)
            if ends_in_an_error:
                raise ValueError("what torch said")

    with pytest.raises(SIGNALS[number]):
        work()
    raise_interruption()  # nothing is left of it
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_handlers_of_others_are_kept() -> None:
    def own(*_: object) -> None:
        pass

    signal.signal(signal.SIGTERM, own)
    with ended_by_signals():
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_drawing_that_is_stopped_while_a_tensor_is_read_leaves_no_page(
    number: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor is not said to be damaged, nor is the page of all others written."""
    with DumpWriter(tmp_path / "dump") as writer:
        for order in range(3):
            writer.add(record(order, layer=order), torch.randn(8, 8))
    element_of = torch.UntypedStorage.__getitem__
    calls: list[int] = []

    def signalled(storage: torch.UntypedStorage, index: int | slice) -> object:
        """Get the signal where torch looks at the first element of the first tensor."""
        calls.append(number)
        if len(calls) == 2:
            signal.raise_signal(number)
        return element_of(storage, index)

    monkeypatch.setattr(torch.UntypedStorage, "__getitem__", signalled)
    monkeypatch.chdir(tmp_path)
    try:
        ended = main(["dumps", "draw", "dump", "--no-plots"])
    except SystemExit as end:
        ended = end.code
    assert len(calls) >= 2
    assert ended == status
    assert not list(tmp_path.glob("draw/**/*.html"))
