"""Numbers as bits, and rounding to a grid by adding a number so large that its ulp is the step."""

import triton
import triton.language as tl

BF16 = tl.constexpr(0)
FP16 = tl.constexpr(1)
FP32 = tl.constexpr(2)
EVEN = tl.constexpr(0)
AWAY = tl.constexpr(1)
ZERO = tl.constexpr(2)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widened(raw, KIND: tl.constexpr):
    """The float32 bits of 16-bit or float32 numbers that were loaded as integers."""
    if KIND == BF16:
        return raw.to(tl.int32) << 16
    elif KIND == FP16:
        return bits_of(raw.to(tl.float16, bitcast=True).to(tl.float32))
    else:
        return raw


@triton.jit
def narrowed(bits, KIND: tl.constexpr):
    """The inverse, rounded to nearest even; the only NaN is the quiet one."""
    if KIND == BF16:
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif KIND == FP16:
        return number(bits).to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return bits


@triton.jit
def on_grid(a, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, ROUNDING: tl.constexpr):
    """Magnitudes to numbers with so many bits after the leading one, none below exponent LOWEST.

    The sum with 2**(exponent + 23 - MANTISSA) is rounded where the grid wants it, so that must be
    a float32 number: a < 2**(104 + MANTISSA).
    """
    field = tl.maximum(bits_of(a) & INFINITY, (LOWEST + 127) << 23)
    return rounded(a, field, MANTISSA, ROUNDING)


@triton.jit
def rounded(a, field, MANTISSA, ROUNDING: tl.constexpr):
    """Magnitudes to multiples of 2**(exponent - MANTISSA), the exponent given in place."""
    magic = number(field + ((23 - MANTISSA) << 23))
    r = (a + magic) - magic
    if ROUNDING == AWAY:
        step = number(field - (MANTISSA << 23))
        r = tl.where(a - r == step * 0.5, r + step, r)
    elif ROUNDING == ZERO:
        step = number(field - (MANTISSA << 23))
        r = tl.where(r > a, r - step, r)
    return r


@triton.jit
def tile(
    length, groups, count, BLOCK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Where ROWS blocks along the last axis lie, and which of their places exist."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, PADDED)[None, :]
    there = (group < count) & (k < BLOCK)
    if TAIL:
        row = group // groups
        within = (group - row * groups) * BLOCK + k
        return row * length + within, there & (within < length)
    else:
        return group * BLOCK + k, there


@triton.jit
def upright_tile(
    length, groups, inner, BLOCK: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr
):
    """Where COLUMNS neighboring blocks along an axis before the last lie."""
    chunks = tl.cdiv(inner, COLUMNS)
    place = tl.program_id(0).to(tl.int64)
    row = place // chunks
    column = (place - row * chunks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    outer = row // groups
    within = (row - outer * groups) * BLOCK + tl.arange(0, PADDED)[:, None]
    there = (tl.arange(0, PADDED)[:, None] < BLOCK) & (within < length) & (column < inner)
    return (outer * length + within) * inner + column, there


@triton.jit
def widely_on_grid(a, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, ROUNDING: tl.constexpr):
    """`on_grid` in float64, for any magnitude that float32 has."""
    field = tl.maximum(exponent_of(a), (LOWEST + 1023) << 52)
    return widely_rounded(a, field, MANTISSA, ROUNDING)


@triton.jit
def exponent_of(a):
    """The exponent of float64 numbers, in place."""
    return a.to(tl.int64, bitcast=True) & 0x7FF0000000000000


@triton.jit
def wide_number(bits):
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def widely_rounded(a, field, mantissa, ROUNDING: tl.constexpr):
    """`rounded` in float64; `mantissa` is a constant, or int64 numbers."""
    magic = wide_number(field + ((52 - mantissa) << 52))
    r = (a + magic) - magic
    if ROUNDING == AWAY:
        step = wide_number(field - (mantissa << 52))
        r = tl.where(a - r == step * 0.5, r + step, r)
    elif ROUNDING == ZERO:
        step = wide_number(field - (mantissa << 52))
        r = tl.where(r > a, r - step, r)
    return r


@triton.jit
def stored(a, sign, OUT: tl.constexpr):
    """float64 magnitudes, and a sign bit, as a narrower dtype: rounded once."""
    if OUT == BF16:
        a = widely_on_grid(a, 7, -126, EVEN)
    elif OUT == FP16:
        a = widely_on_grid(a, 10, -14, EVEN)
    return narrowed(bits_of(a.to(tl.float32)) | sign, OUT)
