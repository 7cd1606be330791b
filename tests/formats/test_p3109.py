"""All formats of IEEE P3109 from three to eight bits, code by code, against gfloat."""

from __future__ import annotations

import math
from functools import partial

import gfloat
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_p3109
from gfloat.types import Domain, RoundMode, Signedness

import qgate
from qgate.formats import definition
from qgate.formats.losses import Losses, losses_of_values
from qgate.testing import CheckFailure, check, check_kernel
from tests.formats.oracles import GFLOAT_MODES, Floats, assert_same_bits
from tests.tables import each_of

NAMES = [
    f"binary{k}p{p}{sign}{domain}"
    for k in range(3, 9)
    for sign in "su"
    for p in range(1, k + (sign == "u"))
    for domain in "ef"
]


def info_of(name: str) -> gfloat.FormatInfo:
    k, p, sign, domain = int(name[6]), int(name[8]), name[9], name[10]
    signedness = Signedness.Signed if sign == "s" else Signedness.Unsigned
    return format_info_p3109(k, p, signedness, Domain.Extended if domain == "e" else Domain.Finite)


def values_of(name: str) -> Floats:
    info = info_of(name)
    return np.array([gfloat.decode_float(info, code).fval for code in range(2**info.k)])


def expected(name: str, x: Floats, mode: RoundMode, saturate: bool) -> Floats:
    """gfloat's rounding; it has none of negative numbers to unsigned formats."""
    info = info_of(name)
    sizes = x if info.is_signed else np.abs(x)
    with np.errstate(invalid="ignore"):
        rounded = np.asarray(gfloat.round_ndarray(info, sizes, mode, sat=saturate))
    if info.is_signed:
        return rounded
    # What rounds to zero is zero; the rest saturates there, or is no number.
    grows = mode != RoundMode.TowardZero
    lost = ~saturate & (x < 0) & (rounded != 0) & (np.isinf(x) | grows)
    return np.where((x < 0) & ~np.isnan(x), np.where(lost, np.nan, 0.0), rounded)


def hard_numbers(name: str) -> Floats:
    """Every value, every middle of two, their float32 neighbors, and what lies beyond."""
    values = values_of(name)
    finite = np.unique(np.abs(values[np.isfinite(values)]))
    step = finite[-1] - finite[-2]
    places = np.concatenate(
        [
            finite,
            (finite[1:] + finite[:-1]) / 2,
            finite[-1] + step * np.array([0.25, 0.5, 0.75, 1, 1.5, 2]),
        ]
    )
    near = places.astype(np.float32)
    assert np.array_equal(near.astype(np.float64), places)
    near = np.concatenate(
        [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))]
    )
    near = np.concatenate([near, -near, [np.inf, -np.inf, np.nan]])
    return near.astype(np.float64)


def test_there_are_a_hundred_and_twenty_of_them_and_none_is_listed() -> None:
    assert len(NAMES) == 120
    assert set(NAMES) < set(qgate.formats.unlisted_names())
    assert not {*NAMES} & {*qgate.formats.names()}
    assert qgate.formats.get("Binary8P3SE") is qgate.formats.get("binary8p3se")


@each_of("name", NAMES)
def test_every_code(name: str) -> None:
    fmt, values = qgate.formats.get(name), values_of(name)
    assert fmt.kind == "element"
    assert (fmt.name, fmt.bits, fmt.signed) == (name, int(name[6]), name[9] == "s")
    assert_same_bits(fmt.code_values(), values, name)
    assert np.isnan(values).sum() == 1
    assert np.isinf(values).sum() == (name[10] == "e") * (2 if fmt.signed else 1)
    assert not np.signbit(values[values == 0]).any()
    info = info_of(name)
    assert (fmt.max, fmt.nan_code, fmt.has_inf) == (info.max, info.code_of_nan, name[10] == "e")
    assert (fmt.min_normal, fmt.min_subnormal) == (info.smallest_normal, info.smallest)
    x = torch.from_numpy(values)
    encoded = qgate.encode(x, name, saturate=False)
    assert encoded.codes.tolist() == list(range(2**fmt.bits))
    assert_same_bits(encoded.decode(), values, name)


@pytest.mark.parametrize("saturate", [True, False], ids=["saturating", "overflowing"])
@pytest.mark.parametrize("rounding", GFLOAT_MODES)
@each_of("name", NAMES)
def test_every_middle(name: str, rounding: str, saturate: bool) -> None:
    x = hard_numbers(name)
    by_gfloat = expected(name, x, GFLOAT_MODES[rounding], saturate)
    q = qgate.Quantizer(name, rounding=rounding, saturate=saturate)  # type: ignore[arg-type]
    assert_same_bits(definition.quantize(x, q), by_gfloat, "the definition", x)
    assert_same_bits(q(torch.from_numpy(x)), by_gfloat, "float64", x)
    assert_same_bits(q(torch.from_numpy(x).float()), by_gfloat, "float32", x)
    assert_same_bits(q.encode(torch.from_numpy(x)).decode(), by_gfloat, "codes", x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if name[6] == "8"])
def test_every_sixteen_bit_number(name: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for saturate in (True, False):
        by_gfloat = expected(name, x.double().numpy(), RoundMode.TiesToEven, saturate)
        q = qgate.Quantizer(name, saturate=saturate, dtype=torch.float64)
        assert_same_bits(q(x), by_gfloat, name, x)
    assert_same_bits(q(x[:1000]), by_gfloat[:1000], "without a table", x[:1000])


@each_of("name", NAMES)
def test_losses(name: str) -> None:
    fmt, x = qgate.formats.get(name), hard_numbers(name)
    info, finite = info_of(name), np.isfinite(x)
    lowest = info.min
    by_gfloat = expected(name, x, RoundMode.TiesToEven, False)
    stays = np.isfinite(by_gfloat)
    lost = qgate.formats.report(torch.from_numpy(x), name) + Losses()
    assert (lost.upper, lost.lower) == (
        int((finite & (x > 0) & ~stays).sum()),
        int((finite & (x < 0) & ~stays).sum()),
    )
    y = qgate.quantize(torch.from_numpy(x), name).numpy()
    assert lost.flushed == int((finite & (x != 0) & (y == 0)).sum())
    assert lost.beyond_range == int(((x > fmt.max) | (x < lowest)).sum())
    assert losses_of_values(fmt, x) == lost  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["binary8p3se", "binary8p1uf", "binary4p2ue", "binary3p1se"])
@pytest.mark.parametrize(
    "options",
    [{"granularity": "tensor"}, {"scale": 0.37}, {"granularity": "block", "block": 32}],
    ids=str,
)
def test_scales_and_idempotence(name: str, options: dict[str, object]) -> None:
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)) * 3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = qgate.Quantizer(name, dtype=torch.float64, **options)  # type: ignore[arg-type]
        defined = definition.quantize(x.to(dtype).double().numpy(), q)
        assert_same_bits(q(x.to(dtype)), defined, str(q))
    encoded = qgate.encode(x.double(), name, **options)  # type: ignore[arg-type]
    y = encoded.decode()
    if options != {"granularity": "block", "block": 32}:
        assert torch.equal(qgate.quantize(y, name, scale=encoded.scales), y)


def test_stochastic_rounding_and_gradients() -> None:
    x = torch.full((40_000,), 1.0625, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    y = qgate.quantize(x, "binary8p3se", rounding="stochastic", generator=generator)
    assert set(y.tolist()) == {1.0, 1.25}
    assert float((y == 1.25).float().mean()) == pytest.approx(0.25, abs=0.01)
    leaf = torch.tensor([-1.0, 1.0, 1e12], requires_grad=True)
    qgate.quantize(leaf, "binary8p3uf").sum().backward()
    assert leaf.grad.tolist() == [0, 1, 0]


def test_kernels_are_checked_with_them() -> None:
    def product(a: torch.Tensor, b: torch.Tensor, of_a: str = "binary8p3se") -> torch.Tensor:
        return linear(qgate.quantize(a, of_a), qgate.quantize(b, "binary8p3se"))

    linear = torch.nn.functional.linear
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(24, 64, generator=generator), torch.randn(16, 64, generator=generator)
    assert check(qgate.quantize(a, "binary8p3se"), a, format="Binary8P3SE").held == ["the tensor"]
    inputs = {0: "binary8p3se", 1: "Binary8P3SE"}
    check_kernel(product, a, b, like=linear, inputs=inputs)
    check_kernel(lambda a, b: linear(a.decode(), b), qgate.encode(a, "binary8p3se"), b, like=linear)
    with pytest.raises(CheckFailure, match=r"argument 0.* fp8_e4m3, not binary8p3se"):
        check_kernel(partial(product, of_a="fp8_e4m3"), a, b, like=linear, inputs=inputs)
    with pytest.raises(ValueError, match="K from 3 to 8 bits"):
        check(a, a, format="binary8p9se")


def test_a_sweep_knows_them() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert math.isfinite(qgate.sweep(x, "binary6p3sf").exponent)
    with pytest.raises(qgate.QgateError, match="no negative values"):
        qgate.sweep(x, "binary6p3uf")
    with pytest.raises(qgate.QgateError, match="K from 3 to 8 bits"):
        qgate.sweep(x, "Binary8P9SE")


@pytest.mark.parametrize(
    "name",
    [
        "binary9p3se",
        "binary8p9se",
        "binary8p8sf",
        "binary8p0ue",
        "binary2p1se",
        "binary8p9ue",
        "binary8p3",
        "binary8p3xe",
        "binary16",
    ],
)
def test_a_wrong_name_says_which_there_are(name: str) -> None:
    for use in (qgate.formats.get, qgate.Quantizer):
        with pytest.raises(qgate.QgateError, match="K from 3 to 8 bits") as caught:
            use(name)
        assert repr(name) in str(caught.value)
        assert "\n" not in str(caught.value)
