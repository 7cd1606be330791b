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
def widen(raw, KIND: tl.constexpr):
    """Return the float32 bits of 16-bit or float32 numbers that were loaded as integers."""
    if KIND == BF16:
        return raw.to(tl.int32) << 16
    elif KIND == FP16:
        return bits_of(raw.to(tl.float16, bitcast=True).to(tl.float32))
    else:
        return raw


@triton.jit
def narrow(bits, KIND: tl.constexpr):
    """Undo `widen`, rounding to nearest even; a NaN becomes the device's."""
    if KIND == BF16:
        return number(bits).to(tl.bfloat16).to(tl.int16, bitcast=True)
    elif KIND == FP16:
        return number(bits).to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return bits


@triton.jit
def on_grid(a, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, ROUNDING: tl.constexpr):
    """Round magnitudes to MANTISSA bits after the leading one, fewer below exponent LOWEST.

    The sum with 2**(exponent + 23 - MANTISSA), with 52 in float64, rounds at the grid's step, so it
    must be a number of their type: in float32 a < 2**(104 + MANTISSA).
    """
    return round_to_step(a, exponent_of(a, LOWEST), MANTISSA, ROUNDING)


@triton.jit
def round_to(a, lowest, growth, ROUNDING: tl.constexpr, FIXED: tl.constexpr):
    """Round float32 magnitudes to steps that grow with the exponent, or with FIXED do not.

    `lowest` has the smallest power of two with full precision and `growth` 2**(23 - bits
    after the leading one): numbers that one compilation takes for each format. The products are by
    powers of two; an integer operation takes twice the time of one of floats.
    """
    power = lowest if FIXED else tl.maximum(number(bits_of(a) & INFINITY), lowest)
    magic = power * growth
    r = (a + magic) - magic
    if ROUNDING == AWAY:
        step = magic * 1.1920928955078125e-07
        r = tl.where(a - r == step * 0.5, r + step, r)
    elif ROUNDING == ZERO:
        step = magic * 1.1920928955078125e-07
        r = tl.where(r > a, r - step, r)
    return r


@triton.jit
def leading(a, SPLIT: tl.constexpr):
    """Round float32 numbers to 24 - log2(SPLIT) bits, ties either way (Veltkamp)."""
    t = a * (SPLIT + 1.0)
    return t - (t - a)


@triton.jit
def side(rest):
    """Return 1, -1 or 0 by the sign of numbers that are zero, or above 2**-106 with any error."""
    return tl.minimum(tl.maximum(rest * 1.329227995784916e36, -1.0), 1.0)


@triton.jit
def beside(near, rest, SPLIT: tl.constexpr):
    """Return a number that rounds to 23 - log2(SPLIT) bits, or to fewer, as near + rest does.

    `near` has one bit more than that: it is a tie, a number of the grid, or far from both. The
    result is on the side of it that `rest` says by its sign; `rest` may be rounded. Integers and
    comparisons take twice the time of products and sums, so there are few.
    """
    return tl.fma(side(rest), tl.abs(near) * (0.5 / (16777216.0 / SPLIT)), near)


@triton.jit
def product(a, b, SPLIT: tl.constexpr):
    """Multiply float32 numbers so that one rounding more, to bits as in `beside`, is the only."""
    near = leading(a * b, SPLIT)
    return beside(near, tl.fma(a, b, near * -1.0), SPLIT)


@triton.jit
def exponent_of(a, LOWEST: tl.constexpr):
    """Return the exponent bits of magnitudes, in place, or those of 2**LOWEST if that is more."""
    if a.dtype == tl.float64:
        field = a.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        return tl.maximum(field, (LOWEST + 1023) << 52)
    else:
        return tl.maximum(bits_of(a) & INFINITY, (LOWEST + 127) << 23)


@triton.jit
def round_to_step(a, field, mantissa, ROUNDING: tl.constexpr):
    """Round magnitudes to multiples of 2**(exponent - mantissa); `field` has the exponent.

    `mantissa` is a constant, or numbers of the field's type.
    """
    WIDTH: tl.constexpr = 52 if a.dtype == tl.float64 else 23
    magic = (field + ((WIDTH - mantissa) << WIDTH)).to(a.dtype, bitcast=True)
    r = (a + magic) - magic
    if ROUNDING == AWAY:
        step = (field - (mantissa << WIDTH)).to(a.dtype, bitcast=True)
        r = tl.where(a - r == step * 0.5, r + step, r)
    elif ROUNDING == ZERO:
        step = (field - (mantissa << WIDTH)).to(a.dtype, bitcast=True)
        r = tl.where(r > a, r - step, r)
    return r


@triton.jit
def tile(
    length, groups, count, BLOCK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Return the offsets of ROWS blocks along the last axis, and which of them exist."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, PADDED)[None, :]
    exists = (group < count) & (k < BLOCK)
    if TAIL:
        row = group // groups
        within = (group - row * groups) * BLOCK + k
        return row * length + within, exists & (within < length)
    else:
        return group * BLOCK + k, exists


@triton.jit
def upright_tile(length, groups, inner, block, PADDED: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of COLUMNS neighboring blocks along an axis before the last."""
    row, chunk = parts(tl.cdiv(inner, COLUMNS))
    outer, group = row // groups, row % groups
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    within = group.to(tl.int64) * block + tl.arange(0, PADDED)[:, None]
    exists = (tl.arange(0, PADDED)[:, None] < block) & (within < length) & (column < inner)
    return (outer.to(tl.int64) * length + within) * inner + column, exists


@triton.jit
def columns_of(length, groups, inner, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return where COLUMNS neighboring blocks along an axis before the last begin.

    The second is the distance of each block's first number to it, and the third the number of rows
    that exist, 0 for columns that do not.
    """
    row, chunk = parts(tl.cdiv(inner, COLUMNS))
    outer = row // groups
    first = (row - outer * groups) * BLOCK
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    start = (outer.to(tl.int64) * length + first) * inner
    return start, column, tl.where(column < inner, length - first, 0)


@triton.jit
def rows_of(x, start, column, high, inner, BLOCK: tl.constexpr):
    """Load each row of `columns_of` as a vector of its own: a thread has all of a block.

    So nothing moves between threads, and a block's scale is made once.
    """
    rows = ()
    for i in tl.static_range(BLOCK):
        at = x + (start + tl.cast(inner, tl.int64) * i) + column
        rows = rows + (tl.load(at, mask=high > i, other=0),)  # noqa: RUF005
    return rows


@triton.jit
def store_row(out, y, ROW: tl.constexpr, start, column, high, inner):
    """Store one row of `columns_of`."""
    tl.store(out + (start + tl.cast(inner, tl.int64) * ROW) + column, y, mask=high > ROW)


@triton.jit
def parts(count):
    """Return the quotient and the rest of this program's number; long integers divide slowly."""
    count = count.to(tl.int32)
    whole = tl.program_id(0) // count
    return whole, tl.program_id(0) - whole * count


@triton.jit
def round_once(a, sign, OUT: tl.constexpr):
    """Round float64 magnitudes with a sign bit to a narrower dtype, once."""
    if OUT == BF16:
        a = on_grid(a, 7, -126, EVEN)
    elif OUT == FP16:
        a = on_grid(a, 10, -14, EVEN)
    return narrow(bits_of(a.to(tl.float32)) | sign, OUT)
