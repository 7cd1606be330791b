"""`qgate dumps`: what each verb shows, writes, and exits with."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

import qgate
from qgate.cli import main
from qgate.dumps import Dump, DumpWriter
from tests.dumps.making import known, record, write

Capsys = pytest.CaptureFixture[str]
X = torch.arange(12.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`a`: two ranks, forward and backward; `known`: a file of megatron-tensor-saver, and a torn one."""
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        with DumpWriter(
            Path("a"), rank=rank, world_size=2, header={"model": "m\x1b[31m"}
        ) as writer:
            fields = {"rank": rank, "world_size": 2, "quant_type": "mxfp8"}
            writer.add(record(0, module="layers.0.q", **fields), X)
            writer.add(record(1, module="layers.0.q", phase="post", name="output", **fields), X * 2)
            writer.add(
                record(2, operation="backward", name="grad_output", module="x\ny", layer=None,
                       nonfinite={"nan": 3}, **fields), X + rank,
            )  # fmt: skip
    known(Path("known"), X.bfloat16(), counter=1)
    Path("known/torn.pt").write_bytes(b"PK")
    return tmp_path


def dumps(capsys: Capsys, *argv: str, status: int = 0) -> str:
    assert main(["dumps", *argv]) == status
    out, err = capsys.readouterr()
    assert (err == "") == (status != 2)
    return err if status == 2 else out


def test_ls(capsys: Capsys) -> None:
    text = dumps(capsys, "ls", "a")
    assert len(text.splitlines()) == 2 + 6
    for word in ("layers.0.q", "backward pre", "grad_output", "3×4", "float32", "3 not finite"):
        assert word in text
    assert r"x\ny" in text
    text = dumps(capsys, "ls", "a", "--limit", "2")
    assert text.splitlines()[-1] == "… and 4 more: --limit shows them"
    text = dumps(
        capsys,
        "ls",
        "a",
        "--where",
        "name=grad_*",
        "--where",
        "rank=1",
        "--where",
        "quant_type=mxfp8",
    )
    assert len(text.splitlines()) == 3
    rows = json.loads(
        dumps(capsys, "ls", "a", "--where", "layer=0", "--where", "iteration=0", "--json")
    )
    assert [row["order"] for row in rows] == [0, 1, 0, 1]
    assert "note: skipped torn.pt: it is torn" in dumps(capsys, "ls", "known")


def test_a_selection_of_nothing_is_an_error_that_says_what_there_is(capsys: Capsys) -> None:
    text = dumps(capsys, "ls", "a", "--where", "name=grad_inptu", status=2)
    assert "unknown name in this dump 'grad_inptu'" in text
    assert "Allowed: grad_output, input, output" in text
    text = dumps(capsys, "ls", "a", "--where", "layer=0", "--where", "name=grad_output", status=2)
    assert "no record of 'a' has all of layer [0], name ['grad_output']" in text
    assert "unknown layer in this dump '7'" in dumps(
        capsys, "ls", "a", "--where", "layer=7", status=2
    )
    assert "is not there" in dumps(capsys, "ls", "nowhere", status=2)


def test_info(capsys: Capsys) -> None:
    text = dumps(capsys, "info", "a")
    for words in (
        "a: 6 records",
        "2 ranks",
        "6 with values, 0 with counts, 2 with values that are not finite",
        "288 B of tensors; 240 B of values are stored",
        "complete: ranks 0, 1",
        r"model: m\x1b[31m",
    ):
        assert words in text
    rows = [line.split() for line in text.splitlines()]
    assert ["operation", "backward", "2", "96", "B"] in rows
    assert ["forward", "4", "192", "B"] in rows
    info = json.loads(dumps(capsys, "info", "a", "--json"))
    assert info["by"]["name"]["grad_output"] == {"records": 2, "bytes": 96}
    assert "unknown" in dumps(capsys, "info", "known")
    writer = DumpWriter(Path("open"))
    writer.add(record(0), X)
    writer.flush()
    assert "note: rank 0: it was not closed" in dumps(capsys, "info", "open")
    writer.close(["order 1: a tensor"])
    text = dumps(capsys, "info", "open")
    assert "incomplete: ranks 0" in text
    assert "note: rank 0: missing: order 1: a tensor" in text


def test_verify(capsys: Capsys) -> None:
    assert dumps(capsys, "verify", "a") == "6 records in a: 6 tensors are what was written\n"
    shard = Path("a/rank00001/tensors-000000.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    text = dumps(capsys, "verify", "a", status=1)
    assert text.count("\n") == 1
    assert "rank00001" in text
    assert "not those that were written" in text
    text = dumps(capsys, "verify", "known", status=1)
    assert text.startswith("known: torn.pt: it is torn")
    Path("known/torn.pt").unlink()
    assert "have no hashes to prove them by" in dumps(capsys, "verify", "known")
    DumpWriter(Path("none")).close()
    assert "nothing was verified" in dumps(capsys, "verify", "none", status=2)


def test_counts_are_verified_by_their_hashes(capsys: Capsys) -> None:
    """Of a run at the level of statistics it was said that there are no hashes."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with qgate.collect(model, "s", level="statistics", phases=("forward",)):
        model(X)
    assert dumps(capsys, "verify", "s") == "3 records in s: 3 counts are what was written\n"


def test_compare(capsys: Capsys) -> None:
    text = dumps(capsys, "compare", "a", "a", "--relative-mse", "0", status=1)
    assert text.startswith("failed: 12 values are not finite, first at x\\ny backward")
    text = dumps(capsys, "compare", "a", "a", "--relative-mse", "0", "--where", "operation=forward")
    assert text.splitlines()[:2] == [
        "passed: every relative_mse is at most 0",
        "4 pairs: 4 equal, 0 differ, 0 cannot be compared",
    ]
    for rank in range(2):
        write(Path("b"), [X, X + 1], rank=rank, world_size=2)
    text = dumps(capsys, "compare", "a", "b", "--where", "operation=forward", status=1)
    assert "failed: nothing was compared" in text
    assert "4 only in a:" in text
    assert "4 only in b:" in text


def test_compare_says_what_differs_first_and_the_worst_first(capsys: Capsys) -> None:
    for name, noise in (("c", 0.5), ("d", 0.0)):
        with DumpWriter(Path(name)) as writer:
            writer.add(record(0, module="p"), X)
            writer.add(record(1, module="p", phase="post", name="output"), X + noise)
            writer.add(record(2, module="q"), X + 4 * noise)
    text = dumps(capsys, "compare", "c", "d")
    lines = text.splitlines()
    assert lines[0] == "3 pairs: 1 equal, 2 differ, 0 cannot be compared"
    assert lines[1].startswith(
        "first difference: L0 p forward output, rank 0, iteration 0, order 1: "
    )
    assert lines[1].endswith("local: what went in is equal")
    assert lines[2] == "  it is wrong: 0.5 is added to every value of the result"
    rows = [line.split()[-6:] for line in lines if line.startswith("L0")]
    assert [row[-1] for row in rows] == ["carried", "local"]
    text = dumps(capsys, "compare", "c", "d", "--limit", "1", "--relative-mse", "0.001", status=1)
    assert text.startswith("failed: relative_mse 0.0949 > 0.001 at L0 q forward input")
    assert "and 1 more" in text
    comparison = json.loads(dumps(capsys, "compare", "c", "d", "--json", "--relative-mse", "1"))
    assert comparison["passed"] is True
    assert comparison["first"]["origin"] == "local"
    assert comparison["first"]["fault"].endswith("0.5 is added to every value of the result")
    assert [pair["kind"] for pair in comparison["pairs"]] == ["equal", "differs", "differs"]


def test_compare_can_allow_what_is_in_one_only(capsys: Capsys) -> None:
    write(Path("c"), [X, X])
    write(Path("d"), [X])
    text = dumps(capsys, "compare", "c", "d", "--relative-mse", "0", status=1)
    assert text.startswith("failed: 1 tensors are in one of the dumps only")
    dumps(capsys, "compare", "c", "d", "--relative-mse", "0", "--allow-unpaired")


def test_merge_and_export(capsys: Capsys) -> None:
    for rank in range(2):
        write(Path(f"host{rank}"), [X, X], rank=rank, world_size=2)
    assert (
        dumps(capsys, "merge", "host0", "host1", "--output", "all") == "all: 4 records of 2 ranks\n"
    )
    assert "4 tensors are what was written" in dumps(capsys, "verify", "all")
    assert "is there already" in dumps(capsys, "merge", "host0", "--output", "all", status=2)
    assert (
        dumps(capsys, "export", "all", "--output", "flat", "--where", "rank=1") == "flat: 2 files\n"
    )
    assert "2 records in flat" in dumps(capsys, "verify", "flat")
    with DumpWriter(Path("summaries")) as writer:
        writer.add(record(0))
    assert main(["dumps", "export", "summaries", "--output", "flat2"]) == 1
    out, err = capsys.readouterr()
    assert "note: no values were kept of L0 linear forward input" in out
    assert "nothing was written" in err


def test_watch_sees_what_arrives(capsys: Capsys) -> None:
    def collect() -> None:
        time.sleep(0.1)
        with DumpWriter(Path("live")) as writer:
            for order in range(3):
                writer.add(record(order), X)
                writer.flush()
                time.sleep(0.05)

    thread = threading.Thread(target=collect)
    thread.start()
    text = dumps(capsys, "watch", "live", "--expect", "3", "--timeout", "200")
    thread.join()
    assert text.splitlines() == [
        *(f"{i}/3 L0 linear forward input, rank 0, iteration 0" for i in (1, 2, 3)),
        "3 records are there: 3 linear forward",
    ]


def test_watch_that_waits_in_vain(capsys: Capsys) -> None:
    text = dumps(capsys, "watch", "nowhere", "--expect", "1", "--timeout", "0.1", status=1)
    assert text == "0.1 s are over: 0 of 1 records came: nothing\n"
    text = dumps(capsys, "watch", "a", "--expect", "7", "--timeout", "60", status=1)
    assert (
        "the collection has ended: 6 of 7 records came: 4 linear forward, 2 linear backward" in text
    )
    text = dumps(capsys, "watch", "known", "--expect", "2", "--timeout", "0", status=1)
    assert "0 s are over: 1 of 2 records came" in text
    assert "note: torn.pt: it is torn" in text
    writer = DumpWriter(Path("open"))
    dumps(capsys, "watch", "open", "--expect", "1", "--timeout", "0.3", status=1)
    writer.close()
    assert list(Dump.open(Path("open")).records()) == []


def test_watch_reads_a_file_again_that_was_torn(capsys: Capsys) -> None:
    from qgate.dumps import Follower

    follower = Follower(Path("known"))
    assert len(follower.poll()) == 1
    assert len(follower.unreadable) == 1
    path = known(Path("known"), X, counter=2)
    Path("known/torn.pt").write_bytes(path.read_bytes())
    assert len(follower.poll()) == 2
    assert (follower.poll(), follower.unreadable, follower.ended) == ([], [], False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["ls", "a", "--limit", "0"],
        ["watch", "a", "--expect", "x"],
        ["watch", "a", "--expect", "1", "--timeout", "-1"],
        ["compare", "a", "a", "--relative-mse", "nan"],
        ["ls", "a", "--where", "layer=x"],
        ["merge", "a"],
        [],
    ],
)
def test_a_command_line_that_cannot_be(argv: list[str], capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(["dumps", *argv])
    assert error.value.code == 2
    assert capsys.readouterr().err


def test_verify_says_what_is_wrong_with_a_dump_that_has_no_record_left(capsys: Capsys) -> None:
    for index in Path("a").glob("rank*/index.jsonl"):
        index.write_text("".join(f"{line[:-9]}\n" for line in index.read_text().splitlines()))
    text = dumps(capsys, "verify", "a", status=1)
    assert text.count("index.jsonl at byte") == 10
    Path("empty").mkdir()
    write(Path("empty/d"), [])
    assert "has no records: nothing was verified" in dumps(capsys, "verify", "empty/d", status=2)


def test_watch_counts_what_was_expected_and_no_more(capsys: Capsys) -> None:
    """Six records at once were counted as 5/2 and 6/2."""
    lines = dumps(capsys, "watch", "a", "--expect", "2", "--timeout", "200").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["1/2", "2/2"]
    assert lines[-1] == "2 records are there: 2 linear forward"
