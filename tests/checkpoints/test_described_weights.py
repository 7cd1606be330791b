"""Weights of GGUF files, bitsandbytes and torchao are read by rows, gated and drawn like others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from qgate.checkpoints import grids, plain, rows, running, weights
from qgate.checkpoints.comparison import compare
from qgate.checkpoints.gguf.layouts import RopeRows, in_rope_order
from qgate.checkpoints.gguf.weights import KINDS
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.packings import decode
from qgate.checkpoints.rows import WeightRows
from qgate.checkpoints.stored import Checkpoint
from qgate.cli import main
from tests.checkpoints import bnb_exports, exports, torchao_exports
from tests.checkpoints.gated import accept, failures, gates_of
from tests.checkpoints.gguf_exports import GgufExport, export, parent_tensors
from tests.checkpoints.gguf_faults import FAULTS, UP, planted
from tests.checkpoints.work import check_spans
from tests.shares import proof, share

ROWS, COLUMNS = 72, 512
Write = Callable[[Path], object]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and work on a few rows at a time."""
    monkeypatch.setattr(grids, "CHUNK", 5 * COLUMNS)
    monkeypatch.setattr(plain, "STEP", 3 * 256)


# Rows ---------------------------------------------------------------------------------------------


def _blocks(name: str) -> Write:
    kind = KINDS[name]
    size = COLUMNS // kind.elements * kind.bytes
    raw = np.random.default_rng(0).integers(0, 127, (ROWS, size), np.uint8)
    tensors = {"up.weight": (raw, Kind[name])}
    return lambda folder: GgufExport(tensors).write(folder / "m.gguf")


def _experts(folder: Path) -> None:
    """Write three experts, each with a scale of its own."""
    kind = KINDS["NVFP4"]
    size = COLUMNS // kind.elements * kind.bytes
    raw = np.random.default_rng(0).integers(0, 120, (3, ROWS // 3, size), np.uint8)
    scales = np.array([0.5, 1.0, 3.0], np.float32)
    tensors = {"up.weight": (raw, Kind.NVFP4), "up.scale": (scales, Kind.F32)}
    GgufExport(tensors).write(folder / "m.gguf")


def _bitsandbytes(scheme: str, *shape: int) -> Write:
    def write(folder: Path) -> None:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        stored, _ = bnb_exports.stored(weight, scheme)
        exports.write(folder, {f"up.{ending}": part for ending, part in stored.items()}, {})

    return write


def _torchao(scheme: str, count: int) -> Write:
    weight = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    # Rows at the front have no zero points in groups that others have.
    weight[:8] = torch.arange(-8.0, 8).bfloat16().repeat(COLUMNS // 16)
    state = {"up.weight": torchao_exports.SCHEMES[scheme][0](weight)}
    tensors, metadata = torchao_exports.flatten_tensor_state_dict(state)
    return lambda folder: torchao_exports.write(folder, dict(tensors), dict(metadata), {})


WRITTEN: dict[str, Write] = {
    **{name: _blocks(name) for name in KINDS if hasattr(Kind, name) and name != "Q8_K"},
    "experts": _experts,
    **{name: _bitsandbytes(name, ROWS, COLUMNS) for name in bnb_exports.RIGHT},
    "blocks of rows": _bitsandbytes("nf4-double", ROWS, 96),
    **{name: _torchao(name, 256) for name in torchao_exports.SCHEMES},
    "swizzled part of a tile": _torchao("mxfp4-swizzled", 160),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", WRITTEN)
def test_spans_of_a_weight_are_its_rows(name: str, tmp_path: Path) -> None:
    WRITTEN[name](tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    checkpoint.ahead = 1 << 9
    (stored,) = find_weights(checkpoint)
    assert check_spans(checkpoint, stored) > 1


def _vector(folder: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 127, 34 * 4, np.uint8)
    GgufExport({"up.weight": (raw, Kind.Q8_0)}).write(folder / "m.gguf")


@pytest.mark.parametrize(("write", "count"), [(_bitsandbytes("nf4", 5, 7), 35), (_vector, 128)])
def test_a_weight_without_rows_of_blocks_is_one_row(
    write: Write, count: int, tmp_path: Path
) -> None:
    write(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    (stored,) = find_weights(checkpoint)
    weight = WeightRows(checkpoint, stored)
    assert weight.shape == (1, count)
    assert torch.equal(weight.sample().values(), decode(checkpoint, stored).values())


@pytest.mark.parametrize("heads", [4, -4])
def test_rows_in_the_order_of_rope_are_those_of_the_tensor(heads: int) -> None:
    values = torch.randn(48, 8)
    expected = in_rope_order(values, heads)
    for step in (1, 5, 7, 12, 20, 48):
        lines = RopeRows(values, heads, 48)
        parts = [lines[i : min(i + step, 48)] for i in range(0, 48, step)]
        assert torch.equal(torch.cat(parts), expected), step


# Records ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.write(tmp_path_factory.mktemp("parent") / "parent", parent_tensors(), {})


def _planted(name: str, path: Path) -> Path:
    return planted(next(fault for fault in FAULTS if fault.name == name)).write(path)


@share(2)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.F16])
def test_every_byte_is_read_once(
    kind: Kind, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = export(Kind.Q4_K)
    child.tensors |= {
        name: data for name, data in export(kind).tensors.items() if "attn_" in name
    }  # fmt: skip
    path = child.write(tmp_path / "m.gguf")
    read: dict[str, int] = {}

    def count(checkpoint: Checkpoint, name: str, first: int, last: int) -> Tensor:
        part = original(checkpoint, name, first, last)
        read[name] = read.get(name, 0) + part.numel() * part.itemsize
        return part

    original = Checkpoint.read_span
    monkeypatch.setattr(Checkpoint, "read_span", count)
    assert compare(str(path), str(parent)).findings == []
    entries = {**open_checkpoint(str(path)).entries, **open_checkpoint(str(parent)).entries}
    # The first row, which tells the format, is read ahead of others.
    assert {name for name in entries if read[name] != entries[name].size} == set()


def _faulty(path: Path) -> Iterator[Path]:
    for name in ("q not reordered", "blocks moved by one", "another layer's tensor"):
        yield _planted(name, path / f"{name}.gguf")


@proof
@pytest.mark.usefixtures("small")
def test_causes_are_found_in_leading_rows(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "SAMPLE", 64 * 256)
    monkeypatch.setattr(weights, "LEADING", 32 * 256)
    words = ("its rows are in the order of the parent", "every block is that", "it was made from")
    for path, cause in zip(_faulty(tmp_path), words, strict=True):
        record = compare(str(path), str(parent))
        assert record.findings[0].cause.startswith(cause), path


@proof
@pytest.mark.parametrize("name", ["blocks never written", "q not reordered"])
def test_processes_and_runs_that_go_on_give_the_record_of_one(
    name: str, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "BATCH", 100_000)
    pair = str(_planted(name, tmp_path / "m.gguf")), str(parent)
    whole = compare(*pair)
    assert whole.findings
    assert compare(*pair, workers=2).to_dict() == whole.to_dict()

    def stop(done: int, _of: int) -> None:
        if done == 12:
            raise KeyboardInterrupt

    folder = tmp_path / "unfinished"
    with pytest.raises(KeyboardInterrupt):
        compare(*pair, stop, unfinished=folder)
    assert list(folder.iterdir())
    assert compare(*pair, unfinished=folder).to_dict() == whole.to_dict()


# Gates and pages ----------------------------------------------------------------------------------


def test_gates_hold_a_gguf_file_against_what_was_accepted(parent: Path, tmp_path: Path) -> None:
    baselines = tmp_path / "baselines"
    right = export(Kind.Q4_K).write(tmp_path / "right.gguf")
    assert accept(right, parent, baselines) == []
    assert failures(gates_of(right, parent, baselines)) == []
    (text,) = failures(
        gates_of(_planted("blocks moved by one", tmp_path / "a.gguf"), parent, baselines)
    )
    assert text.startswith(f"{UP} (checkpoint weights)")
    other = export(Kind.Q6_K).write(tmp_path / "other.gguf")
    texts = failures(gates_of(other, parent, baselines))
    assert any("q4_k per 32 accepted, q6_k per 16 found" in text for text in texts)
    q8_export = export(Kind.Q8_0)
    q8_export.file_type = 15
    texts = failures(gates_of(q8_export.write(tmp_path / "mix.gguf"), parent, baselines))
    assert any("it says Q4_K_M, which is mostly Q4_K" in text for text in texts)


def test_a_page_draws_the_worst_blocks_in_the_order_that_they_are_compared_in(
    parent: Path, tmp_path: Path
) -> None:
    path = _planted("scales twice too high", tmp_path / "m.gguf")
    out = tmp_path / "out"
    command = ["checkpoint", str(path), "--parent", str(parent), "--output-dir", str(out)]
    assert main(command) == 1
    record = json.loads((out / "checkpoint.json").read_text(encoding="utf-8"))
    # Halves of values and parents in another order would differ by more than their size.
    assert record["blocks"]
    assert all(block["error"] < 1.5 for block in record["blocks"])
    page = (out / "checkpoint.html").read_text(encoding="utf-8")
    assert "rows of q and k are compared in the order of llama.cpp&#39;s rope" in page
    assert "most parameters of layers in Q8_0" in page


def test_the_worst_block_of_q_stands_beside_its_own_rows(parent: Path, tmp_path: Path) -> None:
    q8_export = export(Kind.Q8_0)
    for architecture in ("llama", "exaone4"):
        q8_export.architecture = architecture
        path = str(q8_export.write(tmp_path / f"{architecture}.gguf"))
        record = compare(path, str(parent), blocks=16)
        q = [block for block in record.blocks if "attn_q" in block.name]
        assert len(q) == 2
        assert all(block.error is not None and block.error < 1e-3 for block in q)
