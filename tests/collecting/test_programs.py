"""A program that is collected runs as it does alone, whatever it does with its model."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import qgate
from qgate.dumps import Dump
from qgate.hooks import ModuleHooks
from tests.collecting import programs
from tests.collecting.collected import batch, network
from tests.collecting.test_starting import collect, run
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

FILE = str(Path(programs.__file__))
NO_DUMP = ("ends_at_once",)
"""Programs that leave no time to close the dump."""


@share(6)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_program_runs_unchanged(tmp_path: Path, name: str) -> None:
    alone = run(tmp_path, FILE, name)
    done = collect(tmp_path, "--dir", "dump", "--iterations", "9", "--", FILE, name)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout), done.stderr
    assert "Traceback" not in done.stderr
    if name not in NO_DUMP:
        assert list(Dump.open(tmp_path / "dump").records())


def test_a_hook_is_copied_and_pickled_to_nothing() -> None:
    calls: list[str] = []

    def refuse(*_: object) -> None:
        calls.append("")

    hooks, module = ModuleHooks(copied=False), nn.Linear(2, 2)
    lock = threading.Lock()  # as a recorder has: it cannot be pickled
    hooks.add(module, lambda *_: (lock, refuse())[1], refuse, named=True, always=True)
    twin = pickle.loads(pickle.dumps(module))
    twin(torch.ones(1, 2))
    assert not calls
    module(torch.ones(1, 2))
    assert len(calls) == 2


@proof
def test_a_pickled_model_needs_no_qgate(tmp_path: Path) -> None:
    with qgate.collect(network(), tmp_path / "dump", iterations=2) as collector:
        (root,) = collector._roots
        root(batch())
        torch.save(nn.ModuleList([root.head]), tmp_path / "head.pt")
        root(batch())
    code = (
        "import sys, torch; sys.modules['qgate'] = None\n"
        f"print(len(torch.load({str(tmp_path / 'head.pt')!r}, weights_only=False)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


def test_hidden_hooks_come_back_in_their_order() -> None:
    order: list[str] = []
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: order.append("before"))
    hooks = ModuleHooks(copied=False)
    hooks.add(module, lambda *_: order.append("ours"))
    module.register_forward_pre_hook(lambda *_: order.append("after"))
    with hooks.hidden():
        module(torch.ones(1, 2))
        assert order == ["before", "after"]
    module(torch.ones(1, 2))
    assert order[2:] == ["before", "ours", "after"]
    with hooks.hidden():
        hooks.remove()
    assert len(module._forward_pre_hooks) == 2


def test_an_error_of_the_collector_stays_out_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    plain = model(batch())
    collector = qgate.collect(model, tmp_path / "dump", iterations=9)
    with contextlib.ExitStack() as stack:
        collector.start()
        stack.callback(collector.wait)
        stack.callback(collector.stop)
        stack.enter_context(torch.no_grad())  # each call is an iteration
        model(batch())
        monkeypatch.setattr(
            collector.account, "end", lambda *_: (_ for _ in ()).throw(KeyError("of qgate"))
        )
        assert torch.equal(model(batch()), plain)
        assert not collector.listening
    assert "stopped by an error of qgate, KeyError: 'of qgate'" in "".join(collector.missing)


@always
def test_calls_of_two_threads_are_not_mixed(tmp_path: Path) -> None:
    """The second thread calls the model while the first is in it."""
    inside, second_done = threading.Event(), threading.Event()
    first = threading.current_thread()

    def around(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x)
        if threading.current_thread() is first and not inside.is_set():
            inside.set()
            assert second_done.wait(60)
        return result

    model = network(around=around)

    def call() -> None:
        assert inside.wait(60)
        model(batch(2))
        second_done.set()

    second = threading.Thread(target=call)
    second.start()
    with torch.no_grad(), qgate.collect(model, tmp_path / "dump", phases=("forward",)) as collector:
        model(batch())
    second.join()
    records = list(Dump.open(tmp_path / "dump").records())
    assert {record.call for record in records} == {0}
    assert not collector.missing
    assert "1 calls of the model were not collected, as another thread was in it" in (
        collector.summary
    )
