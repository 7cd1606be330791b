"""Scales of a wrong size, and scales that are rounded at the wrong time or in the wrong way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from qgate.causes.faults import WrongCast
from qgate.causes.layouts import grouped, spread_scales, tensor_state
from qgate.errors import QgateError
from qgate.expected.conventions import with_options
from qgate.expected.group_scales import by_groups, float32
from qgate.expected.searched_scales import scales_of
from qgate.formats import get
from qgate.formats.definition import quantize as define
from qgate.formats.definition import round_by_list
from qgate.formats.mx import MxFormat, mx_format
from qgate.formats.nvfp4 import Nvfp4Format, Singles, nvfp4_format
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

Change = Callable[[Floats], Floats]
LEAST = (
    1e-2, 2.0**-8, 1e-3, 2.0**-11, 1e-4, 1e-5, 1e-6, 2.0**-23, 1e-7, 1e-8, 1e-10, 1e-12
)  # fmt: skip
"""Least scales that kernels have, so that none is zero."""
DIVISORS: dict[int, tuple[float, ...]] = {
    4: (15.0, 16.0),
    8: (63.0, 64.0, 127.0, 240.0, 255.0, 256.0, 448.0, 480.0, 57344.0),
}
"""Largest numbers of formats of so many bits, and numbers that are taken for them."""
_PARTS: dict[str, Callable[[int], int]] = {
    "half": lambda length: length // 2,
    **{f"{size} elements": lambda _, size=size: size for size in (1, 16, 32, 64, 128, 256)},  # type: ignore[misc]
    **{
        f"whole tiles of {size}": lambda length, size=size: length // size * size  # type: ignore[misc]
        for size in (16, 32, 64, 128)
    },
}
"""Elements of a group of which a kernel may take the largest magnitude, by their length."""


def size_faults(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List scales that are too large or too small before the elements are rounded."""
    further = ((f, f"{f:g} times") for f in (4.0, 8.0, 16.0, 0.25))
    for factor, words in ((2.0, "twice"), (0.5, "half"), *further):
        yield WrongCast(
            f"is quantized with {words} the scale of the definition",
            lambda x, factor=factor: quantize_with_scales(x, q, lambda s: s * factor),  # type: ignore[misc]
            is_factor=True,
        )
    for step, words in ((1.0, "high"), (-1.0, "low")):
        yield WrongCast(
            f"has every code decoded 1 too {words} (the zero point is off)",
            lambda x, step=step: define(x, q) + step * spread_scales(x, q),  # type: ignore[misc]
        )
    if q.format.kind == "element" and q.granularity is not None and q.zero_point is None:
        yield WrongCast(
            "has scales of its largest values, not of its largest magnitudes",
            lambda x: by_groups(x, grouped(q), lambda rows: _of_largest_values(rows, q)),
        )
        yield from _divisors(q)
        # Codes that saturate show if the lowest code is one further from zero.
        ways = (q, with_options(q, narrow=not q.narrow)) if "narrow" in q.format.options else (q,)
        for (words, count), way in itertools.product(_PARTS.items(), ways):
            yield WrongCast(
                f"has scales made from the first {words} of each group alone",
                lambda x, count=count, way=way: _partial(x, q, way, count),  # type: ignore[misc]
            )
        for least in LEAST:
            yield WrongCast(
                f"has scales no smaller than {least:.3g}",
                lambda x, least=least: quantize_with_scales(  # type: ignore[misc]
                    x, q, lambda s: _at_least(s, least)
                ),
            )
    if q.granularity in ("block", "channel"):
        yield WrongCast(
            "is quantized with one scale, that of the first group",
            lambda x: quantize_with_scales(x, q, lambda s: np.broadcast_to(s[:1], s.shape)),
        )


def _of_largest_values(rows: Floats, q: QuantizerSettings) -> Floats:
    largest = rows.max(1)
    if not bool((largest > 0).all()):
        raise QgateError("no value is above zero")
    return _cast(rows, largest / q.format.max, q)


def _partial(
    x: Floats, q: QuantizerSettings, way: QuantizerSettings, count: Callable[[int], int]
) -> Floats:
    """Quantize in one way with scales of the first elements of each group."""
    state = tensor_state(x, q)

    def rows(groups: Floats) -> Floats:
        first = count(groups.shape[1])
        if not 0 < first < groups.shape[1]:
            raise QgateError("no part of a group")
        return _cast(groups, scales_of(groups[:, :first], q, state), way)

    return by_groups(x, grouped(q), rows)


def _divisors(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List scales that are the largest magnitude over the largest number of another format."""
    largest = float(q.format.max)
    for other in DIVISORS.get(q.format.element.bits, ()):
        if other not in (largest, largest + 1):
            yield WrongCast(
                f"is quantized with a scale of amax/{other:g}, not of amax/{largest:g}",
                lambda x, other=other: quantize_with_scales(  # type: ignore[misc]
                    x, q, lambda s: s * (largest / other)
                ),
                is_factor=True,
            )


def _at_least(scales: Floats, least: float) -> Floats:
    if not bool((scales < least).any()):
        raise QgateError(f"no scale is below {least}")
    return np.maximum(scales, least)


def rounding_faults(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List scales that are rounded after quantizing, too early, or by no rule of the format."""
    for way, rounded in (("up", np.ceil), ("down", np.floor)):
        yield WrongCast(
            f"has scales rounded {way} to powers of two without requantizing",
            lambda x, rounded=rounded: _rescaled(  # type: ignore[misc]
                x, q, lambda s: np.exp2(rounded(np.log2(s)))
            ),
        )
    mx = mx_format(q.format)
    if mx is not None:
        yield WrongCast(
            "has scales made from magnitudes that were rounded to bfloat16",
            lambda x: quantize_with_scales(x, q, lambda s: s, rounded=_to_bfloat16),
        )
        yield WrongCast(
            "has scales rounded to the nearest power of two: its largest values saturate",
            lambda x: _nearest(x, q, mx),
        )
    fmt = nvfp4_format(q.format)
    if fmt is not None:
        scale = fmt.scale_element.name.removeprefix("fp8_").upper()
        uncarried = with_options(q, format=_Uncarried(fmt.name, fmt.element, fmt.scale_element))
        yield WrongCast(
            f"has block scales rounded to {scale} without a carry: 0.97 becomes 0.9375, not 1",
            lambda x: define(x, uncarried),
        )
        yield WrongCast(
            f"is quantized with block scales that are rounded to {scale} afterwards",
            lambda x: _nvfp4(x, q, is_late=True),
        )
        yield WrongCast(
            "is quantized with the reciprocal of its tensor scale",
            lambda x: _nvfp4(x, q, is_inverse=True),
        )
        yield WrongCast(
            "is quantized without the scale of the tensor", lambda x: _nvfp4(x, q, state=1.0)
        )
        for words, power in (("without", 1), ("with the reciprocal of", 2)):
            yield WrongCast(
                f"is decoded {words} the scale of the tensor",
                lambda x, power=power: define(x, q) * _state(x, q) ** power,  # type: ignore[misc]
            )


def quantize_with_scales(
    x: Floats, q: QuantizerSettings, change: Change, rounded: Change = np.asarray
) -> Floats:
    """Quantize with scales changed, or made from rounded values, before elements are rounded."""
    state = tensor_state(x, q)

    def rows(groups: Floats) -> Floats:
        return _cast(groups, change(scales_of(rounded(groups), q, state)), q)

    return by_groups(x, grouped(q), rows)


def _cast(groups: Floats, scales: Floats, q: QuantizerSettings) -> Floats:
    """Round rows to multiples of their scales, which kernels divide by in float32.

    The largest value of a row is halfway between two codes where its scale is twice the right one.
    """
    ratios = float32(groups / scales[:, None])
    codes = round_by_list(ratios, q.format.element, rounding=q.rounding, narrow=q.narrow)
    return np.asarray(codes * scales[:, None])


def _rescaled(x: Floats, q: QuantizerSettings, change: Change) -> Floats:
    """Decode ideal codes with changed scales."""
    return define(x, q) * spread_scales(x, q, lambda scales: change(scales) / scales)


def _nearest(x: Floats, q: QuantizerSettings, mx: MxFormat) -> Floats:
    def rows(groups: Floats) -> Floats:
        amax = np.abs(groups).max(1)
        return _cast(groups, np.exp2(np.round(np.log2(np.where(amax > 0, amax, 1.0) / mx.max))), q)

    return by_groups(x, q, rows)


class _Uncarried(Nvfp4Format):
    """NVFP4 whose scales keep their exponent where rounding needs the next one."""

    def define_scale(self, unrounded: Singles) -> Singles:
        scale = super().define_scale(unrounded)
        below = round_by_list(unrounded.astype(np.float64), self.scale_element, rounding="zero")
        is_carried = (np.frexp(scale)[0] == 0.5) & (scale > self.scale_element.min_normal)
        return np.where(is_carried, np.minimum(below, scale), scale).astype(np.float32)


def _nvfp4(
    x: Floats,
    q: QuantizerSettings,
    *,
    state: float | None = None,
    is_late: bool = False,
    is_inverse: bool = False,
) -> Floats:
    """Quantize to NVFP4 with unrounded block scales, or with another tensor scale."""
    fmt, right = nvfp4_format(q.format), tensor_state(x, q) if state is None else state
    assert fmt is not None
    assert right is not None
    state = 1 / right if is_inverse else right

    def rows(blocks: Floats) -> Floats:
        exact = np.minimum(np.abs(blocks).max(1) * (state / fmt.max), fmt.largest_scale)
        stored = round_by_list(exact, fmt.scale_element)
        used = exact if is_late else stored
        codes = round_by_list(blocks * state / used[:, None], q.format.element, rounding=q.rounding)
        return np.asarray(codes * stored[:, None] / right)

    return by_groups(x, q, rows)


def _state(x: Floats, q: QuantizerSettings) -> float:
    state = tensor_state(x, q)
    assert state is not None
    return state


def _to_bfloat16(values: Floats) -> Floats:
    return round_by_list(values, get("bf16").element)
