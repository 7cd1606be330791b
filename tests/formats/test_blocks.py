"""Block formats on hard blocks against exact rational arithmetic, fast code and definition alike."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import qgate
from qgate.formats import definition
from qgate.formats.mx import mx_format
from tests.formats import rational
from tests.formats.oracles import assert_same_bits, to_float64, torchao_mx
from tests.shares import share

RULES = ("floor", "ceil", "even", "rceil")
FLT_MAX = float(np.finfo(np.float32).max)


def fp32(x: float) -> float:
    return float(np.float32(x))


def beside(x: float, steps: int) -> float:
    """x moved by float32 steps."""
    value = np.float32(x)
    for _ in range(abs(steps)):
        value = np.nextafter(value, np.float32(np.inf if steps > 0 else -np.inf))
    return float(value)


def hard_blocks(fmt: str, size: int, count: int = 240, seed: int = 0) -> list[list[float]]:
    """Blocks whose scale or elements sit where mistakes are made, as float32 numbers."""
    rng = np.random.default_rng(seed)
    magnitudes, emax, _ = rational.ELEMENTS[rational.MX.get(fmt, "e2m1")]
    largest = float(magnitudes[-1])
    blocks: list[list[float]] = []

    def around(amax: float) -> list[float]:
        body = rng.uniform(-1, 1, size) * amax * np.exp2(rng.integers(-8, 1, size))
        body[rng.integers(size)] = amax if rng.random() < 0.5 else -amax
        return [fp32(v) for v in body]

    for k in [-149, -140, -127, -126, -118, -100, -30, -3, -1, 0, 1, 2, 3, 10, 40, 100, 120, 126]:
        for steps in (-1, 0, 1):
            blocks.append(around(beside(2.0**k, steps)))
            if k + emax < 127:
                blocks.append(around(min(beside(largest * 2.0**k, steps), FLT_MAX)))
    for amax in (FLT_MAX, beside(FLT_MAX, -1), 1.5 * 2.0**127, 2.0**127):
        blocks.append(around(amax))
    ties = [float((a + b) / 2) for a, b in itertools.pairwise(magnitudes)]
    for k in (-30, 0, 7):
        for steps in (-1, 0, 1):
            for start in range(0, len(ties), size - 1):
                some = ties[start : start + size - 1]
                row = [beside(t * 2.0**k, steps) * (-1) ** i for i, t in enumerate(some)]
                blocks.append([*row, *[0.0] * (size - 1 - len(row)), fp32(2.0 ** (k + emax))])
    outlier = [*rng.standard_normal(size - 1), 3e4]
    blocks += [[fp32(v) for v in outlier], [0.0] * size, [-0.0] * size, [2.0**-149] * size]
    blocks += [[0.0] * (size - 1) + [beside(0.0, s)] for s in (1, 2, 3, 1000)]
    while len(blocks) < count:
        blocks.append([fp32(v) for v in rng.standard_normal(size) * 2.0 ** rng.integers(-120, 100)])
    return blocks


def as_floats(values: list[rational.Value]) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def both_ways(x: torch.Tensor, q: qgate.Quantizer) -> dict[str, np.ndarray]:
    """float64 results of the fast code, the exact code behind `encode`, and the definition."""
    wide = qgate.Quantizer(q.format, **{**q.options, "dtype": torch.float64})
    return {
        "quantize": wide(x).numpy(),
        "encode": q.encode(x).decode(torch.float64).numpy(),
        "definition": definition.quantize(x.double().numpy(), q),
    }


def assert_equal(found: np.ndarray, expected: np.ndarray, label: str) -> None:
    differ = ~((found == expected) | (np.isnan(found) & np.isnan(expected)))
    first = tuple(np.argwhere(differ)[0]) if differ.any() else None
    assert first is None, f"{label}: {differ.sum()} differ, first {first}: {found[first]!r}"


@share(6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", list(rational.MX))
def test_mx_on_hard_blocks(fmt: str, rule: str) -> None:
    blocks = hard_blocks(fmt, 32)
    blocks[7][3], blocks[8][4], blocks[9][5] = math.nan, math.inf, -math.inf
    pairs = [rational.mx_block(block, fmt, rule) for block in blocks]
    x = torch.tensor(blocks, dtype=torch.float32)
    q = qgate.Quantizer(fmt, scale_rule=rule)
    expected = np.array([as_floats(values) for values, _ in pairs])
    for label, outputs in both_ways(x, q).items():
        assert_equal(outputs, expected, label)
    assert q.encode(x).scales.flatten().tolist() == [code for _, code in pairs]


@share(6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", list(rational.MX))
def test_mx_float32_way_on_ordinary_blocks(fmt: str, rule: str) -> None:
    """Without the extreme blocks no chunk falls back, so this is the float32 arithmetic itself."""
    blocks = [b for b in hard_blocks(fmt, 32, seed=1) if 1e-20 < max(map(abs, b)) < 1e30]
    assert len(blocks) > 60
    expected = np.array([as_floats(rational.mx_block(b, fmt, rule)[0]) for b in blocks])
    x = torch.tensor(blocks, dtype=torch.float32)
    values = qgate.quantize(x, fmt, scale_rule=rule, dtype=torch.float64).numpy()
    assert_equal(values, expected, fmt)
    signs = np.signbit(values) == np.signbit(x.numpy())
    assert (signs | (fmt == "mxint8") & (values == 0)).all()


@share(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", list(rational.MX))
def test_mx_table_way_on_16_bit_blocks(fmt: str, rule: str, dtype: torch.dtype) -> None:
    """A tensor large enough for tables has the same bits as the same blocks alone."""
    x = torch.tensor(hard_blocks(fmt, 32, seed=2), dtype=torch.float32)
    x = x[(x.abs().amax(1) > 1e-4) & (x.abs().amax(1) < 6e4)].to(dtype)
    expected = np.array(
        [as_floats(rational.mx_block(b, fmt, rule)[0]) for b in x.double().tolist()]
    )
    large = x.repeat(2**20 // x.numel() + 1, 1)
    values = qgate.quantize(large, fmt, scale_rule=rule, dtype=torch.float32).double().numpy()
    for start in range(0, len(large) - len(x), len(x) * 97):
        assert_equal(values[start : start + len(x)], expected, f"{fmt} from row {start}")


def test_mx_on_float64_blocks_rounds_once_and_clamps_the_scale() -> None:
    blocks = [[1.0625 + 2.0**-40, 1.0], [1e300, 1.0], [1e-300, 0.0], [2.0**140, 2.0**139]]
    expected = np.array([as_floats(rational.mx_block(b, "mxfp8_e4m3", "floor")[0]) for b in blocks])
    x = torch.tensor(blocks, dtype=torch.float64)
    for label, values in both_ways(x, qgate.Quantizer("mxfp8_e4m3")).items():
        assert_equal(values, expected, label)
    assert qgate.encode(x, "mxfp8").scales.flatten().tolist() == [119, 254, 0, 254]


def ordinary_blocks(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(12)
    powers = torch.randint(-12, 12, (64, 2), generator=generator).repeat_interleave(32, 1)
    return (torch.randn(64, 64, generator=generator) * torch.exp2(powers)).to(dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "fmt", [f for f in qgate.formats.FORMATS if f.kind == "block"], ids=lambda f: f.name
)
def test_blocks_are_those_of_torchao(fmt: qgate.formats.BlockFormat, rule: str) -> None:
    """Compare MX with torchao; the other block formats have only the fractions of rational.py."""
    for dtype in (torch.float32, torch.bfloat16):
        x = ordinary_blocks(dtype)
        is_mx = mx_format(fmt) is not None and fmt.block == 32
        packed = torchao_mx(x, fmt.element.name, rule) if is_mx else None
        assert (packed is None) == (
            mx_format(fmt) is None or fmt.name.startswith(("mxint8", "nvfp4"))
        )
        if packed is not None:
            values = qgate.quantize(x, fmt, scale_rule=rule, dtype=torch.float32)
            expected = to_float64(packed.dequantize(torch.float32))
            assert_same_bits(values, expected, fmt.name, x)


@pytest.mark.parametrize("fmt", list(rational.MX))
def test_mx_partial_blocks_axes_and_block_sizes(fmt: str) -> None:
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.standard_normal((5, 37, 6)) * 50).float()
    for axis, block in ((1, 16), (-1, 4), (0, 3), (2, 100), (1, 1)):
        moved = np.moveaxis(x.double().numpy(), axis, -1)
        rows = moved.reshape(-1, moved.shape[-1])
        expected = np.empty_like(rows)
        for row, out in zip(rows, expected, strict=True):
            for start in range(0, len(row), block):
                part = row[start : start + block].tolist()
                out[start : start + block] = as_floats(rational.mx_block(part, fmt, "floor")[0])
        expected = np.moveaxis(expected.reshape(moved.shape), -1, axis)
        for label, values in both_ways(x, qgate.Quantizer(fmt, axis=axis, block=block)).items():
            assert_equal(values, expected, f"{label}, axis {axis}, block {block}")


@pytest.mark.parametrize("fmt", list(rational.MX))
def test_mx_inf_saturates_on_request(fmt: str) -> None:
    x = torch.tensor([[math.inf, 1.0, -1e38], [math.nan, math.inf, 1.0], [1.0, 2.0, 3.0]])
    q = qgate.Quantizer(fmt, inf="saturate")
    largest = float(rational.ELEMENTS[rational.MX[fmt]][0][-1]) * 2.0**127
    small = float(
        rational.nearest(Fraction(-1e38) / 2**127, rational.ELEMENTS[rational.MX[fmt]][0])
    )
    expected = np.array(
        [
            [largest, 0.0, small * 2.0**127],
            [math.nan] * 3,
            as_floats(rational.mx_block([1.0, 2.0, 3.0], fmt, "floor")[0]),
        ]
    )
    for label, values in both_ways(x[:, :2], q).items():
        assert_equal(values[0], expected[0, :2], label)
    for label, outputs in both_ways(x, q).items():
        assert_equal(outputs, expected, label)
    assert q.encode(x).scales.flatten()[:2].tolist() == [254, 255]


@pytest.mark.parametrize("bits", [2, 3, 5, 7])
def test_mx_narrow_scales_clamp_below_and_are_nan_above(bits: int) -> None:
    limit = 2 ** (bits - 1) - 1
    exponents = np.arange(-70, 71)
    x = torch.from_numpy(np.exp2(exponents + 8.0)).float()[:, None]
    encoded = qgate.encode(x, "mxfp8_e4m3", scale_bits=bits)
    expected = [
        2**bits - 1 if e > limit else max(int(e), -limit) + limit for e in exponents.tolist()
    ]
    assert encoded.scales.flatten().tolist() == expected
    values = encoded.decode(torch.float64).flatten().numpy()
    assert np.isnan(values[exponents > limit]).all()
    representable = (exponents >= -limit - 10) & (exponents <= limit)
    assert (values[representable] == np.exp2(exponents[representable] + 8.0)).all()
    q = qgate.Quantizer("mxfp8_e4m3", scale_bits=bits)
    assert_equal(definition.quantize(x.double().numpy(), q)[:, 0], values, "definition")


def test_nvfp4_on_hard_tensors() -> None:
    rng = np.random.default_rng(4)
    tensors = [
        np.array(hard_blocks("mxfp4_e2m1", 16, seed=5)),
        np.array([b for b in hard_blocks("mxfp4_e2m1", 16, seed=6) if max(map(abs, b)) < 1e3]),
        rng.standard_normal((200, 16)) * np.exp2(rng.integers(-14, 3, (200, 1))),
        np.zeros((3, 16)),
        np.full((2, 16), 2.0**-149),
        np.where(np.arange(64).reshape(4, 16) == 5, FLT_MAX, 1e-30),
    ]
    for number, tensor in enumerate(tensors):
        x = torch.from_numpy(tensor).float()
        rows = x.double().tolist()
        s_enc = rational.nvfp4_scale(max(abs(Fraction(v)) for row in rows for v in row))
        pairs = [rational.nvfp4_block(row, s_enc) for row in rows]
        expected = np.array([as_floats(values) for values, _ in pairs])
        q = qgate.Quantizer("nvfp4")
        outputs_by_way = both_ways(x, q)
        for label in ("encode", "definition"):
            assert_equal(outputs_by_way[label], expected, f"{label} {number}")
        # The float32 way ends in float32: there the exact value is rounded once.
        single = qgate.quantize(x, "nvfp4").numpy()
        assert_equal(single, expected.astype(np.float32), f"quantize {number}")
        encoded = q.encode(x)
        decoded = qgate.formats.get("e4m3").code_values()[encoded.scales.flatten().numpy()]
        assert decoded.tolist() == [float(scale) for _, scale in pairs]
        assert float(encoded.tensor_scale) == float(rational.to_fp32(1 / s_enc))


@share(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvfp4_16_bit_results_are_rounded_once(dtype: torch.dtype) -> None:
    """Tensor scales for which a value lies so near a tie that float32 would round onto it."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    rng = np.random.default_rng(7)
    met = 0
    for _ in range(300):
        x = torch.from_numpy(rng.standard_normal((8, 16)) * np.exp(rng.uniform(-3, 3))).to(dtype)
        rows = x.double().tolist()
        s_enc = rational.nvfp4_scale(max(abs(Fraction(v)) for row in rows for v in row))
        exact = np.array([as_floats(rational.nvfp4_block(row, s_enc)[0]) for row in rows])
        rounded = definition.round_by_list(exact, qgate.formats.get(name), saturate=False)
        twice = torch.from_numpy(exact).float().to(dtype).double().numpy()
        met += int((rounded != twice).any())
        assert_equal(qgate.quantize(x, "nvfp4").double().numpy(), rounded, name)
    assert met > 0


def test_hif4_on_hard_blocks() -> None:
    blocks = hard_blocks("mxfp4_e2m1", 64, seed=8)
    rng = np.random.default_rng(9)
    for k in range(-3, 4):
        quarters = rng.integers(-28, 29, 64) / 8 * 2.0**k
        blocks.append([fp32(v) for v in quarters])
    blocks += [[fp32(7.0 * 2.0**k)] * 64 for k in (-60, -50, -48, -47, 0, 12, 13, 14, 40)]
    expected = np.array([as_floats(rational.hif4_block(block)) for block in blocks])
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(blocks, dtype=dtype)
        for label, values in both_ways(x, qgate.Quantizer("hif4")).items():
            assert_equal(values, expected, f"{label} {dtype}")
    for length in (1, 3, 5, 63, 65, 130):
        row = torch.from_numpy(rng.standard_normal(length) * 3).float()
        parts = [row[i : i + 64].double().tolist() for i in range(0, length, 64)]
        flat = [v for part in parts for v in as_floats(rational.hif4_block(part))]
        for label, outputs in both_ways(row, qgate.Quantizer("hif4")).items():
            assert_equal(outputs, np.array(flat), f"{label}, {length} elements")


def test_hif4_stores_its_levels_as_bits_of_groups() -> None:
    x = torch.zeros(64)
    x[0], x[9], x[62] = 7.0, 3.0, 1.0
    encoded = qgate.encode(x, "hif4")
    assert encoded.micro.shape == (1, 3)
    # Octet 0 needs its bit; quad 0 (7.0) and quad 2 (3.0) theirs; the rest stays below.
    assert encoded.micro[0].tolist() == [0b1, 0b101, 0]
    assert encoded.scales.tolist() == [48 * 4]
    assert encoded.decode()[[0, 9, 62]].tolist() == [7.0, 3.0, 1.0]


@pytest.mark.parametrize("fmt", ["nvfp4", "hif4"])
def test_inf_and_nan_in_two_level_formats(fmt: str) -> None:
    x = torch.ones(4, 64)
    x[1, 3], x[2, 70 % 64] = math.inf, math.nan
    default = qgate.quantize(x, fmt)
    assert default[0].isfinite().all()
    assert default[1, :16].isnan().all()
    assert default[2, :16].isnan().all()
    saturated = qgate.quantize(x, fmt, inf="saturate")
    largest = {"nvfp4": 1.0 * 6 * 448 / 2688, "hif4": 7 * 49152.0}[fmt]
    assert saturated[1, 3].item() == pytest.approx(largest, rel=1e-6)
    assert saturated[2, :16].isnan().all()
    for options in ({}, {"inf": "saturate"}):
        q = qgate.Quantizer(fmt, **options)
        expected = definition.quantize(x.double().numpy(), q)
        assert_equal(q(x).double().numpy(), expected.astype(np.float32).astype(float), fmt)
