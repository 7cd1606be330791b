"""Blocks over two axes: 128x128 of DeepSeek's FP8 weights, 16x16 of NVFP4's."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import qgate
from qgate.expected.conventions import conventions, tiles
from qgate.expected.sampled import define_groups, differing, sample_groups
from qgate.formats import definition
from tests.formats import oracles

SHAPES = [(256, 384), (300, 260), (2, 40, 50), (5, 3), (1, 130), (3, 0)]
FORMATS = ["fp8_e4m3", "fp8_e4m3fnuz", "int8", "uint4", "hif8", "mxfp8", "nvfp4"]


def weights(*shape: int) -> torch.Tensor:
    rng = np.random.default_rng(math.prod(shape))
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (*shape[:-1], 1)))
    return torch.from_numpy(x).float()


def tiled(fmt: str, rows: int, columns: int, **options: Any) -> qgate.Quantizer:
    if qgate.formats.get(fmt).kind == "element":
        options["granularity"] = "block"
    return qgate.Quantizer(fmt, block=(rows, columns), **options)


def by_hand(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 E4M3 of a matrix with a float32 scale per tile, by loops and ml_dtypes."""
    y = np.empty(x.shape)
    down, across = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    scales = np.empty((down, across), np.float32)
    for i in range(down):
        for j in range(across):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            tile = x[part].numpy().astype(np.float64)
            scales[i, j] = np.float32(np.abs(tile).max() / 448)
            ratios = (tile / scales[i, j]).clip(-448, 448).astype(np.float32)
            y[part] = ratios.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales[i, j]
    return torch.from_numpy(y), torch.from_numpy(scales)


@pytest.mark.parametrize("shape", [(256, 384), (300, 260), (5, 3), (1, 130)], ids=str)
def test_the_weights_of_deepseek(shape: tuple[int, int]) -> None:
    x = weights(*shape)
    values, scales = by_hand(x, 128, 128)
    encoded = tiled("fp8_e4m3", 128, 128).encode(x)
    assert torch.equal(encoded.scales, scales)
    y = tiled("fp8_e4m3", 128, 128)(x)
    assert torch.equal(y, values.float())
    assert torch.equal(encoded.decode(), y)
    requantized = qgate.quantize(x, "fp8_e4m3", granularity="block", block=(128, 128), scale=scales)
    assert torch.equal(requantized, y)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_or_a_column_of_a_tile_is_a_block(fmt: str) -> None:
    x = weights(40, 96)
    options = {"granularity": "block"} if qgate.formats.get(fmt).kind == "element" else {}
    for tile, axis in (((1, 32), 1), ((32, 1), 0)):
        blocks = qgate.quantize(x, fmt, block=32, axis=axis, **options)
        assert torch.equal(tiled(fmt, *tile)(x), blocks)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_tile_as_large_as_the_tensor_is_one_group(fmt: str) -> None:
    x = weights(24, 40)
    if qgate.formats.get(fmt).kind == "block":
        whole = qgate.quantize(x.reshape(-1), fmt, block=x.numel()).view_as(x)
    else:
        whole = qgate.quantize(x, fmt, granularity="tensor")
    for tile in ((24, 40), (128, 128)):
        assert torch.equal(tiled(fmt, *tile)(x), whole)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_definition_and_every_tile_alone_say_the_same(fmt: str, shape: Any) -> None:
    x = weights(*shape)
    q = tiled(fmt, 16, 16)
    expected = definition.quantize(x.numpy(), q)
    y = q(x)
    oracles.assert_same_bits(y, expected.astype(np.float32).astype(np.float64), str(q))
    assert torch.equal(q.encode(x).decode(), y)
    if fmt in ("nvfp4", "hif8") or not x.numel():
        return
    for top in range(0, shape[-2], 16):
        for first in range(0, shape[-1], 16):
            part = (..., slice(top, top + 16), slice(first, first + 16))
            assert torch.equal(q(x[part]), y[part])


def test_sixteen_bits_and_gradients_and_nan() -> None:
    x = weights(40, 40)
    x[3, 3], x[20, 37] = math.nan, math.inf
    for dtype in (torch.bfloat16, torch.float16):
        q = tiled("nvfp4", 16, 16)
        expected = definition.quantize(x.to(dtype).double().numpy(), q)
        assert np.array_equal(
            q(x.to(dtype)).double().numpy(),
            torch.from_numpy(expected).float().to(dtype).double().numpy(),
            equal_nan=True,
        )
        spoilt = q(x).isnan()
        assert spoilt[:16, :16].all()
        assert spoilt[16:32, 32:].all()
        assert spoilt.sum() == 16 * 16 + 16 * 8
    leaf = x.nan_to_num(0, 0, 0).requires_grad_()
    tiled("mxfp4", 16, 16)(leaf).sum().backward()
    assert leaf.grad.shape == leaf.shape
    assert 0 < leaf.grad.sum() < leaf.numel()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_report_counts_no_filling(fmt: str) -> None:
    x = weights(21, 37)
    x[0, 0], x[1, 1], x[2, 2] = 0, 0, math.inf
    options = {"granularity": "block"} if qgate.formats.get(fmt).kind == "element" else {}
    lost = qgate.formats.report(x, fmt, block=(16, 16), **options)
    assert (lost.elements, lost.zeros, lost.posinf) == (21 * 37, 2, 1)
    assert lost.poisoned == 16 * 16 - 1
    assert lost.blocks["zeros"].tolist() == [[2, 0, 0], [0, 0, 0]]
    y = tiled(fmt, 16, 16)(x)
    assert lost.flushed == int(((y == 0) & (x != 0)).sum())


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "nvfp4", "uint4"])
def test_samples_of_tiles_are_held_against_the_definition(fmt: str) -> None:
    for shape in ((40, 50), (3, 32, 48), (300, 260)):
        x = weights(*shape)
        q = tiled(fmt, 16, 16)
        y, places = q(x), torch.zeros(x.shape)
        for sample in sample_groups(x, q):
            defined = torch.from_numpy(define_groups(sample, q, x)).float()
            assert not differing(sample.of(y), defined).any()
            row = sample.rows.shape[0] - 1
            index = sample.place(x.shape, row, 0)
            assert x[index] == sample.rows[row, 0]
            places[index] = 1
        assert places.any()


def test_the_convention_of_tiles_is_that_of_the_quantizer() -> None:
    x = weights(40, 50).double().numpy()
    q = tiled("fp8_e4m3", 16, 16)
    assert np.array_equal(tiles("fp8_e4m3", 16, 16)(x), conventions(q)[0](x))
    names = [convention.name for convention in conventions(q)]
    assert any("power of two" in name for name in names)


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (qgate.QgateError, {"fmt": "mxfp4", "block": (16,)}, ["(16,)", "two numbers"]),
        (qgate.QgateError, {"fmt": "mxfp4", "block": (16, 0)}, ["block 0", "at least 1"]),
        (TypeError, {"fmt": "mxfp4", "block": (16, 2.5)}, ["2.5"]),
        (qgate.QgateError, {"fmt": "mxfp4", "block": (16, 16), "axis": 0}, ["axis=0", "16x16"]),
        (qgate.QgateError, {"fmt": "fp8_e4m3", "block": (16, 16)}, ["(16, 16)", "granularity"]),
        (qgate.QgateError, {"fmt": "hif4", "block": (16, 16)}, ["hif4", "'block'"]),
        (qgate.QgateError, {"fmt": "int8", "block": (2, 2), "granularity": "channel", "axis": 0},
         ["axis=0", "2x2"]),
        (qgate.QgateError, {"fmt": "fp8_e4m3", "block": (16, 16), "granularity": "block",
                            "scale": torch.ones(2)}, ["(2,)", "(2, 3)"]),
    ],
)  # fmt: skip
def test_bad_tiles_get_one_line(error: Any, options: dict[str, Any], words: list[str]) -> None:
    fmt = options.pop("fmt")
    for use in (qgate.quantize, qgate.encode, qgate.formats.report):
        with pytest.raises(error) as caught:
            use(torch.ones(20, 40), fmt, **options)
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in words), message


def test_one_dimension_has_no_tiles() -> None:
    with pytest.raises(qgate.QgateError, match=r"16x16 need a tensor of two dimensions.*\(40,\)"):
        tiled("nvfp4", 16, 16)(torch.ones(40))


def test_a_rule_of_a_mode_may_ask_for_tiles() -> None:
    rule = qgate.Rule(":weight$", "fp8_e4m3", options={"granularity": "block", "block": (16, 16)})
    mode = qgate.Mode("tiles", "tiles", rules=(rule,))
    model = qgate.Model(
        torch.nn.Sequential(torch.nn.Linear(40, 24)), [torch.ones(1, 40)], "m", head=()
    )
    quantized = qgate.modes.apply(mode, model)
    (entry,) = quantized.plan.entries
    assert entry.does == "fp8_e4m3 per 16x16"
    assert entry.origin == "amax of the block"
