"""Modes as engines serve them, block by block against loops over numpy and ml_dtypes, and faults in these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from qgate.models import Model, Sampling, load
from qgate.modes import Mode, find_mode, make_plan
from qgate.modes.served_weights import SERVED_WEIGHT_MODES, SIGNS

Array = Any
Block = Callable[[Array], Array]
LAYER = "model.layers.1.mlp.down_proj"
NAMES = [mode.name for mode in SERVED_WEIGHT_MODES]


@pytest.fixture(scope="module")
def model() -> Model:
    return load("tiny-llama", sampling=Sampling(1, 32))


@pytest.fixture(scope="module")
def tensors(model: Model) -> dict[str, Array]:
    """The weight of a layer, and an input with few large channels."""
    weight = model.module.get_submodule(LAYER).weight.detach().numpy()
    draw = np.random.default_rng(3)
    x = draw.normal(size=(2, 9, weight.shape[1])) * np.exp(draw.normal(size=weight.shape[1]))
    return {"weight": weight, "input": x.astype(np.float32)}


f32 = np.float32


def fp4(x: Array) -> Array:
    return x.astype(ml_dtypes.float4_e2m1fn).astype(f32)


def e4m3(x: Array) -> Array:
    """Round to FP8, saturating."""
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(f32)


def in_tiles(x: Array, rows: int, columns: int, block: Block) -> Array:
    """Quantize each tile of the last two axes by itself."""
    flat = x.reshape(-1, x.shape[-1])
    result = np.empty_like(flat)
    for top in range(0, len(flat), rows):
        for start in range(0, flat.shape[1], columns):
            part = np.s_[top : top + rows, start : start + columns]
            result[part] = block(flat[part])
    return result.reshape(x.shape)


def nvfp4(x: Array, rows: int = 1) -> Array:
    """NVFP4 with one scale for the tensor and one for each tile of so many rows and 16 columns."""
    encode = f32(448 * 6) / np.abs(x).max()

    def block(part: Array) -> Array:
        scale = e4m3(np.abs(part).max() * f32(encode * f32(1 / 6)))
        up = f32(1) / f32(scale * f32(f32(1) / encode))
        return (fp4(part * up).astype(np.float64) * scale * f32(f32(1) / encode)).astype(f32)

    return in_tiles(x, rows, 16, block)


def four_over_six(x: Array) -> Array:
    """NVFP4 whose blocks have their largest element at 6, or at 4 where that errs less in all."""
    bound = f32(448 * 6)
    amax = np.abs(x).max()
    encode = bound / amax

    def block(part: Array) -> Array:
        candidates = []
        for factor in (f32(1), f32(1.5)):
            scale = e4m3(f32(f32(np.abs(part).max() / f32(6)) * encode) * factor)
            up = f32(1) / f32(scale * f32(f32(1) / encode))
            codes = fp4(part * up)
            error = f32(0)
            for difference in (f32(f32(codes * scale) * amax) / bound - part).reshape(-1):
                error = f32(error + abs(difference))
            candidates.append(
                (error, (codes.astype(np.float64) * scale * f32(f32(1) / encode)).astype(f32))
            )
        return candidates[1][1] if candidates[1][0] < candidates[0][0] else candidates[0][1]

    return in_tiles(x, 1, 16, block)


def hadamard() -> Array:
    matrix = np.ones((1, 1))
    while len(matrix) < len(SIGNS):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.array(SIGNS)[:, None] * matrix / np.sqrt(len(SIGNS))


def rotated(x: Array) -> Array:
    turn = hadamard()
    pieces = x.reshape(*x.shape[:-1], -1, len(SIGNS)).astype(np.float64)
    turned = nvfp4((pieces @ turn).reshape(x.shape).astype(f32))
    return (turned.reshape(pieces.shape) @ turn.T).reshape(x.shape).astype(f32)


def mxfp4(x: Array, size: int = 16) -> Array:
    def block(part: Array) -> Array:
        amax = np.abs(part).max()
        scale = np.ldexp(1.0, int(np.frexp(amax)[1]) - 1 - 2) if amax else 1.0
        return (np.clip(fp4(np.clip(part / scale, -6, 6)), -6, 6) * scale).astype(f32)

    return in_tiles(x, 1, size, block)


def int4(x: Array) -> Array:
    """Sixteen steps from the least to the largest value of a group, zero among them."""

    def block(part: Array) -> Array:
        low, high = min(part.min(), f32(0)), max(part.max(), f32(0))
        scale = f32(f32(high - low) / f32(15))
        zero = np.clip(np.rint(-low / scale), 0, 15)
        codes = np.clip(np.rint(part / scale) + zero, 0, 15)
        return ((codes - zero) * scale).astype(f32)

    return in_tiles(x, 1, 128, block)


def fp8(x: Array, rows: int) -> Array:
    def block(part: Array) -> Array:
        scale = f32(np.abs(part).max() / f32(448))
        return (e4m3(part / scale) * scale).astype(f32)

    return in_tiles(x, rows, 128, block)


ORACLES: dict[str, dict[str, Block]] = {
    "served-nvfp4-tiles": {"weight": lambda x: nvfp4(x, 16), "input": nvfp4},
    "served-nvfp4-4over6": {"weight": four_over_six, "input": four_over_six},
    "served-nvfp4-rotated": {"weight": rotated, "input": rotated},
    "served-mxfp4-16": {"weight": mxfp4, "input": mxfp4},
    "served-int4-zero": {"weight": int4},
    "served-fp8-tiles": {"weight": lambda x: fp8(x, 128), "input": lambda x: fp8(x, 1)},
}


def wrong_share(mode: Mode, model: Model, tensors: dict[str, Array], port: str) -> float:
    """The share of values that are not those of the oracle; rotations are two products in float32."""
    plan = {entry.site: entry.quantizer for entry in make_plan(mode, model).entries}
    quantizer = plan.get(f"{LAYER}:{port}")
    expected = ORACLES[mode.name].get(port, lambda x: x)(tensors[port])
    x = torch.from_numpy(tensors[port])
    actual = (x if quantizer is None else quantizer(x)).numpy()
    room = 1e-5 * np.abs(expected).max() if mode.name == "served-nvfp4-rotated" else 0.0
    return float((np.abs(actual - expected) > room).mean())


@pytest.mark.parametrize("port", ["weight", "input"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mode_is_what_numpy_makes_of_each_block(
    model: Model, tensors: dict[str, Array], name: str, port: str
) -> None:
    share = wrong_share(find_mode(name, "other"), model, tensors, port)
    # Where a rotation puts a value at a border of two codes, its last bit decides.
    assert share <= (2e-3 if name == "served-nvfp4-rotated" else 0.0)


# Mode, port, and options that are wrong in one point.
FAULTS = (
    ("served-nvfp4-tiles", "weight", {"block": 16}),
    ("served-nvfp4-tiles", "input", {"block": (16, 16)}),
    ("served-nvfp4-4over6", "weight", "nvfp4"),
    ("served-nvfp4-rotated", "weight", {"rotation": (*SIGNS[:9], -SIGNS[9], *SIGNS[10:])}),
    ("served-nvfp4-rotated", "input", {}),
    ("served-mxfp4-16", "weight", {"block": 32}),
    ("served-mxfp4-16", "input", {"block": 16, "scale_rule": "even"}),
    ("served-int4-zero", "weight", {"granularity": "block", "block": 128, "axis": 0, "zero_point": "minmax"}),
    ("served-int4-zero", "weight", {"granularity": "block", "block": 64, "axis": -1, "zero_point": "minmax"}),
    ("served-fp8-tiles", "weight", {"granularity": "block", "block": (128, 1)}),
    ("served-fp8-tiles", "input", {"granularity": "block", "block": (128, 128)}),
    ("served-fp8-tiles", "input", {"granularity": "tensor"}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "port", "wrong"), FAULTS)
def test_a_wrong_block_is_seen(
    model: Model, tensors: dict[str, Array], name: str, port: str, wrong: Any
) -> None:
    mode = find_mode(name, "other")
    rules = [
        rule if f":{port}$" != rule.sites
        else dataclasses.replace(rule, format=wrong) if isinstance(wrong, str)
        else dataclasses.replace(rule, options=wrong)
        for rule in mode.rules
    ]  # fmt: skip
    assert wrong_share(dataclasses.replace(mode, rules=tuple(rules)), model, tensors, port) > 0.02
