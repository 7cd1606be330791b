"""Faults of exporters that explain a weight with too much error: undone, the error is ideal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgate.checkpoints.compute import ideal_values
from qgate.checkpoints.grids import QuantizedWeight

EXPLAINED_DB = 0.5
"""Error over the ideal one at which an undone fault counts as the cause."""
Change = Callable[[QuantizedWeight], QuantizedWeight | None]


@dataclass(frozen=True)
class ExportFault:
    """A fault in words, and what undoes it."""

    words: str
    undo: Change


def find_cause(weight: QuantizedWeight, parent: Tensor) -> str:
    """Name the fault without which a weight would be as an ideal quantizer makes it."""
    weight = replace(weight, elements=weight.float_elements(), unit=1.0)
    allowed = _allowed(weight, parent)
    for fault in (*_faults(weight), *_fitted_faults(weight, parent)):
        undone = fault.undo(weight)
        if undone is None:
            continue
        is_same = _kind(undone) == _kind(weight)
        most = allowed if is_same else _allowed(undone, parent)
        if float((undone.values() - parent).square().sum(dtype=torch.float64)) <= most:
            return fault.words
    return ""


def _allowed(weight: QuantizedWeight, parent: Tensor) -> float:
    """Return the error up to which a weight is as an ideal quantizer of its format makes it."""
    ideal, _ = ideal_values(weight, parent)
    least = float((ideal - parent).square().sum(dtype=torch.float64))
    return least * 10 ** (EXPLAINED_DB / 10)


def _kind(weight: QuantizedWeight) -> tuple[str, bool, tuple[int, int]]:
    return weight.element, weight.zero_points is None, weight.tile


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
    scales = weight.scales[:, None, :, None]
    offsets = weight.in_tiles(weight.elements) - weight.in_tiles(parent) / scales
    zeros = offsets.transpose(1, 2).flatten(2).median(-1).values.round()
    return replace(weight, zero_points=zeros)


def _axes_exchanged(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Move scales of rows of a square weight to its columns, and back."""
    rows, columns = weight.elements.shape
    if rows != columns or weight.scales.numel() < 2:
        return None
    zeros = None if weight.zero_points is None else weight.zero_points.T
    return replace(weight, scales=weight.scales.T, zero_points=zeros, tile=weight.tile[::-1])


def _signs_read(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Read unsigned integers of 8 bits as signed ones, and signed ones as unsigned less 128."""
    codes = weight.elements
    if weight.element == "uint8":
        signed = torch.where(codes > 127, codes - 256, codes)
    elif weight.element == "int8":
        signed = torch.where(codes < 0, codes + 128, codes - 128)
    else:
        return None
    return replace(weight, element="int8", elements=signed, zero_points=None)


def _less(zero_points: Tensor | None, step: int) -> Tensor | None:
    return None if zero_points is None else zero_points - step


def _pairs_swapped(weight: QuantizedWeight) -> QuantizedWeight | None:
    rows, columns = weight.elements.shape
    if columns % 2:
        return None
    pairs = weight.elements.reshape(rows, -1, 2)
    return replace(weight, elements=pairs.flip(2).reshape(rows, columns))


def _pairs_of_rows_swapped(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Swap codes that lie in one byte where a weight is packed along its rows."""
    rows, columns = weight.elements.shape
    if rows % 2:
        return None
    pairs = weight.elements.reshape(-1, 2, columns)
    return replace(weight, elements=pairs.flip(1).reshape(rows, columns))


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
        return x.roll(-step, 0) if len(x) == len(weight.elements) else x

    zeros = None if weight.zero_points is None else moved(weight.zero_points)
    return replace(
        weight, elements=moved(weight.elements), scales=moved(weight.scales), zero_points=zeros
    )
