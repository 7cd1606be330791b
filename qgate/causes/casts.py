"""Known faults of quantizers: each is a name and the values that it makes of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from qgate.causes.choices import choice_faults, scale_type_faults
from qgate.causes.faults import WrongCast
from qgate.causes.integers import code_faults, grid_faults
from qgate.causes.layouts import layout_faults, other_groups, spread_scales, tensor_state
from qgate.causes.scale_sources import source_faults
from qgate.causes.scales import quantize_with_scales, rounding_faults, size_faults
from qgate.errors import QgateError
from qgate.expected.conventions import conventions, with_options
from qgate.expected.group_scales import by_groups
from qgate.expected.searched_scales import scales_of
from qgate.formats import get, names
from qgate.formats.choosing import is_signed_choice
from qgate.formats.definition import quantize as define
from qgate.formats.nvfp4 import nvfp4_format
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings


def wrong_casts(q: QuantizerSettings, *, others: bool = True) -> Iterator[WrongCast]:
    """List the faults that a quantizer may have, the plainest first.

    others   True if other formats are among them, which are many
    """
    ideal = _definition(q)
    name = q.format.name
    yield WrongCast(f"is not quantized to {name}", lambda x: x)
    if q.rotation is not None:
        yield WrongCast(
            "is not rotated before it is quantized", _definition(with_options(q, rotation=None))
        )
    yield from scale_type_faults(q)
    for exponent in (1, -1, 2, -2, 4, -4, 8, -8):
        way = "high" if exponent > 0 else "low"
        yield WrongCast(
            f"has values {2 ** abs(exponent)} times too {way}: the scale is off by a power of two",
            lambda x, factor=2.0**exponent: ideal(x) * factor,  # type: ignore[misc]
        )
    yield from size_faults(q)
    yield from choice_faults(q)
    yield WrongCast("has lost its sign", lambda x: np.abs(ideal(x)))
    yield WrongCast("has the opposite sign", lambda x: -ideal(x))
    plain = QuantizerSettings(q.format, {})
    if q.granularity is not None and plain.granularity is None:
        yield WrongCast(f"is cast to {name} without a scale", _definition(plain))
    if q.rounding != "zero":
        cut = with_options(q, rounding="zero")
        for truncated in (_definition(cut), *_in_float32(cut)):
            yield WrongCast("is truncated, not rounded to the nearest", truncated)
    if q.rounding == "even":
        yield WrongCast(
            "rounds ties away from zero, not to even",
            _definition(with_options(q, rounding="away")),
        )
    yield WrongCast("is rounded up at every step", _rounded_up(q))
    yield from code_faults(q)
    yield from grid_faults(q)
    yield from _groups(q)
    yield from _parts(q)
    yield from layout_faults(q, ideal)
    yield WrongCast("flushes subnormal values to zero", _without_subnormals(q))
    yield from rounding_faults(q)
    yield from source_faults(q)
    if others:
        yield from _other_formats(q)


def _defined(words: str, q: QuantizerSettings, is_same_kind: bool = True) -> WrongCast:
    """Return the fault to be another quantizer, by its definition and all of its conventions."""
    alternatives = lambda dtype: conventions(q, dtype, orders=True)  # noqa: E731
    return WrongCast(words, _definition(q), alternatives, is_same_kind)


def _definition(q: QuantizerSettings) -> Callable[[Floats], Floats]:
    return lambda x: define(x, q)


def _in_float32(q: QuantizerSettings) -> Iterator[Callable[[Floats], Floats]]:
    """Yield a cast that divides in float32, where that decides: a largest value is a code."""
    has_scales = q.granularity is not None and q.zero_point is None and q.rotation is None
    if q.format.kind == "element" and has_scales:
        yield lambda x: quantize_with_scales(x, q, lambda scales: scales)


def _rounded_up(q: QuantizerSettings) -> Callable[[Floats], Floats]:
    def values(x: Floats) -> Floats:
        near, cut = define(x, q), define(x, with_options(q, rounding="zero"))
        step = np.abs(define(x, with_options(q, rounding="away")) - cut)
        return np.where(cut == x, near, cut + np.copysign(np.maximum(step, np.abs(near - cut)), x))

    return values


def _groups(q: QuantizerSettings) -> Iterator[WrongCast]:
    """Scales shared by other elements than they should be."""
    if q.granularity == "block":
        for block in (8, 16, 32, 64, 128):
            if block != q.block or q.tile is not None:
                yield _defined(
                    f"has blocks of {block}, not of {q.block_words}",
                    with_options(q, block=block, tile=None),
                )
        if q.tile is None:
            for step, word in ((1, "late"), (-1, "early")):
                yield WrongCast(
                    f"has blocks that begin one element {word}",
                    lambda x, step=step: _moved_blocks(x, q, step),  # type: ignore[misc]
                )
    if q.granularity == "channel" and q.format.kind == "element":
        for block in (16, 32, 64, 128):
            yield _defined(
                f"has blocks of {block}, not {granularity_words(q)}",
                with_options(q, granularity="block", block=block, axis=-1),
            )
    if q.granularity in ("block", "channel"):
        for number in (0, -1, -2):
            yield WrongCast(
                f"has its scales along axis {number}, not along {-1 if q.axis is None else q.axis}",
                _other_axis(q, number),
            )
    if q.groups is not None:
        for words, groups in other_groups(q.groups):
            yield _defined(
                f"has {words}, not one per {q.groups.name}", with_options(q, groups=groups)
            )
    if q.format.kind == "element" and not q.format.tapered:
        for granularity in ("tensor", "channel"):
            if granularity != q.granularity:
                channels = (0, -1) if q.groups is None else (0, -1, *q.groups.axes[:1])
                axes: tuple[int | None, ...] = (None,) if granularity == "tensor" else channels
                for axis in axes:
                    one = (
                        "one scale for the tensor"
                        if axis is None
                        else f"scales per channel of axis {axis}"
                    )
                    changed = with_options(
                        q, granularity=granularity, axis=axis, scale=None, tile=None, groups=None
                    )
                    yield _defined(f"has {one}, not {granularity_words(q)}", changed)


def _moved_blocks(x: Floats, q: QuantizerSettings, step: int) -> Floats:
    axis = -1 if q.axis is None else q.axis
    if not x.ndim or x.shape[axis] <= (q.block or 1):
        raise QgateError("one block has no neighbor")
    return np.roll(define(np.roll(x, -step, axis), q), step, axis)


def _parts(q: QuantizerSettings) -> Iterator[WrongCast]:
    """Parts of a tensor that got a scale each, as shards and fused weights do."""
    if q.granularity == "tensor" or nvfp4_format(q.format) is not None:
        for axis in (0, -1):
            for count in (2, 3, 4, 8):
                yield WrongCast(
                    f"is quantized in {count} parts of axis {axis}, each with a scale of its own",
                    lambda x, count=count, axis=axis: np.concatenate(  # type: ignore[misc]
                        [define(part, q) for part in np.split(x, count, axis)], axis
                    ),
                )


def granularity_words(q: QuantizerSettings) -> str:
    """Say which elements share a scale."""
    return {
        None: "a cast without scale",
        "tensor": "one per tensor",
        "channel": f"one per channel of axis {q.axis}",
        "block": f"one per block of {q.block_words}",
        "groups": f"one per {q.groups.name}" if q.groups else "",
    }[q.granularity]


def _other_axis(q: QuantizerSettings, axis: int) -> Callable[[Floats], Floats]:
    def values(x: Floats) -> Floats:
        if x.ndim < 2 or q.tile is not None or axis % x.ndim == q.axis_of(x.ndim):
            raise QgateError("the axis is the same")
        return define(x, with_options(q, axis=axis))

    return values


def _without_subnormals(q: QuantizerSettings) -> Callable[[Floats], Floats]:
    def values(x: Floats) -> Floats:
        has_scales = q.granularity is not None
        steps = spread_scales(x, q, lambda scales: scales if has_scales else np.ones_like(scales))
        y = define(x, q)
        return np.where(np.abs(y) < q.format.element.min_normal * steps, 0.0, y)

    return values


def _other_formats(q: QuantizerSettings) -> Iterator[WrongCast]:
    """Another format instead of this one, or before it."""
    own = q.format.name
    for name in names():
        if name == own:
            continue
        fmt = get(name)
        options = {} if fmt.kind == "block" else {"granularity": "channel", "axis": 0}
        if fmt.kind == "block" and q.axis is not None and q.granularity == "block":
            options["axis"] = q.axis
        variants = [QuantizerSettings(fmt, options)]
        if fmt.kind == "element":
            variants += [
                QuantizerSettings(fmt, {}),
                QuantizerSettings(fmt, {"granularity": "tensor"}),
            ]
            if q.granularity == "block":
                variants.append(QuantizerSettings(fmt, {"granularity": "block", "block": q.block}))
        for other in variants:
            yield _defined(f"is {name}, not {own}", other, is_same_kind=False)
            if "narrow" in fmt.options and other.granularity is not None:
                for convention in conventions(other)[1:]:
                    yield WrongCast(f"is {name} ({convention.name}), not {own}", convention)
            yield _twice(f"is quantized twice: to {name}, then to {own}", other, q)


def _twice(words: str, first: QuantizerSettings, q: QuantizerSettings) -> WrongCast:
    def alternatives(dtype: str) -> Iterator[Callable[[Floats], Floats]]:
        for convention in conventions(q, dtype, orders=True):
            yield lambda x, convention=convention: convention(define(x, first))  # type: ignore[misc]

    return WrongCast(words, lambda x: define(define(x, first), q), alternatives)


# What values say of themselves --------------------------------------------------------------------

SAMPLED_GROUPS = 256
CLOSE = 1e-5
"""Relative distance of a ratio to a code that chance does not make for a whole group."""


def describe_values(
    values: Floats,
    x: Floats,
    q: QuantizerSettings,
    *,
    ideal: Floats | None = None,
    any_scale: bool = False,
) -> str:
    """Say whether values are on a grid of the format at all, and if so, whether by its scales."""
    # Parts of a block's scale, as those of tiles, are no scale of all its elements.
    has_grid = (
        "micro" not in q.format.stored
        and (q.format.kind == "element" or q.format.effort == 1)
        and not is_signed_choice(q.format)
        and q.zero_point is None
        and q.rotation is None
    )
    if values.ndim == 0 or not values.size or not has_grid:
        return ""
    ideal = _group_rows(define(x, q) if ideal is None else ideal, q)[:SAMPLED_GROUPS]
    groups, source = (_group_rows(array, q)[:SAMPLED_GROUPS] for array in (values, x))
    usable = np.isfinite(groups).all(1) & (np.abs(groups).max(1) > 0) & np.isfinite(source).all(1)
    groups, ideal = groups[usable], ideal[usable]
    if not len(groups):
        return ""
    factors = (groups * ideal).sum(1) / np.maximum(np.square(ideal).sum(1), 1e-300)
    off = np.abs(groups - factors[:, None] * ideal).max(1) <= CLOSE * np.abs(groups).max(1)
    wrong = np.abs(factors - 1) > CLOSE
    if bool(off.all()) and bool(wrong.any()) and not any_scale:
        return f"has {_scale_words(factors[wrong], len(wrong))}"
    scales = grid_scales(groups, q)
    on_grid = np.isfinite(scales)
    if not bool(on_grid.any()):
        return f"is not quantized to {q.format.name}: no scale puts its values on that grid"
    if not bool(on_grid.all()):
        return (
            f"has values that no scale puts on the grid of {q.format.name}, in "
            f"{int((~on_grid).sum())} of {len(groups)} groups"
        )
    ratios = scales / scales_of(source, q, tensor_state(x, q))
    wrong = np.abs(ratios - 1) > 2 * CLOSE
    if bool(wrong.any()) and q.format.kind == "element" and not any_scale:
        return f"is quantized with {_scale_words(ratios[wrong], len(wrong))}"
    return ""


def _scale_words(factors: Floats, count: int) -> str:
    groups = f"in {len(factors)} of {count} groups" if count > 1 else "for the tensor"
    low, high = float(factors.min()), float(factors.max())
    size = f"{low:.4g}" if abs(high - low) < 1e-4 * abs(high) else f"{low:.4g} to {high:.4g}"
    return f"a scale that is {size} times the definition's {groups}"


def _group_rows(x: Floats, q: QuantizerSettings) -> Floats:
    """Return the whole groups that share a scale as rows."""
    if q.granularity in (None, "tensor"):
        return x.reshape(1, -1)
    if q.tile is not None or q.groups is not None:
        rows: list[Floats] = []

        def collect(groups: Floats) -> Floats:
            rows.append(groups)
            return groups

        by_groups(x, q, collect)
        return np.concatenate([tile for tile in rows if tile.shape == rows[0].shape])
    moved = np.moveaxis(x, q.axis_of(x.ndim), 0 if q.granularity == "channel" else -1)
    if q.granularity == "channel":
        return moved.reshape(len(moved), -1)
    block = min(q.block, moved.shape[-1])
    whole = moved[..., : moved.shape[-1] // block * block]
    return whole.reshape(-1, block)


def grid_scales(groups: Floats, q: QuantizerSettings) -> Floats:
    """Return a scale for each row under which all of its values are codes, NaN where none is."""
    element = q.format.element
    magnitudes = np.unique(np.append(element.magnitudes(), -element.bounds(narrow=False)[0]))
    amax = np.abs(groups).max(1)
    scales = np.full(len(groups), np.nan)
    for code in magnitudes[:0:-1][:256]:
        todo = np.flatnonzero(np.isnan(scales))
        if not len(todo):
            break
        candidates = amax[todo] / code
        ratios = np.abs(groups[todo]) / candidates[:, None]
        above = np.searchsorted(magnitudes, ratios).clip(1, len(magnitudes) - 1)
        distance = np.minimum(
            np.abs(ratios - magnitudes[above - 1]), np.abs(ratios - magnitudes[above])
        )
        fits = (distance <= CLOSE * np.maximum(ratios, q.format.element.min_normal)).all(1)
        scales[todo[fits]] = candidates[fits]
    return scales
