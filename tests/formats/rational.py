"""Block formats in exact rational arithmetic, written from the specifications and nothing else.

Slow and literal on purpose: no code of qgate is used, so that neither the fast code nor the readable
definition is compared with itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction

Value = Fraction | None  # None is NaN

# name -> magnitudes in code order, exponent of the largest, fraction bits of the element
ELEMENTS: dict[str, tuple[list[Fraction], int, int]] = {}


def _float_magnitudes(ebits: int, mbits: int, bias: int, drop: int) -> list[Fraction]:
    values = []
    for code in range(2 ** (ebits + mbits) - drop):
        field, fraction = divmod(code, 2**mbits)
        exponent = max(field, 1) - bias
        values.append((Fraction(fraction, 2**mbits) + (field > 0)) * Fraction(2) ** exponent)
    return values


ELEMENTS["e4m3"] = (_float_magnitudes(4, 3, 7, 1), 8, 3)
ELEMENTS["e5m2"] = (_float_magnitudes(5, 2, 15, 4), 15, 2)
ELEMENTS["e3m2"] = (_float_magnitudes(3, 2, 3, 0), 4, 2)
ELEMENTS["e2m3"] = (_float_magnitudes(2, 3, 1, 0), 2, 3)
ELEMENTS["e2m1"] = (_float_magnitudes(2, 1, 1, 0), 2, 1)
ELEMENTS["int8"] = ([Fraction(i, 64) for i in range(128)], 0, 6)
ELEMENTS["s1p2"] = ([Fraction(i, 4) for i in range(8)], 0, 2)

MX = {
    "mxfp8_e4m3": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxfp6_e3m2": "e3m2",
    "mxfp6_e2m3": "e2m3",
    "mxfp4_e2m1": "e2m1",
    "mxint8": "int8",
}


def nearest(x: Fraction, magnitudes: list[Fraction], *, away: bool = False) -> Fraction:
    """The nearest magnitude with x's sign, ties to the even place or away, at most the last."""
    size = abs(x)
    if size >= magnitudes[-1]:
        magnitude = magnitudes[-1]
    else:
        low = bisect_right(magnitudes, size) - 1
        down, up = size - magnitudes[low], magnitudes[low + 1] - size
        take_up = up < down or (up == down and (away or low % 2 == 1))
        magnitude = magnitudes[low + take_up]
    return -magnitude if x < 0 else magnitude


def saturates(ratio: Fraction, element: str, *, away: bool = False) -> bool:
    """If a number in units of its scale, rounded without a bound, is above the largest value."""
    magnitudes, emax, fraction_bits = ELEMENTS[element]
    over, half = abs(ratio) - magnitudes[-1], Fraction(2) ** (emax - fraction_bits) / 2
    return over > half or (over == half and (away or len(magnitudes) % 2 == 0))


def floor_log2(x: Fraction) -> int:
    """The exponent of the largest power of two <= x, by search."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** guess > x:
        guess -= 1
    while Fraction(2) ** (guess + 1) <= x:
        guess += 1
    return guess


def ceil_log2(x: Fraction) -> int:
    low = floor_log2(x)
    return low if Fraction(2) ** low == x else low + 1


def mx_exponent(amax: Fraction, element: str, rule: str) -> int:
    """The shared exponent before clamping."""
    magnitudes, emax, mantissa = ELEMENTS[element]
    if rule == "floor":
        return floor_log2(amax) - emax
    if rule == "ceil":
        return ceil_log2(amax) - emax
    if rule == "even":
        unit = Fraction(2) ** (floor_log2(amax) - mantissa)
        return floor_log2(math.floor(amax / unit + Fraction(1, 2)) * unit) - emax
    return ceil_log2(amax / magnitudes[-1])


def mx_ratios(block: list[float], fmt: str, rule: str) -> list[Fraction]:
    """The finite numbers of a block in units of its scale."""
    exact = [Fraction(v) for v in block]
    amax = max(abs(v) for v in exact)
    exponent = mx_exponent(amax, MX[fmt], rule) if amax else -127
    return [v / Fraction(2) ** min(max(exponent, -127), 127) for v in exact]


def mx_block(block: list[float], fmt: str, rule: str) -> tuple[list[Value], int]:
    """Values and E8M0 code of one block."""
    if any(not math.isfinite(v) for v in block):
        return [None] * len(block), 255
    exact = [Fraction(v) for v in block]
    amax = max(abs(v) for v in exact)
    exponent = mx_exponent(amax, MX[fmt], rule) if amax else -127
    exponent = min(max(exponent, -127), 127)
    scale = Fraction(2) ** exponent
    magnitudes = ELEMENTS[MX[fmt]][0]
    return [nearest(v / scale, magnitudes) * scale for v in exact], exponent + 127


def to_fp32(x: Fraction) -> Fraction:
    """The nearest float32, ties to even; overflow gives 2**128 and is for the caller to clamp."""
    if x == 0:
        return x
    unit = Fraction(2) ** (max(floor_log2(abs(x)), -126) - 23)
    return min(round(x / unit) * unit, Fraction(2) ** 128)


FLT_MAX = Fraction(2) ** 128 - Fraction(2) ** 104


def nvfp4_scale(amax: Fraction) -> Fraction:
    """s_enc of a tensor."""
    return min(to_fp32(2688 / amax), FLT_MAX) if amax else Fraction(1)


def nvfp4_ratios(block: list[float], s_enc: Fraction) -> tuple[list[Fraction], Fraction]:
    """The numbers of a block before they are rounded to E2M1, and the block's scale, each step
    rounded to float32 in TransformerEngine's order."""
    exact = [Fraction(v) for v in block]
    s_dec = to_fp32(1 / s_enc)
    factor = to_fp32(s_enc * to_fp32(Fraction(1, 6)))
    block_scale = to_fp32(max(abs(v) for v in exact) * factor)
    scale = nearest(min(block_scale, Fraction(448)), ELEMENTS["e4m3"][0])
    product = to_fp32(scale * s_dec)
    encode = min(to_fp32(1 / product), FLT_MAX) if product else FLT_MAX
    return [to_fp32(v * encode) for v in exact], scale


def nvfp4_block(block: list[float], s_enc: Fraction) -> tuple[list[Value], Fraction]:
    """Values and block scale."""
    ratios, scale = nvfp4_ratios(block, s_enc)
    s_dec = to_fp32(1 / s_enc)
    return [nearest(ratio, ELEMENTS["e2m1"][0]) * scale * s_dec for ratio in ratios], scale


def to_bits(x: Fraction, bits: int) -> Fraction:
    """x with so many significant bits, ties to even."""
    if x == 0:
        return x
    unit = Fraction(2) ** (floor_log2(x) - bits + 1)
    return round(x / unit) * unit


def hif4_ratios(block: list[float]) -> list[tuple[Fraction, Fraction]]:
    """The numbers of a block before they are rounded to S1P2, each with its scale: Algorithm 1 of
    the HiFloat4 paper as its authors' code runs it."""
    exact = [Fraction(v) for v in block]
    amax = max(abs(v) for v in exact)
    bf16_scale = to_bits(amax * Fraction(73, 512), 8)  # bf16(1/7) is 1.140625 * 2**-3
    bf16_scale = min(max(bf16_scale, Fraction(2) ** -48), Fraction(49152))
    scale = to_bits(bf16_scale, 3)
    inverse = to_bits(1 / scale, 8)
    out: list[tuple[Fraction, Fraction]] = []
    for i, v in enumerate(exact):
        octet = max(abs(u) for u in exact[i // 8 * 8 : i // 8 * 8 + 8])
        quad = max(abs(u) for u in exact[i // 4 * 4 : i // 4 * 4 + 4])
        e8 = int(octet * inverse >= 4)
        e16 = int(quad * inverse / 2**e8 >= 2)
        out.append((v * inverse / 2 ** (e8 + e16), 2 ** (e8 + e16) * scale))
    return out


def hif4_block(block: list[float]) -> list[Value]:
    """Values of one block."""
    elements = ELEMENTS["s1p2"][0]
    return [nearest(ratio, elements, away=True) * scale for ratio, scale in hif4_ratios(block)]
