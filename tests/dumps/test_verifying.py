"""Verifying a dump with several workers finds what one reader finds."""

import re

import pytest
import torch

import qgate.dumps.reading as reading
import qgate.dumps.verifying as checks
from qgate.dumps import Dump, DumpWriter, problems
from qgate.dumps.layout import rank_name
from qgate.dumps.verifying import Verification
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


@pytest.mark.parametrize(
    ("workers", "limit", "value", "steps"),
    [
        (1, "_SLICE_RECORDS", 2, 12),
        (1, "_SLICE_BYTES", 70, 12),
        # The limit of other processes stays as it is: a slice per rank.
        (2, "_SLICE_RECORDS", 2, 3),
    ],
)
def test_workers_find_what_one_reader_finds(folder, monkeypatch, workers, limit, value, steps):
    monkeypatch.setattr(checks, limit, value)
    verification = Verification(folder, workers)
    assert list(verification.problems()) == []
    assert (verification.records, verification.hashed) == (21, {"tensors": 21, "counts": 0})
    spoil(folder, 0)
    spoil(folder, 2)
    progress = []
    damage = list(Verification(folder, workers).problems(lambda *at: progress.append(at)))
    assert damage == list(problems(Dump.open(folder)))
    assert len(damage) == 2
    assert progress[-1] == (21, 21)
    assert len(progress) == steps


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("_prove", "records 0 to 6 of rank 1 were not proved: it ended"),
        ("_check_rank", "rank 1 was not proved: it ended"),
    ],
)
def test_what_was_not_proved_is_a_problem(folder, monkeypatch, kind, words):
    def lost(function, items, _workers):
        for item in items:
            own = item.rank == 1 and function.__name__ == kind
            yield Failure("it ended") if own else function(item)

    monkeypatch.setattr(checks, "map_items", lost)
    (problem,) = Verification(folder, 2).problems()
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
    monkeypatch.setattr(reading, "_MOST_RECORDS", 10)
    dump = Dump.open(folder)
    for _ in range(2):
        assert list(dump.records()) == whole
        assert list(dump.records(rank=0)) == whole[:7]
        assert [state.records for state in dump.states] == [7, 7, 7]
        record_counts = [
            len(rank_index.records)
            for rank_index in dump._indexes.values()
            if rank_index.records is not None
        ]
        assert record_counts == [7]


def test_an_edited_description_is_found(folder):
    file = folder / "dump.json"
    text = file.read_text()
    file.write_text(text.replace('"world_size": 3', '"world_size": 4'))
    words = "dump.json is not as it was written: its digest is another one"
    assert [words in problem for problem in Verification(folder, 1).problems()] == [True]
    file.write_text(re.sub(r',\n "digest": "[^"]*"', "", text))
    assert [words in problem for problem in Verification(folder, 1).problems()] == [True]
