"""Inputs that published quantizers get wrong, one test or more per defect found in them.

Those of single elements (halves of the smallest number, ties, infinities, HiF8's ends) are among
the midpoints and their neighbors of `test_elements.py`. The expected numbers are worked out by hand
or in fractions from the definition of the format; no quantizer is asked, qgate's least of all.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import definition
from tests.shares import share
from tests.tables import each_of

FP32_MAX = float(np.finfo(np.float32).max)
FP32_MIN_NORMAL = 2.0**-126
INF, NAN = float("inf"), float("nan")

# name: largest magnitude of an element, its exponent, the smallest positive one
MX: dict[str, tuple[float, int, float]] = {
    "mxfp8_e4m3": (448.0, 8, 2.0**-9),
    "mxfp8_e5m2": (57344.0, 15, 2.0**-16),
    "mxfp6_e3m2": (28.0, 4, 2.0**-4),
    "mxfp6_e2m3": (7.5, 2, 2.0**-3),
    "mxfp4_e2m1": (6.0, 2, 0.5),
    "mxint8": (127 / 64, 0, 2.0**-6),
}
MX_FLOATS = [name for name in MX if name != "mxint8"]
EVERY_MX = each_of("fmt", MX)
EVERY_MX_FLOAT = each_of("fmt", MX_FLOATS)
UNIT_SCALE = {"int8": {"scale": 1.0}, "int4": {"scale": 1.0}}
FEW_BITS = ["fp6_e3m2", "fp6_e2m3", "fp4_e2m1"]


def pred(x: float, number: type = np.float32) -> float:
    """The number before x in a dtype."""
    return float(np.nextafter(number(x), number(-np.inf)))


def succ(x: float, number: type = np.float32) -> float:
    """The number after x in a dtype."""
    return float(np.nextafter(number(x), number(np.inf)))


def both(x: torch.Tensor, fmt: str, **options: Any) -> torch.Tensor:
    """x quantized to float64 by the fast code, which the definition has to agree with."""
    q = qgate.Quantizer(fmt, **options)
    fast = qgate.quantize(x, fmt, dtype=torch.float64, **options)
    slow = definition.quantize(x.double().numpy(), q, double=x.dtype == torch.float64)
    assert same(fast, torch.from_numpy(slow))
    if not x.isnan().any():
        assert same(q.encode(x).decode(torch.float64), fast)
    return fast


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal with the signs of zeros; NaN equals NaN."""
    nan = a.isnan() & b.isnan()
    a_bits, b_bits = (t.masked_fill(nan, 0.0).view(torch.int64) for t in (a, b))
    return torch.equal(a_bits, b_bits)


def scale_codes(amax: torch.Tensor, fmt: str, **options: Any) -> list[int]:
    """The scale codes of blocks with these largest magnitudes, signs and places mixed."""
    rows = torch.arange(len(amax))
    x = torch.zeros(len(amax), 32, dtype=amax.dtype)
    x[rows, rows % 32] = torch.where(rows % 2 == 0, amax, -amax)
    encoded = qgate.encode(x, fmt, **options)
    assert encoded.scales is not None
    return encoded.scales.reshape(-1).tolist()


def floor_log2(x: float) -> int:
    """The exponent of the largest power of two that is not above x, without a logarithm."""
    exact = Fraction(x)
    guess = exact.numerator.bit_length() - exact.denominator.bit_length()
    return guess if Fraction(2) ** guess <= exact else guess - 1


def clamped(exponent: int) -> int:
    """The E8M0 code of an exponent."""
    return min(max(exponent, -127), 127) + 127


def positive_numbers(dtype: torch.dtype) -> torch.Tensor:
    """All positive finite numbers of a 16-bit dtype."""
    infinity = torch.tensor(INF, dtype=dtype).view(torch.int16).item()
    return torch.arange(1, infinity, dtype=torch.int32).to(torch.int16).view(dtype)


# ------------------------------------------- 1: floor(log2(amax)) in the dtype of the tensor


@EVERY_MX
def test_amax_just_below_every_power_of_two_in_float32(fmt: str) -> None:
    powers = range(-148, 128)
    amax = [pred(2.0**k) for k in powers]
    expected = [clamped(floor_log2(x) - MX[fmt][1]) for x in amax]
    assert scale_codes(torch.tensor(amax), fmt) == expected
    normal = [k for k in powers if k > -126]
    assert expected[-len(normal) :] == [clamped(k - 1 - MX[fmt][1]) for k in normal]


@share(2)
@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 32639), (torch.float16, 31743)])
@EVERY_MX
def test_every_positive_16_bit_number_as_amax(fmt: str, dtype: torch.dtype, count: int) -> None:
    amax = positive_numbers(dtype)
    assert len(amax) == count
    expected = [clamped(floor_log2(x) - MX[fmt][1]) for x in amax.tolist()]
    assert scale_codes(amax, fmt) == expected


@EVERY_MX
def test_amax_just_below_powers_of_two_in_float64(fmt: str) -> None:
    amax = [pred(2.0**k, np.float64) for k in range(-140, 150)]
    expected = [clamped(floor_log2(x) - MX[fmt][1]) for x in amax]
    assert scale_codes(torch.tensor(amax, dtype=torch.float64), fmt) == expected


# ------------------------------------------- 2: blocks at the end of float32


@EVERY_MX
def test_block_with_the_largest_bfloat16_stays_finite(fmt: str) -> None:
    largest, emax, _ = MX[fmt]
    x = torch.full((32,), 255 * 2.0**120, dtype=torch.bfloat16)
    expected = largest / 2.0**emax * 2.0**127
    assert both(x, fmt).unique().tolist() == [expected]
    assert qgate.quantize(x, fmt).isfinite().all()


# ------------------------------------------- 3: ties, the sign of zero


@EVERY_MX
def test_mx_rounds_ties_to_even_unless_told_otherwise(fmt: str) -> None:
    ties = {
        "mxfp8_e4m3": ([17.0, 19.0, 21.0], [16.0, 20.0, 20.0], [18.0, 20.0, 22.0]),
        "mxfp8_e5m2": ([9.0, 11.0, 13.0], [8.0, 12.0, 12.0], [10.0, 12.0, 14.0]),
        "mxfp6_e3m2": ([9.0, 11.0, 13.0], [8.0, 12.0, 12.0], [10.0, 12.0, 14.0]),
        "mxfp6_e2m3": ([4.25, 4.75, 5.25], [4.0, 5.0, 5.0], [4.5, 5.0, 5.5]),
        "mxfp4_e2m1": ([1.25, 2.5, 5.0], [1.0, 2.0, 4.0], [1.5, 3.0, 6.0]),
        "mxint8": ([64.5, 65.5, 2.5], [64.0, 66.0, 2.0], [65.0, 66.0, 3.0]),
    }
    unit = 1 / 64 if fmt == "mxint8" else 1.0
    inputs, even, away = ([n * unit for n in numbers] for numbers in ties[fmt])
    x = torch.zeros(32)
    x[0] = 2.0 ** MX[fmt][1]
    x[1:4], x[4:7] = torch.tensor(inputs), -torch.tensor(inputs)
    assert both(x, fmt)[1:7].tolist() == [*even, *(-v for v in even)]
    assert both(x, fmt, rounding="away")[1:7].tolist() == [*away, *(-v for v in away)]


@EVERY_MX_FLOAT
def test_negative_zero_and_negative_underflow_in_a_block_are_negative_zero(fmt: str) -> None:
    x = torch.zeros(32)
    x[0], x[1], x[2] = 2.0 ** MX[fmt][1], -0.0, -MX[fmt][2] / 4
    y = both(x, fmt)
    assert y[1:].eq(0).all()
    assert y.signbit().nonzero().flatten().tolist() == [1, 2]


# ------------------------------------------- 4: scale code 0, RCEIL and EVEN at their limits


@EVERY_MX
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_block_of_scale_code_0_is_exact(fmt: str, rule: str) -> None:
    """Elements are V * 2**127 then: the powers of two here are elements themselves."""
    _, emax, smallest = MX[fmt]
    x = torch.zeros(32)
    x[0] = 2.0 ** (emax - 127)
    x[1], x[2] = -smallest * 2.0**-127, 2.0 ** (emax - 128)
    assert x[:3].ne(0).all()
    assert qgate.encode(x, fmt, scale_rule=rule).scales.tolist() == [0]
    assert torch.equal(both(x, fmt, scale_rule=rule), x.double())
    assert torch.equal(qgate.quantize(x, fmt, scale_rule=rule), x)


@EVERY_MX
def test_rceil_takes_the_next_scale_just_above_a_largest_value(fmt: str) -> None:
    """Both sides of the largest value at every scale, where a rounded log2 picks the wrong one."""
    largest = MX[fmt][0]
    exponents = [s for s in range(-127, 128) if largest * 2.0**s < FP32_MAX]
    on = [s + 127 for s in exponents]
    above = [min(code + 1, 254) for code in on]
    for number, dtype in ((np.float32, torch.float32), (np.float64, torch.float64)):
        edges = [largest * 2.0**s for s in exponents]
        before, after = [pred(e, number) for e in edges], [succ(e, number) for e in edges]
        for amax, codes in ((edges, on), (before, on), (after, above)):
            scale_code = scale_codes(torch.tensor(amax, dtype=dtype), fmt, scale_rule="rceil")
            assert scale_code == codes


@EVERY_MX
@pytest.mark.parametrize(
    ("rule", "exponent"), [("floor", 127), ("ceil", 128), ("even", 128), ("rceil", 128)]
)
def test_scale_rules_at_the_largest_float32_keep_the_block_finite(
    fmt: str, rule: str, exponent: int
) -> None:
    """Three rules would like 2**128 to be reachable: it is, up to the largest scale, 2**127."""
    largest, emax, _ = MX[fmt]
    assert scale_codes(torch.tensor([FP32_MAX]), fmt, scale_rule=rule) == [clamped(exponent - emax)]
    x = torch.zeros(32)
    x[0], x[1] = FP32_MAX, 2.0**126
    fits = 2.0**128 if emax > 0 else largest * 2.0**127
    y = both(x, fmt, scale_rule=rule)
    assert y[0].item() == (largest * 2.0 ** (127 - emax) if rule == "floor" else fits)
    assert y[1].item() == 2.0**126
    assert qgate.quantize(x, fmt, scale_rule=rule).isnan().sum() == 0


@EVERY_MX
@pytest.mark.parametrize("binade", [-100, 0, 9, 100])
def test_even_rule_rounds_amax_half_up_to_the_elements_mantissa(fmt: str, binade: int) -> None:
    mantissa = {"mxfp8_e4m3": 3, "mxfp6_e2m3": 3, "mxfp4_e2m1": 1, "mxint8": 6}.get(fmt, 2)
    edge = (2 - 2.0 ** -(mantissa + 1)) * 2.0**binade
    below = 127 + binade - MX[fmt][1]
    amax = torch.tensor([pred(edge), edge, succ(edge)])
    assert scale_codes(amax, fmt, scale_rule="even") == [below, below + 1, below + 1]


# ------------------------------------------- 5: NVFP4's two levels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nvfp4_tensor_of_zeros_is_zeros(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 32, dtype=dtype)
    y = both(x, "nvfp4")
    assert y.eq(0).all()
    encoded = qgate.encode(x, "nvfp4")
    assert encoded.tensor_scale.item() == 1.0
    assert encoded.scales.eq(0).all()
    assert encoded.decode().eq(0).all()


def nvfp4_blocks(*amax: float) -> torch.Tensor:
    """The first amax is 6 * 448, so that the tensor's scale is 1 and a block's is amax / 6."""
    x = torch.zeros(len(amax) + 1, 16)
    x[0, 0] = 2688.0
    for row, largest in zip(x[1:], amax, strict=True):
        row[:4] = torch.tensor([largest, -largest / 2, largest / 3, largest / 12])
    return x


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 8])
def test_nvfp4_block_far_below_the_largest_has_a_subnormal_scale(steps: int) -> None:
    scale = steps * 2.0**-9
    x = nvfp4_blocks(6 * scale)
    assert qgate.encode(x, "nvfp4").scales.flatten().tolist() == [0x7E, steps]
    y = both(x, "nvfp4")
    assert y[1, :4].tolist() == [6 * scale, -3 * scale, 2 * scale, 0.5 * scale]
    assert y[0, 0].item() == 2688.0


def test_nvfp4_block_whose_scale_underflows_is_zero_and_not_nan() -> None:
    x = nvfp4_blocks(6 * 2.0**-11)
    assert qgate.encode(x, "nvfp4").scales.flatten().tolist() == [0x7E, 0]
    y = both(x, "nvfp4")
    assert y[1].eq(0).all()
    assert y[0, 0].item() == 2688.0


def test_nvfp4_block_of_zeros_beside_others_is_zero() -> None:
    y = both(nvfp4_blocks(0.0, 6.0), "nvfp4")
    assert y[1].eq(0).all()
    assert y[2, :4].tolist() == [6.0, -3.0, 2.0, 0.5]


# ------------------------------------------- 6: NaN where the format has none


@pytest.mark.parametrize("name", [*FEW_BITS, *UNIT_SCALE])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, -0x00400000, 0x7FFFFFFF])
def test_nan_stays_nan_whatever_its_payload(name: str, bits: int) -> None:
    x = torch.tensor([bits, 0x3F800000], dtype=torch.int32).view(torch.float32)
    y = both(x, name, **UNIT_SCALE.get(name, {}))
    assert y[0].isnan()
    assert y[1].item() == 1.0


# ------------------------------------------- 7: HiF8 and subnormal float32


@pytest.mark.parametrize("saturate", [True, False])
def test_hif8_of_every_subnormal_power_of_two_is_zero_and_never_inf(saturate: bool) -> None:
    powers = [2.0**k for k in range(-149, -23)]
    x = torch.tensor([*powers, *(-v for v in powers), *(pred(v) for v in powers)])
    y = both(x, "hif8", saturate=saturate)
    assert y.eq(0).all()
    assert not y.signbit().any()
    assert qgate.encode(x, "hif8", saturate=saturate).codes.eq(0).all()


# ------------------------------------------- 8: scales below 2**-127


@pytest.mark.parametrize(
    ("rule", "amax", "code"),
    [
        ("ceil", 2.0**-149, 0),
        ("ceil", 1.5 * 2.0**-128, 0),
        ("ceil", 2.0**-127, 0),
        ("ceil", 1.5 * 2.0**-127, 1),
        ("ceil", 2.0**-126, 1),
        ("floor", 1.25 * 2.0**-127, 0),
        ("floor", 1.75 * 2.0**-127, 0),
        ("floor", pred(FP32_MIN_NORMAL), 0),
        ("floor", FP32_MIN_NORMAL, 1),
        ("rceil", 1.984375 * 2.0**-127, 0),
        ("rceil", succ(1.984375 * 2.0**-127), 1),
        ("rceil", 2.0**-149, 0),
        ("even", 1.75 * 2.0**-127, 0),
        ("even", (2 - 2.0**-8) * 2.0**-127, 1),
    ],
)
def test_scale_code_of_a_tiny_amax(rule: str, amax: float, code: int) -> None:
    """MXINT8 has emax 0, so its scales are the first to meet the end of E8M0."""
    for dtype in (torch.float32, torch.float64):
        assert scale_codes(torch.tensor([amax], dtype=dtype), "mxint8", scale_rule=rule) == [code]


def test_no_scale_rule_passes_the_smallest_scale() -> None:
    """In float64 an amax can be far below 2**-127 and, other than ONNX's, the code stays 0."""
    amax = torch.tensor([2.0**-300, 1.5 * 2.0**-140, 2.0**-1074], dtype=torch.float64)
    for fmt in MX:
        for rule in ("floor", "ceil", "even", "rceil"):
            assert scale_codes(amax, fmt, scale_rule=rule) == [0, 0, 0]


# ------------------------------------------- integers of other libraries


def test_mxint8_leaves_out_minus_two() -> None:
    x = torch.zeros(32)
    x[0], x[1] = -pred(2.0), 1.0
    assert both(x, "mxint8")[:2].tolist() == [-127 / 64, 1.0]
    assert qgate.encode(x, "mxint8").codes[:2].tolist() == [-127, 64]
