"""Judge a tensor that is not quantized: the parent's own, a cast of it, or another one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.checkpoints.compute import squared
from qgate.checkpoints.packings import StoredWeight
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.record import CheckpointFinding, WeightRecord
from qgate.checkpoints.rows import ContiguousRows, MatrixColumns
from qgate.checkpoints.stored import Checkpoint, StoredEntry

STEP = 1 << 18
"""Elements that are compared at a time."""


def judge_plain(
    child: Checkpoint, weight: StoredWeight, parent: Checkpoint | None, match: ParentMatch | None
) -> tuple[WeightRecord, list[CheckpointFinding]]:
    """Compare a tensor that is not quantized: equal bits, or a cast of the parent's."""
    entry = next(iter(weight.parts.values()))
    count = math.prod(entry.shape)
    result = WeightRecord(weight.name, "", entry.dtype, weight.size, count)
    tensors = PlainTensors(child, entry, parent, match)
    causes = []
    if parent is not None and match is not None:
        outcome, cause = tensors.outcome()
        causes += [cause] if cause else []
        result = replace(result, parents=match.names, matched=match.how, outcome=outcome)
    else:
        tensors.look()
    if tensors.not_finite:
        causes.insert(0, f"{tensors.not_finite:,} of {count:,} values are NaN or infinite")
    return result, [CheckpointFinding(weight.name, cause) for cause in causes]


@dataclass
class PlainTensors:
    """A tensor of the child, and the parent's tensors whose rows it has."""

    child: Checkpoint
    entry: StoredEntry
    parent: Checkpoint | None
    match: ParentMatch | None
    not_finite: int = 0

    def look(self) -> None:
        """Count values that are not finite."""
        rows = ContiguousRows(self.child, self.entry.name, 1)
        count = math.prod(self.entry.shape)
        self.not_finite = sum(
            _not_finite(rows[start : min(start + STEP, count)]) for start in range(0, count, STEP)
        )

    def outcome(self) -> tuple[str, str]:
        """Say what became of the parent's tensor, and what is wrong with it."""
        assert self.parent is not None
        shape = self._source_shape(self.parent)
        if self.entry.shape != shape:
            self.look()
            return "changed", f"it has shape {self.entry.shape}, the parent's has {shape}"
        is_equal = is_cast = is_zero = was_zero = True
        not_finite = 0
        for values, source in self._parts(self.parent):
            not_finite += _not_finite(values)
            is_equal = is_equal and values.dtype == source.dtype and _same(values, source)
            if is_equal:
                continue
            is_cast = is_cast and values.is_floating_point()
            is_cast = is_cast and _same(values, source.to(values.dtype))
            is_zero = is_zero and not bool(values.count_nonzero())
            was_zero = was_zero and not bool(source.count_nonzero())
        self.not_finite = not_finite
        if is_equal:
            return "equal", ""
        if is_cast:
            return "cast", ""
        error = self._error(self.parent)
        if error is None:
            return "changed", "all values are zero, the parent's are not"
        return "changed", f"it is not quantized and not the parent's: relative error {error:.2g}"

    def _error(self, parent: Checkpoint) -> float | None:
        """Read again for the relative error; return None for a tensor of zeros."""
        own = energy = total = 0.0
        for values, source in self._parts(parent):
            wide, other = values.double(), source.double()
            own += squared(wide)
            energy += squared(other)
            total += squared(wide.sub_(other))
        return None if own == 0 and energy > 0 else total / (energy or 1.0)

    def _source_shape(self, parent: Checkpoint) -> tuple[int, ...]:
        assert self.match is not None
        shapes = [parent.entries[name].shape for name in self.match.names]
        if len(shapes) == 1:
            return shapes[0][::-1] if self.match.transposed else shapes[0]
        return sum(shape[0] if shape else 1 for shape in shapes), *shapes[0][1:]

    def _parts(self, parent: Checkpoint) -> Iterator[tuple[Tensor, Tensor]]:
        """Read both, some elements at a time."""
        assert self.match is not None
        if self.match.transposed:
            yield from self._turned_parts(parent, self.match.names[0])
            return
        own = ContiguousRows(self.child, self.entry.name, 1)
        offset = 0
        for name in self.match.names:
            source = ContiguousRows(parent, name, 1)
            count = math.prod(parent.entries[name].shape)
            for start in range(0, count, STEP):
                stop = min(start + STEP, count)
                yield own[offset + start : offset + stop], source[start:stop]
            offset += count

    def _turned_parts(self, parent: Checkpoint, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Read rows of the child beside columns of the parent."""
        rows, columns = self.entry.shape
        own = ContiguousRows(self.child, self.entry.name, columns)
        source = MatrixColumns(parent, name, (columns, rows))
        step = max(1, STEP // max(1, columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield own[start:stop], source[start:stop]


def _not_finite(x: Tensor) -> int:
    if not x.is_floating_point() or math.isfinite(float(torch.linalg.vector_norm(x.float()))):
        return 0
    return int((~x.float().isfinite()).sum())


def _same(x: Tensor, y: Tensor) -> bool:
    if x.dtype.itemsize == 2 and torch.equal(x.view(torch.int16), y.view(torch.int16)):
        return True
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())
