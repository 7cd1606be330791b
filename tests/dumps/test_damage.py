"""Dumps that were cut off, damaged, or made to do harm."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate.dumps import Dump, DumpWriter, problems
from qgate.errors import QgateError
from tests.dumps.making import record, write
from tests.warm import run_python

X = torch.arange(1000.0)
ROOT = Path(__file__).resolve().parents[2]


def index(folder: Path) -> Path:
    return folder / "rank00000" / "index.jsonl"


def shard(folder: Path) -> Path:
    return folder / "rank00000" / "tensors-000000.safetensors"


def change_line(folder: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    lines = index(folder).read_text().splitlines(keepends=True)
    fields = json.loads(lines[number])
    change(fields)
    lines[number] = json.dumps(fields) + "\n"
    index(folder).write_text("".join(lines))


# Killed ----------------------------------------------------------------------------------------

_WRITER = """
import os, pathlib, random, signal, sys, time, torch
from qgate.dumps import DumpWriter
from tests.dumps.making import record

root, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(17)
for number in range(kills):
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        writer = DumpWriter(root / str(number), shard_bytes=100_000, header={"run": number})
        os.write(begun, b"x")
        order = 0
        while True:
            tensor = torch.full((5000 + order,), float(order))
            writer.add(record(order, module=f"m{order}"), tensor)
            order += 1
            if order % 7 == 0:
                writer.flush()
            os.write(begun, b"x")
    for _ in range(1 + draw.randrange(16)):
        os.read(ready, 1)
    time.sleep(draw.uniform(0, 0.004))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_kill_at_any_moment_leaves_what_was_finished(tmp_path: Path) -> None:
    kills = 20
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ("-c", _WRITER, str(tmp_path), str(kills))
    done = run_python(*words, cwd=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr
    records = unfinished = 0
    for number in range(kills):
        folder = tmp_path / str(number)
        dump = Dump.open(folder)
        assert list(problems(dump)) == []
        entries = list(dump.records())
        assert [entry.order for entry in entries] == list(range(len(entries)))
        for finished_entry in entries:
            assert dump.tensor(finished_entry).eq(finished_entry.order).all()
            assert finished_entry.shape == (5000 + finished_entry.order,)
        state = dump.state(0)
        assert state.state == "running or killed"
        records, unfinished = records + len(entries), unfinished + len(state.unfinished)
        with DumpWriter(folder, existing="append", header={"run": number}) as writer:
            writer.add(record(writer.next_order), X)
        after = Dump.open(folder).state(0)
        assert (after.state, after.records, after.cut_off) == ("complete", len(entries) + 1, 1)
        assert (after.unfinished, after.torn) == ((), ())
        assert list(folder.rglob(".*")) == []
    assert records > kills
    assert unfinished > 0, "no kill came while a shard was being written"


def test_a_torn_last_line_is_reported_and_goes_with_the_next_session(tmp_path: Path) -> None:
    write(tmp_path, [X, X + 1])
    with index(tmp_path).open("ab") as file:
        file.write(b'{"order":2,"layer_t')
    dump = Dump.open(tmp_path)
    assert len(list(dump.records())) == 2
    (note,) = dump.notes()
    assert "index.jsonl: its last line is torn (19 bytes)" in note
    assert list(problems(dump)) == []
    write(tmp_path, [X + 2], start=2, existing="append")
    assert Dump.open(tmp_path).notes() == []


def test_an_empty_rank_and_a_folder_without_a_line(tmp_path: Path) -> None:
    DumpWriter(tmp_path).close()
    assert Dump.open(tmp_path).state(0).state == "complete"
    index(tmp_path).unlink()
    dump = Dump.open(tmp_path)
    assert list(dump.records()) == []
    assert dump.state(0).state == "running or killed"


# A full disk -----------------------------------------------------------------------------------


def fill(folder: Path, count: int) -> tuple[DumpWriter, list[str]]:
    """Write until it fails and beyond; the messages of what was raised."""
    writer = DumpWriter(folder, shard_bytes=200_000)
    errors = []
    for order in range(count):
        try:
            writer.add(record(order), torch.full((20_000,), float(order)))
        except QgateError as error:
            errors.append(str(error))
    writer.close(["one that came later"])
    return writer, errors


def check_what_is_left(folder: Path, writer: DumpWriter, said: list[str], why: str) -> None:
    assert len(said) == 1, "raised once"
    assert why in said[0]
    assert f"{writer.records} records of rank 0 are complete" in said[0]
    dump = Dump.open(folder)
    records = list(dump.records())
    assert 0 < len(records) == writer.records < 50
    assert list(problems(dump)) == []
    state = dump.state(0)
    assert state.state == "incomplete"
    assert state.missing_count == writer.missing_count == 50 - len(records) + 1
    assert state.missing[0].startswith(f"order {len(records)}: L0 linear forward input")
    assert state.missing[-1] == "one that came later"
    assert list(folder.rglob(".*")) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() or not mount or not umount:
        pytest.skip("only root can mount a small file system")
    size = [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(size, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run([umount, str(folder)], check=True)


def test_a_full_disk_leaves_what_was_finished(small_disk: Path) -> None:
    writer, errors = fill(small_disk / "dump", 50)
    check_what_is_left(small_disk / "dump", writer, errors, "No space left on device")


def test_a_limit_on_files_leaves_what_was_finished(tmp_path: Path) -> None:
    """The third shard may not grow as large as the others did."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = DumpWriter(tmp_path, shard_bytes=200_000)
    errors = []
    try:
        for order in range(50):
            if order == 7:
                resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
            try:
                writer.add(record(order), torch.full((20_000,), float(order)))
            except QgateError as error:
                errors.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    writer.close(["one that came later"])
    check_what_is_left(tmp_path, writer, errors, "File too large")


def test_an_index_that_cannot_grow_names_no_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the lines are written when the disk is full."""
    from qgate.storage import line_folders

    writer = DumpWriter(tmp_path)
    writer.add(record(0), X)
    writer.flush()
    writer.add(record(1), X + 1)
    whole = line_folders.write_all

    def half(handle: int, data: memoryview) -> None:
        whole(handle, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(line_folders, "write_all", half)
    with pytest.raises(QgateError, match="No space left"):
        writer.flush()
    writer.close()
    dump = Dump.open(tmp_path)
    assert [entry.order for entry in dump.records()] == [0]
    assert dump.state(0).state == "running or killed"
    assert writer.missing == ("order 1: L0 linear forward input, rank 0, iteration 0",)
    assert [path.name for path in (tmp_path / "rank00000").glob("*.safetensors")] == [
        "tensors-000000.safetensors"
    ]


# Damaged and hostile ---------------------------------------------------------------------------


def test_a_truncated_shard_is_named_and_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, [X, X + 1])
    data = shard(tmp_path).read_bytes()
    for size in (len(data) - 1, 40_000, 100, 8, 0):
        shard(tmp_path).write_bytes(data[:size])
        dump = Dump.open(tmp_path)
        (problem,) = problems(dump)
        assert "tensors-000000.safetensors' is truncated or damaged" in problem
        for entry in dump.records():
            with pytest.raises(QgateError, match="truncated or damaged"):
                dump.tensor(entry)


def test_a_changed_byte_is_named_and_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, [X, X + 1, X + 2])
    data = bytearray(shard(tmp_path).read_bytes())
    data[32768 + 4000 + 17] ^= 1
    shard(tmp_path).write_bytes(data)
    dump = Dump.open(tmp_path)
    (problem,) = problems(dump)
    assert "tensors-000000.safetensors" in problem
    assert "the values of L0 m1 forward input" in problem
    first, second, third = dump.records()
    assert torch.equal(dump.tensor(first), X)
    assert torch.equal(dump.tensor(third), X + 2)
    with pytest.raises(QgateError, match="not those that were written"):
        dump.tensor(second)
    assert not torch.equal(dump.tensor(second, check=False), X + 1)


def beside_the_digest(folder: Path) -> list[str]:
    """Return the problems of a dump with edited lines, beside the digest of these lines."""
    texts = list(problems(Dump.open(folder)))
    digests = [text for text in texts if "their digest is another one" in text]
    assert len(digests) == 1, texts
    return [text for text in texts if text not in digests]


def test_a_missing_shard_a_missing_key_and_a_wrong_shape(tmp_path: Path) -> None:
    write(tmp_path, [X, X + 1, X + 2])
    change_line(tmp_path, 1, lambda told: told.update(shape=[10, 100]))
    change_line(tmp_path, 2, lambda told: told["tensor"].update(key="77"))
    change_line(tmp_path, 3, lambda told: told.update(dtype="int32"))
    first, second, third = beside_the_digest(tmp_path)
    assert "holds float32 [1000]" in first
    assert "index says float32 [10, 100]" in first
    assert "cannot be read" in second
    assert "index says int32 [1000]" in third
    shard(tmp_path).unlink()
    (problem,) = beside_the_digest(tmp_path)
    assert "is missing, and the index names it" in problem


def test_tampered_lines_are_damage_and_not_torn(tmp_path: Path) -> None:
    write(tmp_path, [X, X + 1, X + 2, X + 3])
    change_line(tmp_path, 2, lambda told: told.update(rank=5))
    change_line(tmp_path, 3, lambda told: told.update(order=0))
    lines = index(tmp_path).read_bytes().splitlines(keepends=True)
    lines[4] = b"\xff[" * 100_000 + b"\n"
    index(tmp_path).write_bytes(b"".join(lines))
    texts = beside_the_digest(tmp_path)
    assert len(texts) == 3
    assert "it is of rank 5" in texts[0]
    assert "at byte" in texts[1]
    assert "rank 0 has order 0 2 times" in texts[2]


def test_a_million_refused_lines_are_counted_and_not_kept(tmp_path: Path) -> None:
    write(tmp_path, [X])
    with index(tmp_path).open("ab") as file:
        file.write(b"0\n" * 1_003)
    texts = list(problems(Dump.open(tmp_path)))
    assert len(texts) == 1_001
    assert texts[-1].endswith("index.jsonl: 3 more lines are no records")


@pytest.mark.parametrize(
    "file",
    [
        "../../secret.safetensors",
        "/etc/passwd",
        "../rank00001/tensors-000000.safetensors",
        "tensors-000000.safetensors/../tensors-000000.safetensors",
        "tensors-000000.safetensors\n",
        "",
    ],
)
def test_a_path_out_of_the_dump_is_refused(file: str, tmp_path: Path) -> None:
    write(tmp_path / "dump", [X])
    change_line(tmp_path / "dump", 1, lambda told: told["tensor"].update(file=file))
    dump = Dump.open(tmp_path / "dump")
    (entry,) = dump.records()
    with pytest.raises(QgateError, match="none of a dump: it is refused"):
        dump.tensor(entry)
    assert len(beside_the_digest(tmp_path / "dump")) == 1


@pytest.mark.parametrize("what", ["shard", "rank"])
def test_a_link_out_of_the_dump_is_refused(what: str, tmp_path: Path) -> None:
    for name in ("dump", "other"):
        write(tmp_path / name, [X])
    path = shard(tmp_path / "dump")
    path = path if what == "shard" else path.parent
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "other" / path.relative_to(tmp_path / "dump"))
    dump = Dump.open(tmp_path / "dump")
    (entry,) = dump.records()
    with pytest.raises(QgateError, match="leads out of the dump: it is refused"):
        dump.tensor(entry)
    (tmp_path / "link").symlink_to(tmp_path / "other")
    linked = Dump.open(tmp_path / "link")
    assert torch.equal(linked.tensor(next(linked.records())), X)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"qgate": "dump", "version": 3}',
            "is of version 3, and this qgate reads version 2: read it with",
        ),
        ('{"qgate": "results", "version": 1}', "no description of a dump"),
        (
            '{"qgate": "dump", "version": 1}',
            "is of version 1, and this qgate reads version 2: read it",
        ),
        ('{"qgate": "dump", "version": 2}', "used: world_size is missing"),
        ("[]", "cannot be used"),
        ("{", "cannot be used"),
        ("[" * 100_000, "cannot be used"),
        (
            '{"qgate": "dump", "version": 2, "world_size": "x", "header": {}, "made_qgate": "",'
            ' "created": ""}',
            "world_size is 'x', not a whole number",
        ),
        (
            '{"qgate": "dump", "version": 2, "world_size": 1000001, "header": {}, "made_qgate": "",'
            ' "created": ""}',
            "world_size is 1000001",
        ),
    ],
)
def test_a_description_that_cannot_be_used(text: str, words: str, tmp_path: Path) -> None:
    write(tmp_path, [X])
    (tmp_path / "dump.json").write_text(text)
    for use in (
        lambda: Dump.open(tmp_path),
        lambda: DumpWriter(tmp_path, existing="append"),
        lambda: DumpWriter(tmp_path, existing="overwrite"),
    ):
        with pytest.raises(QgateError, match=words):
            use()
    assert shard(tmp_path).exists()


def test_a_folder_that_is_no_dump(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match="is not there"):
        Dump.open(tmp_path / "none")
    with pytest.raises(QgateError, match=r"is no dump: it has no dump\.json"):
        Dump.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(QgateError, match="is a file; name the folder"):
        Dump.open(tmp_path / "file")
    write(tmp_path / "dump", [X])
    (tmp_path / "dump" / "dump.json").unlink()
    with pytest.raises(QgateError, match="not empty and no dump"):
        DumpWriter(tmp_path / "dump")


def test_records_are_selected_by_what_they_say(tmp_path: Path) -> None:
    with DumpWriter(tmp_path) as writer:
        for order, name in enumerate(["grad_input", "grad_output", "input"]):
            writer.add(record(order, name=name, layer=order, iteration=None))
    dump = Dump.open(tmp_path)

    def orders(**wanted: object) -> list[int]:
        return [entry.order for entry in dump.records(**wanted)]

    assert orders(name="grad_*") == [0, 1]
    assert orders(name="input") == [2]
    assert orders(layer=[0, 2], name=None) == [0, 2]
    assert orders(layer=1, name="input") == []
    assert orders(iteration=0) == []
    with pytest.raises(
        QgateError, match=r"unknown field to select by .nmae.\. Did you mean name\?"
    ):
        orders(nmae="input")
