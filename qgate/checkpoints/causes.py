"""Faults of exporters that explain a weight with too much error: undone, the error is ideal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from qgate.causes.faults import Fault
from qgate.checkpoints.compute import measured, squared
from qgate.checkpoints.conventions import CONVENTIONS, NESTED
from qgate.checkpoints.gguf.causes import block_faults
from qgate.checkpoints.grids import AWQ_ORDER, TALL, QuantizedWeight, decode_e8m0, widen
from qgate.checkpoints.ideal import Extremes, ideal_scales, ideal_values
from qgate.checkpoints.moved_scales import (
    moved_lines,
    moved_scales,
    scales_swapped,
    scales_transposed,
    unswizzled,
    with_moved_scales,
)
from qgate.formats import get
from qgate.formats.choosing import ChoosingFormat

EXPLAINED_DB = 0.7
"""Error over the ideal one at which an undone fault counts as the cause."""
BLOCKS_DB = 1.0
"""The same for blocks of GGUF, whose ideal error is an estimate."""
UNBALANCED = 0.25
"""Largest share by which groups may be larger or smaller than all others to be the right ones."""
LARGEST_DB = 9.0
"""Error over the ideal one that a right method may have at most."""
SAME_SIZE = 0.03
"""Logarithm of a factor of all values that rounding leaves."""
LEADING = 1 << 20
"""Elements in leading rows that tell what all scales have too much."""
Kind = tuple[str, bool, tuple[int, int], str]
Change = Callable[[QuantizedWeight], QuantizedWeight | None]
CHOOSING = "if4", "mixfp4"
"""Formats of packed FP4 whose blocks have another grid where the sign bit of their scale is set."""


@dataclass(frozen=True)
class ExportFault(Fault[Change]):
    """A fault of an exporter; `change` undoes it.

    reformats   what is undone has another format, and the ideal error of that one
    """

    reformats: bool = False


Acceptance = Callable[[QuantizedWeight, Tensor], bool]
"""Says of a weight with more error than an ideal one whether a method makes it so on purpose."""


def find_cause(
    weight: QuantizedWeight,
    parent: Tensor,
    accepts: Acceptance | None = None,
    faults: Iterable[ExportFault] = (),
    *,
    is_part: bool = False,
) -> str:
    """Name the fault without which a weight would be as a right quantizer makes it.

    faults   those to try, instead of all that need no parent
    is_part  these are leading rows of a weight, where what moved has ends that are not here
    """
    start, stop = _inner_rows(weight) if is_part else (0, len(weight.elements))
    source = parent[start:stop]
    energy = squared(source.float())
    bounds: dict[Kind, tuple[float, float]] = {}
    for fault in faults or (*_own_faults(weight, parent), *_faults(weight)):
        undone = fault.change(weight)
        if undone is None:
            continue
        undone = undone.rows(start, stop)
        kind = _kind(undone, fault.words) if fault.reformats else _kind(weight)
        if kind not in bounds:
            bounds[kind] = _bounds(undone if fault.reformats else weight.rows(start, stop), source)
        allowed, worst = bounds[kind]
        if allowed > energy:
            continue  # The scale of the whole tensor lets nothing be near.
        error = _error_up_to(worst if accepts is not None else allowed, undone, source)
        if error <= allowed or (error <= worst and accepts is not None and accepts(undone, source)):
            return fault.words
    return ""


def _bounds(weight: QuantizedWeight, parent: Tensor) -> tuple[float, float]:
    """Return the squared errors that a weight without a fault, and a method, have at most."""
    over = BLOCKS_DB if weight.element in CONVENTIONS else EXPLAINED_DB
    least = measured(weight, parent).least
    return least * 10 ** (over / 10), least * 10 ** (LARGEST_DB / 10)


def _own_faults(weight: QuantizedWeight, parent: Tensor) -> Iterator[ExportFault]:
    """Yield the faults of packings with bytes or scales of their own."""
    for words, undone in block_faults(weight):
        yield ExportFault(words, lambda _, undone=undone: undone(), reformats=True)  # type: ignore[misc]
    yield from scale_type_faults(weight, parent)
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


def scale_type_faults(weight: QuantizedWeight, parent: Tensor) -> Iterator[ExportFault]:
    """Yield block scales that are read in another format of one byte."""
    if weight.scale_codes is not None:
        for words, undo in scales_of_other_formats(weight, parent):
            yield ExportFault(words, undo)


def _kind(weight: QuantizedWeight, fault: str = "") -> Kind:
    return weight.element, weight.zero_points is None, weight.tile, fault


def _inner_rows(weight: QuantizedWeight) -> tuple[int, int]:
    """Return the rows without those at both ends, where there are more."""
    starts = [start for start, _ in weight.spans()]
    return (starts[1], starts[-1]) if len(starts) > 2 else (0, len(weight.elements))


def _error_up_to(allowed: float, weight: QuantizedWeight, parent: Tensor) -> float:
    """Add up the error of a weight until it is more than allowed."""
    total = 0.0
    for start, stop in weight.spans():
        total += squared(weight.rows(start, stop).values() - parent[start:stop].float())
        if not total <= allowed:
            return math.inf
    return total


def _faults(weight: QuantizedWeight) -> Iterator[ExportFault]:
    words = "neighboring codes are swapped (the order of nibbles)"
    yield ExportFault(words, _pairs_swapped)
    yield ExportFault(words, _pairs_of_rows_swapped)
    for axis, lines in enumerate(("rows", "columns")):
        halves = f"codes of each half of the {lines} are in the other half (the order of nibbles)"
        yield ExportFault(halves, partial(_halves_swapped, axis=axis))
    yield ExportFault("the codes of each word are in reversed order", _words_reversed)
    for words, change, reformats in misread_codes(weight):
        yield ExportFault(words, change, reformats)
    for power in (1, -1, 2, -2):
        yield ExportFault(
            f"all scales are {2 ** abs(power)} times too {'high' if power > 0 else 'low'}",
            partial(_scaled, by=2.0**-power),
        )
    words = "the scale of the whole tensor is stored inverted"
    yield ExportFault(words, _whole_inverted, reformats=True)
    yield ExportFault("scales are stored inverted", lambda w: replace(w, scales=1 / w.scales))
    for step, side in ((-1, "before"), (1, "after")):
        words = f"every scale belongs to the group {side} it"
        yield ExportFault(words, partial(moved_scales, step=step))
        if weight.zero_points is not None:
            undo = partial(moved_scales, step=step, has_zeros=False)
            yield ExportFault(f"{words}, zero points do not", undo)
    yield ExportFault("scales of neighboring groups are swapped", scales_swapped)
    for words, change in moved_lines(weight):
        yield ExportFault(words, change)
    for back in (False, True):
        words = "scales stand in the order of columns, not of rows"
        yield ExportFault(words, partial(scales_transposed, back=back))
    yield ExportFault("scales are swizzled in tiles of 128 x 4", unswizzled)
    yield ExportFault("scales stand along the wrong axis", _axes_exchanged, reformats=True)
    kind = "unsigned" if weight.element.startswith("u") else "signed"
    yield ExportFault(f"codes are read as {kind} and are not", _signs_read, reformats=True)
    yield ExportFault("all signs are lost or flipped", partial(_scaled, by=-1.0))
    if weight.zero_points is not None:
        for step in (1, -1):
            word = "high" if step > 0 else "low"
            yield ExportFault(f"zero points are 1 too {word}", partial(_zeros_less, step=step))
        yield ExportFault(
            "zero points are left out", lambda w: replace(w, zero_points=None), reformats=True
        )
    yield ExportFault("rows stand in another order: moved by one", _rows_moved)
    is_square = weight.shape[0] == weight.shape[1]
    words = "its rows and columns are exchanged" if is_square else "every square part is transposed"
    yield ExportFault(words, _transposed)


def wrong_zero_points(weight: QuantizedWeight, parent: Tensor) -> ExportFault:
    """Return the fault of zero points that are not the ones that the parent tells."""
    if not weight.element.startswith(("int", "uint")):
        return ExportFault("", lambda _: None)
    stored = weight.zero_points
    is_missing = stored is None or not bool(stored.any())
    words = f"zero points are {'missing' if is_missing else 'wrong'}"
    return ExportFault(words, lambda w: _zero_points_fitted(w, parent), reformats=True)


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
    if rows != columns or weight.scales.numel() < 2 or weight.element in CONVENTIONS:
        return None
    if weight.scale_codes is not None:
        return None
    return replace(with_moved_scales(weight, lambda x: x.T), tile=weight.tile[::-1])


def _signs_read(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Read unsigned integers of 8 bits as signed ones, and signed ones as unsigned less 128."""
    if weight.element not in ("int8", "uint8"):
        return None
    codes = _as_bytes(weight.elements)
    signed = codes if weight.element == "uint8" else codes ^ 128
    return replace(weight, element="int8", elements=signed.view(torch.int8), zero_points=None)


def _scaled(weight: QuantizedWeight, by: float) -> QuantizedWeight:
    return replace(weight, scales=weight.scales * by)


def _whole_inverted(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Divide by the scale of the whole tensor that was multiplied in, and the other way round."""
    codes = weight.scale_codes
    if codes is None or codes.dtype == torch.uint8:
        return None
    ratios = (weight.scales / codes.float())[codes.float() > 0]
    whole = ratios.median() if ratios.numel() else torch.ones(())
    return replace(weight, scales=weight.scales / whole / whole)


def wrong_size(weight: QuantizedWeight, parent: Tensor) -> ExportFault:
    """Return the fault of one factor of all scales, whatever it is."""
    own, energy = weight.values(), parent.double().square().sum()
    factor = float((own.double() * parent).sum() / energy.clamp(min=1e-300))
    if not math.isfinite(factor) or factor <= 0 or abs(math.log(factor)) < SAME_SIZE:
        return ExportFault("", lambda _: None)
    times, side = (factor, "high") if factor > 1 else (1 / factor, "low")
    words = f"all scales are {times:.3g} times too {side}"
    return ExportFault(words, partial(_scaled, by=1 / factor))


def _zeros_less(weight: QuantizedWeight, step: int) -> QuantizedWeight | None:
    zeros = weight.zero_points
    return None if zeros is None else replace(weight, zero_points=zeros - step)


def _pairs_swapped(weight: QuantizedWeight) -> QuantizedWeight | None:
    rows, columns = weight.shape
    return None if columns % 2 else _flipped(weight, (rows, -1, 2), 2)


def _halves_swapped(weight: QuantizedWeight, axis: int) -> QuantizedWeight | None:
    """Swap codes that lie in one byte where its halves are a half of the weight apart."""
    length = weight.shape[axis]
    if length % 2:
        return None
    codes = _as_bytes(weight.elements).roll(length // 2, axis)
    return replace(weight, elements=codes.view(weight.elements.dtype))


def _flipped(weight: QuantizedWeight, shape: tuple[int, int, int], axis: int) -> QuantizedWeight:
    """Reverse the codes of each group, which are an axis of the codes in this shape."""
    elements = weight.elements
    codes = _as_bytes(elements).reshape(shape).flip(axis)
    return replace(weight, elements=codes.reshape(elements.shape).view(elements.dtype))


def _as_bytes(elements: Tensor) -> Tensor:
    """View FP8 as bytes, as torch neither flips nor rolls it."""
    is_byte = elements.dtype.itemsize == 1
    return elements.contiguous().view(torch.uint8) if is_byte else elements


def _words_reversed(weight: QuantizedWeight) -> QuantizedWeight | None:
    bits = int(weight.element[-1]) if weight.element.startswith(("int", "uint")) else 4
    rows, columns = weight.shape
    if bits not in (2, 4, 8) or columns % (32 // bits):
        return None
    return _flipped(weight, (rows, -1, 32 // bits), 2)


def _pairs_of_rows_swapped(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Swap codes that lie in one byte where a weight is packed along its rows."""
    rows, columns = weight.shape
    return None if rows % 2 else _flipped(weight, (-1, 2, columns), 1)


def _transposed(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Swap rows and columns of a square matrix, or of square matrices below each other."""
    rows, columns = weight.elements.shape
    if rows % columns or columns < 2:
        return None
    turned = weight.values().reshape(-1, columns, columns).transpose(1, 2).reshape(rows, columns)
    return replace(
        weight, elements=turned, scales=torch.ones(1, 1), tile=(rows, columns), zero_points=None,
        scale_codes=None, unit=1.0, order=None, offsets=None, blocks=None,
    )  # fmt: skip


def wrong_groups(parent: Tensor) -> ExportFault:
    """Return the fault of scales that belong to other columns; it is the last to be tried."""
    words = "columns belong to other groups than those whose scales they have (g_idx)"
    return ExportFault(words, lambda weight: _regrouped(weight, parent))


def wrong_powers(weight: QuantizedWeight, parent: Tensor) -> ExportFault:
    """Return the fault of some scales that are powers of two away from ideal ones."""
    if weight.tile[0] > TALL:
        return ExportFault("", lambda _: None)
    ideal = torch.cat([_ideal_scales(weight, parent, *span) for span in weight.spans()])
    usable = (weight.scales > 0) & (ideal > 0) & weight.scales.isfinite()
    powers = torch.where(usable, (weight.scales / ideal.clamp(min=1e-30)).log2().round(), 0.0)
    count = int(powers.count_nonzero())
    words = f"{count:,} of {powers.numel():,} scales are off by powers of two"
    scales = weight.scales * 2.0**-powers
    return ExportFault(words, lambda w: replace(w, scales=scales) if count else None)


def _ideal_scales(weight: QuantizedWeight, parent: Tensor, start: int, stop: int) -> Tensor:
    rows = weight.rows(start, stop)
    tiles = rows.in_tiles(parent[start:stop].float()).contiguous()
    return ideal_scales(rows, Extremes.of(tiles, signed=rows.has_zero_points))[0]


def _regrouped(weight: QuantizedWeight, parent: Tensor) -> QuantizedWeight | None:
    """Give every column the scales of the group that fit its codes best."""
    rows, columns = weight.elements.shape
    count = weight.scales.shape[1]
    if len(weight.scales) != rows or not 1 < count <= 512 or weight.tile[1] >= columns:
        return None
    zeros = torch.zeros_like(weight.scales) if weight.zero_points is None else weight.zero_points
    step = -(-rows // 256)
    grids = torch.stack([weight.scales, zeros])
    elements, values = widen(weight.elements[::step]) * weight.unit, parent[::step].float()
    errors = torch.stack(
        [
            ((elements - zero[::step, None]) * scale[::step, None] - values).square().sum(0)
            for scale, zero in grids.permute(2, 0, 1)
        ]
    )
    groups = errors.argmin(0)
    size = columns / count
    if float((groups.bincount(minlength=count) - size).abs().max()) > UNBALANCED * size:
        return None
    scales, zeros = grids[:, :, groups]
    return replace(
        weight, scales=scales, zero_points=zeros, tile=(1, 1), scale_codes=None, order=None
    )


def _rows_moved(weight: QuantizedWeight) -> QuantizedWeight:
    def moved(x: Tensor) -> Tensor:
        if len(x) != len(weight.elements):
            return x
        return _as_bytes(x).roll(-1, 0).view(x.dtype)

    return replace(with_moved_scales(weight, moved), elements=moved(weight.elements))


def misread_codes(weight: QuantizedWeight) -> Iterator[tuple[str, Change, bool]]:
    """Yield what was misread in words, undone, and whether that has another format."""
    for axis, to_order in itertools.product((0, 1), (True, False)):
        read, stored = ("of AWQ", "of their neighbors")[:: 1 if to_order else -1]
        words = f"the codes of each word are read in the order {read}, and stand in that {stored}"
        for has_zeros in (True, False) if axis == 0 and weight.has_zero_points else (False,):
            change = partial(_reordered, axis=axis, to_order=to_order, has_zeros=has_zeros)
            yield words, change, False
    formats = ("fp8_e4m3", "fp8_e5m2")[:: 1 if weight.element == "fp8_e4m3" else -1]
    yield f"codes are read as {formats[0]} and are {formats[1]}", _exchanged_fp8, True


def _reordered(
    weight: QuantizedWeight, axis: int, to_order: bool, has_zeros: bool
) -> QuantizedWeight | None:
    """Reorder eight neighbors, that were read in the order of AWQ's words, or should have been."""
    order = torch.tensor(AWQ_ORDER)
    if weight.shape[axis] % len(order) or weight.element not in ("int4", "uint4"):
        return None
    starts = torch.arange(0, weight.shape[axis], len(order))[:, None]
    lines = (starts + (order.argsort() if to_order else order)).flatten()
    elements = weight.elements.index_select(axis, lines)
    zeros = weight.zero_points
    if has_zeros and zeros is not None and len(zeros) == len(elements):
        zeros = zeros[lines]
    return replace(weight, elements=elements, zero_points=zeros)


def _exchanged_fp8(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Read E4M3 as E5M2, and the other way round."""
    kinds = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    if kinds.pop(weight.element, None) != weight.elements.dtype:
        return None
    ((element, dtype),) = kinds.items()
    return replace(weight, element=element, elements=weight.elements.view(dtype))


def _decode_ue5m3(codes: Tensor) -> Tensor:
    table = torch.tensor(get("fp8_ue5m3").element.code_values(), dtype=torch.float32)
    return table[codes.int()]


SCALE_CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "E4M3": lambda codes: codes.view(torch.float8_e4m3fn).float(),
    "E8M0": decode_e8m0,
    "UE5M3": _decode_ue5m3,
}
"""Formats of one byte that scales of blocks have, and what their codes are."""


def scales_of_other_formats(
    weight: QuantizedWeight, parent: Tensor
) -> Iterator[tuple[str, Change]]:
    """Yield scales of one byte that are read in another format than theirs, in words, and undone.

    The scale of the whole tensor belongs to the format that is read, so the parent tells it.
    """
    assert weight.scale_codes is not None
    codes = weight.scale_codes.contiguous().view(torch.uint8)
    stored = "E8M0" if weight.scale_codes.dtype == torch.uint8 else "E4M3"
    if bool((codes == codes.reshape(-1)[:1]).all()):
        return
    count = min(len(weight.elements), -(-LEADING // max(1, weight.shape[1])))
    for meant, decode in SCALE_CODES.items():
        scales = decode(codes)
        if meant == stored or not bool(scales.isfinite().all()) or not bool((scales > 0).any()):
            continue
        # Where no code is subnormal, E4M3 and UE5M3 differ by a factor, which is another fault.
        ratios = (scales / weight.scales)[weight.scales != 0]
        if ratios.numel() and float(ratios.max()) <= 1.001 * float(ratios.min()):
            continue
        values = replace(weight, scales=scales).rows(0, count).values().double()
        product = (values * parent[:count].double()).sum()
        factor = float(product / values.square().sum().clamp(min=1e-300))
        words = f"scales are codes of {meant}, and are read as {stored}"
        yield words, partial(_with_scales, scales=scales * factor)
    if weight.element == "fp4_e2m1" and stored == "E4M3" and bool((codes >= 128).any()):
        for name in CHOOSING:
            words = f"the sign bit of scales chooses a grid ({name}), and is read as a sign"
            yield words, partial(_on_grids, name=name)


def _with_scales(weight: QuantizedWeight, scales: Tensor) -> QuantizedWeight:
    return replace(weight, scales=scales)


def _on_grids(weight: QuantizedWeight, name: str) -> QuantizedWeight:
    """Read each block whose scale is negative on the second grid of a format."""
    fmt = get(name)
    assert isinstance(fmt, ChoosingFormat)
    tiles = weight.in_tiles(weight.float_elements())
    codes = fmt.element.sorted_values.searchsorted(tiles.numpy())
    on_second = torch.tensor(fmt.second_values(), dtype=torch.float32)[
        fmt.element.sorted_codes[codes]
    ]
    is_second = (weight.scales < 0)[:, None, :, None]
    elements = weight.from_tiles(on_second.where(is_second, tiles))
    return replace(weight, elements=elements, scales=weight.scales.abs(), unit=1.0)
