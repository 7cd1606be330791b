"""Peak memory of every kind of reader over one large honest file: twice the file plus a constant.

Fuzzed files are small, so that the constant is what bounds them; here the file is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest
import torch
from safetensors.torch import save_file

from tests.campaigns.fuzzing import checkpoint_targets
from tests.campaigns.fuzzing.guard import Outcome, guarded
from tests.campaigns.fuzzing.table import TARGETS
from tests.campaigns.fuzzing.target import warmed
from tests.dumps.making import write
from tests.page.gate_records import write_results
from tests.shares import always, share, slow_file

pytestmark = slow_file

MB = 1 << 20
ROOM = 32 * MB
LINE = "a line of text as short as those of a list are"
ROWS, COLUMNS = 3072, 4096


def _values() -> torch.Tensor:
    """48 MB of float32."""
    return torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS)


def _codes() -> torch.Tensor:
    return torch.arange(4 * ROWS * COLUMNS, dtype=torch.int32).to(torch.int8).reshape(4 * ROWS, -1)


def _lines(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text * (48 * MB // len(text)))


def _checkpoint(path: Path) -> None:
    parts = {"weight": _codes(), "weight_scale": torch.full((4 * ROWS, 1), 0.01)}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = {"quant_method": "compressed-tensors", "config_groups": groups}
    checkpoint_targets._write(path.parent, parts, recipe)


def _state() -> dict[str, torch.Tensor]:
    return {"up.weight": _codes(), "up.weight_scale": torch.full((4 * ROWS, 1), 0.01)}


def _gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    data = np.zeros((ROWS, 34 * COLUMNS * 4 // 32), np.uint8)
    writer.add_tensor("blk.0.up.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _onnx(path: Path) -> None:
    names = ["w_q", "w_s"]
    arrays = [_codes().numpy(), np.full(4 * ROWS, 0.01, np.float32)]
    tensors = [onnx.numpy_helper.from_array(x, name) for x, name in zip(arrays, names, strict=True)]
    nodes = [
        onnx.helper.make_node("DequantizeLinear", names, ["w"], axis=0),
        onnx.helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    path.write_bytes(
        onnx.helper.make_model(
            onnx.helper.make_graph(nodes, "g", [], [], tensors)
        ).SerializeToString()
    )


# Name of a target, or of a reader here: the file, and what writes it.
FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tensors .pt": ("t.pt", lambda path: torch.save({"w": _values()}, path)),
    "tensors .safetensors": ("t.safetensors", lambda path: save_file({"w": _values()}, path)),
    "tensors .npy": ("t.npy", lambda path: np.save(path, _values().numpy())),
    "tensors .npz": ("t.npz", lambda path: np.savez(path, w=_values().numpy())),
    "token ids": ("ids.npy", lambda path: np.save(path, np.arange(6 * MB))),
    "token rows .npy": ("i.npy", lambda path: np.save(path, np.arange(6 * MB).reshape(-1, 1024))),
    "dump": ("d", lambda path: write(path.parent, [_values()])),
    "samples .txt": ("d.txt", _lines(f"{LINE}\n")),
    "samples .jsonl": ("d.jsonl", _lines(f'{{"text": "{LINE}"}}\n')),
    "samples .csv": ("d.csv", lambda path: path.write_text("text\n" + f"{LINE}\n" * MB)),
    "checkpoint of integers": ("model.safetensors", _checkpoint),
    "checkpoint of GGUF": ("m.gguf", _gguf),
    "checkpoint .onnx": ("model.onnx", _onnx),
    "results": ("results.jsonl", lambda path: write_results(path, 12_000)),
}  # fmt: skip


@share(12)
@pytest.mark.parametrize("name", FILES)
def test_a_reader_takes_twice_the_file_at_most(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, make = FILES[name]
    make(tmp_path / file)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size > 40 * MB
    warmed(TARGETS[name])
    outcome = guarded(lambda: TARGETS[name].read(tmp_path), size=size, seconds=120, room=ROOM)
    assert outcome == Outcome()


@always
def test_a_reader_that_takes_more_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(bytes(48 * MB))
    outcome = guarded(lambda: path.read_bytes() * 3, size=48 * MB, room=ROOM)
    assert re.fullmatch(r"took \d+ MB for 50331648 bytes", outcome.wrong)
