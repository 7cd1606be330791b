"""Scales that are made of something else than the largest magnitude of their group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from qgate.causes.faults import WrongCast
from qgate.causes.layouts import (
    GROUPS_IN_A_ROW,
    forgotten_scales,
    repeated_moves,
    spread_scales,
)
from qgate.causes.scales import LEAST, quantize_with_scales
from qgate.errors import QgateError
from qgate.formats import get
from qgate.formats.definition import quantize as define
from qgate.formats.definition import round_by_list
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

Change = Callable[[Floats], Floats]


def source_faults(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List casts with scales of other groups or values, codes included."""
    if q.granularity is None or q.zero_point is not None or q.rotation is not None:
        return
    if q.granularity in ("block", "channel"):
        for words, change in _of_other_groups(q.granularity == "block"):
            yield WrongCast(
                f"is quantized with {words}",
                lambda x, change=change: quantize_with_scales(  # type: ignore[misc]
                    x, q, lambda s: change(s.reshape(_lines(x, q), -1)).reshape(-1)
                ),
            )
    yield WrongCast(
        "is quantized without its mean", lambda x: define(x - x.mean(-1, keepdims=True), q)
    )
    for words, amount in _amounts():
        yield WrongCast(
            f"has scales made from {words}, not from the largest magnitude",
            lambda x, amount=amount: quantize_with_scales(  # type: ignore[misc]
                x, q, lambda s: s, rounded=lambda rows: amount(rows)[:, None]
            ),
        )
    if q.format.kind != "element":
        yield from _of_blocks(q)
        return
    for words, change in _roundings():
        yield WrongCast(
            f"is quantized with scales rounded to {words}",
            lambda x, change=change: quantize_with_scales(x, q, change),  # type: ignore[misc]
        )
    for added in LEAST:
        yield WrongCast(
            f"is quantized with {added:.3g} added to its scales",
            lambda x, added=added: quantize_with_scales(x, q, lambda s: s + added),  # type: ignore[misc]
        )
    for words, power in (("the square of its scales", 2), ("the reciprocal of its scales", -1)):
        yield WrongCast(
            f"is decoded with {words}",
            lambda x, power=power: define(x, q) * spread_scales(x, q, lambda s: s ** (power - 1)),  # type: ignore[misc]
        )


def _of_blocks(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List scales of blocks that see a part of them, or that have a least power of two."""
    for count in (1, 8, 16, 32):
        yield WrongCast(
            f"has scales made from the first {count} elements of each group alone",
            lambda x, count=count: quantize_with_scales(  # type: ignore[misc]
                x, q, lambda s: s, rounded=lambda rows: _leading(rows, count)
            ),
        )
    for exponent in range(-20, 1):
        yield WrongCast(
            f"has scales no smaller than 2^{exponent}",
            lambda x, least=2.0**exponent: quantize_with_scales(
                x, q, lambda s: _at_least(s, least)
            ),  # type: ignore[misc]
        )


def _leading(rows: Floats, count: int) -> Floats:
    if count >= rows.shape[1]:
        raise QgateError("no part of a group")
    return rows[:, :count]


def _lines(x: Floats, q: QuantizerSettings) -> int:
    """Return the rows of blocks that scales are of; one for channels, whose scales are in a row."""
    is_row = q.granularity == "channel" or q.tile is not None
    return 1 if is_row else x.size // x.shape[q.axis_of(x.ndim)]


def _of_other_groups(has_rows: bool) -> Iterator[tuple[str, Change]]:
    """List which groups' scales all groups get; scales are [row, group]."""
    if has_rows:
        yield from forgotten_scales("row")
    for axis, what in ((1, "group"), (0, "row")) if has_rows else ((1, "group"),):
        for step, way in ((1, "previous"), (-1, "next")):
            yield (
                f"the scale of the {way} {what}",
                lambda s, step=step, axis=axis: np.roll(s, step, axis),  # type: ignore[misc]
            )
        yield from repeated_moves(f"{what}s", axis)
        for count in GROUPS_IN_A_ROW:
            yield (
                f"the largest scale of each {count} {what}s",
                lambda s, n=count, axis=axis: _largest(s, axis, n),  # type: ignore[misc]
            )


def _largest(scales: Floats, axis: int, count: int) -> Floats:
    length = scales.shape[axis]
    if count >= length:
        raise QgateError("there are no other groups")
    largest = np.maximum.reduceat(scales, np.arange(0, length, count), axis)
    return np.repeat(largest, count, axis).take(np.arange(length), axis)


def _amounts() -> Iterator[tuple[str, Change]]:
    """List other amounts of a group, in words."""
    yield "the second largest magnitude", lambda rows: _ranked(rows, 2)
    yield "the third largest magnitude", lambda rows: _ranked(rows, 3)
    for step, words in ((2, "second"), (4, "fourth")):
        for first in range(step if step == 2 else 1):
            yield (
                f"each {words} value, from {first} on",
                lambda rows, step=step, first=first: np.abs(rows[:, first::step]).max(1),  # type: ignore[misc]
            )
    for times in (2, 2.5, 3, 3.5, 4, 5, 6):
        yield (
            f"{times:g} times the RMS",
            lambda rows, times=times: times * np.sqrt(np.square(rows).mean(1)),  # type: ignore[misc]
        )
    yield "the mean of magnitudes", lambda rows: np.abs(rows).mean(1)
    for percent in (99.9, 99.0):
        yield (
            f"the {percent:g} % percentile of magnitudes",
            lambda rows, percent=percent: np.percentile(np.abs(rows), percent, axis=1),  # type: ignore[misc]
        )
    for least in (1.0, 0.1, 0.01, 1e-3, 1e-4):
        yield (
            f"magnitudes no smaller than {least:g}",
            lambda rows, least=least: _at_least(np.abs(rows).max(1), least),  # type: ignore[misc]
        )


def _ranked(rows: Floats, rank: int) -> Floats:
    if rows.shape[1] < rank:
        raise QgateError(f"a group has fewer than {rank} values")
    return np.asarray(np.partition(np.abs(rows), -rank, axis=1)[:, -rank])


def _at_least(values: Floats, least: float) -> Floats:
    if not bool((values < least).any()):
        raise QgateError(f"nothing is below {least}")
    return np.maximum(values, least)


def _roundings() -> Iterator[tuple[str, Change]]:
    for way, rounded in (("nearest", np.rint), ("next higher", np.ceil), ("next lower", np.floor)):
        yield f"the {way} power of two", lambda s, rounded=rounded: np.exp2(rounded(np.log2(s)))  # type: ignore[misc]
    for name in ("fp8_e4m3", "fp8_e5m2"):
        element = get(name).element
        yield name, lambda s, element=element: round_by_list(s, element)  # type: ignore[misc]
