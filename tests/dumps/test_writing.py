"""Dumps come back as they were written, and no name, dtype, view or order is lost on the way."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qgate.dumps import Dump, DumpWriter, Follower, Record, StoredValues, problems, unnamed
from qgate.errors import QgateError
from tests.dumps.making import record, write
from tests.shares import share

X = torch.arange(12.0).reshape(3, 4)


def rank0(folder: Path) -> Path:
    return folder / "rank00000"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
        torch.complex64,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 5)], ids=str)
def test_every_dtype_and_shape_comes_back(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = torch.arange(float(np.prod(shape))).reshape(shape).to(dtype)
    write(tmp_path, [torch.ones(3, dtype=torch.uint8), tensor])
    dump = Dump.open(tmp_path)
    entry = list(dump.records())[1]
    read = dump.tensor(entry)
    assert (entry.shape, entry.dtype) == (shape, str(dtype).removeprefix("torch."))
    assert (read.dtype, tuple(read.shape)) == (dtype, shape)
    flat, flat_expected = (
        values.contiguous().reshape(-1).view(torch.uint8) for values in (read, tensor)
    )
    assert torch.equal(flat, flat_expected)
    assert list(problems(dump)) == []


def test_a_view_does_not_bring_its_storage(tmp_path: Path) -> None:
    whole = torch.randn(1000, 1000)
    write(tmp_path, [whole[3], whole[:, 3], whole.t()[2:4, :5]])
    assert sum(path.stat().st_size for path in shards(tmp_path)) < 60_000
    dump = Dump.open(tmp_path)
    row, column, part = (dump.tensor(entry) for entry in dump.records())
    assert torch.equal(row, whole[3])
    assert torch.equal(column, whole[:, 3])
    assert torch.equal(part, whole.t()[2:4, :5])


def test_gradients_views_and_memory_that_is_used_again(tmp_path: Path) -> None:
    leaf = torch.nn.Parameter(torch.ones(4))
    buffer = torch.zeros(4)
    with DumpWriter(tmp_path) as writer:
        writer.add(record(0), leaf * 2)
        writer.add(record(1), buffer)
        buffer.fill_(7)
        writer.add(record(2), torch.view_as_complex(torch.ones(2, 2)).conj())
    dump = Dump.open(tmp_path)
    a, b, c = (dump.tensor(entry) for entry in dump.records())
    assert a.tolist() == [2.0] * 4
    assert b.tolist() == [0.0] * 4
    assert c.tolist() == [1 - 1j] * 2


def test_identical_tensors_are_stored_once(tmp_path: Path) -> None:
    same = torch.randn(1000)
    places = [
        entry.tensor for entry in write(tmp_path, [same, same.clone(), same.reshape(10, 100)])
    ]
    assert places[0] == places[1]
    assert places[0] != places[2]
    appended = write(tmp_path, [same, same.double()], start=3, existing="append")
    assert appended[0].tensor == places[0]
    assert appended[1].tensor != places[0]


def test_a_record_may_share_the_places_of_another(tmp_path: Path) -> None:
    with DumpWriter(tmp_path) as writer:
        first = writer.add(record(0), X, {"counts": np.arange(3)})
        writer.add(replace(first, order=1, name="again"))
    dump = Dump.open(tmp_path)
    assert [dump.tensor(entry).tolist() for entry in dump.records()] == [X.tolist()] * 2
    assert [len(dump.counts(counted_entry)["counts"]) for counted_entry in dump.records()] == [3, 3]
    assert list(problems(dump)) == []


def test_counts_come_back(tmp_path: Path) -> None:
    counts = {
        "patterns": np.arange(5, dtype=np.uint16),
        "counts": np.arange(5) * 10**12,
        "odd name/ü": np.array(3.5),
    }
    with DumpWriter(tmp_path) as writer:
        one = writer.add(record(0, dtype="bfloat16", shape=(4, 4)), counts=counts)
        two = writer.add(record(1, dtype="bfloat16", shape=(8,)), counts=dict(counts))
        assert one.counts == two.counts
        with pytest.raises(QgateError, match="arrays of numbers"):
            writer.add(record(2), counts={"a": np.array(["x"])})
    dump = Dump.open(tmp_path)
    for entry, shape in zip(dump.records(), [(4, 4), (8,)], strict=True):
        assert (entry.shape, entry.dtype, entry.tensor) == (shape, "bfloat16", None)
        read = dump.counts(entry)
        assert sorted(read) == sorted(counts)
        for name, array in counts.items():
            assert read[name].dtype == array.dtype
            assert np.array_equal(read[name], array)
    with pytest.raises(QgateError, match="only a summary was kept"):
        dump.tensor(entry)
    assert list(problems(dump)) == []


def test_all_that_a_record_says_comes_back(tmp_path: Path) -> None:
    new_record = record(
        10_000,
        module="model.layers/0 \u2028\n ü \ud800",
        name="../../etc/passwd",
        layer=None,
        component="FA",
        quant_type="mx fp8",
        sample=2,
        micro_batch=1,
        call=3,
        stats={"amax": 1.5, "std": float("nan"), "max": float("inf")},
        nonfinite={"nan": 2},
        sampled=0.25,
        extra={
            "shape": torch.Size([2]),
            "dtype": torch.bfloat16,
            "number": np.float32(0.5),
            "not finite": [float("-inf"), {1}],
        },
    )
    with DumpWriter(tmp_path) as writer:
        writer.add(new_record, X)
    (entry,) = Dump.open(tmp_path).records()
    for name in (
        "order",
        "module",
        "name",
        "quant_type",
        "sample",
        "micro_batch",
        "call",
        "sampled",
    ):
        assert getattr(entry, name) == getattr(new_record, name)
    assert entry.stats["amax"] == 1.5
    assert np.isnan(entry.stats["std"])
    assert entry.stats["max"] == np.inf
    assert entry.extra == {
        "shape": [2],
        "dtype": "bfloat16",
        "number": 0.5,
        "not finite": ["-inf", [1]],
    }
    names = [path.name for path in tmp_path.rglob("*")]
    assert sorted(names) == ["dump.json", "index.jsonl", "rank00000", "tensors-000000.safetensors"]
    text = (rank0(tmp_path) / "index.jsonl").read_text("ascii")
    assert len(text.splitlines()) == 3
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_order_is_a_number_and_not_a_text(tmp_path: Path) -> None:
    orders = [10_000, 9_999, 100_000, 5]
    with DumpWriter(tmp_path) as writer:
        for order in orders:
            writer.add(record(order), torch.full((2,), float(order)))
        assert writer.next_order == 100_001
        with pytest.raises(QgateError, match="order 5 of rank 0 is there already"):
            writer.add(record(5), X)
        with pytest.raises(QgateError, match="rank 1 was given to rank 0"):
            writer.add(record(6, rank=1, world_size=2), X)
    dump = Dump.open(tmp_path)
    assert [entry.order for entry in dump.records()] == sorted(orders)
    assert [dump.tensor(tensor_entry)[0].item() for tensor_entry in dump.records()] == sorted(
        orders
    )


def test_shards_are_bounded_and_what_is_finished_is_in_the_index(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path, shard_bytes=1000)
    for i in range(10):
        writer.add(record(i), torch.full((100,), float(i)))
    assert len(shards(tmp_path)) == 3
    assert len(list(Dump.open(tmp_path).records())) == 9
    writer.flush()
    writer.flush()
    dump = Dump.open(tmp_path)
    assert [dump.tensor(entry)[0].item() for entry in dump.records()] == list(range(10))
    assert dump.state(0).state == "running or killed"
    writer.add(record(10, stats={"amax": 1.0}))
    assert len(list(dump.records())) == 11, "an index that has grown is read again"
    writer.close()
    writer.close()
    assert dump.state(0).state == "complete"
    assert dump.notes() == []
    with pytest.raises(QgateError, match="closed"):
        writer.add(record(11), X)


def test_a_header_has_room_for_any_number_of_tensors(tmp_path: Path) -> None:
    many = {f"array {i} {'x' * 100}": np.arange(i) for i in range(500)}
    with DumpWriter(tmp_path) as writer:
        for i in range(300):
            writer.add(record(i), torch.full((1, 1, 1), float(i)))
        writer.add(record(300), X, many)
    dump = Dump.open(tmp_path)
    assert list(problems(dump)) == []
    assert len(dump.counts(list(dump.records())[-1])) == 500
    assert len(shards(tmp_path)) > 2


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_what_has_no_plain_values_is_refused_and_the_rest_goes_on(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    with DumpWriter(tmp_path) as writer:
        with pytest.raises(QgateError, match="cannot dump a tensor of"):
            writer.add(record(0), tensor)
        writer.add(record(1), X)
    assert [entry.order for entry in Dump.open(tmp_path).records()] == [1]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path)
    writer.add(record(0), X)
    writer.close([f"tensor {i}" for i in range(2000)])
    state = Dump.open(tmp_path).state(0)
    assert (state.state, state.missing_count, len(state.missing)) == ("incomplete", 2000, 1000)
    assert "2000 are missing: tensor 0, …" in state.notes()[0]


def test_an_error_in_the_run_is_said(tmp_path: Path) -> None:
    def run() -> None:
        with DumpWriter(tmp_path) as writer:
            writer.add(record(0), X)
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        run()
    state = Dump.open(tmp_path).state(0)
    assert (state.state, state.records) == ("incomplete", 1)
    assert state.missing == ("what came after ValueError: boom",)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 is none of the 2 ranks"),
        ({"rank": -1}, "rank -1"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"existing": "replace"}, "unknown existing 'replace'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(QgateError, match=words):
        DumpWriter(tmp_path / "new", **settings)
    assert not (tmp_path / "new").exists()


# The folder ------------------------------------------------------------------------------------


def test_ranks_share_a_folder_and_never_a_file(tmp_path: Path) -> None:
    writers = [DumpWriter(tmp_path, rank=r, world_size=3, header={"a": (1,)}) for r in (1, 0)]
    for writer in writers:
        for i in range(3):
            fields = {"rank": writer.rank, "world_size": 3}
            writer.add(record(i, **fields), torch.full((2,), 10.0 * writer.rank + i))
        writer.close()
    dump = Dump.open(tmp_path)
    assert dump.ranks == [0, 1]
    assert [dump.tensor(entry)[0].item() for entry in dump.records()] == [0, 1, 2, 10, 11, 12]
    assert dump.notes() == ["of 3 ranks these have written nothing: 2"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "dump.json").stat().st_mode) == 0o666 & ~mask
    with pytest.raises(QgateError, match=r"holds tensors of rank 1 already.*its own rank"):
        DumpWriter(tmp_path, rank=1, world_size=3, header={"a": [1]})
    with pytest.raises(QgateError, match="of 3 ranks, not 4"):
        DumpWriter(tmp_path, rank=2, world_size=4, header={"a": [1]})
    with pytest.raises(QgateError, match=r"its a is \[1\], not 2"):
        DumpWriter(tmp_path, rank=2, world_size=3, header={"a": 2})


@pytest.mark.parametrize("existing", ["refuse", "append", "overwrite"])
def test_ranks_may_begin_at_the_same_moment(existing: Any, tmp_path: Path) -> None:
    if existing == "overwrite":
        for rank in range(20):
            write(tmp_path, [X], rank=rank, world_size=20)

    def begin(rank: int) -> None:
        settings: dict[str, Any] = {"world_size": 16, "header": {"run": "r"}}
        write(tmp_path, [X + 1], rank=rank, existing=existing, **settings)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(begin, range(16)))
    dump = Dump.open(tmp_path)
    assert dump.ranks == list(range(16))
    assert dump.notes() == []
    assert {dump.tensor(entry)[0, 0].item() for entry in dump.records()} == {1.0}
    assert {path.name[:4] for path in tmp_path.iterdir()} == {"dump", "rank"}


def test_two_processes_of_one_rank_find_out(tmp_path: Path) -> None:
    with (
        DumpWriter(tmp_path),
        pytest.raises(QgateError, match=r"being written .* by another process"),
    ):
        DumpWriter(tmp_path, existing="append")
    DumpWriter(tmp_path, existing="append").close()


@pytest.mark.parametrize("existing", ["refuse", "append", "overwrite"])
def test_a_folder_of_something_else_is_left_alone(existing: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(QgateError, match=r"not empty and no dump \(it has thesis.txt\)"):
        DumpWriter(tmp_path, existing=existing)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(QgateError, match="is a file"):
        DumpWriter(tmp_path / "thesis.txt", existing=existing)


def test_refuse_append_overwrite(tmp_path: Path) -> None:
    write(tmp_path, [X, X + 1])
    with pytest.raises(QgateError, match="append to the dump, or overwrite it"):
        write(tmp_path, [X])
    write(tmp_path, [X + 2], start=2, existing="append")
    dump = Dump.open(tmp_path)
    assert [dump.tensor(entry)[0, 0].item() for entry in dump.records()] == [0, 1, 2]
    assert dump.state(0).state == "complete"
    (rank0(tmp_path) / "notes.txt").write_text("mine")
    write(tmp_path, [X + 3], existing="overwrite", header={"new": 1})
    dump = Dump.open(tmp_path)
    assert [dump.tensor(new_entry)[0, 0].item() for new_entry in dump.records()] == [3]
    assert dump.header == {"new": 1}
    assert (rank0(tmp_path) / "notes.txt").read_text() == "mine"
    assert len(shards(tmp_path)) == 1


def test_append_to_nothing_begins(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", [X], existing="append")
    assert len(list(Dump.open(tmp_path / "a" / "b").records())) == 1


def test_overwriting_does_not_mix_runs(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, [X], rank=rank, world_size=4, header={"run": "old"})
    new: dict[str, Any] = {"world_size": 3, "header": {"run": "new"}, "existing": "overwrite"}
    write(tmp_path, [X + 1], rank=1, **new)
    write(tmp_path, [X + 1], rank=0, **new)
    dump = Dump.open(tmp_path)
    assert dump.ranks == [0, 1]
    assert dump.header == {"run": "new"}
    assert dump.notes() == [
        "rank 2 is left from another run: it is not read",
        "of 3 ranks these have written nothing: 2",
    ]
    follower = Follower(tmp_path)
    assert (len(follower.poll()), follower.ended) == (2, False)
    assert {dump.tensor(entry)[0, 0].item() for entry in dump.records()} == {1.0}


def test_ranks_of_another_run_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [X], rank=0, world_size=2, header={"run": "a"})
    with pytest.raises(QgateError, match="its run is 'a', not 'b'"):
        write(tmp_path, [X], rank=1, world_size=2, header={"run": "b"})
    write(tmp_path, [X], rank=1, world_size=2, header={"run": "b"}, existing="append")
    dump = Dump.open(tmp_path)
    assert (dump.ranks, dump.notes()) == ([0, 1], []), "who appends goes on with it"


# What a record takes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"operation": "sideways"}, "unknown operation"),
        ({"phase": "mid"}, "unknown phase"),
        ({"order": -1}, "order"),
        ({"order": "1"}, "order is '1', not a whole number"),
        ({"order": True}, "order is True, not a whole number"),
        ({"shape": [1.5]}, "shape"),
        ({"shape": 3}, "shape"),
        ({"name": 3}, "name"),
        ({"stats": {"a": "x"}}, "stats"),
        ({"nonfinite": {"nan": -1}}, "nonfinite"),
        ({"tensor": {"file": "a"}}, "tensor"),
        ({"tensor": {"file": 1, "key": "", "digest": ""}}, "tensor"),
        ({"of the future": 1}, "unknown field of a dump record 'of the future'"),
        ({"name": None}, "name"),
    ],
)
def test_a_line_is_believed_field_by_field(told: dict[str, Any], words: str) -> None:
    with pytest.raises(QgateError, match=words):
        Record.from_dict({**record().to_dict(), **told})


def test_a_record_without_a_name_is_none() -> None:
    line = record(tensor=StoredValues("tensors-000000.safetensors", "0", "ab")).to_dict()
    assert Record.from_dict(line).to_dict() == line
    del line["name"]
    with pytest.raises(QgateError, match="name is missing"):
        Record.from_dict(line)


def test_the_output_of_a_killed_writer_is_named_once(tmp_path: Path) -> None:
    write(tmp_path, [X])
    (rank0(tmp_path) / "tensors-000007.safetensors").write_bytes(b"x")
    assert [Path(name).name for name in unnamed(Dump.open(tmp_path))] == [
        "tensors-000007.safetensors"
    ]
    DumpWriter(tmp_path, existing="append").close()
    write(tmp_path, [X + 5], start=9, existing="append")
    assert "tensors-000008.safetensors" in [path.name for path in shards(tmp_path)]


@share(2)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_step_adds_the_values_of_each_call(tmp_path: Path, fullgraph: bool) -> None:
    with DumpWriter(tmp_path) as writer:

        def step(x: torch.Tensor) -> torch.Tensor:
            doubled = torch.relu(x) * 2
            writer.add(record(writer.next_order, module="m"), doubled)
            return doubled.sum()

        compiled = torch.compile(step, backend="eager", fullgraph=fullgraph)
        batches = [torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        sums = [compiled(x) for x in batches]
    dump = Dump.open(tmp_path)
    stored = [dump.tensor(entry) for entry in dump.records()]
    assert len(stored) == len(batches)
    for tensor, x, total in zip(stored, batches, sums, strict=True):
        assert torch.equal(tensor, torch.relu(x) * 2)
        assert torch.equal(tensor.sum(), total)
