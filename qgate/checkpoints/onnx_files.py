"""ONNX files as checkpoints: initializers, their external data, and weights as the graph has them.

The graph is only looked at. Large data stays in the files and is read tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.onnx_graphs import OnnxGraph, is_anonymous, logical_name
from qgate.checkpoints.onnx_models import folder_and_name, read_graph
from qgate.checkpoints.onnx_packings import decode_stored
from qgate.checkpoints.onnx_patterns import Stored, StoredBits, UnreadCodes, find_codes
from qgate.checkpoints.onnx_tensors import OnnxTensor
from qgate.checkpoints.stored import Checkpoint, GraphWeight, StoredEntry
from qgate.checkpoints.wrong_files import reading
from qgate.errors import QgateError
from qgate.storage.folders import Folder


def open_onnx(label: str, folder: Folder, names: list[str]) -> Checkpoint:
    """Open an ONNX file, or the only one of a folder."""
    if len(names) > 1:
        listed = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise QgateError(f"{label!r} holds {len(names)} ONNX files, {listed}: name one of them.")
    file = names[0]
    graph = read_graph(folder, file)
    names_taken = set(graph.tensors)
    weights: list[GraphWeight] = []
    entries: dict[str, StoredEntry] = {}
    turned: set[str] = set()
    for stored in find_codes(graph):
        output = stored.output or stored.codes.name
        name = _new_name(graph, logical_name(stored.codes.name), output, names_taken)
        roles = _roles(graph, stored)
        is_turned = graph.is_turned(output)
        shape = _turned(stored.codes.shape) if is_turned else stored.codes.shape
        if isinstance(stored, StoredBits):
            shape = stored.rows, stored.columns
        elif isinstance(stored, UnreadCodes):
            shape = ()
        parts = {role: tensor.name for role, tensor in roles.items()}
        decode = partial(_decode, stored, is_turned)
        weights.append(GraphWeight(name, stored.packing, shape, parts, decode))
        for tensor in roles.values():
            entries[tensor.name] = _entry(tensor, tensor.name, tensor.shape, file)
    helpers = {name for node in graph.nodes for name in node.scales()}
    originals = {}
    for tensor in graph.tensors.values():
        is_weight = tensor.type.is_float and tensor.count > 1
        if tensor.name in entries or tensor.name in helpers or not is_weight:
            continue
        name = _new_name(graph, tensor.name, tensor.name, names_taken)
        originals[name] = tensor.name
        shape = tensor.shape
        if len(shape) > 1 and graph.is_turned(tensor.name):
            turned.add(name)
            shape = _turned(shape)
        entries[name] = _entry(tensor, name, shape, file)

    def read(entry: StoredEntry) -> Tensor:
        tensor = graph.tensors[originals.get(entry.name, entry.name)]
        values = _read(folder, tensor)
        return values.transpose(-1, -2) if entry.name in turned else values

    return Checkpoint(label, entries, read, weights=tuple(weights))


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Swap the last two lengths of a shape."""
    return (*shape[:-2], *shape[:-3:-1])


def _new_name(graph: OnnxGraph, name: str, value: str, taken: set[str]) -> str:
    """Name a weight by its module, where an exporter made up the name that it has."""
    module = graph.module_of(value) if is_anonymous(name) else ""
    named = f"{module}.weight"
    if not module or named in taken:
        return name
    taken.add(named)
    return named


def _entry(tensor: OnnxTensor, name: str, shape: tuple[int, ...], file: str) -> StoredEntry:
    where = file if isinstance(tensor.source, bytes) else tensor.source[0]
    return StoredEntry(name, where, tensor.type.stored, shape, tensor.size)


def _read(folder: Folder, tensor: OnnxTensor) -> Tensor:
    def read(location: str, start: int, stop: int) -> bytes:
        inner, name = folder_and_name(folder, location)
        with reading(str(inner.at(name))):
            return inner.read(name, start, stop)

    try:
        return tensor.read(read)
    except (ValueError, RuntimeError) as error:
        raise QgateError(f"tensor {tensor.name!r} cannot be read: {error}.") from None


def _roles(graph: OnnxGraph, stored: Stored) -> dict[str, OnnxTensor]:
    """Return the tensors of a weight by role: codes, scales and zero points."""
    roles = {"codes": stored.codes}
    for number, name in enumerate(stored.scales):
        tensor = graph.constant(name)
        if tensor is not None:
            roles[f"scale{number or ''}"] = tensor
    zero = graph.constant(stored.zero_point) if stored.zero_point else None
    if zero is not None:
        roles["zero_point"] = zero
    return roles


def _decode(stored: Stored, turned: bool, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    scales = [x.float() for role, x in tensors.items() if role.startswith("scale")]
    if len(scales) < len(stored.scales):
        raise QgateError(f"its scale {stored.scales[-1]!r} is no constant of the graph")
    if stored.zero_point and "zero_point" not in tensors:
        raise QgateError(f"its zero point {stored.zero_point!r} is no constant of the graph")
    scale = math.prod(scales[1:], start=scales[0]) if scales else None
    return decode_stored(stored, tensors["codes"], scale, tensors.get("zero_point"), turned)
