"""Faults of exporters that explain a weight with too much error: undone, the error is ideal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.checkpoints.compute import measured, squared
from qgate.checkpoints.conventions import CONVENTIONS
from qgate.checkpoints.gguf_causes import block_faults
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.ideal import ideal_values

EXPLAINED_DB = 0.5
"""Error over the ideal one at which an undone fault counts as the cause."""
BLOCKS_DB = 1.0
"""The same for blocks of GGUF, whose ideal error is an estimate."""
NESTED = ("nf4", "bnb_fp4")
"""Elements whose scales may be quantized, too."""
LEADING = 1 << 20
"""Elements in leading rows that tell what all scales have too much."""
Change = Callable[[QuantizedWeight], QuantizedWeight | None]


@dataclass(frozen=True)
class ExportFault:
    """A fault in words, and what undoes it."""

    words: str
    undo: Change


def find_cause(weight: QuantizedWeight, parent: Tensor, *, is_part: bool = False) -> str:
    """Name the fault without which a weight would be as an ideal quantizer makes it.

    is_part   these are leading rows of a weight, where what moved has ends that are not here
    """
    start, stop = _inner_rows(weight) if is_part else (0, len(weight.elements))
    source = parent[start:stop]
    allowed: dict[str, float] = {}
    for fault in (*_own_faults(weight, parent), *_faults(weight)):
        undone = fault.undo(weight)
        if undone is None:
            continue
        if undone.element not in allowed:
            # Other blocks have another ideal error.
            allowed[undone.element] = _allowed_error(undone.rows(start, stop), source)
        if _is_within(undone.rows(start, stop), source, allowed[undone.element]):
            return fault.words
    return ""


def _allowed_error(weight: QuantizedWeight, parent: Tensor) -> float:
    """Return the squared error that a weight without a fault has at most."""
    over = BLOCKS_DB if weight.element in CONVENTIONS else EXPLAINED_DB
    return measured(weight, parent).least * float(10 ** (over / 10))


def _own_faults(weight: QuantizedWeight, parent: Tensor) -> Iterator[ExportFault]:
    """Yield the faults of packings with bytes or scales of their own."""
    for words, undone in block_faults(weight):
        yield ExportFault(words, lambda _, undone=undone: undone())  # type: ignore[misc]
    if weight.element in NESTED:
        count = min(len(weight.elements), -(-LEADING // max(1, weight.shape[1])))
        part = weight.rows(0, count)
        _, ideal = ideal_values(part, parent[:count].float())
        offset = (ideal - part.scales).median()
        yield ExportFault(
            f"all absmax are {abs(float(offset)):.3g} too {'low' if offset > 0 else 'high'} (the "
            "offset of double quantization)",
            lambda w: replace(w, scales=w.scales + offset),
        )


def _inner_rows(weight: QuantizedWeight) -> tuple[int, int]:
    """Return the rows without those at both ends, where there are more."""
    starts = [start for start, _ in weight.spans()]
    return (starts[1], starts[-1]) if len(starts) > 2 else (0, len(weight.elements))


def _is_within(weight: QuantizedWeight, parent: Tensor, allowed: float) -> bool:
    """Add up the error of a weight until it is more than allowed."""
    total = 0.0
    for start, stop in weight.spans():
        total += squared(weight.rows(start, stop).values() - parent[start:stop].float())
        if not total <= allowed:
            return False
    return True


def _faults(weight: QuantizedWeight) -> Iterator[ExportFault]:
    yield ExportFault("neighboring codes are swapped (the order of nibbles)", _pairs_swapped)
    for power in (1, -1, 2, -2):
        yield ExportFault(
            f"all scales are {2 ** abs(power)} times too {'high' if power > 0 else 'low'}",
            lambda w, power=power: replace(w, scales=w.scales * 2.0**-power),  # type: ignore[misc]
        )
    yield ExportFault("scales are stored inverted", lambda w: replace(w, scales=1 / w.scales))
    yield ExportFault("every scale belongs to the group before it", lambda w: _moved(w, -1))
    yield ExportFault("every scale belongs to the group after it", lambda w: _moved(w, 1))
    yield ExportFault("scales of neighboring groups are swapped", _scales_swapped)
    yield ExportFault("scales stand in the order of columns, not of rows", _scales_transposed)
    yield ExportFault("scales are swizzled in tiles of 128 x 4", _unswizzled)
    yield ExportFault("all signs are lost or flipped", lambda w: replace(w, scales=-w.scales))
    if weight.zero_points is not None:
        for step in (1, -1):
            word = "high" if step > 0 else "low"
            yield ExportFault(
                f"zero points are 1 too {word}",
                lambda w, step=step: replace(w, zero_points=_less(w.zero_points, step)),  # type: ignore[misc]
            )
        yield ExportFault("zero points are left out", lambda w: replace(w, zero_points=None))
    yield ExportFault("rows stand in another order: moved by one", lambda w: _rows_moved(w, 1))


def _less(zero_points: Tensor | None, step: int) -> Tensor | None:
    return None if zero_points is None else zero_points - step


def _pairs_swapped(weight: QuantizedWeight) -> QuantizedWeight | None:
    rows, columns = weight.elements.shape
    if columns % 2:
        return None
    pairs = _as_bytes(weight.elements).reshape(rows, -1, 2)
    swapped = pairs.flip(2).reshape(rows, columns).view(weight.elements.dtype)
    return replace(weight, elements=swapped)


def _as_bytes(elements: Tensor) -> Tensor:
    """View FP8 as bytes, as torch neither flips nor rolls it."""
    is_byte = elements.dtype.itemsize == 1
    return elements.contiguous().view(torch.uint8) if is_byte else elements


def _moved(weight: QuantizedWeight, step: int) -> QuantizedWeight | None:
    if weight.scales.numel() < 2:
        return None
    moved = weight.scales.reshape(-1).roll(step).reshape(weight.scales.shape)
    return replace(weight, scales=moved)


def _scales_swapped(weight: QuantizedWeight) -> QuantizedWeight | None:
    count = weight.scales.numel()
    if count < 2 or count % 2:
        return None
    swapped = weight.scales.reshape(-1, 2).flip(1).reshape(weight.scales.shape)
    return replace(weight, scales=swapped)


def _scales_transposed(weight: QuantizedWeight) -> QuantizedWeight | None:
    rows, columns = weight.scales.shape
    if rows < 2 or columns < 2:
        return None
    return replace(weight, scales=weight.scales.reshape(columns, rows).T.contiguous())


def _unswizzled(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Undo the order of block scales that tensor cores read: 128 rows by 4 columns."""
    rows, columns = weight.scales.shape
    if rows % 128 or columns % 4:
        return None
    tiled = weight.scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    return replace(weight, scales=tiled.permute(0, 3, 2, 1, 4).reshape(rows, columns))


def _rows_moved(weight: QuantizedWeight, step: int) -> QuantizedWeight:
    def moved(x: Tensor) -> Tensor:
        if len(x) != len(weight.elements):
            return x
        return _as_bytes(x).roll(-step, 0).view(x.dtype)

    zeros = None if weight.zero_points is None else moved(weight.zero_points)
    return replace(
        weight, elements=moved(weight.elements), scales=moved(weight.scales), zero_points=zeros
    )
