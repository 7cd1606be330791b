"""Right codes and scales in the wrong places: orders in which kernels store and read them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from qgate.causes.faults import Cast, WrongCast
from qgate.errors import QgateError
from qgate.expected.conventions import with_options
from qgate.expected.group_scales import by_groups
from qgate.expected.searched_scales import scales_of
from qgate.formats.groups import KNOWN, Groups
from qgate.formats.options import Floats
from qgate.formats.scale_layouts import BY_ROW, SWIZZLES, ScaleLayout
from qgate.formats.settings import QuantizerSettings

if TYPE_CHECKING:
    from torch import Tensor

EIGHTS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""The order in which eight codes of 4 bits are packed, so that pairs are 16 bits apart."""
LANES = (
    ("in reverse order within each four", np.array([3, 2, 1, 0])),
    ("in reverse order within each eight", np.arange(8)[::-1]),
    ("in the order 0, 2, 1, 3 of each four", np.array([0, 2, 1, 3])),
    ("in halves of each four that are swapped", np.array([2, 3, 0, 1])),
    ("in halves of each eight that are swapped", np.array([4, 5, 6, 7, 0, 1, 2, 3])),
)
"""Orders of the codes of one word."""
GROUPS_IN_A_ROW = (2, 4, 8, 16, 32, 64)
"""Groups in a row that a kernel may give one scale, or count anew after."""
AnyArray = TypeVar("AnyArray", Floats, "Tensor")
Move = Callable[[Floats], Floats]
"""The scales of one tensor, a row of them for each line of elements, in another order."""


def layout_faults(q: QuantizerSettings, ideal: Cast) -> Iterator[WrongCast]:
    """List wrong orders of codes and scales: words, and the values that each makes of a source."""
    yield WrongCast("is transposed", lambda x: _square(ideal(x)).swapaxes(-1, -2))
    for tile in (8, 16, 32, 64, 128):
        yield WrongCast(
            f"has its tiles of {tile}x{tile} transposed",
            lambda x, tile=tile: tiles_transposed(ideal(x), tile),  # type: ignore[misc]
        )
    yield WrongCast(
        "has neighboring codes swapped (the order of nibbles)",
        lambda x: by_groups(ideal(x), grouped(q), lambda codes: _swapped(codes, 1)),
    )
    if q.granularity == "block" and not q.block % 2:
        for words, order in (
            ("is read in pairs, but stored as two halves of each block", _halves_in_pairs),
            ("is read as two halves of each block, but stored in pairs", _pairs_in_halves),
        ):
            yield WrongCast(
                f"{words} (the order of nibbles)",
                lambda x, order=order: by_groups(ideal(x), q, order),  # type: ignore[misc]
            )
    if q.format.element.bits == 4:
        for words, eights in (("stored", EIGHTS), ("read", np.argsort(EIGHTS))):
            yield WrongCast(
                f"has its codes {words} in the order 0, 2, 4, 6, 1, 3, 5, 7 of each eight",
                lambda x, eights=eights: _in_eights(ideal(x), eights),  # type: ignore[misc]
            )
    yield WrongCast(
        "is shifted by one element",
        lambda x: np.roll(ideal(x).reshape(-1), 1).reshape(x.shape),
    )
    if q.granularity is not None:
        yield WrongCast(
            "is decoded without scales: its codes are taken as values",
            lambda x: ideal(x) / spread_scales(x, q),
        )
    yield from _lane_faults(ideal)
    if q.groups is not None:
        for words, groups in other_groups(q.groups):
            yield WrongCast(
                f"is decoded as if it had {words}, not one per {q.groups.name}",
                lambda x, groups=groups: _read_as(x, q, ideal, groups),  # type: ignore[misc]
            )
    if q.granularity in ("block", "channel", "groups"):
        for words, move in _moves(q):
            yield WrongCast(
                f"is decoded with {words}",
                lambda x, move=move: _moved_scales(x, q, ideal, move),  # type: ignore[misc]
            )
    if q.granularity == "block" and q.tile is None:
        for words, move in _memory_faults():
            yield WrongCast(
                f"is decoded with {words}",
                lambda x, move=move: _in_memory(x, q, ideal, move),  # type: ignore[misc]
            )
    if q.granularity in ("block", "channel"):
        yield WrongCast(
            "is decoded with the scales of rows for columns",
            lambda x: _square(ideal(x)) * _turned_scales(x, q),
        )
    if q.granularity == "block" and q.tile is None:
        for step, which, way in ((-1, "last", "next"), (1, "first", "previous")):
            yield WrongCast(
                f"is decoded with the scale of the {way} group for the {which} element of each",
                lambda x, step=step: _late_element(x, q, ideal, step),  # type: ignore[misc]
            )


def _moves(q: QuantizerSettings) -> Iterator[tuple[str, Move]]:
    yield "the scales of neighboring groups swapped", _flat(lambda s: _swapped(s, 0))
    yield "every scale moved to the next group", _flat(lambda s: np.roll(s, 1))
    yield "every scale moved to the previous group", _flat(lambda s: np.roll(s, -1))
    yield (
        "one scale, that of the first group, for all groups",
        _flat(lambda s: np.broadcast_to(s[:1], s.shape)),
    )
    yield "scales swizzled in tiles of 4x4", _flat(_swizzled)
    for words, move in repeated_moves("groups", 0):
        yield words, _flat(move)
    if q.granularity not in ("block", "groups"):
        return
    own = "row" if q.groups is None else "matrix"
    yield f"every scale moved to the next group of its {own}", lambda s: np.roll(s, 1, 1)
    yield f"every scale moved to the previous group of its {own}", lambda s: np.roll(s, -1, 1)
    yield (
        f"every scale moved to the previous group of its {own}, the last one for two",
        lambda s: np.concatenate([s[:, 1:], s[:, -1:]], 1),
    )
    yield (
        f"every scale moved to the next group of its {own}, the first one for two",
        lambda s: np.concatenate([s[:, :1], s[:, :-1]], 1),
    )
    yield (
        f"the scale of the group before it, the last group of each {own}",
        lambda s: np.concatenate([s[:, :-1], s[:, -2:-1]], 1),
    )
    yield from forgotten_scales(own)
    yield from repeated_moves("rows", 0)
    yield from repeated_moves("groups of a row", 1)
    yield "every scale moved to the next row", lambda s: np.roll(s, 1, 0)
    yield "every scale moved to the previous row", lambda s: np.roll(s, -1, 0)
    yield (
        f"scales of groups of {2 * q.block}, not of {q.block}",
        lambda s: s[:, np.arange(s.shape[1]) // 2],
    )
    yield "scales stored column by column, read row by row", lambda s: s.T.reshape(s.shape)
    yield "scales stored row by row, read column by column", lambda s: s.reshape(s.shape[::-1]).T


def other_groups(own: Groups) -> Iterator[tuple[str, Groups]]:
    """List groups that a kernel may have in the place of its own: words, and the groups."""
    for rows, words in ((1, "late"), (-1, "early")):
        yield f"groups that begin one row {words}", replace(own, of=_shifted(own, rows))
    for layout in KNOWN:
        if layout.name != own.name:
            yield f"one scale per {layout.name}", replace(layout, axes=own.axes)


def _shifted(own: Groups, rows: int) -> Callable[..., Any]:
    return lambda row, column: own.of(np.maximum(row - rows, 0), column)


def _read_as(x: Floats, q: QuantizerSettings, ideal: Cast, groups: Groups) -> Floats:
    """Decode ideal codes with scales that are looked up by the numbers of other groups."""
    assert q.groups is not None
    row, column = q.groups.along(x.ndim)
    sizes = x.shape[row], x.shape[column]
    scales = scales_of(q.groups.split(x), q).reshape(*q.groups.scales_shape(x.shape))
    numbers = groups.numbers(*sizes)
    if numbers.max(initial=0) >= scales.shape[-1]:
        raise QgateError("the other groups have more scales")
    looked_up = np.moveaxis(scales[..., numbers], (-2, -1), q.groups.axes)
    return ideal(x) * looked_up / spread_scales(x, q)


def forgotten_scales(own: str) -> Iterator[tuple[str, Move]]:
    """List scales at one end of each line that are 1, as where a loop stops early."""
    for end, which in ((0, "first"), (-1, "last")):
        yield (
            f"a scale of 1 for the {which} group of each {own}",
            lambda s, end=end: _with_one(s, end),  # type: ignore[misc]
        )


def _with_one(scales: Floats, end: int) -> Floats:
    if scales.shape[1] < 2:
        raise QgateError("there is one group")
    changed = scales.copy()
    changed[:, end] = 1.0
    return changed


def repeated_moves(groups: str, axis: int) -> Iterator[tuple[str, Move]]:
    """List scales of which some are taken for several groups, or that begin anew."""
    for count in GROUPS_IN_A_ROW:
        yield (
            f"the scale of the first of each {count} {groups}",
            lambda s, n=count: np.take(s, _numbers(s, axis, n) // n * n, axis),  # type: ignore[misc]
        )
        yield (
            f"the scales of the first {count} {groups} again for all others",
            lambda s, n=count: np.take(s, _numbers(s, axis, n) % n, axis),  # type: ignore[misc]
        )
        for last in (count - 1, count):
            yield (
                f"the scale of number {last} of the {groups} for all that follow",
                lambda s, n=last: np.take(s, _numbers(s, axis, n + 1).clip(max=n), axis),  # type: ignore[misc]
            )


def _numbers(scales: Floats, axis: int, count: int) -> Any:
    if count >= scales.shape[axis]:
        raise QgateError("there are no others")
    return np.arange(scales.shape[axis])


def _flat(move: Move) -> Move:
    return lambda scales: move(scales.reshape(-1)).reshape(scales.shape)


def _memory_faults() -> Iterator[tuple[str, Move]]:
    """List layouts in memory that are taken for others; scales are [matrix, row, block]."""
    pairs = [pair for layout in SWIZZLES for pair in ((BY_ROW, layout), (layout, BY_ROW))]
    for stored, read in (*pairs, *itertools.permutations(SWIZZLES, 2)):
        yield (
            f"scales stored {stored.name}, read {read.name}",
            lambda s, stored=stored, read=read: _read_back(s, s, stored, read),  # type: ignore[misc]
        )
    for layout in SWIZZLES:
        yield (
            f"scales of all matrices stored {layout.name} as one, read matrix by matrix",
            lambda s, layout=layout: _read_back(s, s.reshape(1, -1, s.shape[-1]), layout, layout),  # type: ignore[misc]
        )


def _read_back(scales: Floats, matrices: Floats, stored: ScaleLayout, read: ScaleLayout) -> Floats:
    """Store matrices of scales in one layout and read scales of a shape in another."""
    into, out = _addresses(stored, matrices.shape), _addresses(read, scales.shape)
    memory = np.zeros(max(into.max(initial=0), out.max(initial=0)) + 1)
    memory[into] = matrices
    return np.asarray(memory[out])


def _addresses(layout: ScaleLayout, shape: tuple[int, ...]) -> Any:
    """Return where a layout has the scales of matrices, one after the other."""
    places = math.prod(layout.padded(*shape[1:]))
    return np.arange(shape[0])[:, None, None] * places + layout.addresses(*shape[1:])


def _in_memory(x: Floats, q: QuantizerSettings, ideal: Cast, move: Move) -> Floats:
    """Decode ideal codes with scales that a layout in memory takes for others."""
    axis = q.axis_of(x.ndim)
    rows = [size for number, size in enumerate(x.shape) if number != axis]

    def moved(scales: Floats) -> Floats:
        matrices = scales.reshape(math.prod(rows[:-1]), *rows[-1:], -1)
        return np.asarray(move(matrices)).reshape(-1) / scales

    return ideal(x) * spread_scales(x, q, moved)


def _square(values: Floats) -> Floats:
    if values.ndim < 2 or values.shape[-1] != values.shape[-2]:
        raise QgateError("not square")
    return values


def _lane_faults(ideal: Cast) -> Iterator[WrongCast]:
    """List codes in another order within words, as vector loads and byte orders make them."""
    for words, order in LANES:
        yield WrongCast(
            f"has its codes {words}",
            lambda x, order=order: _in_eights(ideal(x), order),  # type: ignore[misc]
        )


def _in_eights(values: Floats, order: Any) -> Floats:
    if values.shape[-1] % len(order):
        raise QgateError(f"no whole groups of {len(order)}")
    return values.reshape(*values.shape[:-1], -1, len(order))[..., order].reshape(values.shape)


def tiles_transposed(values: AnyArray, tile: int) -> AnyArray:
    """Return a matrix of whole tiles, of numpy or torch, with each of them transposed."""
    if values.ndim < 2 or any(length % tile for length in values.shape[-2:]):
        raise QgateError(f"no whole tiles of {tile}x{tile}")
    rows, columns = (length // tile for length in values.shape[-2:])
    tiles = values.reshape(*values.shape[:-2], rows, tile, columns, tile)
    return tiles.swapaxes(-1, -3).reshape(values.shape)


def _turned_scales(x: Floats, q: QuantizerSettings) -> Floats:
    scales = spread_scales(x, q)
    return scales.swapaxes(-1, -2) / scales


def _late_element(x: Floats, q: QuantizerSettings, ideal: Cast, step: int) -> Floats:
    """Decode one element of each group with the scale of the group beside it."""
    scales = spread_scales(x, q)
    axis = q.axis_of(x.ndim)
    index = np.clip(np.arange(x.shape[axis]) - step, 0, x.shape[axis] - 1)
    return ideal(x) * (np.take(scales, index, axis=axis) / scales)


def _swapped(values: Floats, axis: int) -> Floats:
    """Swap neighbors along an axis; the last of an odd number stays."""
    index = np.arange(values.shape[axis])
    even = len(index) // 2 * 2
    index[:even] = index[:even].reshape(-1, 2)[:, ::-1].reshape(-1)
    return np.take(values, index, axis=axis)


def _halves_in_pairs(codes: Floats) -> Floats:
    """Return what a reader of pairs gets from bytes that hold elements of both halves."""
    return codes.reshape(len(codes), 2, -1).swapaxes(1, 2).reshape(codes.shape)


def _pairs_in_halves(codes: Floats) -> Floats:
    return codes.reshape(len(codes), -1, 2).swapaxes(1, 2).reshape(codes.shape)


def _swizzled(scales: Floats) -> Floats:
    whole = len(scales) // 16 * 16
    tiles = scales[:whole].reshape(-1, 4, 4).swapaxes(1, 2)
    return np.concatenate([tiles.reshape(whole), scales[whole:]])


def _moved_scales(x: Floats, q: QuantizerSettings, ideal: Cast, move: Move) -> Floats:
    """Decode ideal codes with the scales of other groups."""
    if q.groups is not None:
        lines = math.prod(q.groups.scales_shape(x.shape)[:-1])
    else:
        is_channel = q.granularity == "channel"
        lines = 1 if is_channel else math.prod(x.shape) // x.shape[q.axis_of(x.ndim)]

    def moved(scales: Floats) -> Floats:
        return np.asarray(move(scales.reshape(lines, -1))).reshape(-1) / scales

    return ideal(x) * spread_scales(x, q, moved)


def spread_scales(x: Floats, q: QuantizerSettings, change: Cast = np.asarray) -> Floats:
    """Return what a change makes of the definition's scales, for each element that of its group."""
    state = tensor_state(x, q)

    def spread(groups: Floats) -> Floats:
        return np.broadcast_to(change(scales_of(groups, q, state))[:, None], groups.shape)

    return by_groups(x, grouped(q), spread)


def tensor_state(x: Floats, q: QuantizerSettings) -> float | None:
    """Return NVFP4's scale of the whole tensor, None for other formats."""
    return q.format.define_state(x) if q.format.kind == "block" else None


def grouped(q: QuantizerSettings) -> QuantizerSettings:
    """Return a quantizer that has groups; those of a plain cast are the tensor."""
    return q if q.granularity is not None else with_options(q, granularity="tensor", scale=1.0)
