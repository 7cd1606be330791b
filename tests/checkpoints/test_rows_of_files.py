"""Rows of ONNX files that are read in parts are those of files read whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

from qgate.checkpoints import (
    comparison,
    compute,
    grids,
    plain,
    rows,
    running,
    weights,
)
from qgate.checkpoints.comparison import compare
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.methods.surroundings import WeightPair
from qgate.checkpoints.onnx import decoding
from qgate.checkpoints.onnx.files import OnnxReader
from qgate.checkpoints.onnx.tensors import OnnxTensor
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.plain import judge_plain
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.rows import ParentRows, WeightRows
from qgate.checkpoints.stored import Checkpoint
from tests.checkpoints import gated, onnx_exports
from tests.checkpoints.exports import write
from tests.checkpoints.onnx_exports import HAND_EXPORTS, QUANTIZED, RUNTIME_EXPORTS, WIDTH
from tests.checkpoints.work import check_spans, names_judged
from tests.shares import proof, share


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports with all data in files of their own."""
    root = tmp_path_factory.mktemp("onnx")
    onnx_exports.write_parent(root / "parent")
    models = {name: make() for name, make in HAND_EXPORTS.items()}
    for number, name in enumerate(RUNTIME_EXPORTS):
        models[name] = onnx.load(onnx_exports.export(root / f"runtime {number}", name))
    return {name: _external(root / f"{number}", model) for number, (name, model) in
            enumerate(models.items())}  # fmt: skip


def _external(folder: Path, model: onnx.ModelProto) -> Path:
    folder.mkdir(exist_ok=True)
    onnx.save(
        model, folder / "model.onnx", save_as_external_data=True, location="model.data",
        size_threshold=0,
    )  # fmt: skip
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and work on a few rows at a time."""
    monkeypatch.setattr(grids, "CHUNK", 8 * WIDTH)
    monkeypatch.setattr(rows, "SLAB", 1 << 10)
    monkeypatch.setattr(Checkpoint, "ahead", 1 << 9)
    monkeypatch.setattr(decoding, "STEP", 1 << 9)
    monkeypatch.setattr(plain, "STEP", 1 << 9)


def _opened(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(str(path))
    checkpoint.ahead = Checkpoint.ahead
    return checkpoint


@share(12)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tall", [grids.TALL, 1])
@pytest.mark.parametrize("name", [*HAND_EXPORTS, *RUNTIME_EXPORTS])
def test_spans_of_a_graph_are_its_rows(
    name: str, tall: int, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (grids, rows):
        monkeypatch.setattr(module, "TALL", tall)
    checkpoint = _opened(exports[name])
    quantized = [weight for weight in find_weights(checkpoint) if weight.packing]
    counts = {weight.name: check_spans(checkpoint, weight) for weight in quantized}
    matrices = [weight for weight in quantized if len(weight.parts["codes"].shape) > 1]
    assert len(matrices) >= len(QUANTIZED)
    assert all(weight.packing and weight.packing.count_rows for weight in matrices)
    assert tall > 1 or all(counts[weight.name] > 1 for weight in matrices)


@share(6)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [*HAND_EXPORTS, *RUNTIME_EXPORTS])
def test_a_graph_is_read_in_parts(
    name: str, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No matrix is read at once, and the formats are those of matrices that are."""
    for module in (grids, rows, compute, weights):
        monkeypatch.setattr(module, "TALL", 8)
    parent = str(exports[name].parent / "parent")
    shares: dict[str, float] = {}
    original = OnnxReader.elements

    def elements(reader: OnnxReader, tensor: OnnxTensor, first: int, last: int) -> Tensor:
        if len(tensor.shape) > 1 and tensor.count > 2000 and not isinstance(tensor.source, bytes):
            share = (last - first) / tensor.count
            shares[tensor.name] = max(share, shares.get(tensor.name, 0.0))
        return original(reader, tensor, first, last)

    monkeypatch.setattr(OnnxReader, "elements", elements)
    monkeypatch.setattr(comparison, "open_checkpoint", lambda spec: _opened(Path(spec)))
    record = compare(str(exports[name]), parent)
    assert record.findings == []
    # Content is told by tensors that are read whole.
    by_content = tuple(w.name for w in record.weights if w.matched == "content")
    most = {key: x for key, x in shares.items() if not key.startswith(by_content)}
    assert most or name == "cast and multiplied"
    assert max(most.values(), default=0) <= 0.5
    monkeypatch.undo()
    assert [w.format for w in compare(str(exports[name]), parent).weights] == [
        w.format for w in record.weights
    ]


def _dequantized(
    codes: np.ndarray | onnx.TensorProto, parts: dict[str, np.ndarray], folder: Path
) -> Checkpoint:
    inputs, outputs = codes.dims if isinstance(codes, onnx.TensorProto) else codes.shape
    nodes = [
        helper.make_node("DequantizeLinear", ["q", *parts], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    model = onnx_exports.model_of(
        nodes, {"q": codes, **parts}, {"x": (None, inputs)}, {"y": (None, outputs)}
    )
    return _opened(_external(folder, model))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [onnx.TensorProto.INT4, onnx.TensorProto.UINT4])
def test_rows_may_begin_inside_a_byte(kind: int, tmp_path: Path) -> None:
    """Codes of 4 bits in rows of an odd length."""
    codes = np.random.default_rng(0).integers(0, 8, (61, 47))
    tensor = onnx.helper.make_tensor("q", kind, codes.shape, codes.reshape(-1))
    tensor = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), "q")
    checkpoint = _dequantized(tensor, {"s": np.ones(47, np.float32)}, tmp_path)
    assert checkpoint.has_spans("q")
    row = torch.from_numpy(codes.reshape(-1))
    for first in range(0, len(row) - 9, 5):
        span = slice(first, first + 9)
        read = checkpoint.read_span("q", span.start, span.stop)
        assert read.tolist() == row[span].tolist()
    (stored,) = find_weights(checkpoint)
    assert check_spans(checkpoint, stored) > 1
    values = WeightRows(checkpoint, stored).rows(0, 47).values()
    assert torch.equal(values, torch.from_numpy(codes.T).float())


FORMS: dict[str, tuple[int, int, int, str, bool]] = {
    "7 bits but for the last row": (64, 65, 0, "int8", False),
    "7 bits": (64, 64, 0, "int7", False),
    "nothing but zeros": (0, 0, 0, "int8", False),
    "a zero point in the last row": (64, 64, 1, "int7", True),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_that_of_all_rows(name: str, tmp_path: Path) -> None:
    most, last, zero, element, has_zero_points = FORMS[name]
    codes = np.full((32, 48), most, np.int8)
    codes[-1, -1] = last
    zeros = np.zeros(48, np.int8)
    zeros[-1] = zero
    checkpoint = _dequantized(codes, {"s": np.ones(48, np.float32), "z": zeros}, tmp_path)
    (stored,) = find_weights(checkpoint)
    weight = WeightRows(checkpoint, stored)
    assert (weight.element, weight.has_zero_points) == (element, has_zero_points)
    assert check_spans(checkpoint, stored) > 1


@pytest.mark.usefixtures("small")
def test_plain_rows_of_a_graph_are_turned(tmp_path: Path) -> None:
    """A float model as the parent, with weights that are inputs x outputs in the file."""
    parent = _opened(_external(tmp_path, onnx_exports.float_model()))
    for name, expected in onnx_exports.parent_tensors().items():
        assert parent.has_spans(name), name
        lines = ParentRows(parent, ParentMatch((name,), "name"), len(expected), expected[0].numel())
        for step in (5, 8, len(expected)):
            spans = [(i, min(i + step, len(expected))) for i in range(0, len(expected), step)]
            read = torch.cat([lines[start:stop] for start, stop in spans])
            assert torch.equal(read, expected.flatten(1) if expected.dim() > 1 else read)
        assert torch.equal(parent.read(name), expected)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda x: x, "equal"),
        (lambda x: x.bfloat16(), "cast"),
        (lambda x: x * 1.5, "changed"),
    ],
)
def test_a_plain_tensor_may_be_transposed(
    change: Callable[[Tensor], Tensor], outcome: str, tmp_path: Path
) -> None:
    values = torch.randn(48, WIDTH)
    write(tmp_path / "child", {"w": change(values).contiguous()}, {})
    write(tmp_path / "parent", {"w": values.T.contiguous()}, {})
    child, parent = _opened(tmp_path / "child"), _opened(tmp_path / "parent")
    (weight,) = find_weights(child)
    match = ParentMatch(("w",), "content", transposed=True)
    pair = WeightPair(child, weight, parent, match, Recipe())
    record, findings = judge_plain(pair)
    assert (record.outcome, len(findings)) == (outcome, outcome == "changed")
    record, _ = judge_plain(replace(pair, match=replace(match, transposed=False)))
    assert record.outcome == "changed"


def test_codes_and_floats_of_one_name_are_two_weights(tmp_path: Path) -> None:
    """`w_quantized` of a product, and `w` of another one."""
    values = np.random.default_rng(0).standard_normal((32, 48)).astype(np.float32)
    codes, scales = onnx_exports.quantized(values, onnx.TensorProto.INT8, 1, 0)
    parts = {"w_quantized": codes.astype(np.int8), "s": scales, "w": values}
    nodes = [
        helper.make_node("DequantizeLinear", ["w_quantized", "s"], ["d"], axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
        helper.make_node("MatMul", ["x", "w"], ["z"]),
    ]
    model = onnx_exports.model_of(
        nodes, parts, {"x": (None, 32)}, {"y": (None, 48), "z": (None, 48)}
    )
    write(tmp_path / "parent", {"w": torch.from_numpy(values.T.copy())}, {})
    pair = str(_external(tmp_path / "child", model)), str(tmp_path / "parent")
    for workers in (1, 2):
        record = compare(*pair, workers=workers)
        assert record.findings == []
        outcomes = {weight.name: weight.outcome for weight in record.weights}
        assert outcomes == {"w_quantized": "quantized", "w": "equal"}


# Processes and kills -----------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path) -> tuple[str, str]:
    """A graph with a fault that only names of other tensors explain, and its parent."""
    model = onnx.load_model_from_string(HAND_EXPORTS["int8 per output"]().SerializeToString())
    tensors = {t.name: t for t in model.graph.initializer}
    for ending in ("quantized", "scale"):
        other = tensors[f"layers.0.up.weight_{ending}"].raw_data
        tensors[f"layers.1.up.weight_{ending}"].raw_data = other
    onnx_exports.write_parent(tmp_path / "parent")
    return str(_external(tmp_path / "child", model)), str(tmp_path / "parent")


@proof
def test_processes_give_the_record_of_one(
    faulty: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "BATCH", 20_000)
    single_record = compare(*faulty, blocks=2)
    assert single_record.findings[0].cause.startswith(
        "it was made from layers.0.up.weight, not from"
    )
    assert repr(compare(*faulty, workers=2, blocks=2).to_dict()) == repr(single_record.to_dict())


def test_a_graph_that_was_written_again_is_judged_again(
    faulty: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data is in another file, which is as it was."""
    monkeypatch.setattr(running, "BATCH", 20_000)
    names = names_judged(monkeypatch)

    def interrupt(done: int, of: int) -> None:
        if done == of - 1:
            raise KeyboardInterrupt

    for has_changed in (False, True):
        folder = tmp_path / f"out {has_changed}"
        with pytest.raises(KeyboardInterrupt):
            compare(*faulty, interrupt, unfinished=folder)
        before = list(names)
        names.clear()
        if has_changed:
            os.utime(Path(faulty[0]) / "model.onnx", ns=(1, 1))
        record = compare(*faulty, unfinished=folder)
        assert (set(names) >= set(before)) == has_changed
        names.clear()
    assert repr(record.to_dict()) == repr(compare(*faulty).to_dict())


# Gates -------------------------------------------------------------------------------------------


def test_gates_hold_graphs(faulty: tuple[str, str], tmp_path: Path) -> None:
    child, parent = map(Path, faulty)
    (text,) = gated.accept(child, parent, tmp_path / "baselines")
    assert "it was made from layers.0.up.weight, not from layers.1.up.weight" in text
    assert "layers.1.up.weight" in text
    onnx.save(HAND_EXPORTS["int8 per output"](), tmp_path / "model.onnx")
    assert gated.accept(tmp_path / "model.onnx", parent, tmp_path / "others") == []
    onnx.save(HAND_EXPORTS["int8 per input"](), tmp_path / "model.onnx")
    gates = gated.gates_of(tmp_path / "model.onnx", parent, tmp_path / "others")
    assert any("int8 per row accepted, int8 per column" in text for text in gated.failures(gates))
