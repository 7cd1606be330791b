"""Folders become one, and dumps become files of megatron-tensor-saver and come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qgate.dumps import Dump, DumpWriter, export_dump, merge_dumps, problems
from qgate.dumps.tensor_saver_names import parse
from qgate.errors import QgateError
from tests.dumps.making import known, record, write

X = torch.arange(12.0).reshape(3, 4)


def test_ranks_of_several_folders_come_together(tmp_path: Path) -> None:
    for rank, host in ((0, "a"), (1, "b")):
        write(
            tmp_path / host, [X + rank, X + 10], rank=rank, world_size=2,
            header={"run": "r", "model": "m", "host": host},
        )  # fmt: skip
    merged = merge_dumps([tmp_path / "a", tmp_path / "b"], tmp_path / "deep" / "out")
    assert (merged.ranks, merged.records, merged.same, merged.missing) == (2, 4, 0, ())
    dump = Dump.open(tmp_path / "deep" / "out")
    assert [dump.tensor(entry)[0, 0].item() for entry in dump.records()] == [0, 10, 1, 10]
    assert dump.header["model"] == "m"
    assert dump.header["merged_from"] == [{"host": "a"}, {"host": "b"}]
    assert dump.notes() == []
    assert list(problems(dump)) == []
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    DumpWriter(tmp_path / "a", rank=0, world_size=2, header=Dump.open(tmp_path / "a").header,
               existing="overwrite").close()  # fmt: skip
    assert list(problems(dump)) == [], "what was merged does not depend on where it came from"


def test_parts_of_one_rank_come_together_in_order(tmp_path: Path) -> None:
    counts = {"counts": np.arange(4)}
    for folder, orders in (("a", (0, 3, 4)), ("b", (1, 2, 4))):
        with DumpWriter(tmp_path / folder, shard_bytes=1) as writer:
            for order in orders:
                writer.add(record(order), X + order, counts if order == 2 else None)
    merged = merge_dumps([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (merged.records, merged.same) == (5, 1)
    dump = Dump.open(tmp_path / "out")
    assert [dump.tensor(entry)[0, 0].item() for entry in dump.records()] == [0, 1, 2, 3, 4]
    assert np.array_equal(dump.counts(list(dump.records())[2])["counts"], np.arange(4))
    assert list(problems(dump)) == []


def test_a_clash_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", [X, X])
    write(tmp_path / "b", [X, X + 1])
    with pytest.raises(QgateError, match="both have order 1 of rank 0"):
        merge_dumps([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(QgateError, match="is there already"):
        merge_dumps([tmp_path / "a"], tmp_path / "b")
    (tmp_path / "empty").mkdir()
    merge_dumps([tmp_path / "a"], tmp_path / "empty")
    assert list(problems(Dump.open(tmp_path / "empty"))) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 1, "world_size": 3, "header": {"run": "a"}}, "is of 3 ranks and"),
        ({"rank": 1, "world_size": 2, "header": {"run": "b"}}, "is of run 'b' and"),
    ],
)
def test_only_one_run_is_merged(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path / "a", [X], world_size=2, header={"run": "a"})
    write(tmp_path / "b", [X], **settings)
    with pytest.raises(QgateError, match=words):
        merge_dumps([tmp_path / "a", tmp_path / "b"], tmp_path / "out")


def test_what_was_missing_stays_missing(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path / "a", world_size=2)
    writer.add(record(0, world_size=2), X)
    writer.close(["order 1: a tensor"])
    killed = DumpWriter(tmp_path / "b", rank=1, world_size=2)
    killed.add(record(0, rank=1, world_size=2), X)
    killed.flush()
    merged = merge_dumps([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert merged.missing[0] == "order 1: a tensor"
    assert "what came after 1 records" in merged.missing[1]
    assert [state.state for state in Dump.open(tmp_path / "out").states] == ["incomplete"] * 2
    killed.close()


def test_a_path_out_of_a_dump_is_not_merged(tmp_path: Path) -> None:
    write(tmp_path / "a", [X])
    index = tmp_path / "a" / "rank00000" / "index.jsonl"
    index.write_text(index.read_text().replace("tensors-000000.safetensors", "../../secret"))
    with pytest.raises(QgateError, match="none of a dump"):
        merge_dumps([tmp_path / "a"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_of_the_known_collector_becomes_a_dump(tmp_path: Path) -> None:
    for rank in range(2):
        known(
            tmp_path / "a", X.bfloat16() + rank, counter=1, iteration=0, rank=rank, phase="pre",
            component="linear", operation="backward",
        )  # fmt: skip
    (tmp_path / "a" / "empty.pt").touch()
    merged = merge_dumps([tmp_path / "a"], tmp_path / "out")
    assert merged.records == 2
    dump = Dump.open(tmp_path / "out")
    first, second = dump.records()
    assert (first.name, first.extra["known_name"], second.rank) == ("grad_output", "input", 1)
    assert torch.equal(dump.tensor(second), X.bfloat16() + 1)
    assert list(problems(dump)) == []
    assert "empty.pt: it is empty" in merged.missing[0]


def test_a_clash_of_known_files_names_the_folders_that_were_given(tmp_path: Path) -> None:
    for name in "ab":
        known(tmp_path / name, X.bfloat16(), counter=1, iteration=0, rank=0, quant_type=name)
    with pytest.raises(QgateError) as error:
        merge_dumps([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert f"{str(tmp_path / 'a')!r} and {str(tmp_path / 'b')!r} both have order 0" in str(
        error.value
    )


def test_what_is_exported_comes_back(tmp_path: Path) -> None:
    names = [
        ("linear", "forward", "pre", "input"),
        ("linear", "backward", "pre", "grad_output"),
        ("linear", "backward", "post", "grad_input"),
        ("attention", "forward", "post", "context"),
        ("my norm", "forward", "pre", "x/../y ü"),
    ]
    whole = torch.randn(100, 100).bfloat16()
    with DumpWriter(tmp_path / "dump", rank=1, world_size=2) as writer:
        for order, (kind, operation, phase, name) in enumerate(names):
            new_record = record(
                10_000 + order, layer_type=kind, operation=operation, phase=phase, name=name,
                rank=1, world_size=2, layer=None if order else 12, quant_type="a/b",
                extra={"softmax_scale": 0.5},
            )  # fmt: skip
            writer.add(new_record, whole[order])
        writer.add(record(3, rank=1, world_size=2))
    dump = Dump.open(tmp_path / "dump")
    done = export_dump(dump, tmp_path / "files")
    assert (done.files, len(done.without_values)) == (5, 1)
    paths = sorted((tmp_path / "files").iterdir())
    assert all(path.stat().st_size < 5_000 for path in paths), "a view brings no storage"
    assert [path.name[15:] for path in paths[:4]] == [
        "_10000_iter000_linear_L12_forward_pre_linear_a-b_rank01_sample000_input.pt",
        "_10001_iter000_linear_backward_pre_linear_a-b_rank01_sample000_input.pt",
        "_10002_iter000_linear_backward_post_linear_a-b_rank01_sample000_output.pt",
        "_10003_iter000_attention_forward_post_linear_a-b_rank01_sample000_output.pt",
    ]
    assert [getattr(parse(path.name), "generation", None) for path in paths] == [3, 3, 3, 3, None]
    content = torch.load(paths[0], weights_only=True)
    assert content["tensor_info"]["overflow_info"]["max_threshold"] == 3.3895313892515355e38
    assert content["metadata"]["softmax_scale"] == 0.5
    back = Dump.open(tmp_path / "files")
    assert back.skipped == []
    for exported, original in zip(back.records(), list(dump.records())[1:], strict=True):
        expected = "output" if original.name == "context" else original.name
        assert exported.name == expected
        same = ("layer_type", "layer", "operation", "phase", "quant_type", "rank", "shape", "dtype")
        for name in same:
            assert getattr(exported, name) == getattr(original, name)
        assert torch.equal(back.tensor(exported), dump.tensor(original))
    with pytest.raises(QgateError, match="is not empty"):
        export_dump(dump, tmp_path / "files")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3), torch.tensor(2.0), torch.arange(3), torch.tensor([True]),
        torch.ones(3).to(torch.float8_e4m3fn), torch.tensor([1.0, torch.inf, torch.nan]),
    ],
    ids=str,
)  # fmt: skip
def test_any_tensor_is_exported(tensor: torch.Tensor, tmp_path: Path) -> None:
    write(tmp_path / "dump", [tensor])
    export_dump(Dump.open(tmp_path / "dump"), tmp_path / "files")
    (path,) = (tmp_path / "files").iterdir()
    content = torch.load(path, weights_only=True)
    assert content["tensor"].dtype == tensor.dtype
    assert content["tensor_info"]["shape"] == list(tensor.shape)
    back = Dump.open(tmp_path / "files")
    (exported,) = back.records()
    assert replace(exported, tensor=None).iteration == 0
    assert list(problems(back)) == []
