"""Undo what exporters do to scales: move them, transpose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight

Change = Callable[[QuantizedWeight], QuantizedWeight | None]


def moved_scales(
    weight: QuantizedWeight, step: int, has_zeros: bool = True
) -> QuantizedWeight | None:
    """Move scales to other groups, and their zero points where these have moved, too."""
    if weight.scales.numel() < 2:
        return None
    moved = with_moved_scales(weight, lambda x: x.reshape(-1).roll(step).reshape(x.shape))
    return moved if has_zeros else _with_own_zeros(moved, weight)


def moved_lines(weight: QuantizedWeight) -> Iterator[tuple[str, Change]]:
    """Yield scales that moved by one row, or by one group within rows, in words, and undone."""
    if min(weight.scales.shape) < 2:
        return
    for axis, text in ((0, "the row {} it"), (1, "the group {} it in the same row")):
        for step, side in ((-1, "before"), (1, "after")):
            words = f"every scale belongs to {text.format(side)}"
            yield words, partial(_moved_line, step=step, axis=axis, has_zeros=True)
            if weight.zero_points is not None:
                change = partial(_moved_line, step=step, axis=axis, has_zeros=False)
                yield f"{words}, zero points do not", change


def _moved_line(weight: QuantizedWeight, step: int, axis: int, has_zeros: bool) -> QuantizedWeight:
    moved = with_moved_scales(weight, lambda x: x.roll(step, axis))
    return moved if has_zeros else _with_own_zeros(moved, weight)


def _with_own_zeros(moved: QuantizedWeight, weight: QuantizedWeight) -> QuantizedWeight:
    """Keep the zero points of a weight whose scales were moved; those of minima follow scales."""
    zeros = weight.zero_points
    if zeros is not None and bool((zeros != zeros.round()).any()):
        zeros = zeros * weight.scales / moved.scales
    return replace(moved, zero_points=zeros)


def with_moved_scales(weight: QuantizedWeight, move: Callable[[Tensor], Tensor]) -> QuantizedWeight:
    """Move scales, and zero points with them."""
    zeros = None if weight.zero_points is None else move(weight.zero_points)
    return replace(weight, scales=move(weight.scales), zero_points=zeros)


def scales_swapped(weight: QuantizedWeight) -> QuantizedWeight | None:
    count = weight.scales.numel()
    if count < 2 or count % 2:
        return None
    return with_moved_scales(weight, lambda x: x.reshape(-1, 2).flip(1).reshape(x.shape))


def scales_transposed(weight: QuantizedWeight, back: bool) -> QuantizedWeight | None:
    rows, columns = weight.scales.shape
    if rows < 2 or columns < 2:
        return None
    if back:
        return replace(weight, scales=weight.scales.T.reshape(rows, columns))
    return replace(weight, scales=weight.scales.reshape(columns, rows).T.contiguous())


def unswizzled(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Undo the order of block scales that tensor cores read: 128 rows by 4 columns."""
    rows, columns = weight.scales.shape
    if rows % 128 or columns % 4:
        return None
    tiled = weight.scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    return replace(weight, scales=tiled.permute(0, 3, 2, 1, 4).reshape(rows, columns))
