"""Oracles for the formats: other people's code, and a slow exact definition.

Nothing here calls qgate: a test that compares qgate with this file cannot agree with itself. A new
format is one more row of `FLOATS` or `INTEGERS`; `LIBRARIES` finds in each library the types that
have the fields of a row. An oracle names the inputs that its library rounds right.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import en_dtypes
import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import torch
from gfloat import RoundMode
from onnx.reference import ReferenceEvaluator

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.integer]
Array = npt.NDArray[np.floating] | torch.Tensor
Mask = npt.NDArray[np.bool_]

ROUNDINGS = ("even", "away", "zero")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Drop the messages of torchao about accelerators that this machine does not have."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


with _quietly():
    from torchao.prototype.mx_formats import constants as torchao_constants
    from torchao.prototype.mx_formats import kernels as torchao_kernels
    from torchao.prototype.mx_formats import mx_tensor


# ---------------------------------------------------------------- the exact definition


@dataclass(frozen=True)
class Fields:
    """A row of the table of formats: field widths, and the meaning of the last codes.

    `top` is "ieee" (the last exponent is Inf and NaN), "nan" (only the last code is a NaN), "fnuz"
    (none of the last, but a NaN for -0) or "none". An unsigned type is a scale: it has no zero and no subnormals.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: str
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def spelling(self) -> str:
        """The type in the manner of numpy, without its suffix; empty for an unusual bias."""
        usual = max(2 ** (self.exponent_bits - 1) - (self.top != "fnuz"), 1)
        bias = "" if self.bias == usual else f"b{self.bias}"
        if bias and self.top != "fnuz":
            return ""
        if self.top == "ieee" and (self.exponent_bits, self.mantissa_bits) in ((5, 10), (8, 7)):
            return "float16" if self.exponent_bits == 5 else "bfloat16"
        return f"float{self.bits}_e{self.exponent_bits}m{self.mantissa_bits}{bias}"

    @property
    def dtype(self) -> str:
        """The name of the type in torch and ml_dtypes."""
        suffix = {"ieee": "", "fnuz": "fnuz"}.get(self.top, "fn" if self.signed else "fnu")
        return self.spelling + suffix


FLOATS = {
    "fp8_e4m3": Fields(4, 3, 7, "nan"),
    "fp8_e5m2": Fields(5, 2, 15, "ieee"),
    "fp8_e4m3fnuz": Fields(4, 3, 8, "fnuz"),
    "fp8_e5m2fnuz": Fields(5, 2, 16, "fnuz"),
    "fp8_e4m3b11fnuz": Fields(4, 3, 11, "fnuz"),
    "fp6_e3m2": Fields(3, 2, 3, "none"),
    "fp6_e2m3": Fields(2, 3, 1, "none"),
    "fp4_e2m1": Fields(2, 1, 1, "none"),
    "S1P2": Fields(1, 2, 1, "none"),
    "fp16": Fields(5, 10, 15, "ieee"),
    "bf16": Fields(8, 7, 127, "ieee"),
}
SCALES = {
    "E8M0": Fields(8, 0, 127, "nan", signed=False),
    "E6M2": Fields(6, 2, 48, "nan", signed=False),
    "fp8_ue5m3": Fields(5, 3, 15, "nan", signed=False),
}
CAN_OVERFLOW = [name for name, row in FLOATS.items() if row.top != "none"]
# The largest integer, and the unit it is counted in; those from zero on have names in `UNSIGNED`.
INTEGERS = {
    "int8": (127, Fraction(1)),
    "int4": (7, Fraction(1)),
    "int2": (1, Fraction(1)),
    "uint8": (255, Fraction(1)),
    "uint4": (15, Fraction(1)),
    "uint2": (3, Fraction(1)),
    "mxint8 element": (127, Fraction(1, 64)),
}
UNSIGNED = [name for name in INTEGERS if name.startswith("uint")]
HIF8_TABLE = """
0       2^-22     2^-21    2^-20     2^-19  2^-18     2^-17    2^-16
1       1.125     1.25     1.375     1.5    1.625     1.75     1.875
2       2.25      2.5      2.75      3      3.25      3.5      3.75
0.5     0.5625    0.625    0.6875    0.75   0.8125    0.875    0.9375
4       4.5       5        5.5       6      6.5       7        7.5
8       9         10       11        12     13        14       15
0.25    0.28125   0.3125   0.34375   0.375  0.40625   0.4375   0.46875
0.125   0.140625  0.15625  0.171875  0.1875 0.203125  0.21875  0.234375
16      20        24       28        32     40        48       56
64      80        96       112       128    160       192      224
2^-4  1.25*2^-4  1.5*2^-4  1.75*2^-4  2^-5  1.25*2^-5  1.5*2^-5  1.75*2^-5
2^-6  1.25*2^-6  1.5*2^-6  1.75*2^-6  2^-7  1.25*2^-7  1.5*2^-7  1.75*2^-7
256     384       512      768       1024   1536      2048     3072
4096    6144      8192     12288     16384  24576     32768    Inf
2^-8   1.5*2^-8   2^-9   1.5*2^-9   2^-10  1.5*2^-10  2^-11  1.5*2^-11
2^-12  1.5*2^-12  2^-13  1.5*2^-13  2^-14  1.5*2^-14  2^-15  1.5*2^-15
"""
# Where the grid would go on if 0x6F were not Inf: an overflow is what rounds there.
HIF8_BEYOND = Fraction(3, 2) * 2**15


@dataclass(frozen=True)
class Grid:
    """The magnitudes of one sign, ascending; the last is the first one too big to be stored.

    They are made as fractions and kept as floats: all of them, and the numbers halfway between,
    are float64 numbers (that is checked), and comparing floats is exact.
    """

    exact: list[Fraction]
    overflow: float | None
    negative_zero: bool

    @cached_property
    def places(self) -> list[float]:
        return [_as_float(exact_value) for exact_value in self.exact]

    @cached_property
    def middles(self) -> list[float]:
        return [_as_float((a + b) / 2) for a, b in pairwise(self.exact)]

    @property
    def largest(self) -> float:
        return self.places[-2]


def _as_float(value: Fraction) -> float:
    number = float(value)
    assert Fraction(number) == value, f"{value} is not a float64 number."
    return number


@cache
def _float_grid(fmt: Fields) -> Grid:
    e, m = fmt.exponent_bits, fmt.mantissa_bits
    unused = {"ieee": 2**m, "nan": 1}.get(fmt.top, 0)
    places = []
    for code in range(2 ** (e + m) - unused + 1):
        exponent, fraction = divmod(code, 2**m)
        if exponent == 0:
            value = Fraction(fraction, 2**m) * Fraction(2) ** (1 - fmt.bias)
        else:
            value = (1 + Fraction(fraction, 2**m)) * Fraction(2) ** (exponent - fmt.bias)
        places.append(value)
    overflow = {"ieee": np.inf, "none": None}.get(fmt.top, np.nan)
    return Grid(places, overflow, negative_zero=fmt.top != "fnuz")


@cache
def hif8_magnitudes() -> list[Fraction | None]:
    """The table above in code order, None for Inf."""

    def number(text: str) -> Fraction | None:
        if text == "Inf":
            return None
        product = Fraction(1)
        for factor in text.split("*"):
            base, _, power = factor.partition("^")
            product *= Fraction(base) ** int(power or 1)
        return product

    return [number(text) for text in HIF8_TABLE.split()]


@cache
def grid(name: str, negative: bool = False, narrow: bool = True) -> Grid:
    """The magnitudes of one sign: they differ only for integers, not in their narrow range."""
    if name in FLOATS:
        return _float_grid(FLOATS[name])
    if name == "hif8":
        finite = [value for value in hif8_magnitudes() if value is not None]
        return Grid([*sorted(finite), HIF8_BEYOND], np.inf, negative_zero=False)
    largest, unit = INTEGERS[name]
    largest = 0 if negative and name in UNSIGNED else largest + (negative and not narrow)
    return Grid([n * unit for n in range(largest + 2)], None, negative_zero=False)


def exactly(
    x: Array, name: str, *, rounding: str, saturate: bool = True, narrow: bool = True
) -> Floats:
    """Each number to one of the values beside it, worked out in fractions, one by one."""
    numbers, back = np.unique(to_float64(x).reshape(-1).view(np.int64), return_inverse=True)
    rounded = [
        _round_exactly(value, name, rounding, saturate, narrow)
        for value in numbers.view(np.float64).tolist()
    ]
    return np.array(rounded, dtype=np.float64)[back].reshape(tuple(x.shape))


def _round_exactly(x: float, name: str, rounding: str, saturate: bool, narrow: bool) -> float:
    if math.isnan(x):
        return math.nan
    negative = math.copysign(1, x) < 0
    g = grid(name, negative, narrow)
    size = abs(x)
    if size < g.places[-1]:
        below = bisect_right(g.places, size) - 1
        index = below + _goes_up(size, g.middles[below], below, rounding)
        overflows = index == len(g.places) - 1
        value = g.places[index]
    else:
        overflows = size == math.inf or rounding != "zero"
        value = g.largest
    if overflows:
        value = g.largest if saturate or g.overflow is None else g.overflow
    if value == 0 and not g.negative_zero:
        return 0.0
    return -value if negative else value


def _goes_up(size: float, middle: float, below: int, rounding: str) -> bool:
    if rounding == "zero":
        return False
    if size != middle:
        return size > middle
    return rounding == "away" or below % 2 == 1


def neighbors(name: str) -> tuple[Floats, Floats]:
    """All pairs of adjacent magnitudes that can be stored, as lower and upper ones."""
    places = np.array(grid(name).places[:-1])
    return places[:-1], places[1:]


def midpoints(name: str, *, narrow: bool = True) -> Floats:
    """The numbers halfway between neighbors, the overflow threshold included, of both signs."""
    positive, negative = (np.array(grid(name, sign, narrow).middles) for sign in (False, True))
    return np.concatenate([positive, -negative])


# ---------------------------------------------------------------- other people's code


def to_float64(x: Array) -> Floats:
    """The numbers of an array or tensor as float64; exact for every dtype used here."""
    if isinstance(x, torch.Tensor):
        return x.detach().to(torch.float64).numpy()
    return np.asarray(x, dtype=np.float64)


def to_float32(x: Array) -> npt.NDArray[np.float32]:
    """The same as float32, refused where that would round: the peer would round a second time."""
    wide = to_float64(x)
    with np.errstate(over="ignore", invalid="ignore"):
        single = wide.astype(np.float32)
    if not np.array_equal(single.astype(np.float64), wide, equal_nan=True):
        raise ValueError("this oracle rounds from float32 and the input does not fit there.")
    return single


def everything(x: Floats) -> Mask:
    return np.ones(x.shape, dtype=bool)


def not_nan(x: Floats) -> Mask:
    return ~np.isnan(x)


def fits_int64(x: Floats) -> Mask:
    """torch.fake_quantize casts to int64 before it clamps."""
    return np.abs(x) < 2.0**62


@dataclass(frozen=True)
class Oracle:
    """One library's rounding to one format: call it on an array, get float64 values.

    double   it rounds float64 numbers once; the others refuse numbers beyond float32
    accepts  the inputs that it rounds right
    """

    fmt: str
    source: str
    run: Callable[[Array], Floats]
    saturate: bool = True
    narrow: bool = True
    rounding: str = "even"
    double: bool = False
    accepts: Callable[[Floats], Mask] = everything

    def __call__(self, x: Array) -> Floats:
        return self.run(x)


@dataclass(frozen=True)
class Decoder:
    """One library's values of all codes of one format; `skips` are codes it is wrong about."""

    fmt: str
    source: str
    run: Callable[[Codes], Floats]
    skips: frozenset[int] = field(default_factory=frozenset)

    def __call__(self, codes: Codes) -> Floats:
        return self.run(codes)


Entries = Iterator[Oracle | Decoder]


def _by_numpy(name: str, source: str, dtype: type | None, **options: Any) -> Entries:
    """Casts and codes of a numpy dtype; casts to those of other packages go through float32."""
    if dtype is None:
        return
    narrowed = to_float64 if options.get("double") else to_float32

    def cast(x: Array) -> Floats:
        with np.errstate(all="ignore"):
            return narrowed(x).astype(dtype).astype(np.float64)

    def decode(codes: Codes) -> Floats:
        carrier = np.uint16 if np.dtype(dtype).itemsize == 2 else np.uint8
        with np.errstate(invalid="ignore"):
            return codes.astype(carrier).view(dtype).astype(np.float64)

    if name not in SCALES and name not in INTEGERS:
        yield Oracle(name, source, cast, **options)
    yield Decoder(name, source, decode)


def _numpy(name: str, row: Fields | None) -> Entries:
    if row and row.dtype == "float16":
        yield from _by_numpy(name, "numpy", np.float16, saturate=False, double=True)
    if name in ("int8", "uint8"):
        yield from _by_numpy(name, "numpy", np.dtype(name).type)


def _ml_dtypes(name: str, row: Fields | None) -> Entries:
    dtype = getattr(ml_dtypes, row.dtype if row else name, None)
    accepts = everything if name in CAN_OVERFLOW else not_nan
    saturate = name not in CAN_OVERFLOW
    yield from _by_numpy(name, "ml_dtypes", dtype, saturate=saturate, accepts=accepts)


def _en_dtypes(name: str, row: Fields | None) -> Entries:
    if name == "hif8":
        options = {"saturate": False, "rounding": "away"}
        yield from _by_numpy(name, "en_dtypes", en_dtypes.hifloat8, **options)
    if row and (row.top == "none" or not row.signed):
        dtype = getattr(en_dtypes, row.spelling, None)
        yield from _by_numpy(name, "en_dtypes", dtype, accepts=not_nan)


def _torch(name: str, row: Fields | None) -> Entries:
    if row is None:
        return
    dtype = getattr(torch, row.dtype, None)
    if dtype is None:
        return

    def cast(x: Array) -> Floats:
        return torch.from_numpy(to_float32(x)).to(dtype).to(torch.float64).numpy()

    def decode(codes: Codes) -> Floats:
        carrier = np.uint16 if dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(codes.astype(carrier)).view(dtype).to(torch.float64).numpy()

    if row.signed:
        yield Oracle(name, "torch", cast, saturate=row.top == "nan")
    yield Decoder(name, "torch", decode)


def _fake_quantize(name: str, _row: Fields | None) -> Entries:
    if name not in INTEGERS or INTEGERS[name][1] != 1:
        return
    high = INTEGERS[name][0]
    for low in (0,) if name in UNSIGNED else (-high, -high - 1):

        def cast(x: Array, low: int = low) -> Floats:
            single = torch.from_numpy(to_float32(x))
            return torch.fake_quantize_per_tensor_affine(single, 1.0, 0, low, high).double().numpy()

        narrow = low > -high - 1
        yield Oracle(name, "torch.fake_quantize", cast, narrow=narrow, accepts=fits_int64)


def _onnx(name: str, row: Fields | None) -> Entries:
    """The reference implementation of Cast with saturate=1, and of saturating integers."""
    if row:
        spelling = row.spelling if row.top == "none" else row.dtype
        to = getattr(onnx.TensorProto, spelling.upper().replace("_", ""), None)
        if to is not None and row.signed and row.bits <= 8:

            def cast(x: Array) -> Floats:
                with np.errstate(all="ignore"):
                    return _onnx_cast(to).run(None, {"x": to_float32(x)})[0].astype(np.float64)

            accepts = everything if name in CAN_OVERFLOW else not_nan
            yield Oracle(name, "onnx", cast, accepts=accepts)
    elif hasattr(onnx.TensorProto, name.upper()):
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)

        def integers(x: Array) -> Floats:
            with np.errstate(invalid="ignore"):
                codes = onnx.numpy_helper.saturate_cast(to_float64(x), dtype)
            return codes.astype(np.float64)

        narrow = name in UNSIGNED
        yield Oracle(name, "onnx", integers, narrow=narrow, double=True, accepts=not_nan)


@cache
def _onnx_cast(to: int) -> ReferenceEvaluator:
    helper = onnx.helper
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=to, saturate=1)],
        "cast",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", to, None)],
    )
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)]))


def _torchao(name: str, row: Fields | None) -> Entries:
    if row is None or row.top != "none" or row.exponent_bits < 2:
        return
    widths = row.exponent_bits, row.mantissa_bits

    def decode(codes: Codes) -> Floats:
        tensor = torch.from_numpy(codes.astype(np.uint8))
        return torchao_kernels._floatx_unpacked_to_f32(tensor, *widths).double().numpy()

    def cast(x: Array) -> Floats:
        single = torch.from_numpy(np.ascontiguousarray(to_float32(x)))
        return decode(torchao_kernels._f32_to_floatx_unpacked(single, *widths).numpy())

    yield Oracle(name, "torchao", cast, accepts=not_nan)
    yield Decoder(name, "torchao", decode)


def _transformers(name: str, row: Fields | None) -> Entries:
    """The values of MXFP4 checkpoints."""
    if row and row.dtype == "float4_e2m1fn":

        def decode(codes: Codes) -> Floats:
            return np.array(importlib.import_module(module).FP4_VALUES)[codes.astype(np.int64)]

        module = "transformers.integrations.mxfp4"
        yield Decoder(name, "transformers", decode)


GFLOAT_MODES = {
    "even": RoundMode.TiesToEven,
    "away": RoundMode.TiesToAway,
    "zero": RoundMode.TowardZero,
}


def _gfloat(name: str, row: Fields | None) -> Entries:
    """gfloat rounds to every format of fields, in every way."""
    info = gfloat.formats.format_info_ocp_int8 if name == "mxint8 element" else None
    if row:
        info = gfloat.FormatInfo(
            name,
            k=row.bits,
            precision=row.mantissa_bits + 1,
            bias=row.bias,
            is_signed=row.signed,
            domain=gfloat.Domain.Extended if row.top == "ieee" else gfloat.Domain.Finite,
            has_nz=row.signed and row.top != "fnuz",
            num_high_nans={"ieee": 2**row.mantissa_bits - 1, "nan": 1}.get(row.top, 0),
            has_subnormals=row.signed or name == "fp8_ue5m3",
            is_twos_complement=False,
        )
    if info is None:
        return

    def decode(codes: Codes) -> Floats:
        return np.asarray(gfloat.decode_ndarray(info, codes.astype(np.int64)), dtype=np.float64)

    # gfloat gives every format of more than one significant bit a zero.
    has_zero_too_many = row is not None and not row.signed and row.mantissa_bits > 0
    yield Decoder(name, "gfloat", decode, frozenset({0} if has_zero_too_many else ()))
    if row is None or not row.signed:
        return
    for rounding, mode in GFLOAT_MODES.items():
        for saturate in (True, False) if name in CAN_OVERFLOW else (True,):

            def cast(x: Array, mode: RoundMode = mode, saturate: bool = saturate) -> Floats:
                with np.errstate(invalid="ignore"):
                    rounded = gfloat.round_ndarray(info, to_float64(x), mode, sat=saturate)
                return np.asarray(rounded)

            yield Oracle(name, "gfloat", cast, saturate, rounding=rounding, double=True)


def _specifications(name: str, _row: Fields | None) -> Entries:
    """Codes written out: no library has them all."""

    def hif8(codes: Codes) -> Floats:
        positive = [np.inf if value is None else float(value) for value in hif8_magnitudes()]
        return np.array([*positive, np.nan, *[-v for v in positive[1:]]])[codes.astype(np.int64)]

    def e6m2(codes: Codes) -> Floats:
        exact = [(1 + Fraction(c % 4, 4)) * Fraction(2) ** (c // 4 - 48) for c in range(255)]
        return np.array([*map(float, exact), np.nan])[codes.astype(np.int64)]

    written = {"hif8": ("the paper's table", hif8), "E6M2": ("the definition", e6m2)}
    if name in written:
        yield Decoder(name, *written[name])


LIBRARIES: tuple[Callable[[str, Fields | None], Entries], ...] = (
    _gfloat, _numpy, _torch, _fake_quantize, _onnx, _ml_dtypes, _en_dtypes, _torchao,
    _transformers, _specifications,
)  # fmt: skip
ELEMENTS = [*FLOATS, "hif8", *INTEGERS]
ENTRIES = [
    entry
    for name in (*ELEMENTS, *SCALES)
    for library in LIBRARIES
    for entry in library(name, FLOATS.get(name) or SCALES.get(name))
]
ORACLES = [entry for entry in ENTRIES if isinstance(entry, Oracle)]
DECODERS = [entry for entry in ENTRIES if isinstance(entry, Decoder)]


def oracles_for(
    fmt: str, *, rounding: str, saturate: bool = True, narrow: bool = True, double: bool = False
) -> list[Oracle]:
    """List the oracles of this case; with `double`, those that round a float64 number once."""
    case = (fmt, rounding, saturate, narrow)
    return [
        oracle
        for oracle in ORACLES
        if (oracle.fmt, oracle.rounding, oracle.saturate, oracle.narrow) == case
        and (oracle.double or not double)
    ]


def decoders_for(fmt: str) -> list[Decoder]:
    return [decoder for decoder in DECODERS if decoder.fmt == fmt]


def torchao_mx(x: torch.Tensor, element: str, rule: str) -> mx_tensor.MXTensor | None:
    """x in MX blocks of 32 of an element as torchao packs them; None without such elements."""
    row = FLOATS.get(element)
    names = torchao_constants.DTYPE_TO_SHORT_STR
    short = f"f{row.bits}e{row.exponent_bits}m{row.mantissa_bits}" if row else ""
    elem_dtype = next((dtype for dtype, name in names.items() if name == short), None)
    if elem_dtype is None:
        return None
    mode = mx_tensor.ScaleCalculationMode[rule.upper()]
    return mx_tensor.MXTensor.to_mx(x, elem_dtype, 32, mode)


# ---------------------------------------------------------------- comparing


def assert_same_bits(actual: Array, expected: Floats, what: str, x: Array | None = None) -> None:
    """Equal as float64 bits, zeros with their signs; a NaN equals a NaN whatever its bits."""
    got, want = to_float64(actual).reshape(-1), np.ascontiguousarray(expected).reshape(-1)
    assert got.shape == want.shape, f"{what}: {got.shape} is not {want.shape}"
    wrong = got.view(np.int64) != want.view(np.int64)
    wrong &= ~(np.isnan(got) & np.isnan(want))
    if wrong.any():
        inputs = None if x is None else to_float64(x).reshape(-1)
        lines = [
            f"  {f'index {i}' if inputs is None else f'x={inputs[i]!r}'}: "
            f"got {got[i]!r}, expected {want[i]!r}"
            for i in np.flatnonzero(wrong)[:8].tolist()
        ]
        head = f"{what}: {wrong.sum()} of {len(wrong)} differ"
        raise AssertionError("\n".join([head, *lines]))
