"""Codes that are rounded, cut off or read in a wrong way, under right scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from qgate.causes.faults import WrongCast
from qgate.causes.layouts import grouped, spread_scales, tensor_state
from qgate.expected.group_scales import by_groups
from qgate.expected.searched_scales import scales_of
from qgate.formats.definition import quantize as define
from qgate.formats.definition import round_by_list
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings

Code = Callable[[Floats], Floats]
"""The codes that are made of ratios of values and scales."""
Ratio = Callable[[Floats, Floats], Floats]
BOUNDS = (96.0, 100.0, 112.0, 120.0, 126.0)
"""Largest codes of int8 that a kernel may saturate at."""
FNUZ = 240.0
"""The largest number of the E4M3 of other devices."""


ROUNDED_DOWN = "is rounded down (floor), not to the nearest"
ROUNDED_UP = "is rounded up (ceil), not to the nearest"


def code_faults(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List wrong codes: words, and the values that each makes of a source."""
    if q.format.kind != "element" or q.zero_point is not None or q.rotation is not None:
        return
    if "narrow" not in q.format.options:
        if q.format.max > FNUZ > q.format.max / 2:
            yield WrongCast(
                f"saturates at {FNUZ:g}, the largest number of E4M3 FNUZ, not at {q.format.max:g}",
                lambda x: _coded(x, q, lambda r: _rounded(np.clip(r, -FNUZ, FNUZ), q)),
            )
        return
    bits = q.format.element.bits
    half = 2.0 ** (bits - 1)
    top = half - 1

    def clipped(codes: Floats) -> Floats:
        return np.clip(codes, -half, top)

    for upper in range(bits - 1, 1, -1):
        step = 2.0 ** (bits - upper)
        yield WrongCast(
            f"keeps the upper {upper} of {bits} bits of its codes",
            lambda x, step=step: _coded(  # type: ignore[misc]
                x, q, lambda r: np.rint(_rounded(r, q) / step) * step
            ),
        )
    for words, rounded in ((ROUNDED_DOWN, np.floor), (ROUNDED_UP, np.ceil)):
        for is_product in (False, True):
            yield WrongCast(
                words,
                lambda x, rounded=rounded, is_product=is_product: _coded(  # type: ignore[misc]
                    x, q, lambda r: clipped(rounded(r)), ratio=_product if is_product else _quotient
                ),
            )
    yield WrongCast(
        "has half a step added before codes are cut off toward zero, negative ones too",
        lambda x: _coded(x, q, lambda r: clipped(np.trunc(r + 0.5))),
    )
    for divisor in (half, half + 0.5):
        yield WrongCast(
            f"has codes that wrap: {half:g} becomes {-half:g}",
            lambda x, divisor=divisor: _coded(  # type: ignore[misc]
                x, q, lambda r: (np.rint(r) + half) % (2 * half) - half, top / divisor
            ),
        )
    yield WrongCast(
        "has negative codes read without their sign",
        lambda x: _coded(x, q, lambda r: clipped(np.rint(r)) % (2 * half)),
    )
    for words, change in (
        ("has negative codes cut to zero", lambda codes: np.maximum(codes, 0)),
        ("has negative codes one too high (ones' complement)", lambda codes: codes + (codes < 0)),
        (
            f"has every code decoded {half:g} too high (read as unsigned)",
            lambda codes: codes + half,
        ),
        ("has negative codes one too low", lambda codes: codes - (codes < 0)),
        ("has codes read as sign and magnitude", _sign_and_magnitude(half)),
        *((f"has codes up to {n} flushed to zero", _flushed(n)) for n in (1, 2, 3, 4)),
        *_signs_of_lanes(2 * half),
    ):
        yield WrongCast(
            words,
            lambda x, change=change: _coded(
                x, q, lambda r: change(np.asarray(clipped(np.rint(r))))
            ),  # type: ignore[misc]
        )
    for bound in (half / 2 - 1, half / 2, *(BOUNDS if bits == 8 else ())):
        yield WrongCast(
            f"saturates early: no code is beyond {bound:g}",
            lambda x, bound=bound: _coded(  # type: ignore[misc]
                x, q, lambda r: np.clip(np.rint(r), -bound, bound)
            ),
        )


def grid_faults(q: QuantizerSettings) -> Iterator[WrongCast]:
    """List other codes of a format that has no integers: rounded one way, or saturated early."""
    if q.format.kind == "element" and "narrow" in q.format.options:
        return
    yield WrongCast(ROUNDED_DOWN, lambda x: _directed(x, q, up=False))
    yield WrongCast(ROUNDED_UP, lambda x: _directed(x, q, up=True))
    largest = float(q.format.element.magnitudes().max())
    magnitudes = q.format.element.magnitudes()
    for bound in dict.fromkeys(
        [0.5 * largest, 0.75 * largest, 0.9 * largest, *magnitudes[-2:-18:-1]]
    ):
        yield WrongCast(
            f"saturates at {bound:.4g}, not at {largest:g}",
            lambda x, bound=bound: _saturated(x, q, bound),  # type: ignore[misc]
        )
    for dropped in (1, 2):
        yield WrongCast(
            f"has the lowest {'bit' if dropped == 1 else f'{dropped} bits'} of its codes cut off",
            lambda x, step=2**dropped: _with_coarse_codes(x, q, step),  # type: ignore[misc]
        )


def _directed(x: Floats, q: QuantizerSettings, *, up: bool) -> Floats:
    """Round to the next value of the format above or below."""
    numbers = q.format.element.magnitudes()
    numbers = np.unique(np.concatenate([-numbers, numbers]))
    scales = spread_scales(x, q)
    ratios = x / scales
    index = np.searchsorted(numbers, ratios, "left" if up else "right") - (not up)
    result: Floats = numbers[index.clip(0, len(numbers) - 1)] * scales
    return np.where(np.isfinite(x), result, x)


def _signs_of_lanes(wrap: float) -> Iterator[tuple[str, Code]]:
    """List signs that are lost at one end of each word, as where it is shifted without its sign."""
    for count in (2, 4, 8):
        for lane, which in ((0, "first"), (count - 1, "last")):
            words = f"the {which} of each {count} codes"
            yield f"has lost the sign of {words}", _at_lane(np.abs, count, lane)
            yield (
                f"has {words} read without its sign",
                _at_lane(lambda codes: codes % wrap, count, lane),
            )


def _at_lane(change: Code, count: int, lane: int) -> Code:
    def changed(codes: Floats) -> Floats:
        is_there = np.arange(codes.shape[-1]) % count == lane
        return np.where(is_there, change(codes), codes)

    return changed


def _flushed(largest: int) -> Code:
    return lambda codes: np.where(np.abs(codes) <= largest, 0.0, codes)


def _sign_and_magnitude(half: float) -> Code:
    return lambda codes: np.where(codes < 0, -(codes + half), codes)


def _with_coarse_codes(x: Floats, q: QuantizerSettings, step: int) -> Floats:
    """Take numbers of a format whose place in the list of all is a multiple of a step."""
    numbers, scales = q.format.element.magnitudes(), spread_scales(x, q)
    ratios = define(x, q) / scales
    places = np.searchsorted(numbers, np.abs(ratios) * (1 + 1e-9), "right") - 1
    return np.copysign(numbers[places // step * step], ratios) * scales


def _saturated(x: Floats, q: QuantizerSettings, largest: float) -> Floats:
    bounds = spread_scales(x, q) * largest
    return np.clip(define(x, q), -bounds, bounds)


def _coded(
    x: Floats, q: QuantizerSettings, code: Code, factor: float = 1.0, ratio: Ratio | None = None
) -> Floats:
    """Quantize with scales of the definition times a factor, and codes of another rule."""
    state = tensor_state(x, q)

    def rows(groups: Floats) -> Floats:
        scales = scales_of(groups, q, state)[:, None] * factor
        ratios = groups / scales if ratio is None else ratio(groups, scales)
        return np.asarray(code(ratios) * scales)

    return by_groups(x, grouped(q), rows)


def _quotient(x: Floats, scales: Floats) -> Floats:
    """Divide in float32, as kernels do: what is cut off then depends on the last bit."""
    return np.asarray(x.astype(np.float32) / scales.astype(np.float32), dtype=np.float64)


def _product(x: Floats, scales: Floats) -> Floats:
    """Multiply by the reciprocal of the scale in float32."""
    inverse = np.float32(1.0) / scales.astype(np.float32)
    return np.asarray(x.astype(np.float32) * inverse, dtype=np.float64)


def _rounded(ratios: Floats, q: QuantizerSettings) -> Floats:
    return round_by_list(ratios, q.format.element, rounding=q.rounding, narrow=q.narrow)
