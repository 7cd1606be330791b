"""Checkpoints made on purpose: what blows up, what would run, what leads out of the folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.campaigns.fuzzing.table import TARGETS
from tests.campaigns.fuzzing.target import run_folder, warmed

Change = Callable[[Path], object]
GRAPH, EXTERNAL = "checkpoint .onnx", "checkpoint .onnx, external"
SECRET = "../outside/secret"


def _changed(change: Callable[[Any], object]) -> Change:
    """Return a change of the folder from one of the graph."""

    def run(folder: Path) -> None:
        path = folder / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        change(model.graph)
        path.write_bytes(model.SerializeToString())

    return run


def _without_data(graph: Any) -> None:
    for tensor in graph.initializer:
        tensor.ClearField("raw_data")
        tensor.dims[:] = [2**20, 2**20]


def _point(**places: str) -> Change:
    def change(graph: Any) -> None:
        tensor = graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        del tensor.external_data[:]
        for key, value in places.items():
            tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=value))

    return _changed(change)


def _linked(folder: Path) -> None:
    data = folder / "model.onnx.data"
    shutil.copy(data, folder.parent / "outside" / "data")
    data.unlink()
    data.symlink_to(folder.parent / "outside" / "data")


def _cycle(graph: Any) -> None:
    """Let nodes take what they make."""
    for node in graph.node:
        node.input[0] = node.output[0]
    graph.node.extend(
        [
            onnx.helper.make_node("Identity", ["i"], ["j"]),
            onnx.helper.make_node("Identity", ["j"], ["i"]),
        ]
    )
    graph.node.append(onnx.helper.make_node("DequantizeLinear", ["i", "j"], ["k"]))


def _deep(folder: Path) -> None:
    """Write a message in a message in a message, which no parser follows."""
    inner = b""
    for _ in range(5000):
        inner = b"\x0a" + onnx_length(len(inner)) + inner
    (folder / "model.onnx").write_bytes(b"\x08\x0a\x3a" + onnx_length(len(inner)) + inner)


def onnx_length(value: int) -> bytes:
    """Return a length as protobuf writes it."""
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def _set(node_input: str, **numbers: int) -> Change:
    def change(graph: Any) -> None:
        node = next(n for n in graph.node if node_input in n.input)
        for attribute in node.attribute:
            attribute.i = numbers.get(attribute.name, attribute.i)

    return _changed(change)


def _many(graph: Any) -> None:
    """Let thousands of tensors have the same megabytes."""
    names = [f"t{number}" for number in range(4000)]
    for name in names:
        tensor = graph.initializer.add(name=name, data_type=3, dims=[1024, 1])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.append(
            onnx.StringStringEntryProto(key="location", value="model.onnx.data")
        )


REFUSED: dict[str, tuple[str, Change, str]] = {
    "shapes without data": (GRAPH, _changed(_without_data), "the file is damaged"),
    "a message of messages": (GRAPH, _deep, "holds no quantized weight"),
    "many tensors in one place": (EXTERNAL, _changed(_many), "4000 tensors take|tensors take|overlap"),
    "above the folder": (GRAPH, _point(location=SECRET), "outside of the model's folder"),
    "through the folder": (GRAPH, _point(location="a/../../outside/secret"), "outside of the model's folder"),
    "a path of the system": (GRAPH, _point(location="/etc/passwd"), "outside of the model's folder"),
    "a URL": (GRAPH, _point(location="file:///etc/passwd"), "outside of the model's folder"),
    "a link out": (EXTERNAL, _linked, "is a link out of the model's folder"),
    "an offset of no end": (EXTERNAL, _point(location="model.onnx.data", offset=str(2**62)), "is cut off"),
    "an offset below zero": (EXTERNAL, _point(location="model.onnx.data", offset="-8"), "at byte -8"),
}  # fmt: skip
READ: dict[str, tuple[str, Change]] = {
    "nodes in a circle": (GRAPH, _changed(_cycle)),
    "blocks of no end": (GRAPH, _set("out.weight_Q4", K=2**62, N=2**62, block_size=2**40)),
    "no blocks": (GRAPH, _set("out.weight_Q4", block_size=0)),
    "an axis of no end": (GRAPH, _set("down.weight_quantized", axis=2**62)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_checkpoint_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target, change, words = REFUSED[name]
    warmed(TARGETS[target])
    outcome = run_folder(TARGETS[target], change, tmp_path)
    assert outcome.wrong == ""
    assert any(word in outcome.said for word in words.split("|")), outcome.said
    assert "\n" not in outcome.said
    assert "secret" not in outcome.said.replace(SECRET, "").replace("outside/secret", "")


@pytest.mark.parametrize("name", READ)
def test_a_hostile_graph_is_read_within_bounds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target, change = READ[name]
    warmed(TARGETS[target])
    assert run_folder(TARGETS[target], change, tmp_path).wrong == ""
