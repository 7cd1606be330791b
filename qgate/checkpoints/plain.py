"""Judge a tensor that is not quantized: the parent's own, a cast of it, or another one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qgate.checkpoints.accounting import TIED
from qgate.checkpoints.compute import squared
from qgate.checkpoints.gguf.layouts import ParentLayout, parent_layouts
from qgate.checkpoints.methods.compared_rows import ComparedRows
from qgate.checkpoints.methods.explanations import explain_change
from qgate.checkpoints.methods.surroundings import WeightPair
from qgate.checkpoints.orders import order_of_lines, order_text
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.record import CheckpointFinding, WeightRecord
from qgate.checkpoints.rows import ContiguousRows, MatrixColumns, ParentRows
from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.text import counted

STEP = 1 << 18
"""Elements that are compared at a time."""
NOT_PARENTS = "it is not quantized and not the parent's"
UNWRITTEN = 1e15
"""Magnitude that no parameter has; memory that was not written has it often."""

BEGINNING = 256
"""Elements by which tensors of one shape are told apart."""
FEW = 1 / 16
"""Largest share of rows that are counted, and not called all."""
BF16_STEP = 2.0**-7
"""Relative error of a sum that was rounded to bfloat16, with some room."""


def judge_plain(pair: WeightPair) -> tuple[WeightRecord, list[CheckpointFinding]]:
    """Compare a tensor that is not quantized: equal bits, or a cast of the parent's."""
    child, weight, parent, match = pair.child, pair.weight, pair.parent, pair.match
    tensors: PlainTensors | None = None
    sums = ValueSums()
    entry = next(iter(weight.parts.values()))
    count = math.prod(entry.shape)
    result = WeightRecord(weight.name, "", entry.dtype, weight.size, count)
    outcome = cause = ""
    if parent is not None and match is not None:
        tensors = PlainTensors(child, entry, parent, match)
        outcome, cause = tensors.outcome_in(parent_layouts(child, parent, weight.name, match))
        sums = tensors.sums
        result = replace(result, parents=match.names, matched=match.how, outcome=outcome)
    else:
        sums.look(child, entry)
    causes = list(_memory_causes(entry, sums, is_parents=outcome in ("equal", "cast")))
    if tensors is not None and cause and not causes:
        compared, layer = tensors.compared(), pair.surroundings
        if layer is not None and compared is not None:
            method, undone_by = explain_change(layer, compared)
            result = replace(result, method=method, undone_by=undone_by)
        causes = [] if result.method else [tensors.named(cause)]
    return result, [CheckpointFinding(weight.name, cause) for cause in causes]


@dataclass
class ValueSums:
    """Counts of the values of one tensor; the largest only where it is larger than any weight."""

    not_finite: int = 0
    largest: float = 0.0
    first: float | None = None
    is_constant: bool = True
    is_float: bool = False

    def look(self, checkpoint: Checkpoint, entry: StoredEntry) -> None:
        """Add all values of a tensor."""
        rows = ContiguousRows(checkpoint, entry.name, 1)
        count = math.prod(entry.shape)
        for start in range(0, count, STEP):
            self.add(rows[start : min(start + STEP, count)])

    def add(self, values: Tensor) -> None:
        self.see_constant(values)
        self.is_float = values.is_floating_point()
        if not self.is_float:
            return
        wide = values.float()
        norm = float(torch.linalg.vector_norm(wide))
        if norm <= UNWRITTEN:
            return
        finite = wide[wide.isfinite()]
        self.not_finite += wide.numel() - finite.numel()
        if finite.numel():
            self.largest = max(self.largest, float(finite.abs().max()))

    def see_constant(self, values: Tensor) -> None:
        """Compare values with the first one, while all were equal."""
        if not self.is_constant or not values.numel():
            return
        values = values.reshape(-1)
        self.first = float(values[0]) if self.first is None else self.first
        self.is_constant = float(values[0]) == self.first and bool((values == values[0]).all())

    @property
    def first_text(self) -> str:
        return f"{self.first:.4g}" if self.first else "zero"


@dataclass
class PlainTensors:
    """A tensor of the child, and the parent's tensors whose rows it has."""

    child: Checkpoint
    entry: StoredEntry
    parent: Checkpoint
    match: ParentMatch
    sums: ValueSums = field(default_factory=ValueSums)
    layout: ParentLayout = field(default_factory=ParentLayout)

    def compared(self) -> ComparedRows | None:
        """Return both as rows; None for what is no matrix of the parent's shape."""
        shape = self.entry.shape
        if len(shape) != 2 or self._source_shape() != shape:
            return None
        matrix = shape[0], shape[1]
        own = ContiguousRows(self.child, self.entry.name, shape[1])
        source = self.layout.of(ParentRows(self.parent, self.match, *matrix), shape[0])
        return ComparedRows.of_plain(own, source, matrix)

    def outcome_in(self, layouts: Iterable[ParentLayout]) -> tuple[str, str]:
        """Compare with the parent's tensor in the layout it should have, then in others."""
        first: tuple[str, str] | None = None
        for layout in layouts:
            self.layout, self.sums = layout, ValueSums()
            outcome, cause = self.outcome()
            if outcome != "changed":
                return ("changed", layout.cause) if layout.cause else (outcome, "")
            first = first or (outcome, cause)
        assert first is not None
        return first

    def outcome(self) -> tuple[str, str]:
        """Say what became of the parent's tensor, and what is wrong with it."""
        shape = self._source_shape()
        # Of several tensors, such as experts, only the rows are told by shapes.
        count = math.prod(self.entry.shape)
        is_stacked = len(self.match.names) > 1 and math.prod(shape) == count
        if self.entry.shape != shape and not is_stacked:
            self.sums.look(self.child, self.entry)
            return "changed", f"it has shape {self.entry.shape}, the parent's has {shape}"
        is_equal = is_cast = True
        parents = ValueSums()
        for values, source in self._parts():
            self.sums.add(values)
            is_equal = is_equal and values.dtype == source.dtype and _same(values, source)
            if is_equal:
                continue
            is_cast = is_cast and values.is_floating_point()
            is_cast = is_cast and _same(values, source.to(values.dtype))
            parents.see_constant(source)
        if is_equal:
            return "equal", ""
        if is_cast:
            return "cast", ""
        if self.sums.is_constant and not parents.is_constant:
            return "changed", f"all values are {self.sums.first_text}, the parent's are not"
        error = self._error()
        return "changed", f"{NOT_PARENTS}: relative error {error:.2g}"

    def named(self, cause: str) -> str:
        """Add to a cause what is wrong, where it can be told."""
        if not cause.startswith(NOT_PARENTS) or len(self.match.names) > 1:
            return cause
        other = tensor_that_it_is(self.child, self.entry, self.parent, self._is)
        words = f"it is {other} of the parent" if other else ""
        words = words or plain_cause(self._parts(), self.entry.shape, self.compared())
        return f"{cause}; {words}" if words else cause

    def _is(self, name: str) -> bool:
        match = ParentMatch((name,), "name")
        outcome = PlainTensors(self.child, self.entry, self.parent, match).outcome()[0]
        return outcome in ("equal", "cast")

    def _error(self) -> float:
        """Read again for the relative error."""
        energy = total = 0.0
        for values, source in self._parts():
            other = source.double()
            energy += squared(other)
            total += squared(values.double().sub_(other))
        return total / (energy or 1.0)

    def _source_shape(self) -> tuple[int, ...]:
        shapes = [self.parent.entries[name].shape for name in self.match.names]
        if len(shapes) == 1:
            return shapes[0][::-1] if self.match.transposed else shapes[0]
        return sum(shape[0] if shape else 1 for shape in shapes), *shapes[0][1:]

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Read both, some elements at a time."""
        if self.match.transposed:
            yield from self._turned_parts()
            return
        own = ContiguousRows(self.child, self.entry.name, 1)
        offset = 0
        for name in self.match.names:
            shape = self.parent.entries[name].shape
            count = math.prod(shape)
            # Elements one by one, or the rows that a layout may reorder.
            columns = shape[1] if len(shape) == 2 and shape[1] and self.layout.heads else 1
            rows = count // columns
            source = self.layout.of(ContiguousRows(self.parent, name, columns), rows)
            step = max(1, STEP // columns)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                values = own[offset + start * columns : offset + stop * columns]
                yield values, source[start:stop].reshape(values.shape)
            offset += count

    def _turned_parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Read rows of the child beside columns of the parent."""
        rows, columns = self.entry.shape
        own = ContiguousRows(self.child, self.entry.name, columns)
        source = MatrixColumns(self.parent, self.match.names[0], (columns, rows))
        step = max(1, STEP // max(1, columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield own[start:stop], source[start:stop]


def _memory_causes(entry: StoredEntry, sums: ValueSums, *, is_parents: bool) -> Iterator[str]:
    """Name values that no training leaves: NaN, a constant matrix, memory nothing wrote."""
    count = math.prod(entry.shape)
    if entry.dtype.startswith("F8_"):
        yield f"it is {entry.dtype} without scales: codes are stored, and not what they mean"
    elif sums.not_finite:
        yield f"{sums.not_finite:,} of {count:,} values are NaN or infinite"
    elif is_parents or not sums.is_float:
        return
    elif sums.is_constant and len(entry.shape) > 1 and count > 1:
        yield f"all values are {sums.first_text}: nothing wrote them"
    elif sums.largest > UNWRITTEN:
        yield f"values are as large as {sums.largest:.2g}: it is memory that nothing wrote"


def tied_weights(child: Checkpoint) -> Iterator[CheckpointFinding]:
    """Find an output layer that is said to be the embedding, and differs from it."""
    if not child.model_settings.get("tie_word_embeddings", False):
        return
    heads = [name for name in child.entries if name.endswith(f"{TIED}.weight")]
    embeddings = [name for name in child.entries if re.search(r"(embed_tokens|wte)\.weight$", name)]
    if len(heads) == len(embeddings) == 1:
        head, embedding = child.entries[heads[0]], child.entries[embeddings[0]]
        same_form = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
        if same_form and not _are_equal(child, head, embedding):
            yield CheckpointFinding(
                head.name, f"it is tied to {embedding.name}, and differs from it"
            )


def _are_equal(checkpoint: Checkpoint, first: StoredEntry, second: StoredEntry) -> bool:
    match = ParentMatch((second.name,), "name")
    return PlainTensors(checkpoint, first, checkpoint, match).outcome()[0] == "equal"


def _same(x: Tensor, y: Tensor) -> bool:
    if x.dtype.itemsize == 2 and torch.equal(x.view(torch.int16), y.view(torch.int16)):
        return True
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


def tensor_that_it_is(
    child: Checkpoint, entry: StoredEntry, parent: Checkpoint, is_equal: Callable[[str], bool]
) -> str:
    """Return the tensor of the parent, of the same shape, that one of the child is."""
    count = min(BEGINNING, math.prod(entry.shape))
    own = ContiguousRows(child, entry.name, 1)[0:count]
    for name, other in parent.entries.items():
        if other.shape != entry.shape or name == entry.name:
            continue
        beginning = ContiguousRows(parent, name, 1)[0:count].to(own.dtype)
        if torch.equal(own, beginning) and is_equal(name):
            return name
    return ""


def plain_cause(
    parts: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, ...], compared: ComparedRows | None
) -> str:
    """Name an offset of all values, rows that are wrong, or their order; nothing where it is none.

    parts     the values and the parent's, some elements at a time
    compared  both as rows, where it is a matrix
    """
    width = shape[-1] if len(shape) > 1 else 1
    wrong: set[int] = set()
    low, high, room, start = math.inf, -math.inf, 0.0, 0
    for own, source in parts:
        values, parent = own.reshape(-1).float(), source.reshape(-1).float()
        differs = (values != parent) & ~(values.isnan() & parent.isnan())
        wrong.update(((start + differs.nonzero().reshape(-1)) // width).unique().tolist())
        offsets = values - parent
        low, high = min(low, float(offsets.min())), max(high, float(offsets.max()))
        room = max(room, BF16_STEP * float(torch.maximum(values.abs(), parent.abs()).max()))
        start += len(values)
    if high - low <= room < abs(high + low) / 8:
        middle = (high + low) / 2
        return f"every value is {abs(middle):.3g} {'more' if middle > 0 else 'less'}"
    count = start // width
    if len(wrong) <= max(2, FEW * count):
        return _lines_text(sorted(wrong), count, compared)
    if compared is None:
        return ""
    values, parent = compared.leading()
    orders = ((axis, order_of_lines(values, parent, axis)) for axis in (0, 1))
    return next((order_text(axis, order) for axis, order in orders if order is not None), "")


def _lines_text(wrong: list[int], count: int, compared: ComparedRows | None) -> str:
    """Name a few rows, or values of a vector, that are wrong."""
    noun = "row" if compared is not None else "value"
    if compared is None:
        return f"{counted(len(wrong), noun)} of {count:,}, first {noun} {wrong[0]}"
    rows = [compared.read(row, row + 1)[0].float() for row in wrong]
    parents = [compared.parent[row : row + 1][0].float() for row in wrong]
    if len(rows) == 2 and torch.equal(rows[0], parents[1]) and torch.equal(rows[1], parents[0]):
        return f"rows {wrong[0]} and {wrong[1]} are swapped"
    zero = [row for row, values in zip(wrong, rows, strict=True) if not bool(values.any())]
    if len(zero) == len(wrong):
        are = "is" if len(zero) == 1 else "are"
        return f"{counted(len(zero), noun)} of {count:,} {are} zero, first row {zero[0]}"
    return f"{counted(len(wrong), noun)} of {count:,} differ, first row {wrong[0]}"
