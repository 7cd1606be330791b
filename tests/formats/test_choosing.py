"""Blocks that choose among two grids: IF4, IF3, IF6 and MixFP4, against torch and numpy written from
the formulas of mit-han-lab/fouroversix (`quantize/pytorch/reference.py`, `kernels/triton`, at
dadfad6) and of Algorithm 1 of arXiv 2605.31035, and NVFP4 with UE5M3 scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch

import qgate
from qgate.formats import definition
from qgate.formats._literals import E4M3, FORMATS, UE5M3
from qgate.formats.engine import fast_choosing
from qgate.formats.engine.dtypes import combine
from qgate.formats.engine.job import Job, split
from qgate.formats.nvfp4 import Nvfp4Format
from tests.formats.oracles import assert_same_bits
from tests.formats.test_nvfp4_variants import numbers, tied
from tests.shares import share

F32 = np.float32
LISTS = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "e2m0": [0, 1, 2, 4],
    "e2m3": np.unique(np.arange(64).astype(np.uint8).view(ml_dtypes.float6_e2m3fn).astype(F32))[31:],
    "e3m2": np.unique(np.arange(64).astype(np.uint8).view(ml_dtypes.float6_e3m2fn).astype(F32))[31:],
    "int3": range(4), "int4": range(8), "int6": range(32),
}  # fmt: skip
CHOOSING = ["if4", "if3", "if6_e2m3", "if6_e3m2", "mixfp4"]


@dataclass(frozen=True)
class Sides:
    """The two grids of a format: lists of magnitudes, and factors of the second one."""

    first: str
    second: str
    ratio: float
    unit: float
    divisor: float


SIDES = {
    "if4": Sides("e2m1", "int4", 7 / 6, 6 / 7, 6),
    "if3": Sides("e2m0", "int3", 3 / 4, 4 / 3, 4),
    "if6_e2m3": Sides("e2m3", "int6", 31 / 7.5, 7.5 / 31, 7.5),
    "if6_e3m2": Sides("e3m2", "int6", 31 / 28, 28 / 31, 28),
    "mixfp4": Sides("e2m1", "int4", 1, 1, 7),
}


def nearest(ratios: np.ndarray, name: str) -> np.ndarray:
    """Round to a list of magnitudes, ties to the even position."""
    listed = np.asarray(LISTS[name], dtype=np.float64)
    size = np.minimum(np.abs(ratios.astype(np.float64)), listed[-1])
    above = np.searchsorted(listed, size).clip(1)
    low, high = listed[above - 1], listed[above]
    up = (size > (low + high) / 2) | ((size == (low + high) / 2) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), ratios)


def e4m3(scale: np.ndarray) -> np.ndarray:
    return np.minimum(scale, F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)


@dataclass
class Reference:
    values: np.ndarray
    scales: np.ndarray
    is_second: np.ndarray
    near: np.ndarray


def reference(x: np.ndarray, name: str, error: str = "mse") -> Reference:
    """Quantize each row's blocks of 16 as the formulas say, all steps in float32."""
    sides = SIDES[name]
    blocks = x.astype(F32).reshape(-1, 16)
    largest = float(LISTS[sides.first][-1])
    bound, amax = F32(largest * 448), F32(np.abs(blocks).max())
    encode = bound / amax
    decode = F32(1) / encode
    tried = []
    with np.errstate(all="ignore"):
        for side, divisor in ((sides.first, largest), (sides.second, sides.divisor)):
            scale = e4m3(np.abs(blocks).max(1) / F32(divisor) * encode)[:, None]
            ratios = np.where(scale != 0, blocks * np.minimum(F32(1) / (decode * scale), 3e38), 0)
            is_second = side == sides.second
            codes = nearest(ratios * F32(sides.ratio) if is_second else ratios, side).astype(F32)
            decoded = codes * scale * amax
            decoded = (decoded * F32(sides.unit) if is_second else decoded) / bound
            errors = np.abs(decoded - blocks)
            errors = errors * errors if error == "mse" else errors
            total = np.zeros(len(blocks), F32)
            for column in errors.T:
                total = total + column
            factor = scale.astype(np.float64) * float(decode)
            if is_second and sides.unit != 1:
                factor = (scale * decode * F32(sides.unit)).astype(np.float64)
            tried.append((codes.astype(np.float64) * factor, scale[:, 0], total))
    (one, s1, e1), (two, s2, e2) = tried
    second = e2 <= e1 if name == "mixfp4" else e2 < e1
    values = np.where(second[:, None], two, one).reshape(x.shape)
    near = np.abs(e2.astype(float) - e1) <= 2e-6 * e1
    shape = x.shape[0], -1
    scales = np.where(second, -np.where(s2, s2, -0.0), s1)
    return Reference(values, scales.reshape(shape), second.reshape(shape), near & (s1 + e1 > 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CHOOSING)
def test_the_formulas(name: str, seed: int, dtype: torch.dtype) -> None:
    x = numbers(seed).to(dtype)
    theirs = reference(x.float().numpy(), name)
    q = qgate.Quantizer(name, dtype=torch.float64)
    encoded = q.encode(x)
    ours = q(x)
    assert torch.equal(ours, torch.from_numpy(theirs.values))
    stored = encoded.scales.numpy()
    assert np.array_equal(stored >= 128, theirs.is_second)
    read = (stored & 127).view(ml_dtypes.float8_e4m3fn).astype(F32)
    assert np.array_equal(read, np.abs(theirs.scales))
    assert_same_bits(encoded.decode(), ours.numpy(), "decoded", x)
    assert 0.1 < theirs.is_second.mean() < 0.99, "both grids have to occur"


@pytest.mark.parametrize("name", CHOOSING)
def test_errors_that_nearly_agree_are_added_in_their_order(name: str) -> None:
    near = 0
    for seed in range(4):
        x = tied(seed)
        theirs = reference(x.numpy(), name)
        ours = qgate.quantize(x, name, dtype=torch.float64)
        assert torch.equal(ours, torch.from_numpy(theirs.values))
        near += int(theirs.near.sum())
    assert near or name not in ("if4", "mixfp4"), "errors that nearly agree have to occur"


@share(3, by=["name", "dtype"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", ["even", "away", "zero"])
@pytest.mark.parametrize("name", [*CHOOSING, "nvfp4_ue5m3"])
def test_the_definition_says_the_same(name: str, rounding: str, dtype: torch.dtype) -> None:
    x = numbers(4)[:, :90].clone()
    x[1, 2], x[2, 20], x[2, 40] = math.nan, math.inf, -math.inf
    options: list[dict[str, Any]] = [{}, {"inf": "saturate"}, {"axis": 0}, {"block": (8, 12)}]
    t = x.to(dtype)
    for extra in options:
        q = qgate.Quantizer(name, rounding=rounding, dtype=torch.float64, **extra)  # type: ignore[arg-type]
        defined = definition.quantize(t.double().numpy(), q, double=dtype == torch.float64)
        assert_same_bits(q(t), defined, f"{q} of {dtype}", t)
        assert_same_bits(q.encode(t).decode(), defined, "decoded", t)


def test_codes_of_the_second_grid_are_stored_as_the_references_store_them() -> None:
    """IF4 has integers in two's complement, IF3 and IF6 have a sign and a magnitude."""
    stored = {"if4": (9, 7), "if3": (7, 3), "if6_e3m2": (63, 31), "mixfp4": (15, 7)}
    for name, ends in stored.items():
        listed = list(LISTS[SIDES[name].second])
        levels = np.resize(np.array([*(-level for level in listed), *listed]), 64).reshape(4, 16)
        levels[:, 0], levels[:, 1] = -listed[-1], listed[-1]
        encoded = qgate.encode(torch.from_numpy(levels * SIDES[name].unit).float(), name)
        assert bool((encoded.scales >= 128).all()), name
        assert tuple(encoded.codes[0, :2].tolist()) == ends
        assert int(encoded.codes.max()) < 2 ** qgate.formats.get(name).bits
        read = encoded.decode(torch.float64).numpy() / SIDES[name].unit
        assert np.allclose(read, levels, rtol=1e-6), name


def test_if4_puts_uniform_blocks_on_integers_and_long_tails_on_fp4() -> None:
    even = torch.linspace(-1, 1, 16)[None]
    tail = torch.tensor([[6.0, 0.5, 0.5, 1, 1.5, 1.5, 0.5, 1, 0.5, 1, 2, 3, 0.5, 1, 1.5, 2]])
    for name in ("if4", "mixfp4"):
        scales = qgate.encode(torch.cat([even, tail]), name).scales
        assert scales.reshape(-1).ge(128).tolist() == [True, False]


def test_the_largest_scale_of_4over6_and_its_error_are_parts_of_the_name() -> None:
    x = numbers(0)
    for name, error, at_most in (
        ("nvfp4_4over6", "mae", 448), ("nvfp4_4over6_mse", "mse", 448),
        ("nvfp4_4over6_256", "mae", 256), ("NVFP4-4over6-mse-256", "mse", 256),
    ):  # fmt: skip
        fmt = qgate.formats.get(name)
        assert (fmt.error, fmt.largest_scale) == (error, at_most)  # type: ignore[union-attr]
        stored = qgate.encode(x, name).scales.numpy().view(ml_dtypes.float8_e4m3fn)
        assert float(stored.astype(F32).max()) in (at_most, at_most * 1.5)
    assert "nvfp4_4over6" in FORMATS.names()
    assert "nvfp4_4over6_mse" not in FORMATS.names()


# UE5M3 --------------------------------------------------------------------------------------------


def test_every_ue5m3_code_is_the_upper_byte_of_a_float16() -> None:
    """It has float16's exponents, and goes on where float16 has Inf and NaN; only 0xFF is NaN."""
    codes = np.arange(256, dtype=np.uint16)
    halves = (codes << 7).view(np.float16).astype(np.float64)
    halves[248:] = [2.0**16 * (1 + m / 8) for m in range(7)] + [np.nan]
    assert np.array_equal(UE5M3.code_values(), halves, equal_nan=True)
    theirs = gfloat.FormatInfo(
        name="ue5m3", k=8, precision=4, bias=15, domain=gfloat.Domain.Finite, is_signed=False,
        num_high_nans=1, has_nz=False, has_subnormals=True, is_twos_complement=False,
    )  # fmt: skip
    for code in range(256):
        value = gfloat.decode_float(theirs, code).fval
        assert np.array_equal(value, UE5M3.code_values()[code], equal_nan=True)
    x = torch.from_numpy(np.concatenate([halves[:255], (halves[1:255] + halves[:254]) / 2]))
    for t in (x, x * (1 + 2.0**-20), x * (1 - 2.0**-20)):
        rounded = [gfloat.round_float(theirs, float(v), sat=True) for v in t]
        assert qgate.quantize(t, "ue5m3").tolist() == rounded
        encoded = qgate.encode(t, "ue5m3").codes.tolist()
        assert encoded == [gfloat.encode_float(theirs, v) for v in rounded]


def test_nvfp4_with_ue5m3_scales_follows_transformer_engine() -> None:
    """NVIDIA/TransformerEngine#3325: 114688 stands for 448."""
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers(2).to(dtype)
        blocks = x.float().numpy().reshape(-1, 16)
        amax = F32(np.abs(blocks).max())
        encode = F32(6 * 114688) / amax
        decode = F32(1) / encode
        base = np.abs(blocks).max(1) * (encode * (F32(1) / F32(6)))
        halves = np.abs(UE5M3.code_values()[:255])
        codes = np.abs(np.minimum(base, 114688)[:, None] - halves).argmin(1)
        scale = halves[codes].astype(F32)[:, None]
        with np.errstate(all="ignore"):
            factor = np.minimum(F32(1) / (scale * decode), F32(3.4028235e38))
        values = nearest((blocks * factor).astype(F32), "e2m1") * scale * float(decode)
        encoded = qgate.encode(x, "nvfp4_ue5m3")
        assert np.array_equal(encoded.scales.numpy().reshape(-1), codes)
        ours = qgate.quantize(x, "nvfp4_ue5m3", dtype=torch.float64)
        assert_same_bits(ours.numpy(), values.reshape(x.shape), "values", x)


@pytest.mark.parametrize("scale", [E4M3, UE5M3], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("element", ["int4", "fp6_e2m3", "fp8_e4m3"])
def test_any_element_takes_either_scale(element: str, scale: Any) -> None:
    fmt = Nvfp4Format("mine", FORMATS.get(element).element, scale)
    x = numbers(1)
    for rounding in ("even", "zero"):
        q = qgate.Quantizer(fmt, rounding=rounding, dtype=torch.float64)  # type: ignore[arg-type]
        defined = definition.quantize(x.double().numpy(), q)
        assert_same_bits(q(x), defined, str(q), x)
        assert_same_bits(q.encode(x).decode(), defined, "decoded", x)
    assert qgate.formats.report(x, fmt).saturated < 0.2 * x.numel()


def test_small_blocks_survive_in_ue5m3_that_e4m3_flushes() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x[1:] *= 2.0 ** -torch.arange(20, 27)[:, None]
    lost = [int(qgate.formats.report(x, name).flushed) for name in ("nvfp4", "nvfp4_ue5m3")]
    assert lost[0] >= 7 * 64
    assert lost[1] < 250


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*CHOOSING, "nvfp4_4over6", "nvfp4_4over6_mse_256"])
def test_the_fast_way_gives_the_bits_of_the_slow_one(name: str, dtype: torch.dtype) -> None:
    """With zero scales, zero blocks, equal errors, rows across and a short last block."""
    x = numbers(5, 96, 208)[:, :200].clone()
    x[8:40] = tied(2)[:32, :200]
    x[40], x[41, ::2], x[42, :40] = x[40] * 2.0**-19, -x[41, ::2].abs() * 2.0**-12, 2.0
    for axis in (0, 1):
        for out in (dtype, torch.float64):
            q = qgate.Quantizer(name, axis=axis, dtype=out)
            job = Job(x.to(dtype), q)
            slow = job.layout.empty(out, x.device)
            for chunk, context, _, parts in split(job):
                values = combine(parts.elements, parts.scale, out, context)
                chunk.data(slow).copy_(values)
            slow = job.layout.restore(slow).double()
            assert_same_bits(q(x.to(dtype)), slow.numpy(), f"{q} of {dtype}", x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["if4", "mixfp4", "nvfp4_4over6"])
def test_numbers_that_two_roundings_would_move_to_a_tie(name: str, dtype: torch.dtype) -> None:
    """Each largest magnitude has a factor of its own; those that meet ties of 16 bits are tried."""
    fmt, met = qgate.formats.get(name), 0
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(6)).clamp(-0.99, 0.99)
    for largest in (1 + torch.arange(128) / 128).tolist():
        decode = F32(1) / (F32(fmt.bound) / F32(largest))
        tables = fast_choosing._factor_tables(fmt, float(decode), dtype)
        if all(table is None for table in tables):
            continue
        x[0, 0], met = largest, met + 1
        job = Job(x.to(dtype), qgate.Quantizer(name))
        slow = [combine(part.elements, part.scale, dtype, c) for _, c, _, part in split(job)]
        assert torch.equal(qgate.quantize(x.to(dtype), name), torch.cat(slow).view(64, 16))
    assert met >= 20 or (name, dtype) != ("mixfp4", torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "largest"),
    [("nvfp4_4over6", 0.004962921142578125), ("if4", 0.0005803108215332031)],
)
def test_numbers_that_no_factor_keeps_from_a_tie(
    name: str, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the normal numbers of float16 some blocks are rounded once more."""
    block_counts: list[int] = []
    exact = fast_choosing._exact

    def counted(*arguments: Any) -> torch.Tensor:
        values = exact(*arguments)
        block_counts.append(len(values))
        return values

    monkeypatch.setattr(fast_choosing, "_exact", counted)
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(4096, 16, generator=draw) * torch.rand(4096, 1, generator=draw) * largest
    x[0, 0] = largest
    x = x.half()
    job = Job(x, qgate.Quantizer(name))
    slow = [combine(part.elements, part.scale, torch.float16, c) for _, c, _, part in split(job)]
    assert torch.equal(qgate.quantize(x, name), torch.cat(slow).view(4096, 16))
    assert sum(block_counts) > 0
