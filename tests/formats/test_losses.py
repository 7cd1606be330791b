"""The losses of formats against the readable definition and exact fractions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import FORMATS, ElementFormat, definition
from qgate.formats.engine.effects import Effects
from qgate.formats.losses import Losses, losses_of_values
from tests.formats import rational
from tests.shares import share

ELEMENTS = [name for name in FORMATS.names() if isinstance(FORMATS.get(name), ElementFormat)]
BLOCKS = [name for name in FORMATS.names() if name not in ELEMENTS]
ROUNDINGS = ("even", "away", "zero")
EXAMPLE = [1.0, 460.0, 1000.0, math.inf, math.nan, 2.0**-10, 2.0**-12, 0.0]


def element(name: str) -> ElementFormat:
    element_format = FORMATS.get(name)
    assert isinstance(element_format, ElementFormat)
    return element_format


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a 16-bit dtype: both zeros, subnormals, infinities, all NaN."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def beside_the_ends(fmt: ElementFormat) -> torch.Tensor:
    """float32 numbers at, below and above every place where a format begins to lose."""
    step = 2.0 ** (fmt.max_exponent - fmt.mantissa)
    places = [fmt.max, fmt.max + step / 2, fmt.max + step, fmt.min_normal, fmt.min_subnormal]
    places += [fmt.min_subnormal / 2, fmt.min_subnormal / 4]
    near = []
    for end_value in np.array([p for p in places if p < 3.4e38], dtype=np.float32):
        near += [end_value, *(np.nextafter(end_value, np.float32(end)) for end in (0, np.inf))]
    return torch.tensor(
        np.array([*near, *(-value for value in near), np.nan, np.inf, -np.inf, 0.0])
    )


def unbounded(fmt: ElementFormat) -> ElementFormat:
    """A format whose list goes on beyond its largest value."""
    ends = {"bounds": lambda _self, **_: (-math.inf, math.inf)}
    facts = {f.name: getattr(fmt, f.name) for f in dataclasses.fields(fmt)}
    unbounded_format: ElementFormat = type("Unbounded", (type(fmt),), ends)(**facts)
    return unbounded_format


def expected(x: np.ndarray, fmt: ElementFormat, rounding: str, narrow: bool = True) -> Losses:
    """Counted by the readable definition, with and without its bound."""
    low, high = fmt.bounds(narrow=narrow)
    far = definition.round_by_list(x, unbounded(fmt), rounding=rounding)  # type: ignore[arg-type]
    near = definition.round_by_list(x, fmt, rounding=rounding, narrow=narrow)  # type: ignore[arg-type]
    finite = np.isfinite(x)
    return Losses(
        nan=int(np.isnan(x).sum()),
        posinf=int((x == np.inf).sum()),
        neginf=int((x == -np.inf).sum()),
        zeros=int((x == 0).sum()),
        nonzero=int((finite & (x != 0)).sum()),
        upper=int((finite & (far > high)).sum()),
        lower=int((finite & (far < low)).sum()),
        flushed=int((finite & (x != 0) & (near == 0)).sum()),
        underflow=int((finite & (x != 0) & (np.abs(x) < fmt.min_normal)).sum()),
        beyond_range=int(((x > fmt.max) | (x < (-fmt.max if fmt.signed else 0.0))).sum()),
    )


INPUTS = {
    "bf16": lambda _: patterns(torch.bfloat16),
    "fp16": lambda _: patterns(torch.float16),
    "fp32": beside_the_ends,
}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_against_the_definition(name: str, given: str, rounding: str) -> None:
    fmt, x = element(name), INPUTS[given](element(name))
    with_scale = {"scale": 1.0} if fmt.always_scaled else {}
    options = {"rounding": rounding, **with_scale}
    losses = qgate.formats.report(x, name, **options) + Losses()  # type: ignore[arg-type]
    expected_losses = expected(x.double().numpy(), fmt, rounding)
    assert losses == (
        dataclasses.replace(expected_losses, beyond_range=None) if with_scale else expected_losses
    )
    if given == "bf16" and fmt.bits <= 8:
        assert losses.upper == losses.lower > 0 < losses.flushed or not fmt.signed
        assert 0 < losses.upper < losses.lower or fmt.signed
    if rounding == fmt.rounding:
        assert losses_of_values(fmt, x.double().numpy()) == expected_losses
        cast = qgate.quantize(x, name, dtype=torch.float64, **with_scale)
        assert int(((cast == 0) & (x != 0) & x.isfinite()).sum()) == losses.flushed


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_lowest_integer_has_an_end_of_its_own(name: str) -> None:
    fmt = element(name)
    x = torch.tensor([fmt.max + 0.5, fmt.max + 0.25, -fmt.max - 1.5, -fmt.max - 1.75, -1e9, 1e9])
    losses = qgate.formats.report(x, name, scale=1.0, narrow=False)
    assert (losses.upper, losses.lower) == (2, 2)
    expected_losses = expected(x.double().numpy(), fmt, "even", narrow=False)
    assert (losses.upper, losses.lower) == (expected_losses.upper, expected_losses.lower)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp4_e2m1", "int8", "hif8"])
def test_the_scale_comes_first(name: str) -> None:
    """Scales that are no powers of two, and those made from the largest element."""
    fmt = element(name)
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    small = float(x.abs().max()) / fmt.max / 3
    for options in ({"scale": small}, {"scale": small / 7}, {"granularity": "channel", "axis": 0}):
        losses = qgate.formats.report(x, name, **options)  # type: ignore[arg-type]
        scale = qgate.encode(x, name, **options).scales.double()  # type: ignore[arg-type]
        ratios = (x.double() / scale.reshape(-1, 1)).numpy()
        expected_losses = expected(ratios, fmt, fmt.rounding)
        assert (losses.upper, losses.lower, losses.flushed) == (
            expected_losses.upper, expected_losses.lower, expected_losses.flushed,
        )  # fmt: skip
        assert (losses.saturated > 0) == ("scale" in options)


# Blocks ------------------------------------------------------------------------------------------


def blocks_for(name: str, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Blocks of random numbers, of ties around the largest value, of tiny numbers, and zeros."""
    rng = np.random.default_rng(1)
    magnitudes, emax, fraction_bits = rational.ELEMENTS[rational.MX.get(name, "e2m1")]
    largest, step = float(magnitudes[-1]), 2.0 ** (emax - fraction_bits)
    rows = [rng.standard_normal(size) * 2.0**k for k in (-130, -30, -5, 0, 3, 40, 100)]
    rows += [rng.standard_t(2, size) for _ in range(20)]
    rows.append(np.where(np.arange(size) % 8, 2.0**-20, 2.0**14))
    if name == "nvfp4":  # only block scales below E4M3's smallest normal let anything saturate
        return torch.tensor(np.array([2.0**-k * row for k in range(22) for row in rows[7:20]])).to(
            dtype
        )
    for k, end in itertools.product((-4, 0, 9), (0.25, 0.5, 0.75, 0.9)):
        row = rng.uniform(-1, 1, size)
        row[:4] = [largest + step * end, -largest - step * end, largest + step * 0.5, -largest]
        rows.append(row * 2.0**k)
    rows += [np.zeros(size), np.full(size, 2.0**-133), np.full(size, 1e30)]
    x = torch.tensor(np.array(rows)).to(dtype)
    return x[x.isfinite().all(1)]


def ratios_of(name: str, rows: list[list[float]]) -> list[tuple[Fraction, bool]]:
    """Each number in units of its scale, and if it is to be zero after, by fractions alone."""
    ratio_pairs = []
    amax = max(abs(Fraction(v)) for row in rows for v in row)
    s_enc = rational.nvfp4_scale(amax)
    for row in rows:
        if name == "nvfp4":
            ratios, scale = rational.nvfp4_ratios(row, s_enc)
            values = rational.nvfp4_block(row, s_enc)[0]
            ratios = [ratio if scale else Fraction(0) for ratio in ratios]
        elif name == "hif4":
            ratios = [ratio for ratio, _ in rational.hif4_ratios(row)]
            values = rational.hif4_block(row)
        else:
            ratios = rational.mx_ratios(row, name, "floor")
            values = rational.mx_block(row, name, "floor")[0]
        lost = [v != 0 and value == 0 for v, value in zip(row, values, strict=True)]
        ratio_pairs += list(zip(ratios, lost, strict=True))
    return ratio_pairs


@share(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*rational.MX, "nvfp4", "hif4"])
def test_blocks_against_fractions(name: str, dtype: torch.dtype) -> None:
    x = blocks_for(name, dtype, FORMATS.get(name).block or 0)
    kind = {"nvfp4": "e2m1", "hif4": "s1p2"}.get(name) or rational.MX[name]
    ratios = ratios_of(name, x.double().tolist())
    beyond = [r for r, _ in ratios if rational.saturates(r, kind, away=name == "hif4")]
    losses = qgate.formats.report(x, name)
    assert losses.upper == sum(r > 0 for r in beyond) > 0
    assert losses.lower == sum(r < 0 for r in beyond) > 0
    assert losses.flushed == sum(lost for _, lost in ratios) > 0
    assert (losses.finite, losses.nan, losses.inf, losses.poisoned) == (x.numel(), 0, 0, 0)
    assert losses.beyond_range is None


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_without_a_scale_are_poisoned(name: str) -> None:
    size = FORMATS.get(name).block or 0
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    clean = qgate.formats.report(x[2:], name)
    x[0, 0], x[1, 1], x[1, 2] = math.nan, math.inf, -math.inf
    x[:2, 3:] *= 1e-3
    x[2:] = x[2:]
    losses = qgate.formats.report(x, name)
    assert (losses.nan, losses.posinf, losses.neginf) == (1, 1, 1)
    assert losses.poisoned == 2 * size - 3
    assert losses.finite == 4 * size - 3
    if name not in (
        "nvfp4",
        "nvfp4_4over6",
    ):  # its scale of the whole tensor is of the finite elements, here others
        assert (losses.upper, losses.lower, losses.flushed) == (
            clean.upper,
            clean.lower,
            clean.flushed,
        )


@pytest.mark.parametrize("name", [*ELEMENTS, *BLOCKS])
def test_the_error_of_what_saturates(name: str) -> None:
    """By quantizing: the elements whose error is towards zero from beyond the largest value."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)) * 3
    x[::4, ::8] *= element(name).max / 2 if name in ELEMENTS else 1.0
    options = {"scale": 0.01} if name.startswith("int") else {}
    x = x.clamp(-3.3e38, 3.3e38)
    losses = qgate.formats.report(x, name, **options)  # type: ignore[arg-type]
    error = (qgate.quantize(x, name, dtype=torch.float64, **options) - x.double()).square()  # type: ignore[arg-type]
    inside = torch.zeros(x.shape, dtype=torch.bool)
    flat = x.clone().requires_grad_()
    qgate.quantize(flat, name, **options).sum().backward()  # type: ignore[arg-type, no-untyped-call]
    assert flat.grad is not None
    inside = flat.grad == 0
    assert int(inside.sum()) == losses.saturated
    assert losses.saturated_error_share == pytest.approx(
        float(error[inside].sum() / error.sum()) if error.any() else 0.0, rel=1e-9
    )


# Counts ------------------------------------------------------------------------------------------


def test_the_example_has_these_counts() -> None:
    losses = qgate.formats.report(torch.tensor(EXAMPLE).bfloat16(), "fp8_e4m3")
    assert (losses.nan, losses.posinf, losses.neginf, losses.zeros, losses.nonzero) == (
        1,
        1,
        0,
        1,
        5,
    )
    assert (losses.upper, losses.lower, losses.flushed, losses.beyond_range) == (1, 0, 2, 3)
    assert (losses.saturated_share, losses.flushed_share) == (1 / 6, 2 / 6)
    assert losses.beyond_range_share == 3 / 8
    assert losses.saturated_error_share == pytest.approx(552**2 / (552**2 + 12**2), rel=1e-6)
    text = str(losses)
    assert "saturated               1  16.6667% of the finite" in text
    assert "beyond range            3  37.5000% of all" in text


def test_counts_of_parts_add_up() -> None:
    x = patterns(torch.bfloat16)
    parts = [qgate.formats.report(part, "fp8_e5m2") for part in x.split(10_000)]
    assert sum(parts, Losses()) == qgate.formats.report(x, "fp8_e5m2") + Losses()
    assert (parts[0] + qgate.formats.report(x, "mxfp8")).beyond_range is None


@pytest.mark.parametrize("name", ["fp8_e5m2", "mxfp4", "int8"])
def test_reports_of_one_format_add_up_to_a_report(name: str) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 30
    x[3, 5], x[40] = 1e6, 1e-9
    options = {"scale": 1.0} if name == "int8" else {}
    whole = qgate.formats.report(x, name, **options)  # type: ignore[arg-type]
    total = sum(
        (qgate.formats.report(part, name, **options) for part in x.split(16)[1:]),  # type: ignore[arg-type]
        qgate.formats.report(x[:16], name, **options),  # type: ignore[arg-type]
    )
    assert isinstance(total, Effects)
    assert 0 < total.saturated_error_share < 1
    share = pytest.approx(whole.saturated_error_share, rel=1e-12)
    assert total.saturated_error_share == share
    same_share = {"saturated_error_share": whole.saturated_error_share}
    assert dataclasses.replace(total, **same_share) == whole
    assert str(total) == str(whole)
    assert total.blocks == {}


def test_reports_of_two_formats_add_up_to_counts() -> None:
    x = torch.ones(32)
    total = qgate.formats.report(x, "fp8_e4m3") + qgate.formats.report(x, "fp8_e5m2")
    assert type(total) is Losses
    assert total.nonzero == 64


def test_nothing_has_shares_of_zero() -> None:
    for x in (torch.empty(0), torch.tensor([math.nan, math.inf])):
        losses = qgate.formats.report(x, "hif8")
        assert (losses.saturated_share, losses.flushed_share, losses.finite) == (0.0, 0.0, 0)
    assert qgate.formats.report(torch.empty(0), "hif8").beyond_range_share == 0.0
    assert qgate.formats.report(torch.empty(0), "mxfp4").beyond_range_share is None


def test_counts_of_what_was_rounded_to_be_counted_are_corrected() -> None:
    counted = Losses(posinf=3, neginf=2, zeros=5, nonzero=10, upper=1, flushed=2, underflow=4)
    exact = counted.before_rounding(1, 2, vanished=3)
    assert (exact.posinf, exact.neginf, exact.zeros, exact.nonzero) == (1, 2, 2, 15)
    assert (exact.upper, exact.lower, exact.flushed, exact.underflow) == (3, 0, 5, 7)
    assert exact.elements == counted.elements
    corrected = counted.before_rounding(1, 2, vanished=3, lost=False)
    assert (corrected.upper, corrected.flushed, corrected.nonzero) == (1, 2, 15)
