"""Double quantization of scales against bitsandbytes, and against the definition."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional

import qgate
from qgate.formats.double_scales import DoubleScales, dynamic_levels
from tests.formats.hard_blocks import assert_defined, hard_rows

KINDS = {"nf4_double": "nf4", "bnb_fp4_double": "fp4"}


def numbers(rows: int = 150, columns: int = 512) -> torch.Tensor:
    """Blocks whose largest magnitudes add up exactly, whatever the order: bytes over 2^6."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator) * 0.2
    sizes = torch.randint(64, 256, (rows, columns // 64), generator=generator) / 64
    x.view(rows, -1, 64)[:, :, 7] = sizes
    return x.clamp(-1, 4)


def test_levels_are_those_of_the_dynamic_type() -> None:
    assert dynamic_levels() == tuple(functional.create_dynamic_map().double().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_stored_scales_and_values_are_those_of_bitsandbytes(name: str, dtype: torch.dtype) -> None:
    x = numbers().to(dtype)
    packed, state = functional.quantize_4bit(
        x, blocksize=64, quant_type=KINDS[name], compress_statistics=True
    )
    exact = qgate.encode(x, name.removesuffix("_double")).scales
    ours = DoubleScales.of(exact)
    assert ours.offset == float(state.offset)
    assert torch.equal(ours.codes.reshape(-1), state.absmax.reshape(-1))
    assert torch.equal(ours.largest.reshape(-1), state.state2.absmax)
    table = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert torch.equal(qgate.encode(x, name).scales.reshape(-1), table.reshape(-1))
    theirs = functional.dequantize_4bit(packed, state).to(dtype)
    differ = qgate.quantize(x, name) != theirs
    # It multiplies by a reciprocal, which decides ratios that are all but a tie.
    assert differ.float().mean() < 1e-3
    assert not torch.equal(qgate.quantize(x, name), qgate.quantize(x, name.removesuffix("_double")))


def test_random_scales_have_the_codes_of_bitsandbytes() -> None:
    """But for those beside a middle: its kernel for CPUs looks up ratios in steps of 2^-15."""
    scales = torch.rand(5000, generator=torch.Generator().manual_seed(1)) ** 3
    ours = DoubleScales.of(scales)
    assert ours.offset == pytest.approx(float(scales.mean()), rel=1e-6)
    codes, state = functional.quantize_blockwise(scales - ours.offset, blocksize=256)
    assert torch.equal(ours.largest.reshape(-1), state.absmax)
    differ = ours.codes != codes
    assert differ.float().mean() < 3e-3
    levels = torch.tensor(dynamic_levels(), dtype=torch.float64)
    ratios = (scales - ours.offset).double() / state.absmax.double().repeat_interleave(256)[:5000]
    middles = (levels[1:] + levels[:-1]) / 2
    assert ((ratios[differ][:, None] - middles).abs().amin(1) < 2.0**-15).all()
    theirs = functional.dequantize_blockwise(codes, state) + ours.offset
    assert torch.equal(ours.decode()[~differ], theirs[~differ])


@pytest.mark.parametrize("name", KINDS)
def test_hard_blocks_by_the_definition(name: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = hard_rows(dtype)
        for y in (x, x[1], x[:0], x.view(2, 12, 200), x[3:4], x[0, 0]):
            for options in ({}, {"block": 7}):
                assert_defined(y, name, **options)


def test_it_loses_little_more_than_scales_in_float32() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(2))
    ratios = {
        name: qgate.stats.errors(qgate.quantize(x, name), x).metric("sqnr_db")
        for name in ("nf4", "nf4_double")
    }
    assert abs(ratios["nf4"] - ratios["nf4_double"]) < 0.02


def test_what_is_not_allowed() -> None:
    for options in ({"axis": 0}, {"block": (8, 8)}, {"inf": "saturate"}):
        with pytest.raises(qgate.QgateError):
            qgate.Quantizer("nf4_double", **options)
    with pytest.raises(qgate.QgateError, match="unknown format 'lloyd2_double'"):
        qgate.Quantizer("lloyd2_double")
