"""The graph of an ONNX file: parsed without large data, its tensors checked against the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from qgate.checkpoints.onnx.graphs import OnnxGraph, OnnxNode
from qgate.checkpoints.onnx.heads import NoModelError, OnnxHead, ShortFileError, read_onnx_head
from qgate.checkpoints.onnx.tensors import TYPES, OnnxTensor, OnnxType
from qgate.checkpoints.wrong_files import check_not_pointer, cut_off, file_size, reading
from qgate.errors import QgateError, first_line
from qgate.storage.folders import Folder, links_away
from qgate.text import one_line

MOST_SHARED = 16
"""Bytes that tensors take of an external file for each byte in it: tied ones share theirs."""
_EXTERNAL = 1
_FLOAT, _INTEGER, _TENSOR, _GRAPH, _FLOATS, _INTEGERS = 1, 2, 4, 5, 6, 7
_STARTS_WITH = b"\x08"
"""The tag of `ir_version`, which writers put first."""


def read_graph(folder: Folder, file: str) -> OnnxGraph:
    """Read the graph of an ONNX file, and check that the bytes of all tensors are there."""
    path = str(folder.at(file))
    with reading(path):
        size = file_size(folder, file)
        check_not_pointer(folder, file)
        head = _head(folder, file, path, size)
    try:
        model = _parsed(head.model)
        graph = OnnxGraph()
        builder = _Builder(graph, file, head.spans)
        builder.add_graph(model.graph, "")
    except QgateError as error:
        raise QgateError(f"{path!r}: {error}") from None
    except Exception as error:
        raise QgateError(f"{path!r} is damaged or no .onnx file: {first_line(error)}.") from None
    if not graph.nodes and not graph.tensors:
        raise QgateError(f"{path!r} is damaged or no .onnx file: it has no graph.")
    with reading(path):
        _check_external(folder, file, path, graph)
    return graph


def _head(folder: Folder, file: str, path: str, size: int) -> OnnxHead:
    first = folder.read(file, 0, 1)
    try:
        return read_onnx_head(lambda start, stop: folder.read(file, start, min(stop, size)), size)
    except (ShortFileError, NoModelError) as error:
        if isinstance(error, ShortFileError) and first == _STARTS_WITH:
            raise cut_off(path, size, error.needed) from None
        raise QgateError(f"{path!r} is damaged or no .onnx file.") from None


def _parsed(data: bytes) -> Any:
    try:
        import onnx
    except ImportError:
        raise QgateError(
            "ONNX files need the package onnx: pip install 'pytest-qgate[checkpoints]'."
        ) from None
    return onnx.ModelProto.FromString(data)


class _Builder:
    """Adds the nodes and tensors of a graph, and those of the graphs in its nodes."""

    def __init__(self, graph: OnnxGraph, file: str, spans: dict[int, tuple[int, int]]) -> None:
        self._graph, self._file, self._spans = graph, file, spans

    def add_graph(self, proto: Any, scope: str) -> None:
        renamed: dict[str, str] = {}
        for number, tensor in enumerate(proto.initializer):
            name = str(tensor.name)
            if name in self._graph.tensors:
                if not scope:
                    raise QgateError(f"the initializer {one_line(name)!r} is there twice")
                renamed[name] = name = f"{scope}/{name}"
            self._add_tensor(tensor, name, None if scope else self._spans.get(number))
        for number, node in enumerate(proto.node):
            self._add_node(node, renamed, f"{scope}/{number}")

    def _add_node(self, proto: Any, renamed: dict[str, str], scope: str) -> None:
        numbers: dict[str, tuple[int, ...]] = {}
        written = [str(name) for name in proto.output]
        renamed |= {name: f"{scope}/{name}" for name in written if name in self._graph.makers}
        outputs = tuple(renamed.get(name, name) for name in written)
        for attribute in proto.attribute:
            kind, name = int(attribute.type), str(attribute.name)
            if kind == _INTEGER:
                numbers[name] = (int(attribute.i),)
            elif kind == _INTEGERS:
                numbers[name] = tuple(int(number) for number in attribute.ints)
            elif kind == _GRAPH:
                self.add_graph(attribute.g, f"{scope}/{name}")
            elif str(proto.op_type) == "Constant" and outputs:
                if kind == _TENSOR:
                    self._add_tensor(attribute.t, outputs[0], None)
                elif kind in (_FLOAT, _FLOATS):
                    values = [attribute.f] if kind == _FLOAT else list(attribute.floats)
                    shape = () if kind == _FLOAT else (len(values),)
                    data = np.asarray(values, "<f4").tobytes()
                    self._graph.tensors[outputs[0]] = OnnxTensor(outputs[0], TYPES[1], shape, data)
        inputs = tuple(renamed.get(str(name), str(name)) for name in proto.input)
        if str(proto.op_type) != "Constant":
            self._graph.add(OnnxNode(str(proto.op_type), str(proto.name), inputs, outputs, numbers))

    def _add_tensor(self, proto: Any, name: str, span: tuple[int, int] | None) -> None:
        kind = TYPES.get(int(proto.data_type))
        if kind is None:
            return
        shape = tuple(int(length) for length in proto.dims)
        if any(length < 0 for length in shape):
            raise QgateError(f"tensor {one_line(name)!r} has shape {shape}: the file is damaged")
        tensor = OnnxTensor(name, kind, shape, b"")
        if int(proto.data_location) == _EXTERNAL:
            tensor = _external(proto, tensor)
        elif span is not None:
            tensor = OnnxTensor(name, kind, shape, (self._file, *span))
        else:
            tensor = OnnxTensor(name, kind, shape, _inline(proto, kind))
        if tensor.stored_size != tensor.size:
            raise QgateError(
                f"tensor {one_line(name)!r} has {tensor.stored_size:,} bytes, and its type "
                f"{kind.name} and shape {shape} take {tensor.size:,}: the file is damaged"
            )
        self._graph.tensors[name] = tensor


def _inline(proto: Any, kind: OnnxType) -> bytes:
    """Return the bytes of a tensor whose values stand in the message."""
    if proto.raw_data:
        return bytes(proto.raw_data)
    if proto.int32_data:
        width = {"F16": "<u2", "BF16": "<u2"}.get(kind.stored, f"<u{max(kind.bits, 8) // 8}")
        return np.asarray(proto.int32_data, np.int64).astype(width).tobytes()
    for values, width in (
        (proto.float_data, "<f4"),
        (proto.int64_data, "<i8"),
        (proto.double_data, "<f8"),
        (proto.uint64_data, f"<u{max(kind.bits, 8) // 8}"),
    ):
        if values:
            return np.asarray(values).astype(width).tobytes()
    return b""


# External data -----------------------------------------------------------------------------------


def _external(proto: Any, tensor: OnnxTensor) -> OnnxTensor:
    described = {str(entry.key): str(entry.value) for entry in proto.external_data}
    location = described.get("location", "")
    subject = f"tensor {one_line(tensor.name)!r}"
    path = PurePosixPath(location)
    if (
        not path.parts
        or path.is_absolute()
        or ".." in path.parts
        or any(character in location for character in "\\:\0")
    ):
        raise QgateError(
            f"{subject} is said to be in {one_line(location)!r}, outside of the model's folder: "
            "that is not read"
        )
    try:
        offset = int(described.get("offset", "0"))
        length = int(described.get("length", tensor.size))
    except ValueError:
        raise QgateError(f"{subject} has external data at no number: {described}"[:200]) from None
    if offset < 0 or length < 0:
        raise QgateError(f"{subject} has external data at byte {offset}, {length} long")
    return OnnxTensor(tensor.name, tensor.type, tensor.shape, (location, offset, offset + length))


def folder_and_name(folder: Folder, location: str) -> tuple[Folder, str]:
    """Return the folder of an external file, and its name there."""
    *parents, name = PurePosixPath(location).parts
    for parent in parents:
        folder = folder.inside(parent)
    return folder, name


def _check_external(folder: Folder, file: str, path: str, graph: OnnxGraph) -> None:
    """Check that external files are in the folder, and as long as the tensors in them say."""
    for location, tensors in _by_location(graph, file):
        inner, name = folder_and_name(folder, location)
        where = repr(str(inner.at(name)))
        last = max(tensors, key=lambda tensor: tensor.source[2])
        needed = int(last.source[2])
        subject = f"tensor {one_line(last.name)!r}"
        stamp = inner.stamp(name)
        if stamp is None:
            raise QgateError(
                f"{path!r} has external data in {where}, which is not there: {needed:,} bytes of "
                f"{len(tensors)} tensors. Copy it beside the model."
            )
        if links_away(folder, file, inner, name):
            raise QgateError(f"{where} is a link out of the model's folder: that is not read.")
        if stamp.size < needed:
            check_not_pointer(inner, name)
            raise QgateError(
                f"{where} is cut off: it has {stamp.size:,} of {needed:,} bytes, which {subject} "
                f"of {path!r} needs. Download it again."
            )
        _check_overlap(where, path, tensors)
        total = sum(tensor.size for tensor in tensors)
        if total > MOST_SHARED * max(stamp.size, 1):
            raise QgateError(
                f"{path!r} is damaged: {len(tensors)} tensors take {total:,} bytes of {where}, "
                f"which has {stamp.size:,}."
            )


def _check_overlap(where: str, path: str, tensors: list[OnnxTensor]) -> None:
    """Refuse tensors that share some of their bytes; tied ones share all."""
    end, before = 0, ""
    spans = sorted(
        {(tensor.source[1], tensor.source[2]): tensor.name for tensor in tensors}.items()
    )
    for (first, last), name in spans:
        if first < end:
            raise QgateError(
                f"{path!r}: tensors {one_line(before)!r} and {one_line(name)!r} overlap in {where} "
                f"from byte {first:,} to {min(end, last):,}: an offset is wrong. Export it again."
            )
        end, before = last, name


def _by_location(graph: OnnxGraph, file: str) -> Iterator[tuple[str, list[OnnxTensor]]]:
    external: dict[str, list[OnnxTensor]] = {}
    for tensor in graph.tensors.values():
        if not isinstance(tensor.source, bytes) and tensor.source[0] != file and tensor.size:
            external.setdefault(tensor.source[0], []).append(tensor)
    yield from external.items()
