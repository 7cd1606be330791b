"""Dumps written to stores of objects: whole objects only, whatever happens to the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qgate
from qgate.collecting import Collector
from qgate.dumps import Dump, DumpWriter, merge_dumps, problems, unnamed
from qgate.dumps.layout import check_store
from qgate.errors import QgateError
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.collecting.collected import network, train
from tests.dumps.making import record, write
from tests.shares import proof
from tests.warm import run_python

bucket, memory, server = stores.bucket, stores.memory, stores.server
URL, HOME = "memory://bucket/run", "/bucket/run"
X = torch.arange(12.0).reshape(3, 4)
ROOT = Path(__file__).resolve().parents[2]


def names(memory: Any) -> list[str]:
    return [name.removeprefix(f"{HOME}/") for name in sorted(memory.store)]


def values(dump: Dump) -> list[Any]:
    return [
        (entry.rank, entry.order, dump.tensor(entry).tolist())
        for entry in dump.records()
        if entry.tensor
    ]


def test_the_objects_are_the_files_of_a_folder(memory: Any, tmp_path: Path) -> None:
    for target in (URL, tmp_path):
        for rank in range(2):
            write(target, [X + rank, X, X + 2], rank=rank, world_size=2, shard_bytes=40)
    home = "rank00000"
    assert names(memory)[:5] == ["dump.json", *(f"{home}/index-00000{i}.jsonl" for i in range(4))]
    shards = [name for name in names(memory) if name.endswith(".safetensors")]
    assert shards == [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*.s*"))]
    for name in shards:
        assert memory.cat(f"{HOME}/{name}") == (tmp_path / name).read_bytes()
    local_dump, stored_dump = Dump.open(tmp_path), Dump.open(URL)
    assert list(local_dump.records()) == list(stored_dump.records())
    assert [state.state for state in stored_dump.states] == ["complete"] * 2
    # Copied to this machine as it is, it reads the same and is appended to after a merge.
    for name in names(memory):
        path = tmp_path / "copied" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(memory.cat(f"{HOME}/{name}"))
    copied = Dump.open(tmp_path / "copied")
    assert values(copied) == values(local_dump)
    assert copied.notes() == []
    with pytest.raises(QgateError, match="has its index in parts, as from a store"):
        DumpWriter(tmp_path / "copied", world_size=2, existing="append")
    merge_dumps([tmp_path / "copied"], tmp_path / "merged")
    write(tmp_path / "merged", [X + 9], world_size=2, existing="append", start=3)
    assert len(values(Dump.open(tmp_path / "merged"))) == 7


def test_refuse_append_overwrite(memory: Any) -> None:
    write(URL, [X], world_size=2, header={"model": "m"})
    settings = {"world_size": 2, "header": {"model": "m"}}
    with pytest.raises(QgateError, match="holds tensors of rank 0 already"):
        DumpWriter(URL, **settings)
    with pytest.raises(QgateError, match=r"'memory://bucket/run' is a dump with other settings"):
        DumpWriter(URL, rank=1, world_size=2, header={"model": "other"})
    with pytest.raises(QgateError, match="is a file; a dump is a folder"):
        DumpWriter(f"{URL}/dump.json")
    with pytest.raises(QgateError, match=r"is not empty and no dump .it has run"):
        DumpWriter("memory://bucket")
    (appended,) = write(URL, [X], start=1, existing="append", **settings)
    assert appended.tensor is not None
    assert appended.tensor.key == "0", "what was stored is not stored again"
    dump = Dump.open(URL)
    assert [entry.order for entry in dump.records()] == [0, 1]
    assert dump.state(0).state == "complete"
    write(URL, [X + 5], existing="overwrite", header={"model": "new"})
    dump = Dump.open(URL)
    assert (values(dump), dump.header) == ([(0, 0, (X + 5).tolist())], {"model": "new"})
    assert len(names(memory)) == 1 + 3 + 1


def test_two_writers_of_one_rank_meet(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = DumpWriter(URL)
    second = DumpWriter(URL, existing="append")
    first.add(record(0), X)
    with pytest.raises(QgateError, match=r"rank 0 is being written to .* by another process"):
        first.flush()
    second.add(record(1), X + 1)
    second.close()
    first.close()
    dump = Dump.open(URL)
    assert values(dump) == [(0, 1, (X + 1).tolist())]
    assert list(problems(dump)) == []
    assert first.missing == ("order 0: L0 linear forward input, rank 0, iteration 0",)
    real = type(memory).pipe_file
    # Another one begins between the look at the folder and the first write.
    memory.rm(HOME, recursive=True)

    def raced(self: Any, path: str, data: bytes, **told: Any) -> None:
        if path.endswith("index-000000.jsonl"):
            real(self, path, b"{}\n")
        real(self, path, data, **told)

    monkeypatch.setattr(type(memory), "pipe_file", raced)
    with pytest.raises(QgateError, match="by another process: every process needs a rank"):
        DumpWriter(URL)


@pytest.mark.parametrize("broken", range(9))
def test_a_store_that_fails_in_the_middle(
    broken: int, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever write it is: the error is raised once, and what is named is there and whole."""
    puts = {"count": 0, "broken": broken}

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def put(*args: Any, **told: Any) -> Any:
            puts["count"] += 1
            if puts["count"] > puts["broken"]:
                raise RuntimeError("the store is on fire")
            return real(*args, **told)

        return put

    for method in ("pipe_file", "put_file"):
        monkeypatch.setattr(type(memory), method, failing(getattr(type(memory), method)))
    errors = []
    if broken < 2:
        with pytest.raises(OSError, match="the store is on fire"):
            DumpWriter(URL, shard_bytes=40)
    else:
        writer = DumpWriter(URL, shard_bytes=40)
        for order in range(3):
            try:
                writer.add(record(order), X + order)
            except QgateError as error:
                errors.append(str(error))
        try:
            writer.close(["one that came later"])
        except QgateError as error:
            errors.append(str(error))
        assert len(errors) == 1
        assert "cannot be written: the store is on fire" in errors[0]
    whole = max(0, broken - 2) // 2
    if broken:
        dump = Dump.open(URL)
        assert values(dump) == [(0, order, (X + order).tolist()) for order in range(whole)]
        assert list(problems(dump)) == []
        assert len(unnamed(dump)) == (broken in (3, 5, 7))
    assert puts["count"] > broken


def test_a_failure_that_passes_is_told_in_the_closing_state(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = type(memory).put_file, [True]

    def put(*args: Any, **told: Any) -> Any:
        if broken.pop() if broken else False:
            raise PermissionError(13, "Access Denied")
        return real(*args, **told)

    monkeypatch.setattr(type(memory), "put_file", put)
    writer = DumpWriter(URL)
    writer.add(record(0), X)
    with pytest.raises(QgateError, match=r"cannot be written: Access Denied. 0 records of rank 0"):
        writer.flush()
    writer.add(record(1), X)
    writer.close(["what came later"])
    state = Dump.open(URL).state(0)
    assert (state.state, state.missing_count) == ("incomplete", 3)
    assert "order 1" in state.missing[1]


def test_one_shard_at_a_time_is_on_this_machine(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writer = DumpWriter(URL, shard_bytes=10_000)
    most = 0
    for order in range(30):
        writer.add(record(order), torch.full((1000,), float(order)))
        most = max(most, sum(path.stat().st_size for path in tmp_path.rglob("*.*")))
    writer.close()
    assert 0 < most < (1 << 15) + 10_000 + 2 * 4000
    assert list(tmp_path.iterdir()) == []
    assert len([name for name in names(memory) if "tensors" in name]) == 10
    assert list(problems(Dump.open(URL))) == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/run", "cannot be reached|may leave half a file behind"),
        ("gs://bucket/run", "gs:// needs gcsfs; pip install it"),
        ("abfs://bucket/run", "abfs:// needs adlfs; pip install it"),
        ("s3://nobucket/run", "The specified bucket does not exist"),
        ("http://127.0.0.1:9/run", "http:// may leave half a file behind, so nothing is written"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_where_nothing_can_be_written(
    url: str, words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    for package in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path / "a", [X])
    for attempt in (
        lambda: DumpWriter(url),
        lambda: check_store(url),
        lambda: qgate.collect(network(), url).start(),
        lambda: merge_dumps([tmp_path / "a"], url),
    ):
        with pytest.raises(QgateError, match=words):
            attempt()


# The collector ----------------------------------------------------------------------------------


@proof
def test_what_is_collected_into_a_bucket_is_what_is_collected_into_a_folder(
    bucket: Any, tmp_path: Path
) -> None:
    url = f"s3://{stores.BUCKET}/run"
    for target in (url, tmp_path / "run"):
        train_into(target)
    local_dump, stored_dump = Dump.open(tmp_path / "run"), Dump.open(url)
    records = list(stored_dump.records())
    assert len(records) > 60
    assert records == list(local_dump.records())
    assert list(problems(stored_dump)) == []
    assert stored_dump.notes() == local_dump.notes() == []
    assert not [name for name in stores.keys(bucket) if "probe" in name]
    with pytest.raises(QgateError, match="holds tensors of rank 0 already"):
        train_into(url)
    for entry in records[:20]:
        if entry.counts is not None:
            mine, other = local_dump.counts(entry), stored_dump.counts(entry)
            assert all(np.array_equal(mine[name], other[name]) for name in mine)


def train_into(place: Path | str, **settings: Any) -> Collector:
    model = network()
    with qgate.collect(model, place, **settings) as collector:
        train(model, settings.get("iterations", 1))
    return collector


def test_training_goes_on_when_the_store_fails(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = type(memory).put_file, []

    def put(*args: Any, **told: Any) -> Any:
        count.append(1)
        if len(count) > 4:
            raise OSError(5, "Service Unavailable")
        return real(*args, **told)

    monkeypatch.setattr(type(memory), "put_file", put)
    model, plain = network(), network()
    right, losses = train(plain, 6), []
    with (
        pytest.raises(QgateError, match=r"cannot be written: Service Unavailable"),
        qgate.collect(model, URL, iterations=6, memory=1 << 30),
    ):
        losses = train(model, 6)
    assert losses == right
    dump = Dump.open(URL)
    assert dump.state(0).state == "incomplete"
    assert {entry.iteration for entry in dump.records()} == {0, 1}
    assert list(problems(dump)) == []


_UNCLOSED = """
import sys
import qgate
from tests.collecting.collected import network, train

model = network()
collector = qgate.collect(model, sys.argv[1], iterations=9).start()
train(model, 1)
"""


@proof
@pytest.mark.usefixtures("bucket")
def test_a_program_that_only_ends_leaves_a_dump_that_is_closed() -> None:
    """Addresses cannot be looked up any more when `atexit` comes: here each request needs one."""
    url, address = f"s3://{stores.BUCKET}/run", os.environ["AWS_ENDPOINT_URL"]
    each_anew = {"connector_args": {"keepalive_timeout": 0.001, "use_dns_cache": False}}
    done = subprocess.run(
        [sys.executable, "-c", _UNCLOSED, url], timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT),
             "AWS_ENDPOINT_URL": address.replace("0.0.0.0", "localhost"),
             "FSSPEC_S3": json.dumps({"config_kwargs": each_anew})},
    )  # fmt: skip
    assert done.returncode == 0
    state = Dump.open(url).state(0)
    assert state.state == "incomplete"
    assert state.records > 60
    assert state.missing == ("8 of 9 iterations: stopped by the end of the program",)


_KILLED = """
import os, signal, sys
import qgate
from qgate.storage.object_folders import ObjectFolder
from tests.collecting.collected import network, train

real, left = ObjectFolder.put, [int(sys.argv[2])]

def put(self, name, data, **told):
    left[0] -= name.startswith("index")
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, name, data, **told)

ObjectFolder.put = put
model = network()
with qgate.collect(model, sys.argv[1], iterations=9):
    train(model, 9)
"""


@proof
@pytest.mark.usefixtures("bucket")
def test_a_killed_run_leaves_what_had_been_put() -> None:
    url = f"s3://{stores.BUCKET}/run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1"}
    done = run_python("-c", _KILLED, url, "6", cwd=ROOT, environment=environment)
    assert done.returncode == -signal.SIGKILL
    dump = Dump.open(url)
    assert dump.state(0).state == "running or killed"
    assert {entry.iteration for entry in dump.records()} == {0, 1}
    assert list(problems(dump)) == []
    (shard_url,) = unnamed(dump)
    assert shard_url.startswith(f"{url}/rank00000/tensors-")
    train_into(url, first_iteration=9, existing="append")
    dump = Dump.open(url)
    assert {later_entry.iteration for later_entry in dump.records()} == {0, 1, 9}
    assert (dump.state(0).state, dump.state(0).cut_off) == ("complete", 1)
    assert list(problems(dump)) == []
    assert location_of(shard_url).exists()
