"""Loss scales against brute force over exponents with real quantization."""

from __future__ import annotations

import json
import math
from bisect import bisect_left

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate import formats
from qgate.drawing.loss_scaling import loss_scale
from qgate.errors import QgateError
from qgate.summaries.pooling import pool_of

FORMATS = ("fp16", "fp8_e5m2", "fp8_e4m3", "hif8", "bf16", "fp4_e2m1", "fp6_e3m2")


EXPONENTS = range(-260, 261)


def flushed(values: torch.Tensor, name: str) -> dict[int, float]:
    """Return the share of values, none of them zero, that vanish at each exponent."""
    exponents = torch.tensor([*EXPONENTS], dtype=torch.float64)
    zeros = (formats.quantize(values * torch.exp2(exponents)[:, None], name) == 0).sum(1)
    return {k: n / len(values) for k, n in zip(EXPONENTS, zeros.tolist(), strict=True)}


def squared_error(values: torch.Tensor, name: str, k: int) -> float:
    """Of gradients quantized at a loss scale, after it was divided out again."""
    wrong = formats.quantize(values * 2.0**k, name) * 2.0**-k - values
    return float((wrong / values.abs().max()).square().sum())


def brute(x: torch.Tensor, name: str) -> dict[str, float]:
    values = x.double()
    values = values[values.isfinite() & (values != 0)]
    lost, amax = flushed(values, name), values.abs().max()
    least = next(k for k in EXPONENTS if lost[k] <= 0.001)
    saturating = bisect_left(
        EXPONENTS, True, key=lambda k: formats.report(amax * 2.0**k, name).saturated > 0
    )
    largest = EXPONENTS[saturating - 1]
    between = [*range(least, largest + 1)] or [largest]
    if name == "hif8" and len(between) > 1:
        errors = {k: squared_error(values, name, k) for k in between}
        between = [k for k in between if errors[k] <= 10**0.01 * min(errors.values())]
    advised = min(between, key=abs)
    return {
        "format": name,
        "least": least,
        "largest": largest,
        "advised": advised,
        "flush": lost[0],
        "at_best": lost[advised],
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 1e-7, 1e-20, 3e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loss_scales_agree_with_brute_force(name, scale, dtype):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(3001, generator=generator, dtype=torch.float64) ** 3 * scale).to(dtype)
    if not (x != 0).any():
        assert loss_scale(x, name) is None
        return
    assert loss_scale(x, name) == brute(x, name)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-65504, 65504, width=16), min_size=1, max_size=30),
    st.sampled_from(FORMATS),
)
def test_loss_scales_of_few_values_agree_with_brute_force(values, name):
    x = torch.tensor([*values, math.nan, math.inf, 0.0]).half()
    expected = brute(x, name) if (x.isfinite() & (x != 0)).any() else None
    assert loss_scale(pool_of(x), name) == expected


def test_hif8_is_advised_a_scale_at_which_it_is_precise():
    """Where at most 0.1 % vanish, most gradients are powers of two there: 12 dB worse."""
    x = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-7).bfloat16()
    scaling = loss_scale(x, "hif8")
    values = x.double()[x != 0]
    errors = {
        k: squared_error(values, "hif8", k) for k in range(scaling["least"], scaling["largest"])
    }
    assert errors[scaling["least"]] > 10 * min(errors.values())
    assert errors[scaling["advised"]] < 10**0.01 * min(errors.values())
    assert scaling["least"] < scaling["advised"] < scaling["largest"]


def test_no_scaling_is_advised_where_none_is_needed():
    scaling = loss_scale(torch.linspace(0.5, 4, 100).bfloat16(), "e5m2")
    assert (scaling["advised"], scaling["flush"], scaling["at_best"]) == (0, 0.0, 0.0)
    assert scaling["least"] < 0 < scaling["largest"]


def test_one_in_a_thousand_may_be_flushed():
    x = torch.cat([torch.ones(999), torch.tensor([2.0**-60])]).bfloat16()
    assert loss_scale(x, "fp16")["advised"] == 0
    two = torch.cat([torch.ones(998), torch.tensor([2.0**-60] * 2)]).bfloat16()
    scaling = loss_scale(two, "fp16")
    assert (scaling["least"], scaling["largest"]) == (36, 15)
    assert (scaling["advised"], scaling["at_best"]) == (15, 0.002)


def test_wide_gradients_too_small_for_bf16():
    x = torch.tensor([1e-60, 2e-60, 1e-42, 1.0], dtype=torch.float64)
    scaling = loss_scale(x, "fp16")
    assert 1e-60 * 2.0 ** scaling["least"] > 2.0**-25
    assert scaling["flush"] == 0.75
    json.dumps(scaling, allow_nan=False)


@pytest.mark.parametrize("values", [[], [0.0, -0.0], [math.nan, math.inf]])
def test_gradients_of_zeros_have_no_loss_scale(values):
    assert loss_scale(torch.tensor(values), "fp16") is None
    assert loss_scale(torch.tensor(values).bfloat16(), "fp16") is None


def test_loss_scales_of_a_scalar_and_of_added_pools():
    assert loss_scale(torch.tensor(2.0**-30), "fp16")["least"] == 6
    a, b = torch.randn(50) * 1e-9, torch.randn(70) * 1e-3
    total = pool_of(a) + pool_of(b)
    assert loss_scale(total, "e5m2") == loss_scale(torch.cat([a, b]), "e5m2")


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "int8", "float32"])
def test_formats_that_bring_scales_are_refused(name):
    with pytest.raises(QgateError, match=name):
        loss_scale(torch.ones(3), name)
