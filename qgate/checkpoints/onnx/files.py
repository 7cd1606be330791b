"""ONNX files as checkpoints: initializers, their external data, and weights as the graph has them.

The graph is only looked at. Large data stays in the files and is read some elements at a time.
"""

from __future__ import annotations

from torch import Tensor

from qgate.checkpoints.onnx.decoding import OnnxDecoder
from qgate.checkpoints.onnx.graphs import OnnxGraph, is_anonymous, logical_name
from qgate.checkpoints.onnx.models import folder_and_name, read_graph
from qgate.checkpoints.onnx.patterns import Stored, StoredBits, find_codes
from qgate.checkpoints.onnx.tensors import OnnxTensor
from qgate.checkpoints.rows import MatrixColumns
from qgate.checkpoints.stored import REMOTE_AHEAD, Checkpoint, GraphWeight, StoredEntry
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
    reader = OnnxReader(folder, graph)
    names_taken = set(graph.tensors)
    weights: list[GraphWeight] = []
    entries: dict[str, StoredEntry] = {}
    for stored in find_codes(graph):
        output = stored.output or stored.codes.name
        logical = logical_name(stored.codes.name)
        logical = stored.codes.name if logical in names_taken else logical
        names_taken.add(logical)
        name = _new_name(graph, logical, output, names_taken)
        roles = _roles(graph, stored)
        is_turned = graph.is_turned(output)
        shape = _turned(stored.codes.shape) if is_turned else stored.codes.shape
        if isinstance(stored, StoredBits):
            shape = stored.rows, stored.columns
        elif not stored.scales:
            shape = ()
        parts = {role: tensor.name for role, tensor in roles.items()}
        decoder = OnnxDecoder(stored, is_turned, roles, reader.elements)
        weights.append(GraphWeight(name, stored.packing, shape, parts, decoder, *decoder.layout()))
        for tensor in roles.values():
            entries[tensor.name] = _entry(tensor, tensor.name, tensor.shape, file)
    helpers = {name for node in graph.nodes for name in node.scales()}
    for tensor in graph.tensors.values():
        is_weight = tensor.type.is_float and tensor.count > 1
        if tensor.name in entries or tensor.name in helpers or not is_weight:
            continue
        name = _new_name(graph, tensor.name, tensor.name, names_taken)
        reader.originals[name] = tensor.name
        shape, has_spans = tensor.shape, True
        if len(shape) > 1 and graph.is_turned(tensor.name):
            reader.turned.add(name)
            shape, has_spans = _turned(shape), len(shape) == 2
        entries[name] = _entry(tensor, name, shape, file, has_spans)
    return Checkpoint(label, entries, reader, span_reader=reader.span, weights=tuple(weights))


class OnnxReader:
    """Reads the tensors of a graph; those that are stored as inputs x outputs are turned.

    originals   the names in the file of entries that have others
    turned      the names of entries that are turned
    """

    def __init__(self, folder: Folder, graph: OnnxGraph) -> None:
        self._folder, self._graph = folder, graph
        self.originals: dict[str, str] = {}
        self.turned: set[str] = set()
        self._columns: tuple[str, MatrixColumns] | None = None

    def __call__(self, entry: StoredEntry) -> Tensor:
        tensor = self._tensor(entry)
        values = self.elements(tensor, 0, tensor.count).reshape(tensor.shape)
        return values.transpose(-1, -2) if entry.name in self.turned else values

    def span(self, entry: StoredEntry, first: int, last: int) -> Tensor:
        """Read the elements of an entry from one number to another, as one row."""
        if entry.name not in self.turned:
            return self.elements(self._tensor(entry), first, last)
        rows, columns = entry.shape
        if self._columns is None or self._columns[0] != entry.name:
            self._columns = entry.name, self._columns_of(self._tensor(entry), (columns, rows))
        start, stop = first // columns, -(-last // columns)
        read = self._columns[1][start:stop].reshape(-1)
        return read[first - start * columns : last - start * columns]

    def elements(self, tensor: OnnxTensor, first: int, last: int) -> Tensor:
        """Read the elements of a tensor as it is stored."""
        try:
            return tensor.span(self._bytes, first, last)
        except (ValueError, RuntimeError) as error:
            raise QgateError(f"tensor {tensor.name!r} cannot be read: {error}.") from None

    def _bytes(self, location: str, start: int, stop: int) -> bytes:
        inner, name = folder_and_name(self._folder, location)
        with reading(str(inner.at(name))):
            return inner.read(name, start, stop)

    def _tensor(self, entry: StoredEntry) -> OnnxTensor:
        return self._graph.tensors[self.originals.get(entry.name, entry.name)]

    def _columns_of(self, tensor: OnnxTensor, shape: tuple[int, int]) -> MatrixColumns:
        """Return the columns of a matrix as it is stored."""
        entry = _entry(tensor, tensor.name, shape, "")
        ahead = REMOTE_AHEAD if self._folder.parallel_reads > 1 else Checkpoint.ahead
        stored = Checkpoint(
            "",
            {entry.name: entry},
            lambda _: self.elements(tensor, 0, tensor.count).reshape(shape),
            span_reader=lambda _, first, last: self.elements(tensor, first, last),
            ahead=ahead,
        )
        return MatrixColumns(stored, entry.name, shape)


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


def _entry(
    tensor: OnnxTensor, name: str, shape: tuple[int, ...], file: str, has_spans: bool = True
) -> StoredEntry:
    if isinstance(tensor.source, bytes):
        return StoredEntry(name, file, tensor.type.stored, shape, tensor.size)
    where, offset, _ = tensor.source
    begin = offset if has_spans else None
    return StoredEntry(name, where, tensor.type.stored, shape, tensor.size, begin)


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
