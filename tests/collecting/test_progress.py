"""When an iteration ends, and that memory stays bounded while it is written."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qgate
from qgate import QgateError
from qgate.collecting.snapshots import WriterThread
from qgate.dumps import Dump, DumpWriter
from tests.collecting.collected import batch, found, has_hooks, loss_of, network, records, train
from tests.shares import proof


def micro_batches(folder: Path) -> set[tuple[Any, ...]]:
    return {(r.iteration, r.micro_batch, r.sample) for r in records(folder)}


@proof
def test_gradients_are_accumulated_until_the_optimizer_steps(tmp_path: Path) -> None:
    model = network()
    with qgate.collect(model, tmp_path / "dump", iterations=2) as collector:
        train(model, 3, passes=2)
    assert not collector.missing
    assert micro_batches(tmp_path / "dump") == {(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)}
    weights = found(tmp_path / "dump", module="head", name="weight", iteration=0)
    assert weights[0][0].tensor == weights[1][0].tensor
    calls = [r.call for r, _ in found(tmp_path / "dump", module="head", name="grad_input")]
    assert calls == [0, 1, 0, 1]


def test_two_optimizers_and_one_of_another_model(tmp_path: Path) -> None:
    model, other = network(), nn.Linear(3, 3)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:4], 0.1), torch.optim.Adam(parameters[4:], 0.1)]
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    with qgate.collect(model, tmp_path / "dump", iterations=2) as collector:
        for _ in range(2):
            loss = loss_of(model, batch())
            other(torch.ones(3)).sum().backward()
            foreign.step()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    assert collector.iterations == [0, 1]
    assert not collector.missing


def test_optimizers_inside_the_backward_pass(tmp_path: Path) -> None:
    model = network()
    own = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
    for parameter, optimizer in own.items():
        parameter.register_post_accumulate_grad_hook(lambda _p, o=optimizer: o.step())
    with qgate.collect(model, tmp_path / "dump", iterations=2) as collector:
        for _ in range(3):
            loss_of(model, batch()).backward()
    assert collector.iterations == [0, 1]
    assert not collector.missing
    assert sum(r.name == "grad_weight" for r in records(tmp_path / "dump")) == 18


def test_parameters_changed_by_hand(tmp_path: Path) -> None:
    model = network()
    with qgate.collect(model, tmp_path / "dump", iterations=2) as collector:
        for _ in range(3):
            loss_of(model, batch()).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert collector.iterations == [0, 1]
    assert not collector.missing


@proof
@pytest.mark.parametrize("graph", [True, False])
def test_each_forward_pass_of_inference_is_an_iteration(tmp_path: Path, graph: bool) -> None:
    model = network()
    with (
        qgate.collect(model, tmp_path / "dump", iterations=2, phases=("forward",)) as collector,
        torch.set_grad_enabled(graph),
    ):
        for seed in range(5):
            model(batch(seed))
    assert collector.iterations == [0, 1]
    assert micro_batches(tmp_path / "dump") == {(0, 0, 0), (1, 0, 1)}


def test_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = network()
        with qgate.collect(model, tmp_path / "dump", phases=("forward",)) as collector:
            model(batch())
    assert not collector.missing


def test_step_says_it_and_samples_are_limited_and_labeled(tmp_path: Path) -> None:
    model = network()
    with qgate.collect(model, tmp_path / "dump", iterations=2, samples=2) as collector:
        for label in (10, 20):
            for count in range(3):
                collector.sample = label + count
                loss_of(model, batch()).backward()
            collector.step()
            collector.step()
    assert collector.iterations == [0, 1]
    assert not collector.missing
    assert micro_batches(tmp_path / "dump") == {(0, 0, 10), (0, 1, 11), (1, 0, 20), (1, 1, 21)}


@proof
def test_without_with(tmp_path: Path) -> None:
    model = network()
    collector = qgate.collect(model, tmp_path / "dump").start()
    train(model, 2)
    collector.close()
    assert collector.iterations == [0]
    with pytest.raises(QgateError, match="make another"):
        collector.start()


class Slow(DumpWriter):
    """A disk that takes its time."""

    waits = 0.002

    def add(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.waits)
        return super().add(*args, **kwargs)


@proof
def test_a_slow_disk_makes_the_model_wait_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgate.collecting.collector.DumpWriter", Slow)
    model = network()
    most = 20_000
    with qgate.collect(model, tmp_path / "dump", memory=most, iterations=2) as collector:
        train(model, 2)
    assert collector._recorder is not None
    assert 0 < collector._recorder.thread.peak_bytes <= most
    assert not collector.missing
    assert len(records(tmp_path / "dump")) == 2 * 69
    values = {r.name: t for r, t in found(tmp_path / "dump", module="head", iteration=0)}
    torch.testing.assert_close(values["output"], network()(batch(0)).detach())


def test_a_tensor_larger_than_all_room_goes_alone(tmp_path: Path) -> None:
    model = network()
    with qgate.collect(model, tmp_path / "dump", memory=1) as collector:
        train(model, 1)
    assert not collector.missing
    assert len(records(tmp_path / "dump")) == 69


def test_the_queue_blocks_until_there_is_room() -> None:
    gate, done, order = threading.Event(), threading.Event(), []
    queue = WriterThread(100, lambda _: None)
    queue.reserve(80)
    queue.put(lambda: (order.append(1), gate.wait(60)), 80)  # type: ignore[arg-type, return-value]

    def more() -> None:
        queue.reserve(50)
        queue.put(lambda: order.append(2), 50)
        done.set()

    thread = threading.Thread(target=more)
    thread.start()
    assert not done.wait(0.05)
    gate.set()
    assert done.wait(60)
    queue.end(lambda: order.append(3))
    queue.join()
    thread.join()
    assert order == [1, 2, 3]
    assert queue.pending_bytes == 0
    assert queue.peak_bytes == 80


class Full(DumpWriter):
    """A disk that is full after some tensors."""

    def _put(self, blocks: Any) -> str:
        if self.bytes_written > 20_000:
            raise OSError(28, "No space left on device")
        return super()._put(blocks)


def test_a_full_disk_stops_collecting_and_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgate.collecting.collector.DumpWriter", Full)
    right = train(network())
    losses: list[float] = []
    model = network()
    with (
        pytest.raises(QgateError, match="No space left"),
        qgate.collect(model, tmp_path / "dump", memory=50_000),
    ):
        losses += train(model)
    assert losses == right
    assert not has_hooks(model)
    dump = Dump.open(tmp_path / "dump")
    assert "missing" in str(dump.notes())
    for record in dump.records():
        dump.tensor(record)
