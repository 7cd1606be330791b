"""Two ranks of a data-parallel run, each into its own part of one dump; sharded parameters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import qgate
from qgate import QgateError
from qgate.collecting.starting import rank_and_size, run_id
from qgate.dumps import Dump
from tests.collecting.collected import found, network, records, train
from tests.shares import always, proof, slow_file
from tests.warm import WarmPython

pytestmark = slow_file

ROOT = Path(__file__).resolve().parents[2]

_DDP = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.nn.functional import cross_entropy
import qgate
from qgate.models.tiny import TINY

def run(rank, folder, collecting):
    torch.manual_seed(0)
    model = TINY.get("tiny_llama").build()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    losses = []
    def steps():
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            ids = torch.randint(0, 256, (2, 12))
            optimizer.zero_grad()
            loss = cross_entropy(ddp(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if collecting:
        with qgate.collect(ddp, folder / "dump") as collector:
            steps()
        assert not collector.missing, collector.missing
    else:
        steps()
    return losses, [p.detach().clone() for p in model.parameters()]

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    runs = []
    plain, collected = run(rank, folder, False), run(rank, folder, True)
    assert plain[0] == collected[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], collected[1]))
    for count in range(2):  # the second run is told from the first and takes its place
        if count:
            dist.barrier()
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        with qgate.collect(model, folder / "again", existing="overwrite") as collector:
            model(torch.ones(1, 2)).sum().backward()
        runs.append(collector.run)
    assert runs[0] != runs[1] != ""
    dist.destroy_process_group()
"""


def spawn(script: Path, folder: Path, ranks: int = 2) -> None:
    """Run the script once per rank, each in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        WarmPython([str(script), str(rank), str(folder)], folder, environment)
        for rank in range(ranks)
    ]
    ended = [process.finish() for process in processes]
    assert all(done.returncode == 0 for done in ended), "\n".join(done.stderr for done in ended)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks_of_tiny_llama_under_ddp(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_DDP)
    spawn(tmp_path / "train.py", tmp_path)
    got = records(tmp_path / "dump")
    by_rank = {r: [e for e in got if e.rank == r] for r in (0, 1)}
    linear, norms, embedding, attention = (5 * 7 + 1) * 6, (5 * 2 + 1) * 6, 5, 5 * 8
    assert len(by_rank[0]) == len(by_rank[1]) == linear + norms + embedding + attention
    assert {e.world_size for e in got} == {2}
    assert {e.operation for e in by_rank[1]} == {"forward", "backward"}
    assert (tmp_path / "dump" / "rank00001" / "index.jsonl").is_file()
    assert "model.layers.0.mlp.gate_proj" in {e.module for e in got}
    assert not Dump.open(tmp_path / "dump").notes()
    assert Dump.open(tmp_path / "dump").header["model"] == "Llama"
    second_dump = Dump.open(tmp_path / "again")
    assert {e.rank for e in second_dump.records()} == {0, 1}
    assert len(Dump.open(tmp_path / "dump").header["run"]) == len(second_dump.header["run"]) == 32
    assert Dump.open(tmp_path / "dump").header["run"] != second_dump.header["run"]
    selection = {"module": "model.layers.2.self_attn.o_proj", "name": "grad_weight"}
    a, b = (found(tmp_path / "dump", rank=rank, **selection)[0][1] for rank in (0, 1))
    assert not torch.equal(a, b)  # each rank's own, before they are averaged


_FSDP = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import qgate
from tests.collecting.collected import batch, loss_of, network

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for collecting in (False, True):
        model = network()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        collector = qgate.collect(model, folder / "dump", iterations=2)
        if collecting:
            collector.start()
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, batch(2 * step + rank))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if collecting:
            collector.close()
            assert not collector.missing, collector.missing
            assert collector.iterations == [0, 1]
        results.append((losses, [p.to_local().detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1]))
    dist.destroy_process_group()
"""


@proof
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks_with_sharded_parameters(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_FSDP)
    spawn(tmp_path / "train.py", tmp_path)
    got = records(tmp_path / "dump")
    assert len(got) == 2 * 2 * 69
    assert Dump.open(tmp_path / "dump").header["model"] == "Network"
    weight = found(tmp_path / "dump", module="layers.1.fc1", name="weight", rank=1, iteration=0)
    assert torch.equal(weight[0][1], network().layers[1].fc1.weight)  # whole, as it is used


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8)),
        ({"LOCAL_RANK": "1"}, (1, 2)),
        ({"RANK": "x", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4)),
    ],
)
def test_the_rank_of_a_launcher(environment: dict[str, str], place: tuple[int, int] | None) -> None:
    assert rank_and_size(environment) == place


def test_the_run_of_a_launcher() -> None:
    assert run_id({"TORCHELASTIC_RUN_ID": "7f3"}) == "7f3"
    assert run_id({"TORCHELASTIC_RUN_ID": "none"}) == run_id({}) == ""


def test_ranks_that_are_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with qgate.collect(network(), tmp_path / "dump", ranks=[0]) as collector:
        assert not collector.listening
    assert collector.summary == "this rank was not to be collected"
    assert not (tmp_path / "dump").exists()
    model = network()
    with qgate.collect(model, tmp_path / "dump", ranks=[1]):
        train(model, 1)
    assert {r.rank for r in records(tmp_path / "dump")} == {1}


@always
def test_a_rank_that_comes_late_is_not_taken_for_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    model = network()
    with qgate.collect(model, tmp_path / "dump"):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
        train(model, 1)
    assert {r.rank for r in records(tmp_path / "dump")} == {5}
    model = network()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with qgate.collect(model, tmp_path / "other", ranks=[0]) as collector:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        train(model, 1)
        assert not collector.listening
    with pytest.raises(QgateError, match="holds tensors"), qgate.collect(model, tmp_path / "dump"):
        train(model, 1)
