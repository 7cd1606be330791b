"""Comparisons by several processes, after a kill, and of files that change."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from qgate.checkpoints import running
from qgate.checkpoints.comparison import CheckpointPair, compare
from qgate.checkpoints.opening import open_again, open_checkpoint
from qgate.checkpoints.record import CheckpointRecord
from qgate.checkpoints.running import judgements
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.checkpoints.weights import Judgement
from qgate.cli import main
from qgate.engine import Workers
from qgate.errors import QgateError
from tests.checkpoints.exports import export, parent_tensors, write
from tests.checkpoints.work import DeadlyPair, names_judged
from tests.shares import proof

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair in two shards each, with a scale that is not finite and a norm that is another one."""
    folder = tmp_path_factory.mktemp("pair")
    tensors = parent_tensors()
    tensors["model.norm.weight"] *= 1.05
    write(folder / "parent", tensors, {})
    export(folder / "child", "nvfp4")
    child = load_file(folder / "child" / "model.safetensors")
    child["model.layers.1.mlp.up_proj.weight_scale"].view(torch.uint8)[0, 0] = 127
    save_file(child, folder / "child" / "model.safetensors")
    for name in ("child", "parent"):
        _split(folder / name)
    return folder


def _split(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    parts = [
        {k: x for k, x in tensors.items() if ("layers.0" in k) == one} for one in (True, False)
    ]
    for number, part in enumerate(parts, 1):
        save_file(part, folder / f"model-{number:05}-of-00002.safetensors")
    (folder / "model.safetensors").unlink()


@pytest.fixture
def pair(exported: Path, tmp_path: Path) -> Pair:
    for name in ("child", "parent"):
        (tmp_path / name).mkdir()
        for file in (exported / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    return str(tmp_path / "child"), str(tmp_path / "parent")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "BATCH", 20_000)


def _texts(record: CheckpointRecord) -> str:
    return repr(record.to_dict())


def _interrupt_at(number: int) -> Callable[[int, int], None]:
    def step(done: int, of: int) -> None:
        assert of == 21
        if done == number:
            raise KeyboardInterrupt

    return step


@proof
def test_processes_give_the_record_of_one(pair: Pair) -> None:
    single_record = compare(*pair)
    assert len(single_record.findings) == 2
    steps: list[tuple[int, int]] = []
    workers_record = compare(*pair, lambda *done: steps.append(done), workers=2)
    assert _texts(workers_record) == _texts(single_record)
    assert steps == sorted(steps)
    assert steps[-1] == (21, 21)
    assert len(steps) > 4


@proof
@pytest.mark.usefixtures("ray_cluster")
def test_ray_gives_the_record_of_one_process(pair: Pair) -> None:
    assert _texts(compare(*pair, workers=Workers("ray", 1))) == _texts(compare(*pair))


def test_batches_are_weights_of_one_shard(pair: Pair) -> None:
    weights = [
        StoredWeight(name, None, {"": entry})
        for name, entry in open_checkpoint(pair[1]).entries.items()
    ]
    listed = list(running.batches(weights))
    assert [batch.start for batch in listed[1:]] == [batch.stop for batch in listed[:-1]]
    assert (listed[0].start, listed[-1].stop) == (0, len(weights))
    for batch in listed:
        part = weights[batch.start : batch.stop]
        assert len({weight.parts[""].file for weight in part}) == 1
        assert len(part) == 1 or sum(weight.size for weight in part) <= running.BATCH
    assert list(running.batches([])) == []


def test_a_killed_run_goes_on_where_it_was(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compare(*pair)
    names = names_judged(monkeypatch)
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compare(*pair, _interrupt_at(12), unfinished=folder)
    before = list(names)
    names.clear()
    assert len(list(folder.iterdir())) == 1
    resumed_record = compare(*pair, unfinished=folder)
    assert _texts(resumed_record) == _texts(whole)
    assert 21 - len(before) <= len(names) < 21
    assert len(set(before) & set(names)) < len(before)
    assert list(folder.iterdir()) == []


def test_a_shard_that_was_written_again_is_judged_again(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compare(*pair, _interrupt_at(20), unfinished=folder)
    names = names_judged(monkeypatch)
    shard = Path(pair[0]) / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.input_layernorm.weight"] *= 2
    save_file(tensors, shard)
    os.utime(shard, ns=(1, 1))
    record = compare(*pair, unfinished=folder)
    assert any("layers.0.input_layernorm" in finding.subject for finding in record.findings)
    assert {name for name in names if "layers.0" in name} == {
        weight.name for weight in record.weights if "layers.0" in weight.name
    }
    assert len(names) < 21


def test_an_unfinished_folder_that_cannot_be_written_is_an_error(
    pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(QgateError, match=r"cannot be written to .*file.*--output-dir"):
        compare(*pair, unfinished=tmp_path / "file")


@proof
def test_weights_of_a_process_that_dies_are_named(tmp_path: Path) -> None:
    export(tmp_path / "child", "int8")
    deadly = DeadlyPair(str(tmp_path / "child"))
    with pytest.raises(QgateError, match=r"weights '.*' are not compared: its process ended twice"):
        list(judgements(deadly, Workers(jobs=2)))


# Files that change -------------------------------------------------------------------------------


def _write_again(shard: Path) -> None:
    data = shard.read_bytes()
    shard.write_bytes(data)
    os.utime(shard, ns=(1, 1))


@pytest.mark.parametrize("name", ["child", "parent"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_write_again, "'model-00001-of-00002.safetensors' was changed while it was read"),
        (Path.unlink, "'model-00001-of-00002.safetensors' was removed while it was read"),
    ],
)
def test_a_file_that_changes_is_an_error(
    name: str, change: Callable[[Path], None], words: str, pair: Pair, tmp_path: Path
) -> None:
    def step(done: int, _of: int) -> None:
        if done == 20:
            change(tmp_path / name / "model-00001-of-00002.safetensors")

    with pytest.raises(QgateError, match=words) as caught:
        compare(*pair, step)
    assert str(tmp_path / name) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(pair: Pair, tmp_path: Path) -> None:
    def step(done: int, _of: int) -> None:
        if done == 0:
            for file in (tmp_path / "parent").glob("*.safetensors"):
                os.truncate(file, file.stat().st_size // 2)

    with pytest.raises(QgateError, match=r"tensor '.*' cannot be read: the file ends [\d,]+ bytes"):
        compare(*pair, step)


def test_another_process_refuses_files_that_have_changed(pair: Pair) -> None:
    stamps = open_checkpoint(pair[0]).stamps
    assert open_again(pair[0], stamps).stamps == stamps
    _write_again(Path(pair[0]) / "model-00001-of-00002.safetensors")
    with pytest.raises(QgateError, match="was changed while it was read"):
        open_again(pair[0], stamps)


# Buckets -----------------------------------------------------------------------------------------


@pytest.fixture
def store(pair: Pair) -> Iterator[Pair]:
    memory = fsspec.filesystem("memory")
    for path in pair:
        for file in Path(path).iterdir():
            memory.pipe_file(f"/pair/{Path(path).name}/{file.name}", file.read_bytes())
    yield "memory://pair/child", "memory://pair/parent"
    memory.rm("/pair", recursive=True)


def test_a_pair_in_a_store_has_the_record_of_one_on_disk(store: Pair, pair: Pair) -> None:
    store_record, disk_record = compare(*store).to_dict(), compare(*pair).to_dict()
    for record in (store_record, disk_record):
        del record["child"], record["parent"]
    assert repr(store_record) == repr(disk_record)


def test_a_store_that_ends_in_the_middle_is_one_line(
    store: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    original = CheckpointPair.judge

    def judge(pair: CheckpointPair, weight: StoredWeight) -> Judgement:
        name = "/pair/parent/model-00002-of-00002.safetensors"
        memory.pipe_file(name, memory.cat_file(name)[:2000])
        return original(pair, weight)

    monkeypatch.setattr(CheckpointPair, "judge", judge)
    assert main(["checkpoint", store[0], "--parent", store[1]]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert "model-00002-of-00002.safetensors" in error
    assert "bytes too early" in error or "was changed" in error


# The command -------------------------------------------------------------------------------------


def test_the_command_takes_workers(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", pair[0], "--parent", pair[1]]
    assert main(words) == 1
    alone = capsys.readouterr().out
    assert main([*words, "--jobs", "2"]) == 1
    assert capsys.readouterr().out == alone
    assert main([*words, "--set", "engine=cluster"]) == 2
    assert "engine 'cluster' is not known" in capsys.readouterr().err


def test_an_interrupted_command_says_so_in_a_line_and_goes_on_with_a_folder(
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = CheckpointPair.judge
    names: list[str] = []

    def judge(self: CheckpointPair, weight: StoredWeight) -> Judgement:
        names.append(weight.name)
        if len(names) in (1, 10):
            raise KeyboardInterrupt
        return original(self, weight)

    monkeypatch.setattr(CheckpointPair, "judge", judge)
    command = ["checkpoint", pair[0], "--parent", pair[1]]
    assert main(command) == 128 + signal.SIGINT
    assert capsys.readouterr().err.strip() == "qgate checkpoint: interrupted"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "parent"]
    command += ["--output-dir", str(tmp_path / "out")]
    assert main(command) == 128 + signal.SIGINT
    assert main(command) == 1
    assert len(names) < 10 + 21
    assert not list((tmp_path / "out").glob(".unfinished*"))
