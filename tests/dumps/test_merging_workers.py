"""Ranks are put together by workers: the same bytes for all of them, or nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qgate.dumps.merging as merges
from qgate.cli import main
from qgate.dumps import Dump, DumpWriter, MergedDump, merge_dumps, problems
from qgate.dumps.index import Index
from qgate.engine import Failure, merged
from qgate.engine import Reduction as Outcome
from qgate.errors import QgateError
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.dumps import merging_work
from tests.dumps.making import known, record, write
from tests.shares import proof
from tests.warm import run_python

bucket, memory, server = stores.bucket, stores.memory, stores.server
BUCKET = f"s3://{stores.BUCKET}"
X = torch.arange(12.0).reshape(3, 4)
ROOT = Path(__file__).resolve().parents[2]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def objects(url: str) -> dict[str, bytes]:
    location = location_of(url)
    location.fs.invalidate_cache()
    contents = {name: location.fs.cat_file(name) for name in location.fs.find(location.path)}
    return {name.split("/out/")[-1]: contents[name] for name in sorted(contents)}


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """Four ranks of two hosts, of which one rank is in both, one was killed, and one lacks much."""
    fields = {"world_size": 4, "header": {"run": "r"}, "shard_bytes": 60}
    write(tmp_path / "a", [X, X + 1, X + 2], rank=0, **fields)
    write(tmp_path / "a", [X + 3, X], rank=1, **fields)
    write(tmp_path / "b", [X + 5, X + 6], rank=1, start=7, **fields)
    killed = DumpWriter(tmp_path / "b", rank=2, **fields)
    killed.add(record(0, rank=2, world_size=4), X, {"counts": np.arange(3)})
    killed.flush()
    killed._files.close()
    writer = DumpWriter(tmp_path / "b", rank=3, **fields)
    writer.add(record(0, rank=3, world_size=4), X)
    writer.close([f"order {i}" for i in range(1200)])
    return [tmp_path / "a", tmp_path / "b"]


@proof
@pytest.mark.usefixtures("memory")
def test_anyone_makes_the_same_dump_anywhere(
    hosts: list[Path], tmp_path: Path, bucket: Any
) -> None:
    progress: list[tuple[int, int]] = []
    one = merge_dumps(hosts, tmp_path / "one", step=lambda *at: progress.append(at))
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (one.ranks, one.records, one.same) == (4, 9, 0)
    assert (len(one.missing), one.missing_count) == (1000, 1201)
    expected = tree(tmp_path / "one")
    assert merge_dumps(hosts, "memory://bucket/out") == one
    assert objects("memory://bucket/out") == expected
    for host in hosts:
        for name, data in tree(host).items():
            key = f"{host.name}/{name}"
            bucket.put_object(Bucket=stores.BUCKET, Key=key, Body=data)
    # From the store into the store, copied by the store.
    stored_merge = merge_dumps([f"{BUCKET}/a", f"{BUCKET}/b"], f"{BUCKET}/out", 2)
    assert (stored_merge.ranks, stored_merge.records, stored_merge.missing_count) == (4, 9, 1201)
    stored_objects, folder_bytes = objects(f"{BUCKET}/out"), str(tmp_path).encode()
    assert stored_objects.keys() == expected.keys()
    digest = re.compile(rb'"digest": ?"[0-9a-f]+"')  # of lines that name the folder
    for name, data in expected.items():
        there_data = digest.sub(b"", data.replace(folder_bytes, BUCKET.encode()))
        assert digest.sub(b"", stored_objects[name]) == there_data, name


def test_a_rank_of_another_run_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a", [X], rank=1, world_size=2, header={"run": "old"})
    write(tmp_path / "a", [X], world_size=2, header={"run": "new"}, existing="overwrite")
    assert merge_dumps([tmp_path / "a"], tmp_path / "out").ranks == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dump.json", "rank00000"]


def test_a_merge_in_and_out_of_a_store(tmp_path: Path, memory: Any) -> None:
    for rank in range(2):
        known(tmp_path / "known", X.bfloat16() + rank, counter=1, rank=rank, iteration=0,
              phase="pre", component="linear")  # fmt: skip
    merge_dumps([tmp_path / "known"], "memory://bucket/out")
    merge_dumps(["memory://bucket/out"], tmp_path / "back")
    local_dump, stored_dump = Dump.open(tmp_path / "back"), Dump.open("memory://bucket/out")
    assert list(local_dump.records()) == list(stored_dump.records())
    assert [local_dump.tensor(entry)[0, 0] for entry in local_dump.records()] == [0, 1]
    assert list(problems(local_dump)) == list(problems(stored_dump)) == []
    repeated = [merge_dumps([tmp_path / "known"], tmp_path / name) for name in "xy"]
    assert repeated[0] == repeated[1]
    first, second = tree(tmp_path / "x"), tree(tmp_path / "y")
    assert first == second
    assert not [name for name in memory.store if ".qgate" in name or "converted" in name]


def test_a_worker_that_is_killed_costs_nothing(
    hosts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = merge_dumps(hosts, tmp_path / "one")

    def dying(_: Any, *args: Any, **told: Any) -> Any:
        return merged(merging_work.killed_once, *args, **told)

    def none(*_: Any) -> None:
        raise AssertionError("what one has to know of all ranks must not grow with their records")

    monkeypatch.setattr(merges, "merged", dying)
    monkeypatch.setattr(Index, "read", none)
    assert merge_dumps(hosts, tmp_path / "out", 2) == one
    assert (tmp_path / "killed1").exists()
    assert tree(tmp_path / "out") == tree(tmp_path / "one")


def test_a_rank_that_kills_its_workers_is_named(
    hosts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lost = Failure("its process ended twice: killed, or out of memory")
    monkeypatch.setattr(merges, "merged", lambda *_, **__: Outcome(failed={1: lost, 2: lost}))
    assert main(["dumps", "merge", *map(str, hosts), "--output", str(tmp_path / "out")]) == 2
    error_text = capsys.readouterr().err
    assert "rank 1 was not put together: its process ended twice" in error_text
    assert "nor were 1 others" in error_text
    assert f"Nothing was written to {str(tmp_path / 'out')!r}" in error_text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


_KILLED = """
import os, signal, sys
import qgate.dumps.merging as merging

real = merging.merge_rank

def dying(part):
    if part.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(part)

merging.merge_rank = dying
child = os.fork()
merging.merge_dumps(sys.argv[1:3], sys.argv[3] if child else sys.argv[4])
"""


@proof
@pytest.mark.usefixtures("bucket")
def test_a_killed_driver_leaves_nothing_that_looks_like_a_dump(
    hosts: list[Path], tmp_path: Path
) -> None:
    url = f"{BUCKET}/out"
    words = ("-c", _KILLED, *map(str, hosts), url, str(tmp_path / "out"))
    done = run_python(*words, cwd=tmp_path, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert "rank00000/index.jsonl" in objects(url)
    with pytest.raises(QgateError, match=r"is no dump: it has no dump.json"):
        Dump.open(url)
    with pytest.raises(QgateError, match=r"has what a merge left that was killed: remove it, or"):
        merge_dumps(hosts, url)


@pytest.mark.usefixtures("memory")
def test_what_goes_wrong_leaves_nothing_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    write(tmp_path / "a", [X], world_size=2)
    write(tmp_path / "a", [X, X], rank=1, world_size=2)
    write(tmp_path / "b", [X, X + 1], rank=1, world_size=2)
    out = "memory://bucket/out"
    with pytest.raises(QgateError, match=r"/a' and .*/b' both have order 1 of rank 1"):
        merge_dumps([tmp_path / "a", tmp_path / "b"], out)
    assert list(memory.store) == []
    memory.pseudo_dirs[:] = [""]  # which other stores do not have
    monkeypatch.setattr(merges, "merged", lambda *_, **__: Outcome(result=MergedDump(ranks=2)))
    with pytest.raises(QgateError, match=r"2 ranks were put together, and 0 of them are in"):
        merge_dumps([tmp_path / "a"], out)
    monkeypatch.undo()
    assert list(memory.store) == []
    memory.pseudo_dirs[:] = [""]  # which other stores do not have
    real = type(memory).put_file

    def full(self: Any, path: str, to: str, **told: Any) -> None:
        if "rank00001" in to:
            raise OSError(28, "Quota exceeded")
        real(self, path, to, **told)

    monkeypatch.setattr(type(memory), "put_file", full)
    with pytest.raises(OSError, match="Quota exceeded"):
        merge_dumps([tmp_path / "a"], out)
    assert list(memory.store) == []
    memory.pseudo_dirs[:] = [""]  # which other stores do not have
    monkeypatch.undo()

    def second(*args: Any, **options: Any) -> Any:
        with pytest.raises(QgateError, match="is being merged into, or"):
            merge_dumps([tmp_path / "a"], out)
        return merged(*args, **options)

    monkeypatch.setattr(merges, "merged", second)
    assert merge_dumps([tmp_path / "a"], out).ranks == 2
    assert list(problems(Dump.open(out))) == []
    with pytest.raises(QgateError, match="is there already: choose another folder"):
        merge_dumps([tmp_path / "a"], out)
