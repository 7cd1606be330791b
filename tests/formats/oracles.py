"""What other people's code and a slow exact definition say about the element formats.

Nothing here calls qgate: a test that compares qgate with this file cannot agree with itself. Each
library is asked only for what `specs/formats.md` found it right about, and says so by what it
accepts: the dtype it rounds from without going through float32 first, and inputs it gets wrong.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property, partial
from itertools import pairwise

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


def _import_torchao_kernels() -> object:
    """torchao's kernels, without what it logs about the accelerators it does not find."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from torchao.prototype.mx_formats import kernels
    finally:
        logging.disable(logging.NOTSET)
    return kernels


torchao_kernels = _import_torchao_kernels()


# ---------------------------------------------------------------- the exact definition


@dataclass(frozen=True)
class Fields:
    """A row of the table of formats: field widths, and what the last codes are kept for.

    `top` is "ieee" (the last exponent is Inf and NaN), "nan" (only the last code is a NaN) or
    "none".
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: str


FLOATS = {
    "fp8_e4m3": Fields(4, 3, 7, "nan"),
    "fp8_e5m2": Fields(5, 2, 15, "ieee"),
    "fp6_e3m2": Fields(3, 2, 3, "none"),
    "fp6_e2m3": Fields(2, 3, 1, "none"),
    "fp4_e2m1": Fields(2, 1, 1, "none"),
    "S1P2": Fields(1, 2, 1, "none"),
    "fp16": Fields(5, 10, 15, "ieee"),
    "bf16": Fields(8, 7, 127, "ieee"),
}
# The largest integer, and the unit it is counted in.
INTEGERS = {
    "int8": (127, Fraction(1)),
    "int4": (7, Fraction(1)),
    "mxint8 element": (127, Fraction(1, 64)),
}
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
        return [_as_float(place) for place in self.exact]

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
    unused = {"ieee": 2**m, "nan": 1, "none": 0}[fmt.top]
    places = []
    for code in range(2 ** (e + m) - unused + 1):
        exponent, fraction = divmod(code, 2**m)
        if exponent == 0:
            value = Fraction(fraction, 2**m) * Fraction(2) ** (1 - fmt.bias)
        else:
            value = (1 + Fraction(fraction, 2**m)) * Fraction(2) ** (exponent - fmt.bias)
        places.append(value)
    overflow = {"ieee": np.inf, "nan": np.nan, "none": None}[fmt.top]
    return Grid(places, overflow, negative_zero=True)


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
    """The magnitudes of one sign: they differ only for integers that use their lowest code."""
    if name in FLOATS:
        return _float_grid(FLOATS[name])
    if name == "hif8":
        finite = [value for value in hif8_magnitudes() if value is not None]
        return Grid([*sorted(finite), HIF8_BEYOND], np.inf, negative_zero=False)
    largest, unit = INTEGERS[name]
    largest += negative and not narrow
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


def _by_gfloat(x: Array, info: gfloat.FormatInfo, rounding: str, saturate: bool) -> Floats:
    mode = {
        "even": RoundMode.TiesToEven,
        "away": RoundMode.TiesToAway,
        "zero": RoundMode.TowardZero,
    }[rounding]
    with np.errstate(invalid="ignore"):
        return np.asarray(gfloat.round_ndarray(info, to_float64(x), mode, sat=saturate))


def _by_numpy_dtype(x: Array, dtype: type) -> Floats:
    """ml_dtypes and en_dtypes are numpy dtypes; their casts go through float32."""
    with np.errstate(all="ignore"):
        return to_float32(x).astype(dtype).astype(np.float64)


def _by_numpy_half(x: Array) -> Floats:
    with np.errstate(over="ignore"):
        return to_float64(x).astype(np.float16).astype(np.float64)


def _by_torch(x: Array, dtype: torch.dtype) -> Floats:
    return torch.from_numpy(to_float32(x)).to(dtype).to(torch.float64).numpy()


def _by_onnx(x: Array, to: int) -> Floats:
    """ONNX's reference implementation of Cast with saturate=1."""
    single = to_float32(x)
    return _onnx_cast(to).run(None, {"x": single})[0].astype(np.float64)


@cache
def _onnx_cast(to: int) -> ReferenceEvaluator:
    helper = onnx.helper
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=to, saturate=1)],
        "cast",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", to, None)],
    )
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))


def _by_onnx_integer(x: Array, dtype: type) -> Floats:
    with np.errstate(invalid="ignore"):
        codes = onnx.numpy_helper.saturate_cast(to_float64(x), np.dtype(dtype))
    return codes.astype(np.float64)


def _by_fake_quantize(x: Array, low: int, high: int) -> Floats:
    single = torch.from_numpy(to_float32(x))
    return torch.fake_quantize_per_tensor_affine(single, 1.0, 0, low, high).double().numpy()


def _by_torchao(x: Array, name: str) -> Floats:
    single = torch.from_numpy(np.ascontiguousarray(to_float32(x)))
    codes = getattr(torchao_kernels, f"f32_to_{name}_unpacked")(single)
    return getattr(torchao_kernels, f"{name}_unpacked_to_f32")(codes).double().numpy()


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

    double   it rounds float64 numbers once; the others refuse what is not a float32 number
    accepts  the inputs it is right about
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


E1M2_INFO = gfloat.FormatInfo(
    "e1m2",
    k=4,
    precision=3,
    bias=1,
    is_signed=True,
    domain=gfloat.Domain.Finite,
    has_nz=True,
    num_high_nans=0,
    has_subnormals=True,
    is_twos_complement=False,
)
# gfloat gives every format of more than one significant bit a zero: right for codes above 0 only.
E6M2_INFO = gfloat.FormatInfo(
    "e6m2",
    k=8,
    precision=3,
    bias=48,
    is_signed=False,
    domain=gfloat.Domain.Finite,
    has_nz=False,
    num_high_nans=1,
    has_subnormals=False,
    is_twos_complement=False,
)
GFLOAT_INFO = {
    "fp8_e4m3": gfloat.formats.format_info_ocp_e4m3,
    "fp8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "fp6_e3m2": gfloat.formats.format_info_ocp_e3m2,
    "fp6_e2m3": gfloat.formats.format_info_ocp_e2m3,
    "fp4_e2m1": gfloat.formats.format_info_ocp_e2m1,
    "S1P2": E1M2_INFO,
    "fp16": gfloat.formats.format_info_binary16,
    "bf16": gfloat.formats.format_info_bfloat16,
}
CAN_OVERFLOW = ("fp8_e4m3", "fp8_e5m2", "fp16", "bf16")


def _gfloat_oracles() -> list[Oracle]:
    return [
        Oracle(
            name,
            "gfloat",
            partial(_by_gfloat, info=info, rounding=rounding, saturate=saturate),
            saturate=saturate,
            rounding=rounding,
            double=True,
        )
        for name, info in GFLOAT_INFO.items()
        for rounding in ROUNDINGS
        for saturate in ((True, False) if name in CAN_OVERFLOW else (True,))
    ]


def _numpy_dtype(fmt: str, source: str, dtype: type, **how: object) -> Oracle:
    return Oracle(fmt, source, partial(_by_numpy_dtype, dtype=dtype), **how)  # type: ignore[arg-type]


def _torch(fmt: str, dtype: torch.dtype, saturate: bool) -> Oracle:
    return Oracle(fmt, "torch", partial(_by_torch, dtype=dtype), saturate=saturate)


def _torchao(fmt: str, name: str) -> Oracle:
    return Oracle(fmt, "torchao", partial(_by_torchao, name=name), accepts=not_nan)


def _onnx(fmt: str, to: int) -> Oracle:
    return Oracle(fmt, "onnx", partial(_by_onnx, to=to))


def _onnx_integer(fmt: str, dtype: type) -> Oracle:
    run = partial(_by_onnx_integer, dtype=dtype)
    return Oracle(fmt, "onnx", run, narrow=False, double=True, accepts=not_nan)


def _fake_quantize(fmt: str, low: int, high: int) -> Oracle:
    run = partial(_by_fake_quantize, low=low, high=high)
    narrow = low == -high
    return Oracle(fmt, "torch.fake_quantize", run, narrow=narrow, accepts=fits_int64)


ORACLES = [
    *_gfloat_oracles(),
    _torch("fp8_e4m3", torch.float8_e4m3fn, saturate=True),
    _onnx("fp8_e4m3", onnx.TensorProto.FLOAT8E4M3FN),
    _numpy_dtype("fp8_e4m3", "ml_dtypes", ml_dtypes.float8_e4m3fn, saturate=False),
    _onnx("fp8_e5m2", onnx.TensorProto.FLOAT8E5M2),
    _torch("fp8_e5m2", torch.float8_e5m2, saturate=False),
    _numpy_dtype("fp8_e5m2", "ml_dtypes", ml_dtypes.float8_e5m2, saturate=False),
    _numpy_dtype("fp6_e3m2", "ml_dtypes", ml_dtypes.float6_e3m2fn, accepts=not_nan),
    _numpy_dtype("fp6_e3m2", "en_dtypes", en_dtypes.float6_e3m2, accepts=not_nan),
    _torchao("fp6_e3m2", "f6_e3m2"),
    _numpy_dtype("fp6_e2m3", "ml_dtypes", ml_dtypes.float6_e2m3fn, accepts=not_nan),
    _numpy_dtype("fp6_e2m3", "en_dtypes", en_dtypes.float6_e2m3, accepts=not_nan),
    _torchao("fp6_e2m3", "f6_e2m3"),
    _numpy_dtype("fp4_e2m1", "ml_dtypes", ml_dtypes.float4_e2m1fn, accepts=not_nan),
    _numpy_dtype("fp4_e2m1", "en_dtypes", en_dtypes.float4_e2m1, accepts=not_nan),
    _torchao("fp4_e2m1", "f4"),
    _numpy_dtype("S1P2", "en_dtypes", en_dtypes.float4_e1m2, accepts=not_nan),
    _numpy_dtype("hif8", "en_dtypes", en_dtypes.hifloat8, saturate=False, rounding="away"),
    Oracle("fp16", "numpy", _by_numpy_half, saturate=False, double=True),
    _torch("fp16", torch.float16, saturate=False),
    _numpy_dtype("bf16", "ml_dtypes", ml_dtypes.bfloat16, saturate=False),
    _torch("bf16", torch.bfloat16, saturate=False),
    _onnx_integer("int8", np.int8),
    _onnx_integer("int4", ml_dtypes.int4),
    _fake_quantize("int8", -127, 127),
    _fake_quantize("int8", -128, 127),
    _fake_quantize("int4", -7, 7),
    _fake_quantize("int4", -8, 7),
]


def oracles_for(
    fmt: str, *, rounding: str, saturate: bool = True, narrow: bool = True, double: bool = False
) -> list[Oracle]:
    """Those who know this case; with `double`, those who round a float64 number once."""
    wanted = (fmt, rounding, saturate, narrow)
    return [
        oracle
        for oracle in ORACLES
        if (oracle.fmt, oracle.rounding, oracle.saturate, oracle.narrow) == wanted
        and (oracle.double or not double)
    ]


# ---------------------------------------------------------------- codes to values


@dataclass(frozen=True)
class Decoder:
    """One library's values of all codes of one format; `skips` are codes it is wrong about."""

    fmt: str
    source: str
    run: Callable[[Codes], Floats]
    skips: frozenset[int] = field(default_factory=frozenset)

    def __call__(self, codes: Codes) -> Floats:
        return self.run(codes)


def _decode_numpy(codes: Codes, dtype: type, carrier: type = np.uint8) -> Floats:
    with np.errstate(invalid="ignore"):
        return codes.astype(carrier).view(dtype).astype(np.float64)


def _decode_torch(codes: Codes, dtype: torch.dtype, carrier: type = np.uint8) -> Floats:
    return torch.from_numpy(codes.astype(carrier)).view(dtype).to(torch.float64).numpy()


def _decode_gfloat(codes: Codes, info: gfloat.FormatInfo) -> Floats:
    return np.asarray(gfloat.decode_ndarray(info, codes.astype(np.int64)), dtype=np.float64)


def _decode_torchao(codes: Codes, name: str) -> Floats:
    tensor = torch.from_numpy(codes.astype(np.uint8))
    return getattr(torchao_kernels, f"{name}_unpacked_to_f32")(tensor).double().numpy()


def _decode_hif8_table(codes: Codes) -> Floats:
    positive = [np.inf if value is None else float(value) for value in hif8_magnitudes()]
    values = np.array([*positive, np.nan, *[-value for value in positive[1:]]])
    return values[codes.astype(np.int64)]


def _decode_e6m2(codes: Codes) -> Floats:
    """The table's row in words: six exponent bits of bias 48, two mantissa bits, NaN at the top."""
    values = [float((1 + Fraction(c % 4, 4)) * Fraction(2) ** (c // 4 - 48)) for c in range(255)]
    return np.array([*values, np.nan])[codes.astype(np.int64)]


def _decoder(fmt: str, source: str, how: Callable[..., Floats], *what: object) -> Decoder:
    return Decoder(fmt, source, lambda codes: how(codes, *what))


DECODERS = [
    *[_decoder(name, "gfloat", _decode_gfloat, info) for name, info in GFLOAT_INFO.items()],
    _decoder("fp8_e4m3", "ml_dtypes", _decode_numpy, ml_dtypes.float8_e4m3fn),
    _decoder("fp8_e4m3", "torch", _decode_torch, torch.float8_e4m3fn),
    _decoder("fp8_e5m2", "ml_dtypes", _decode_numpy, ml_dtypes.float8_e5m2),
    _decoder("fp8_e5m2", "torch", _decode_torch, torch.float8_e5m2),
    _decoder("fp6_e3m2", "ml_dtypes", _decode_numpy, ml_dtypes.float6_e3m2fn),
    _decoder("fp6_e3m2", "en_dtypes", _decode_numpy, en_dtypes.float6_e3m2),
    _decoder("fp6_e3m2", "torchao", _decode_torchao, "f6_e3m2"),
    _decoder("fp6_e2m3", "ml_dtypes", _decode_numpy, ml_dtypes.float6_e2m3fn),
    _decoder("fp6_e2m3", "en_dtypes", _decode_numpy, en_dtypes.float6_e2m3),
    _decoder("fp6_e2m3", "torchao", _decode_torchao, "f6_e2m3"),
    _decoder("fp4_e2m1", "ml_dtypes", _decode_numpy, ml_dtypes.float4_e2m1fn),
    _decoder("fp4_e2m1", "en_dtypes", _decode_numpy, en_dtypes.float4_e2m1),
    _decoder("fp4_e2m1", "torchao", _decode_torchao, "f4"),
    _decoder("S1P2", "en_dtypes", _decode_numpy, en_dtypes.float4_e1m2),
    _decoder("hif8", "en_dtypes", _decode_numpy, en_dtypes.hifloat8),
    _decoder("hif8", "the paper's table", _decode_hif8_table),
    _decoder("int8", "numpy", _decode_numpy, np.int8),
    _decoder("int4", "ml_dtypes", _decode_numpy, ml_dtypes.int4),
    _decoder("mxint8 element", "gfloat", _decode_gfloat, gfloat.formats.format_info_ocp_int8),
    _decoder("E8M0", "gfloat", _decode_gfloat, gfloat.formats.format_info_ocp_e8m0),
    _decoder("E8M0", "ml_dtypes", _decode_numpy, ml_dtypes.float8_e8m0fnu),
    _decoder("E8M0", "torch", _decode_torch, torch.float8_e8m0fnu),
    _decoder("E8M0", "en_dtypes", _decode_numpy, en_dtypes.float8_e8m0),
    Decoder("E6M2", "gfloat", partial(_decode_gfloat, info=E6M2_INFO), frozenset({0})),
    _decoder("E6M2", "the definition", _decode_e6m2),
    _decoder("fp16", "numpy", _decode_numpy, np.float16, np.uint16),
    _decoder("fp16", "torch", _decode_torch, torch.float16, np.uint16),
    _decoder("bf16", "ml_dtypes", _decode_numpy, ml_dtypes.bfloat16, np.uint16),
    _decoder("bf16", "torch", _decode_torch, torch.bfloat16, np.uint16),
]


def decoders_for(fmt: str) -> list[Decoder]:
    return [decoder for decoder in DECODERS if decoder.fmt == fmt]


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
