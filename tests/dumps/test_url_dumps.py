"""Dumps by URL: what they say is what a folder says, and no more is read than is asked for."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
import torch

from qgate.cli import main
from qgate.dumps import Dump, DumpWriter, Follower, export_dump, problems, unnamed
from qgate.dumps.shards import HEADER
from qgate.errors import QgateError
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.dumps.making import GENERATIONS, known, record
from tests.shares import proof
from tests.tables import each_of

bucket, memory, server = stores.bucket, stores.memory, stores.server
Capsys = pytest.CaptureFixture[str]
BUCKET = f"s3://{stores.BUCKET}"
COUNTS = {"patterns": np.arange(5, dtype=np.uint16), "counts": np.arange(5) * 10**12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks with several shards, every way to store values, and the last one cut off."""
    run_folder = tmp_path_factory.mktemp("dumps") / "run"
    for rank in range(3):
        writer = DumpWriter(
            run_folder, rank=rank, world_size=3, header={"model": "m"}, shard_bytes=3000
        )
        for order in range(6):
            values = torch.arange(300.0).reshape(3, 100) + 1000 * rank + order
            new_record = record(
                order, rank=rank, world_size=3, module=f"layers.{order}", layer=order
            )
            writer.add(
                new_record, values if order else values.bfloat16(), COUNTS if order == 3 else None
            )
        raw = torch.ones(2, 3).to(torch.float8_e4m3fnuz)
        writer.add(record(6, rank=rank, world_size=3), raw)
        writer.add(record(7, rank=rank, world_size=3, stats={"amax": 2.0}))
        writer.flush()
        if rank < 2:
            writer.close(["a tensor"] if rank else ())
        else:
            with (run_folder / "rank00002" / "index.jsonl").open("ab") as file:
                file.write(b'{"order": 99, "torn')
            writer._files.close()
    return run_folder


def put(place: Any, folder: Path) -> str:
    """All files of a folder, as they are."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            target = place / path.relative_to(folder).as_posix()
            target.fs.pipe_file(target.path, path.read_bytes())
    return str(place)


@pytest.fixture(params=[f"{BUCKET}/deep/run", "memory://bucket/run"])
def url(request: pytest.FixtureRequest, folder: Path) -> str:
    request.getfixturevalue("bucket" if request.param.startswith("s3") else "memory")
    return put(location_of(request.param), folder)


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Keys and bytes of all objects that are read."""
    read: list[tuple[str, int]] = []
    real = s3fs.S3FileSystem._call_s3

    async def call(self: Any, method: str, *args: Any, **told: Any) -> Any:
        answer = await real(self, method, *args, **told)
        if method == "get_object":
            read.append((told["Key"], answer["ContentLength"]))
        return answer

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    return read


def test_a_dump_by_url_says_what_a_folder_says(url: str, folder: Path) -> None:
    local_dump, stored_dump = Dump.open(folder), Dump.open(url)
    assert (stored_dump.ranks, stored_dump.header, stored_dump.world_size) == (
        local_dump.ranks,
        local_dump.header,
        3,
    )
    assert list(stored_dump.records()) == list(local_dump.records())
    assert list(stored_dump.records(rank=[1, 2], name="in*", layer=3)) == list(
        local_dump.records(rank=[1, 2], layer=3)
    )
    for entry in local_dump.records():
        if entry.tensor is not None:
            read, local_tensor = stored_dump.tensor(entry), local_dump.tensor(entry)
            assert (read.dtype, read.shape) == (local_tensor.dtype, local_tensor.shape)
            assert torch.equal(read.view(torch.uint8), local_tensor.view(torch.uint8))
            part = stored_dump.beginning(entry, 4)
            assert torch.equal(part.view(torch.uint8), local_tensor.flatten()[:4].view(torch.uint8))
        if entry.counts is not None:
            stored_counts = stored_dump.counts(entry)
            assert {name: array.tolist() for name, array in stored_counts.items()} == {
                name: array.tolist() for name, array in COUNTS.items()
            }
    assert [note.replace(url, str(folder)) for note in stored_dump.notes()] == local_dump.notes()
    assert [state.state for state in stored_dump.states] == [
        "complete",
        "incomplete",
        "running or killed",
    ]
    assert list(problems(stored_dump)) == []
    assert unnamed(stored_dump) == []


@pytest.mark.usefixtures("bucket")
def test_only_the_bytes_of_a_record_are_read(tmp_path: Path, got: Any) -> None:
    size, many = 40_000, 50
    with DumpWriter(tmp_path) as writer:
        for order in range(many):
            writer.add(record(order), torch.full((size // 4,), float(order)))
    url = put(location_of(f"{BUCKET}/run"), tmp_path)
    index = (tmp_path / "rank00000" / "index.jsonl").stat().st_size
    shard = "run/rank00000/tensors-000000.safetensors"
    dump = Dump.open(url)
    records = list(dump.records())
    assert len(list(dump.records(rank=0))) == many
    assert dump.state(0).state == "complete"
    assert [request for request in got if request[0].endswith("l")] == [
        ("run/rank00000/index.jsonl", index)
    ]
    got.clear()
    assert dump.tensor(records[20])[0] == 20
    assert got == [(shard, HEADER), (shard, size)]
    got.clear()
    assert dump.tensor(records[10])[0] == 10
    assert dump.beginning(records[40], 7).tolist() == [40.0] * 7
    assert got == [(shard, size), (shard, 28)]
    got.clear()
    assert list(problems(dump)) == []
    assert sum(bytes_read for _, bytes_read in got) == size * many, "each once"
    assert len(got) <= 3, "those in a row come together"


def test_a_sweep_of_one_tensor_does_not_read_the_shard(bucket: Any, got: Any) -> None:
    from safetensors.torch import save

    from qgate.dumps import read_tensors

    body = save({f"layer.{i}": torch.full((25_000,), float(i)) for i in range(30)})
    bucket.put_object(Bucket=stores.BUCKET, Key="w.safetensors", Body=body)
    (layer_tensor,) = read_tensors(f"{BUCKET}/w.safetensors:layer.7")
    assert layer_tensor.tensor[0] == 7
    assert sum(bytes_read for _, bytes_read in got) == (1 << 16) + 100_000


@pytest.mark.usefixtures("memory")
def test_a_dump_that_grows_is_followed(tmp_path: Path) -> None:
    follower = Follower("memory://bucket/run")
    assert follower.poll() == []
    writer = DumpWriter("memory://bucket/run")
    assert follower.poll() == []
    for order in range(3):
        writer.add(record(order), torch.ones(3) * order)
        assert [followed.order for followed in follower.poll()] == ([order - 1] if order else [])
        writer.flush()
    opened = Dump.open("memory://bucket/run")
    assert len(list(opened.records())) == 3
    writer.add(record(3), torch.ones(3) * 3)
    writer.close()
    assert [entry.order for entry in follower.poll()] == [2, 3]
    assert follower.ended
    assert len(list(opened.records())) == 3, "it is what there was at first"
    location = location_of("memory://bucket/known")
    path = known(tmp_path, torch.ones(3), counter=1)
    follower = Follower(location)
    target = location / path.name
    target.fs.pipe_file(target.path, path.read_bytes()[:100])
    assert follower.poll() == []
    assert "torn" in follower.unreadable[0]
    target.fs.pipe_file(target.path, path.read_bytes())
    assert [extra_entry.counter for extra_entry in map(_Extra, follower.poll())] == [1]


class _Extra:
    def __init__(self, of: Any) -> None:
        self.counter = of.extra["counter"]


@pytest.mark.usefixtures("memory")
def test_folders_of_the_known_collector(tmp_path: Path) -> None:
    for number, (_, parts) in enumerate(GENERATIONS.items()):
        known(tmp_path, torch.arange(6.0).reshape(2, 3) + number, zipped=number % 2 == 0, **parts)
    whole = known(tmp_path, torch.ones(3), counter=9)
    (tmp_path / "copy.pt").write_bytes(whole.read_bytes())
    (tmp_path / "again.pt").write_bytes(whole.read_bytes())
    (tmp_path / "torn.pt").write_bytes(whole.read_bytes()[:200])
    (tmp_path / "code.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (tmp_path / "inner").mkdir()
    known(tmp_path / "inner", torch.ones(3), counter=9)
    local_dump = Dump.open(tmp_path)
    stored_dump = Dump.open(put(location_of("memory://bucket/known"), tmp_path))
    assert stored_dump.skipped == local_dump.skipped
    assert len(stored_dump.skipped) == 6
    assert stored_dump.damaged == local_dump.damaged
    records_by_place = [
        # What has one time and counter is in the order in which it came there.
        {entry.tensor: replace(entry, order=0, call=0) for entry in dump.records()}
        for dump in (local_dump, stored_dump)
    ]
    assert records_by_place[0] == records_by_place[1]
    for stored_entry in stored_dump.records():
        assert torch.equal(stored_dump.tensor(stored_entry), local_dump.tensor(stored_entry))


@proof
def test_every_verb_says_of_a_url_what_it_says_of_a_folder(
    url: str, folder: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_path = str(folder)
    for argv, status in (
        (("dumps", "ls", "DIR", "--where", "layer=3"), 0),
        (("dumps", "ls", "DIR", "--json"), 0),
        (("dumps", "info", "DIR"), 0),
        (("dumps", "verify", "DIR"), 0),
        (("dumps", "compare", "DIR", folder_path, "--relative-mse", "0"), 0),
        (("dumps", "watch", "DIR", "--expect", "24"), 0),
        (("dumps", "export", "DIR", "--output", "OUT"), 0),
        (("dumps", "draw", "DIR", "--no-plots", "--output-dir", "OUT"), 0),
    ):
        outputs = []
        for location, out in ((folder_path, "h"), (url, "u")):
            arguments = [location if argument == "DIR" else argument for argument in argv]
            arguments = [f"{out}{argv[1]}" if word == "OUT" else word for word in arguments]
            assert main(arguments) == status
            output = capsys.readouterr().out.replace(location, "DIR").replace(folder_path, "DIR")
            outputs.append(output.replace(f"{out}{argv[1]}", "OUT"))
        assert outputs[0] == outputs[1], argv
    analyses = [json.loads(Path(f"{side}draw", "analysis.json").read_text()) for side in "hu"]
    assert analyses[0]["tensors"] == analyses[1]["tensors"]
    exported = [{p.name: torch.load(p) for p in Path(f"{side}export").iterdir()} for side in "hu"]
    assert exported[0].keys() == exported[1].keys()
    assert main(["dumps", "export", url, "--output", "memory://bucket/flat"]) == 0
    back = Dump.open("memory://bucket/flat")
    assert len(list(back.records())) == len(exported[0])
    with pytest.raises(QgateError, match="is not empty"):
        export_dump(back, "memory://bucket/flat")


def test_a_byte_that_changed_in_the_store_is_found(
    bucket: Any, folder: Path, capsys: Capsys
) -> None:
    url = put(location_of(f"{BUCKET}/run"), folder)
    shard = f"{url}/rank00001/tensors-000000.safetensors"
    data = bytearray(location_of(shard).read_bytes())
    data[HEADER + 5] ^= 1
    bucket.put_object(Bucket=stores.BUCKET, Key=shard.removeprefix(f"{BUCKET}/"), Body=bytes(data))
    assert main(["dumps", "verify", url]) == 1
    (line, *_) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"'{shard}': the values of L")


# What is wrong ----------------------------------------------------------------------------------


def spoiled(change: Callable[[Path], object], folder: Path, tmp_path: Path) -> Dump:
    import shutil

    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    change(copied / "rank00000")
    return Dump.open(put(location_of("memory://bucket/spoiled"), copied))


def _cut(home: Path) -> None:
    path = home / "tensors-000000.safetensors"
    path.write_bytes(path.read_bytes()[: HEADER + 100])


def _renamed(to: str) -> Callable[[Path], object]:
    def change(home: Path) -> None:
        text = (home / "index.jsonl").read_text()
        (home / "index.jsonl").write_text(text.replace("tensors-000000.safetensors", to))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_cut, "cannot be read .it is cut off."),
        (lambda home: (home / "tensors-000000.safetensors").unlink(), "is missing, and the index"),
        (
            lambda home: (home / "tensors-000000.safetensors").write_bytes(b"\xff" * 9000),
            "is truncated or damaged .it has no head.",
        ),
        (_renamed("../rank00001/tensors-000000.safetensors"), "none of a dump: it is refused"),
        (_renamed("tensors-000001.safetensors"), "cannot be read .it has no tensor '0'."),
    ],
)
@pytest.mark.usefixtures("memory")
def test_what_is_damaged_is_named(
    change: Callable[[Path], object], words: str, folder: Path, tmp_path: Path
) -> None:
    dump = spoiled(change, folder, tmp_path)
    with pytest.raises(QgateError, match=words):
        dump.tensor(next(dump.records()))
    assert len(list(problems(dump))) >= 1


@pytest.fixture
def empty_dump(bucket: Any) -> None:  # noqa: ARG001
    DumpWriter(f"{BUCKET}/run").close()


@each_of(
    ("url", "words"),
    [
        (f"{BUCKET}/nun", f"the dump '{BUCKET}/nun' is not there"),
        ("s3://nobucket/run", "'s3://nobucket/run' is not there: The specified bucket does not"),
        (f"{BUCKET}/run/dump.json", "is a file; name the folder"),
        (f"{BUCKET}/run/rank00000", "is no dump: it has no dump.json"),
        ("s3://", "cannot be reached|is not there|is no dump"),
        ("gs://bucket/run", "gs:// needs gcsfs; pip install it"),
        ("az://bucket/run", "az:// needs adlfs; pip install it"),
        ("sss://bucket/run", "sss:// is not known; use s3://"),
    ],
)
@pytest.mark.usefixtures("empty_dump")
def test_what_cannot_be_opened_is_told(
    url: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    for package in ("gcsfs", "adlfs"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(QgateError, match=words):
        Dump.open(url)
    assert main(["dumps", "info", url]) == 2
    assert main(["dumps", "draw", url, "--quick"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that lets nobody in."""

    class Closed(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Closed) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        stores.log_in(f"http://127.0.0.1:{http_server.server_address[1]}", monkeypatch)
        yield
        http_server.shutdown()


@pytest.mark.usefixtures("closed")
def test_a_store_that_lets_nobody_in(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match=r"'s3://dumps/run' cannot be reached: Access Denied"):
        Dump.open("s3://dumps/run")
    with pytest.raises(QgateError, match=r"'s3://dumps/run' cannot be reached: Access Denied"):
        DumpWriter("s3://dumps/run")
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.HTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as http_server:
        address = f"http://127.0.0.1:{http_server.server_address[1]}"
    stores.log_in(address, monkeypatch)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(QgateError, match=r"'s3://dumps/run' cannot be reached: Could not connect"):
        Dump.open("s3://dumps/run")
