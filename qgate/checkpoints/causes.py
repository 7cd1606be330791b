"""Faults of exporters that explain a weight with too much error: undone, the error is ideal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.checkpoints.compute import measured, squared
from qgate.checkpoints.grids import TALL, QuantizedWeight

EXPLAINED_DB = 0.5
"""Error over the ideal one at which an undone fault counts as the cause."""
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
    allowed = _allowed(weight.rows(start, stop), source)
    for fault in (*_faults(weight), *_fitted_faults(weight, parent)):
        undone = fault.undo(weight)
        if undone is None:
            continue
        inner = undone.rows(start, stop)
        most = allowed if _kind(undone) == _kind(weight) else _allowed(inner, source)
        if _is_within(inner, source, most):
            return fault.words
    return ""


def _allowed(weight: QuantizedWeight, parent: Tensor) -> float:
    """Return the error up to which a weight is as an ideal quantizer of its format makes it."""
    return measured(weight, parent).least * float(10 ** (EXPLAINED_DB / 10))


def _kind(weight: QuantizedWeight) -> tuple[str, bool, tuple[int, int]]:
    return weight.element, weight.zero_points is None, weight.tile


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
    words = "neighboring codes are swapped (the order of nibbles)"
    yield ExportFault(words, _pairs_swapped)
    yield ExportFault(words, _pairs_of_rows_swapped)
    for power in (1, -1, 2, -2):
        yield ExportFault(
            f"all scales are {2 ** abs(power)} times too {'high' if power > 0 else 'low'}",
            lambda w, power=power: replace(w, scales=w.scales * 2.0**-power),  # type: ignore[misc]
        )
    yield ExportFault("scales are stored inverted", lambda w: replace(w, scales=1 / w.scales))
    yield ExportFault("every scale belongs to the group before it", lambda w: _moved(w, -1))
    yield ExportFault("every scale belongs to the group after it", lambda w: _moved(w, 1))
    yield ExportFault("scales of neighboring groups are swapped", _scales_swapped)
    for back in (False, True):
        yield ExportFault(
            "scales stand in the order of columns, not of rows",
            lambda w, back=back: _scales_transposed(w, back),  # type: ignore[misc]
        )
    yield ExportFault("scales are swizzled in tiles of 128 x 4", _unswizzled)
    yield ExportFault("scales stand along the wrong axis", _axes_exchanged)
    kind = "unsigned" if weight.element.startswith("u") else "signed"
    yield ExportFault(f"codes are read as {kind} and are not", _signs_read)
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


def _fitted_faults(weight: QuantizedWeight, parent: Tensor) -> Iterator[ExportFault]:
    """Yield faults that are undone with the help of the parent."""
    if weight.element.startswith(("int", "uint")):
        stored = weight.zero_points
        is_missing = stored is None or not bool(stored.any())
        words = f"zero points are {'missing' if is_missing else 'wrong'}"
        yield ExportFault(words, lambda w: _zero_points_fitted(w, parent))


def _zero_points_fitted(weight: QuantizedWeight, parent: Tensor) -> QuantizedWeight:
    """Take the zero points that most elements of a tile tell; of a tall one, its first rows."""
    zeros: list[Tensor] = []
    for start, stop in weight.spans():
        if start % weight.tile[0] and weight.tile[0] > TALL:
            continue
        chunk = weight.rows(start, stop)
        values = chunk.in_tiles(parent[start:stop].float()) / chunk.scales[:, None, :, None]
        offsets = chunk.in_tiles(chunk.elements) - values
        zeros.append(offsets.transpose(1, 2).flatten(2).median(-1).values.round())
    return replace(weight, zero_points=torch.cat(zeros))


def _axes_exchanged(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Move scales of rows of a square weight to its columns, and back."""
    rows, columns = weight.elements.shape
    if rows != columns or weight.scales.numel() < 2:
        return None
    zeros = None if weight.zero_points is None else weight.zero_points.T
    return replace(weight, scales=weight.scales.T, zero_points=zeros, tile=weight.tile[::-1])


def _signs_read(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Read unsigned integers of 8 bits as signed ones, and signed ones as unsigned less 128."""
    if weight.element not in ("int8", "uint8"):
        return None
    codes = _as_bytes(weight.elements)
    signed = codes if weight.element == "uint8" else codes ^ 128
    return replace(weight, element="int8", elements=signed.view(torch.int8), zero_points=None)


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


def _pairs_of_rows_swapped(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Swap codes that lie in one byte where a weight is packed along its rows."""
    rows, columns = weight.elements.shape
    if rows % 2:
        return None
    pairs = _as_bytes(weight.elements).reshape(-1, 2, columns)
    swapped = pairs.flip(1).reshape(rows, columns).view(weight.elements.dtype)
    return replace(weight, elements=swapped)


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


def _scales_transposed(weight: QuantizedWeight, back: bool) -> QuantizedWeight | None:
    rows, columns = weight.scales.shape
    if rows < 2 or columns < 2:
        return None
    if back:
        return replace(weight, scales=weight.scales.T.reshape(rows, columns))
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
