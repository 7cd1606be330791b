"""Rows that are read in parts are those of tensors that are read whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qgate.checkpoints import grids, rows
from qgate.checkpoints.comparison import compare
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.packings import PACKINGS
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.rows import ParentRows
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import MisfitError
from tests.checkpoints.exports import export, parent_tensors, write
from tests.checkpoints.work import check_spans

HEIGHT, WIDTH = 72, 128
Stored = dict[str, Tensor]
torch.manual_seed(0)


def _bytes(*shape: int, most: int = 255) -> Tensor:
    return torch.randint(0, most + 1, shape, dtype=torch.uint8)


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def _fp8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def _gptq(order: Tensor) -> Stored:
    return {
        "qweight": _words(WIDTH // 8, HEIGHT),
        "qzeros": _words(4, HEIGHT // 8),
        "scales": torch.rand(4, HEIGHT).half(),
        "g_idx": order,
    }


def _hqq(bits: int, words: Tensor, group: int = 32) -> Stored:
    groups = HEIGHT * WIDTH // group
    return {
        "W_q": words,
        "scale": torch.rand(groups, 1).half(),
        "zero": torch.rand(groups, 1).half(),
        "shape": torch.tensor([HEIGHT, WIDTH]),
        "nbits": torch.tensor([bits]),
        "axis": torch.tensor([1]),
    }


WEIGHTS: dict[str, dict[str, Tensor]] = {
    "HQQ of 8 bits": _hqq(8, _bytes(288, 32)),
    "HQQ of 4 bits": _hqq(4, _bytes(144, 32)),
    "HQQ of 4 bits, a group per row": _hqq(4, _bytes(36, WIDTH), WIDTH),
    "HQQ of 3 bits": _hqq(3, _words(29, 32) & 0x3FFFFFFF),
    "HQQ of 2 bits": _hqq(2, _bytes(72, 32)),
    "NVFP4": {
        "weight_packed": _bytes(HEIGHT, WIDTH // 2),
        "weight_scale": torch.rand(HEIGHT, WIDTH // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([7.0]),
    },
    "ModelOpt NVFP4": {
        "weight": _bytes(3, HEIGHT // 3, WIDTH // 2),
        "weight_scale": torch.rand(3, HEIGHT // 3, WIDTH // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01),
    },
    "MXFP4": {
        "weight_packed": _bytes(HEIGHT, WIDTH // 2),
        "weight_scale": _bytes(HEIGHT, WIDTH // 32, most=254),
    },
    "packed integers": {
        "weight_packed": _words(HEIGHT, WIDTH // 8),
        "weight_scale": torch.rand(HEIGHT, 4).bfloat16(),
        "weight_shape": torch.tensor([HEIGHT, WIDTH]),
        "weight_zero_point": _words(HEIGHT // 8, 4),
    },
    "packed integers of 8 bits": {
        "weight_packed": _words(HEIGHT, WIDTH // 4),
        "weight_scale": torch.rand(HEIGHT, 1),
        "weight_shape": torch.tensor([HEIGHT, WIDTH]),
    },
    "FP8 tiles": {
        "weight": _fp8(HEIGHT, WIDTH),
        "weight_scale_inv": torch.rand(5, 8),
    },
    "FP8 per tensor": {"weight": _fp8(HEIGHT, WIDTH), "weight_scale": torch.tensor(0.1)},
    "FP8 of experts": {
        "weight": _fp8(4, HEIGHT // 4, WIDTH),
        "weight_scale": torch.rand(4, HEIGHT // 4, 1),
    },
    "FP8 with one scale each": {
        "weight": _fp8(4, HEIGHT // 4, WIDTH),
        "weight_scale": torch.rand(4, 1, 1),
    },
    "int8 with zero points": {
        "weight": _bytes(HEIGHT, WIDTH).view(torch.int8),
        "weight_scale": torch.rand(HEIGHT),
        "weight_zero_point": _bytes(HEIGHT).view(torch.int8),
    },
    "bitsandbytes": {"weight": _bytes(HEIGHT, WIDTH).view(torch.int8), "SCB": torch.rand(HEIGHT)},
    "GPTQ": _gptq(torch.arange(WIDTH, dtype=torch.int32) // 32),
    "GPTQ in another order": _gptq(torch.randperm(WIDTH).int() // 32),
    "AWQ": {
        "qweight": _words(WIDTH, HEIGHT // 8),
        "qzeros": _words(4, HEIGHT // 8),
        "scales": torch.rand(4, HEIGHT).half(),
    },
    "blocks": {
        "blocks": _bytes(3, HEIGHT // 3, 4, 16),
        "scales": _bytes(3, HEIGHT // 3, 4, most=254),
    },
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and work on a few rows at a time."""
    monkeypatch.setattr(grids, "CHUNK", 8 * WIDTH)
    monkeypatch.setattr(rows, "SLAB", 1 << 10)


def _opened(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(str(path))
    checkpoint.ahead = 1 << 9
    return checkpoint


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("tall", [grids.TALL, 1])
def test_spans_of_a_weight_are_its_rows(
    name: str, tall: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (grids, rows):
        monkeypatch.setattr(module, "TALL", tall)
    path = tmp_path / "model.safetensors"
    save_file({f"up.{ending}": x for ending, x in WEIGHTS[name].items()}, path)
    checkpoint = _opened(path)
    (stored,) = find_weights(checkpoint)
    assert check_spans(checkpoint, stored) > 1 or name == "FP8 per tensor"


def test_every_packing_is_decoded_by_rows() -> None:
    assert [p.name for p in PACKINGS if not (p.by_rows or p.by_columns)] == []


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "parent", parent_tensors(), {})
    export(tmp_path / "child", "nvfp4")
    monkeypatch.setattr(grids, "CHUNK", 8 * WIDTH)
    read: dict[str, int] = {}

    def count(checkpoint: Checkpoint, name: str, first: int, last: int) -> Tensor:
        part = original(checkpoint, name, first, last)
        key = f"{checkpoint.label}/{name}"
        read[key] = read.get(key, 0) + part.numel() * part.itemsize
        return part

    original = Checkpoint.read_span
    monkeypatch.setattr(Checkpoint, "read_span", count)
    pair = [str(tmp_path / name) for name in ("child", "parent")]
    assert compare(*pair).findings == []
    sizes = {
        f"{checkpoint.label}/{name}": entry.size
        for checkpoint in map(open_checkpoint, pair)
        for name, entry in checkpoint.entries.items()
    }
    repeated_reads = {key: size for key, size in read.items() if size > sizes[key]}
    assert repeated_reads == {}
    assert {key for key in sizes if "global" not in key} <= set(read)


@pytest.mark.usefixtures("small")
def test_rows_of_a_parent_are_those_of_its_tensors(tmp_path: Path) -> None:
    tensors = {
        "q": torch.randn(24, WIDTH),
        "k": torch.randn(8, WIDTH),
        "turned": torch.randn(WIDTH, HEIGHT).bfloat16(),
        "experts": torch.randn(3, WIDTH, 24),
        "rows": torch.randn(3, 24, WIDTH),
        "kernel": torch.randn(HEIGHT, 16, 4, 2),
    }
    save_file(tensors, tmp_path / "parent.safetensors")
    parent = _opened(tmp_path / "parent.safetensors")
    expected = {
        ParentMatch(("q", "k"), "fused"): torch.cat([tensors["q"], tensors["k"]]),
        ParentMatch(("turned",), "content", transposed=True): tensors["turned"].T,
        ParentMatch(("experts",), "name"): tensors["experts"].transpose(1, 2).flatten(0, 1),
        ParentMatch(("rows",), "name"): tensors["rows"].flatten(0, 1),
        ParentMatch(("kernel",), "name"): tensors["kernel"].flatten(1),
    }
    for match, values in expected.items():
        lines = ParentRows(parent, match, *values.shape)
        for step in (5, 8, len(values)):
            parts = [lines[i : min(i + step, len(values))] for i in range(0, len(values), step)]
            assert torch.equal(torch.cat(parts), values), (match, step)
    with pytest.raises(MisfitError, match="q of the parent has shape"):
        ParentRows(parent, ParentMatch(("q",), "name"), 25, WIDTH)


def test_the_cause_of_an_error_is_found_in_leading_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = {f"{name}.weight": torch.randn(256, WIDTH) for name in ("moved", "high", "right")}
    child = {}
    for name, weight in parent.items():
        scale = weight.abs().amax(1, keepdim=True) / 127
        child |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
    child |= {name: child[name].roll(1, 0) for name in ("moved.weight", "moved.weight_scale")}
    child["high.weight_scale"] *= 2
    monkeypatch.setattr(grids, "CHUNK", 8 * WIDTH)
    monkeypatch.setattr(rows, "SAMPLE", 64 * WIDTH)
    write(tmp_path / "parent", parent, {})
    write(tmp_path / "child", child, {})
    record = compare(str(tmp_path / "child"), str(tmp_path / "parent"))
    causes = {finding.subject: finding.cause for finding in record.findings}
    assert "moved by one" in causes.pop("moved.weight")
    assert "2 times too high" in causes.pop("high.weight")
    assert causes == {}
