"""A dump proved by many workers says what one says."""

import pytest
import torch

import qgate.dumps.reading as reading
import qgate.dumps.verifying as verifying
import qgate.dumps.worker_verifying as checks
from qgate.dumps import Dump, DumpWriter, problems
from qgate.dumps.layout import rank_name
from qgate.dumps.worker_verifying import Proof
from qgate.engine import Failure
from tests.dumps.making import record


@pytest.fixture
def folder(tmp_path):
    for rank in range(3):
        with DumpWriter(tmp_path, rank=rank, world_size=3) as writer:
            for order in range(7):
                values = torch.arange(8.0).reshape(2, 4) + order
                writer.add(record(order, rank=rank, world_size=3), values)
    return tmp_path


def spoil(folder, rank):
    (shard,) = (folder / rank_name(rank)).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("most", "value"), [("_MOST_TOGETHER", 2), ("_MOST_BYTES", 70)])
def test_workers_find_what_one_reader_finds(folder, monkeypatch, workers, most, value):
    monkeypatch.setattr(verifying, most, value)
    proof = Proof(folder, workers)
    assert list(proof.problems()) == []
    assert (proof.records, proof.hashed) == (21, {"tensors": 21, "counts": 0})
    spoil(folder, 0)
    spoil(folder, 2)
    told = []
    found = list(Proof(folder, workers).problems(lambda *at: told.append(at)))
    assert found == list(problems(Dump.open(folder)))
    assert len(found) == 2
    assert told[-1] == (21, 21)
    assert len(told) == (12 if workers == 1 else 3), "other processes look with parts of their own"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("_Part", "records 0 to 6 of rank 1 were not proved: it ended"),
        ("_Rank", "rank 1 was not proved: it ended"),
    ],
)
def test_what_was_not_proved_is_a_problem(folder, monkeypatch, kind, words):
    def lost(function, items, _workers):
        for item in items:
            own = item.rank == 1 and type(item).__name__ == kind
            yield Failure("it ended") if own else function(item)

    monkeypatch.setattr(checks, "outcomes", lost)
    (problem,) = Proof(folder, 2).problems()
    assert problem == f"{folder}: {words}"


def test_records_of_a_rank_are_read_from_its_index_alone(folder, monkeypatch):
    dump = Dump.open(folder)
    assert len(dump.ranks) == 3
    read = []
    real = Dump._read
    monkeypatch.setattr(
        Dump, "_read", lambda self, rank, **how: read.append(rank) or real(self, rank, **how)
    )
    assert len(list(dump.records(rank=1))) == 7
    assert set(read) == {1}


def test_a_dump_holds_the_records_of_few_ranks(folder, monkeypatch):
    """What many ranks wrote is forgotten, and read again when it is asked for."""
    whole = list(Dump.open(folder).records())
    monkeypatch.setattr(reading, "_MOST_HELD", 10)
    dump = Dump.open(folder)
    for _ in range(2):
        assert list(dump.records()) == whole
        assert list(dump.records(rank=0)) == whole[:7]
        assert [state.records for state in dump.states] == [7, 7, 7]
        held = [len(each.records) for each in dump._indexes.values() if each.records is not None]
        assert held == [7]
