"""Every element format, code by code and rounding by rounding, against other people's code.

Both implementations are tested: the fast `qgate.quantize` by all the ways it can take, and the
readable `definition.quantize`. What is right comes from `oracles`, which does not know qgate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import definition
from qgate.formats._literals import E6M2, E8M0, MXINT8_ELEMENT, S1P2
from tests.formats import oracles
from tests.formats.oracles import Floats, assert_same_bits
from tests.shares import share

# Formats that are parts of block formats have no name to be found by.
PARTS = {fmt.name: fmt for fmt in (S1P2, E8M0, E6M2, MXINT8_ELEMENT)}
ELEMENTS = oracles.ELEMENTS
SIXTEEN_BITS = [torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")
TABLES_FROM = 2**14
EXACT_FOR = 4000


def fmt_of(name: str) -> Any:
    return PARTS.get(name) or qgate.formats.get(name)


@dataclass(frozen=True)
class Case:
    """One way to round to one format."""

    name: str
    rounding: str
    saturate: bool = True
    narrow: bool = True

    @property
    def fmt(self) -> Any:
        return fmt_of(self.name)

    @property
    def options(self) -> dict[str, Any]:
        """As little as says it: what a format takes for granted is not repeated."""
        options: dict[str, Any] = {}
        if self.rounding != default_rounding(self.name):
            options["rounding"] = self.rounding
        if not self.saturate:
            options["saturate"] = False
        if self.name in oracles.INTEGERS:
            options |= {"scale": 1.0} if self.narrow else {"scale": 1.0, "narrow": False}
        return options

    def exactly(self, x: Any) -> Floats:
        modes = {"rounding": self.rounding, "saturate": self.saturate, "narrow": self.narrow}
        return oracles.exactly(x, self.name, **modes)

    def oracles(self, *, double: bool = False) -> list[oracles.Oracle]:
        modes = {"rounding": self.rounding, "saturate": self.saturate, "narrow": self.narrow}
        return oracles.oracles_for(self.name, **modes, double=double)

    def agreed(self, x: Floats, *, double: bool) -> Floats:
        """Return the result on which all oracles agree.

        The exact definition is slow: it checks a sample of many numbers, if gfloat rounds all.
        """
        libraries = self.oracles(double=double)
        if libraries and libraries[0].accepts is oracles.everything and len(x) > EXACT_FOR:
            sample = np.random.default_rng(5).choice(len(x), EXACT_FOR, replace=False)
            expected = libraries[0](x)
            exact = self.exactly(x[sample])
            assert_same_bits(expected[sample], exact, libraries[0].source, x[sample])
        else:
            expected = self.exactly(x)
        for oracle in libraries:
            accepted = oracle.accepts(x)
            assert accepted.sum() > len(x) / 2
            assert_same_bits(oracle(x[accepted]), expected[accepted], oracle.source, x[accepted])
        return expected

    def __str__(self) -> str:
        words = [self.name.replace(" ", "_"), self.rounding]
        words += [] if self.saturate else ["overflows"]
        words += [] if self.narrow else ["full"]
        return "-".join(words)


def default_rounding(name: str) -> str:
    return "away" if name == "hif8" else "even"


def cases() -> Iterator[Case]:
    for name in ELEMENTS:
        for rounding in oracles.ROUNDINGS:
            yield Case(name, rounding)
            if name in (*oracles.CAN_OVERFLOW, "hif8"):
                yield Case(name, rounding, saturate=False)
            if name in oracles.INTEGERS and name not in oracles.UNSIGNED:
                yield Case(name, rounding, narrow=False)


CASES = list(cases())
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 numbers of a 16-bit dtype, Inf and NaN among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def around(centers: Floats, number: type) -> Floats:
    """Numbers of a dtype with the two beside each of them."""
    exact = centers.astype(number)
    assert np.array_equal(exact.astype(np.float64), centers)
    below, above = (np.nextafter(exact, number(end)) for end in (-np.inf, np.inf))
    return np.concatenate([exact, below, above]).astype(np.float64)


def check(case: Case, x: torch.Tensor, expected: Floats) -> None:
    """Whatever way x takes through qgate, the values are the expected ones."""
    for way, values in quantized(case, x):
        assert_same_bits(values, expected, f"{case} by {way}", x)


def quantized(case: Case, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | Floats]]:
    """x by the definition and by the fast ways: as it is, in small pieces, as wider dtypes."""
    options, fmt = case.options, case.fmt
    wide = oracles.to_float64(x)
    yield "the definition", definition.quantize(wide, qgate.Quantizer(fmt, **options))
    yield "one tensor", qgate.quantize(x, fmt, dtype=torch.float32, **options)
    pieces = x.split(TABLES_FROM // 2)
    small = [qgate.quantize(piece, fmt, dtype=torch.float64, **options) for piece in pieces]
    yield "small pieces", torch.cat(small)
    if x.dtype != torch.float64:
        yield "float64 input", qgate.quantize(x.double(), fmt, **options)
    if x.dtype.itemsize == 2:
        yield "float32 input", qgate.quantize(x.float(), fmt, **options)
    if fmt.bits <= 8 and x.dtype.itemsize == 2:
        yield "its own dtype", qgate.quantize(x, fmt, **options)
    nan = "error" if fmt.nan_code is not None or not x.isnan().any() else "zero"
    encoded = qgate.encode(x, fmt, nan=nan, **options)
    lost = x.isnan() if nan == "zero" else torch.zeros(x.shape, dtype=torch.bool)
    yield "codes and decode", encoded.decode(torch.float64).masked_fill(lost, torch.nan)
    decode = oracles.decoders_for(case.name)[0]
    codes = encoded.codes.view(torch.uint8 if fmt.bits <= 8 else torch.uint16).numpy()
    values = decode(codes & (2**fmt.bits - 1))
    yield f"codes that {decode.source} reads", np.where(lost.numpy(), np.nan, values)


# ---------------------------------------------------------------- facts


# name: bits, largest, smallest normal, smallest subnormal, exponent of the largest, rounding, bias
FACTS: dict[str, tuple[int, float, float, float, int, str, int | None]] = {
    "fp8_e4m3": (8, 448.0, 2.0**-6, 2.0**-9, 8, "even", 7),
    "fp8_e5m2": (8, 57344.0, 2.0**-14, 2.0**-16, 15, "even", 15),
    "fp8_e4m3fnuz": (8, 240.0, 2.0**-7, 2.0**-10, 7, "even", 8),
    "fp8_e5m2fnuz": (8, 57344.0, 2.0**-15, 2.0**-17, 15, "even", 16),
    "fp8_e4m3b11fnuz": (8, 30.0, 2.0**-10, 2.0**-13, 4, "even", 11),
    "fp6_e3m2": (6, 28.0, 0.25, 0.0625, 4, "even", 3),
    "fp6_e2m3": (6, 7.5, 1.0, 0.125, 2, "even", 1),
    "fp4_e2m1": (4, 6.0, 1.0, 0.5, 2, "even", 1),
    "S1P2": (4, 1.75, 1.0, 0.25, 0, "even", 1),
    "mxint8 element": (8, 127 / 64, 1 / 64, 1 / 64, 0, "even", None),
    "E8M0": (8, 2.0**127, 2.0**-127, 2.0**-127, 127, "even", 127),
    "E6M2": (8, 1.5 * 2.0**15, 2.0**-48, 2.0**-48, 15, "even", 48),
    "fp8_ue5m3": (8, 114688.0, 2.0**-14, 2.0**-17, 16, "even", 15),
    "fp16": (16, 65504.0, 2.0**-14, 2.0**-24, 15, "even", 15),
    "bf16": (16, 255 * 2.0**120, 2.0**-126, 2.0**-133, 127, "even", 127),
    "hif8": (8, 32768.0, 2.0**-15, 2.0**-22, 15, "away", None),
    "int8": (8, 127.0, 1.0, 1.0, 6, "even", None),
    "int4": (4, 7.0, 1.0, 1.0, 2, "even", None),
    "int2": (2, 1.0, 1.0, 1.0, 0, "even", None),
    "uint8": (8, 255.0, 1.0, 1.0, 7, "even", None),
    "uint4": (4, 15.0, 1.0, 1.0, 3, "even", None),
    "uint2": (2, 3.0, 1.0, 1.0, 1, "even", None),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_those_of_the_specifications(name: str) -> None:
    fmt = fmt_of(name)
    facts = (
        fmt.bits,
        fmt.max,
        fmt.min_normal,
        fmt.min_subnormal,
        fmt.max_exponent,
        fmt.rounding,
        getattr(fmt, "bias", None),
    )
    assert facts == FACTS[name]


@pytest.mark.parametrize(
    ("name", "infinities", "nans"),
    [
        ("fp8_e4m3", [], [0x7F, 0xFF]),
        ("fp8_e5m2", [0x7C, 0xFC], [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]),
        ("fp8_e4m3fnuz", [], [0x80]),
        ("fp8_e5m2fnuz", [], [0x80]),
        ("fp8_e4m3b11fnuz", [], [0x80]),
        ("fp6_e3m2", [], []),
        ("fp6_e2m3", [], []),
        ("fp4_e2m1", [], []),
        ("S1P2", [], []),
        ("mxint8 element", [], []),
        ("int8", [], []),
        *((name, [], []) for name in ("int4", "int2", "uint8", "uint4", "uint2")),
        ("E8M0", [], [0xFF]),
        ("E6M2", [], [0xFF]),
        ("fp8_ue5m3", [], [0xFF]),
        ("hif8", [0x6F, 0xEF], [0x80]),
        ("fp16", [0x7C00, 0xFC00], [c for c in range(2**16) if c & 0x7FFF > 0x7C00]),
        ("bf16", [0x7F80, 0xFF80], [c for c in range(2**16) if c & 0x7FFF > 0x7F80]),
    ],
)
def test_codes_of_infinities_and_nans(name: str, infinities: list[int], nans: list[int]) -> None:
    fmt = fmt_of(name)
    values = fmt.code_values()
    assert np.flatnonzero(np.isinf(values)).tolist() == infinities
    assert np.flatnonzero(np.isnan(values)).tolist() == nans
    assert fmt.has_inf is bool(infinities)
    assert (fmt.nan_code in nans) if nans else fmt.nan_code is None


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1"])
def test_float_formats_have_two_zeros(name: str) -> None:
    fmt = fmt_of(name)
    assert fmt.negative_zero == 2 ** (fmt.bits - 1)


FNUZ = [name for name, row in oracles.FLOATS.items() if row.top == "fnuz"]


@pytest.mark.parametrize("name", ["hif8", *FNUZ, *oracles.INTEGERS])
def test_single_zero(name: str) -> None:
    fmt = fmt_of(name)
    assert fmt.negative_zero is None
    assert np.flatnonzero(fmt.code_values() == 0).tolist() == [0]


@pytest.mark.parametrize("saturate", [True, False])
def test_float32_becomes_bf16_as_torch_casts_it_for_every_upper_half(saturate: bool) -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    x = (upper | lower).view(torch.float32)
    expected = x.bfloat16().float()
    largest = torch.finfo(torch.bfloat16).max
    expected = expected.clamp(-largest, largest) if saturate else expected
    # In rows of one sign and exponent, of which those of NaN and overflow take another way.
    y = torch.cat([qgate.quantize(part, "bf16", saturate=saturate) for part in x.split(128)])
    is_same = y.view(torch.int32) == expected.view(torch.int32)
    assert bool((is_same | (y.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("name", ELEMENTS)
def test_list_of_magnitudes(name: str) -> None:
    expected = np.array(oracles.grid(name).places[:-1])
    assert_same_bits(fmt_of(name).magnitudes(), expected, name)
    negative = [] if name in oracles.UNSIGNED else -expected[:0:-1]
    assert_same_bits(fmt_of(name).values(), np.array([*negative, *expected]), name)


# ---------------------------------------------------------------- codes


DECODERS = pytest.mark.parametrize("decoder", oracles.DECODERS, ids=lambda d: f"{d.fmt}-{d.source}")


@DECODERS
def test_every_code_has_the_value_others_read(decoder: oracles.Decoder) -> None:
    fmt = fmt_of(decoder.fmt)
    codes = np.setdiff1d(np.arange(2**fmt.bits), list(decoder.skips))
    assert_same_bits(fmt.code_values()[codes], decoder(codes), str(decoder))


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_is_encoded_and_decoded_to_itself(name: str) -> None:
    fmt = fmt_of(name)
    codes = np.arange(2**fmt.bits)
    values = oracles.decoders_for(name)[0](codes)
    case = Case(
        name,
        default_rounding(name),
        saturate=fmt.nan_code is None,
        narrow=name not in oracles.INTEGERS or name in oracles.UNSIGNED,
    )
    nan = np.isnan(values)
    for dtype in (torch.float32, torch.float64):
        encoded = qgate.encode(torch.from_numpy(values).to(dtype), fmt, **case.options)
        encoded_codes = encoded.codes.view(torch.uint8 if fmt.bits <= 8 else torch.uint16).numpy()
        encoded_codes = encoded_codes.astype(np.int64) & (2**fmt.bits - 1)
        assert encoded_codes[~nan].tolist() == codes[~nan].tolist()
        assert np.isin(encoded_codes[nan], codes[nan]).all()
        assert_same_bits(encoded.decode(torch.float64), values, name)


def test_hif8_code_table() -> None:
    table = oracles.hif8_magnitudes()
    assert len(table) == 128
    expected = [np.inf if value is None else float(value) for value in table]
    assert qgate.formats.get("hif8").code_values()[:128].tolist() == expected


# ---------------------------------------------------------------- rounding


SOURCES = {
    "fp8_e4m3": {"gfloat", "torch", "onnx", "ml_dtypes"},
    "fp8_e5m2": {"gfloat", "torch", "onnx", "ml_dtypes"},
    "fp8_e4m3fnuz": {"gfloat", "torch", "onnx", "ml_dtypes"},
    "fp8_e5m2fnuz": {"gfloat", "torch", "onnx", "ml_dtypes"},
    "fp8_e4m3b11fnuz": {"gfloat", "ml_dtypes"},
    "fp6_e3m2": {"gfloat", "onnx", "ml_dtypes", "en_dtypes", "torchao"},
    "fp6_e2m3": {"gfloat", "onnx", "ml_dtypes", "en_dtypes", "torchao"},
    "fp4_e2m1": {"gfloat", "onnx", "ml_dtypes", "en_dtypes", "torchao", "transformers"},
    "S1P2": {"gfloat", "en_dtypes"},
    "fp16": {"gfloat", "numpy", "torch"},
    "bf16": {"gfloat", "torch", "ml_dtypes"},
    "hif8": {"en_dtypes"},
    "int8": {"onnx", "torch.fake_quantize", "numpy"},
    "int4": {"onnx", "torch.fake_quantize", "ml_dtypes"},
    "int2": {"onnx", "torch.fake_quantize", "ml_dtypes"},
    "uint8": {"onnx", "torch.fake_quantize", "numpy"},
    "uint4": {"onnx", "torch.fake_quantize", "ml_dtypes"},
    "uint2": {"onnx", "torch.fake_quantize", "ml_dtypes"},
    "mxint8 element": {"gfloat"},
}


def test_every_element_format_meets_the_libraries_that_know_it() -> None:
    """A new format needs a row of fields; then every library with such a type checks it."""
    registered = {f.name for f in qgate.formats.FORMATS if f.kind == "element"}
    assert registered | set(PARTS) == {*ELEMENTS, *oracles.SCALES}
    own_words = {"the paper's table", "the definition"}
    for name in ELEMENTS:
        sources = {entry.source for entry in oracles.ENTRIES if entry.fmt == name}
        assert sources - own_words == SOURCES[name]
        assert oracles.decoders_for(name)


def test_no_foreign_library_rounds_these_formats() -> None:
    """Their rounding is held to the exact definition alone."""
    even = [case for case in CASES if case.rounding == "even"]
    assert {case.name for case in even if not case.oracles()} == {"hif8", "mxint8 element"}
    assert {name for name in ELEMENTS if not any(o.fmt == name for o in oracles.ORACLES)} == {
        "mxint8 element"
    }


@share(8, by=["case.name", "dtype"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@EVERY_CASE
def test_every_sixteen_bit_number(case: Case, dtype: torch.dtype) -> None:
    x = every_number(dtype)
    check(case, x, case.agreed(oracles.to_float64(x), double=False))


@share(4)
@EVERY_CASE
def test_midpoints_and_their_neighbors(case: Case) -> None:
    """Float64 is rounded once, and not through float32, which has no number beside a midpoint."""
    centers = oracles.midpoints(case.name, narrow=case.narrow)
    for number in (np.float32, np.float64):
        wide = np.concatenate([around(centers, number), [0.0, -0.0, INF, -INF, NAN]])
        expected = case.agreed(wide, double=number is np.float64)
        check(case, torch.from_numpy(wide.astype(number)), expected)


@share(4)
@EVERY_CASE
def test_random_float64_numbers_with_ties_and_their_neighbors(case: Case) -> None:
    rng = np.random.default_rng(20240913)
    magnitudes = np.array(oracles.grid(case.name).places)
    top, bottom = np.log2(magnitudes[-1]) + 3, np.log2(magnitudes[1]) - 3
    spread = 2.0 ** rng.uniform(bottom, top, 9000)
    even = rng.uniform(0, magnitudes[-1] * 1.1, 5000)
    ties = rng.choice(oracles.midpoints(case.name, narrow=case.narrow), 2000)
    x = np.concatenate([spread * rng.choice([-1, 1], 9000), even, around(ties, np.float64)])
    assert len(x) == 20000
    expected = case.exactly(x)
    assert_same_bits(case.agreed(x, double=True), expected, "the exact definition", x)
    check(case, torch.from_numpy(x), expected)


# ---------------------------------------------------------------- stochastic rounding


def stochastic(x: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    options = {"scale": 1.0} if name in oracles.INTEGERS else {}
    generator = torch.Generator().manual_seed(seed)
    return qgate.quantize(
        x, fmt_of(name), rounding="stochastic", generator=generator, dtype=torch.float64, **options
    )


def some_gaps(name: str) -> tuple[Floats, Floats]:
    """Neighbors at both ends of the list of magnitudes and in between."""
    low, high = oracles.neighbors(name)
    places = np.unique(np.linspace(0, len(low) - 1, 6).astype(int))
    return low[places], high[places]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_goes_up_as_often_as_it_is_near(name: str, dtype: torch.dtype) -> None:
    draws = 10_000
    for sign in (1.0,) if name in oracles.UNSIGNED else (1.0, -1.0):
        for portion in (1 / 16, 1 / 4, 1 / 2, 7 / 8):
            low, high = some_gaps(name)
            x = torch.from_numpy(sign * (low + portion * (high - low)))
            assert torch.equal(x.to(dtype).double(), x)
            many = x.to(dtype).repeat(draws, 1)
            y = sign * oracles.to_float64(stochastic(many, name, seed=7))
            up = y == high
            assert (up | (y == low)).all()
            off = np.abs(up.sum(axis=0) - draws * portion)
            assert (off < 5 * np.sqrt(draws * portion * (1 - portion))).all()


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_never_moves_exact_values_nor_leaves_the_range(name: str) -> None:
    values = fmt_of(name).values()
    x = torch.from_numpy(values).repeat(max(1, 40_000 // len(values)), 1)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(stochastic(x.to(dtype), name, seed=1), x)
    largest = values[-1]
    beyond = torch.tensor([largest * 1.01, INF, largest * 1.9, NAN], dtype=torch.float64)
    y = stochastic(beyond.repeat(1000, 1), name, seed=2)
    assert (y[:, :3] == largest).all()
    assert y[:, 3].isnan().all()
    lowest = 0.0 if name in oracles.UNSIGNED else -largest
    assert (stochastic(-beyond.repeat(1000, 1), name, seed=2)[:, :3] == lowest).all()


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_repeats_with_its_seed(name: str) -> None:
    low, high = some_gaps(name)
    x = torch.from_numpy((low + high) / 2).float().repeat(20_000, 1)
    first = stochastic(x, name, seed=3)
    assert torch.equal(first, stochastic(x, name, seed=3))
    assert not torch.equal(first, stochastic(x, name, seed=4))


# ---------------------------------------------------------------- size and the ways it chooses


@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32], ids=str)
@pytest.mark.parametrize("name", ELEMENTS)
def test_large_tensors_get_the_bits_of_small_ones(name: str, dtype: torch.dtype) -> None:
    """From some size on 16-bit tensors are looked up in a table; it must not show."""
    x = every_number(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    options = {"scale": 1.0} if name in oracles.INTEGERS else {}
    for scale in (options, {"scale": 0.37}):
        for out in (None, torch.float32):
            q = qgate.Quantizer(fmt_of(name), **scale, dtype=out)
            small = torch.cat([q(piece) for piece in x.split(TABLES_FROM // 2)])
            large = q(x.repeat(16))
            assert large.numel() >= 2**20
            assert large.dtype == (out or dtype)
            expected = oracles.to_float64(small)
            for part in large.view(16, -1):
                assert_same_bits(part, expected, str(q), x)


@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32], ids=str)
@pytest.mark.parametrize("name", [n for n in qgate.formats.names() if n not in ELEMENTS])
def test_large_tensors_of_blocks_get_the_bits_of_small_ones(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(128, 64, generator=generator) * 2.0 ** torch.randint(
        -20, 12, (128, 1), generator=generator
    )
    x[::7, 3] = 0.0
    x = x.to(dtype)
    assert x.numel() < TABLES_FROM
    small = qgate.quantize(x, name, dtype=torch.float32)
    large = qgate.quantize(x.repeat(128, 1), name, dtype=torch.float32)
    assert large.numel() >= 2**20
    for part in large.view(128, 128, 64):
        assert torch.equal(part.view(torch.int32), small.view(torch.int32))
