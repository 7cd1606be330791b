"""Codes that are rounded, cut off or read in a wrong way, under right scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from qgate.causes.layouts import Cast, grouped, tensor_state
from qgate.expected.group_scales import by_groups
from qgate.expected.searched_scales import scales_of
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


def code_faults(q: QuantizerSettings) -> Iterator[tuple[str, Cast]]:
    """List wrong codes: words, and the values that each makes of a source."""
    if q.format.kind != "element" or q.zero_point is not None or q.rotation is not None:
        return
    if "narrow" not in q.format.options:
        if q.format.max > FNUZ > q.format.max / 2:
            yield (
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
        yield (
            f"keeps the upper {upper} of {bits} bits of its codes",
            lambda x, step=step: _coded(  # type: ignore[misc]
                x, q, lambda r: np.rint(_rounded(r, q) / step) * step
            ),
        )
    for words, rounded in (("down (floor)", np.floor), ("up (ceil)", np.ceil)):
        for is_product in (False, True):
            yield (
                f"is rounded {words}, not to the nearest",
                lambda x, rounded=rounded, is_product=is_product: _coded(  # type: ignore[misc]
                    x, q, lambda r: clipped(rounded(r)), ratio=_product if is_product else _quotient
                ),
            )
    yield (
        "has half a step added before codes are cut off toward zero, negative ones too",
        lambda x: _coded(x, q, lambda r: clipped(np.trunc(r + 0.5))),
    )
    for divisor in (half, half + 0.5):
        yield (
            f"has codes that wrap: {half:g} becomes {-half:g}",
            lambda x, divisor=divisor: _coded(  # type: ignore[misc]
                x, q, lambda r: (np.rint(r) + half) % (2 * half) - half, top / divisor
            ),
        )
    yield (
        "has negative codes read without their sign",
        lambda x: _coded(x, q, lambda r: clipped(np.rint(r)) % (2 * half)),
    )
    for bound in (half / 2 - 1, half / 2, *(BOUNDS if bits == 8 else ())):
        yield (
            f"saturates early: no code is beyond {bound:g}",
            lambda x, bound=bound: _coded(  # type: ignore[misc]
                x, q, lambda r: np.clip(np.rint(r), -bound, bound)
            ),
        )


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
