"""Smoothing advice against a slow definition, and planted cases that it must tell apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import qgate
from qgate.activation_stats.record import Smoothed
from qgate.activation_stats.smoothing import hadamard_block, quantizer_of, rotate, smoothing_advice
from qgate.errors import QgateError


def layer(rows: int = 48, width: int = 64, out: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=g), torch.randn(out, width, generator=g) * 0.05


def slow_db(x: Tensor, w: Tensor, fmt: str, s: Tensor, turn: Tensor) -> float:
    def q(rows: Tensor) -> Tensor:
        if fmt == "int8":
            return torch.stack([qgate.quantize(row, "int8") for row in rows])
        return qgate.quantize(rows, fmt)

    xs, ws = (x / s @ turn).float(), (w * s @ turn).float()
    share = []
    for row, true in zip(q(xs), x, strict=True):
        y = w @ true
        share.append(float((q(ws) @ row - y).square().sum() / y.square().sum()))
    return -10 * math.log10(np.mean(share))


def sylvester(n: int) -> Tensor:
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(n)


@pytest.mark.parametrize("fmt", ["int8", "mxfp8_e4m3", "mxfp4_e2m1"])
def test_predictions_are_those_of_the_definition(fmt: str) -> None:
    x, w = layer()
    x[:, 3] *= 30
    advice = smoothing_advice(x, w, formats=[fmt], alphas=(0.0, 0.5, 1.0))
    assert advice is not None
    got = advice.smoothed[0]
    one, eye = torch.ones(64), torch.eye(64)
    assert got["before_db"] == pytest.approx(slow_db(x, w, fmt, one, eye), abs=0.01)
    for text, value in got["curve"].items():
        s = x.abs().amax(0) ** float(text) / w.abs().amax(0) ** (1 - float(text))
        assert value == pytest.approx(slow_db(x, w, fmt, s, eye), abs=0.2)
    assert got["hadamard_db"] == pytest.approx(slow_db(x, w, fmt, one, sylvester(64)), abs=0.2)
    assert got["after_db"] == max(got["curve"].values()) == got["curve"][f"{got['alpha']:g}"]


def int8(x: Tensor, w: Tensor) -> Smoothed:
    advice = smoothing_advice(x, w, formats=["int8"])
    assert advice is not None
    return advice.smoothed[0]


def test_a_systematic_channel_is_helped_by_both() -> None:
    x, w = layer(128, 256)
    x[:, 7] *= 100
    got = int8(x, w)
    assert got["after_db"] > got["before_db"] + 6
    assert got["hadamard_db"] > got["before_db"] + 6


def test_a_massive_token_is_helped_by_rotation_and_not_by_migration() -> None:
    x, w = layer(128, 256)
    x[5, 9] = 3000
    plain, got = int8(x[5:6], w), int8(x, w)
    assert got["after_db"] < got["before_db"] + 0.5
    assert plain["hadamard_db"] > plain["before_db"] + 2
    assert got["hadamard_db"] > got["before_db"]


def test_a_rotation_is_orthonormal_also_of_other_widths() -> None:
    assert [hadamard_block(n) for n in (64, 96, 7, 12)] == [64, 32, 1, 4]
    for width in (64, 96, 12):
        turned = rotate(torch.eye(width))
        assert torch.allclose(turned @ turned.T, torch.eye(width), atol=1e-6)
    assert torch.allclose(rotate(torch.eye(16)), sylvester(16))
    x, w = layer(width=7)
    advice = smoothing_advice(x, w, formats=["int8"])
    assert advice is not None
    assert advice.block == 1
    assert "hadamard_db" not in advice.smoothed[0]


def test_what_cannot_be_compared_has_no_advice() -> None:
    x, w = layer()
    assert smoothing_advice(torch.zeros_like(x), w) is None
    assert smoothing_advice(x * math.nan, w) is None
    assert smoothing_advice(x, w * math.nan) is None
    with pytest.raises(QgateError, match="64 wide"):
        smoothing_advice(x, w[:, :5])
    with pytest.raises(QgateError, match="from 0 to 1"):
        smoothing_advice(x, w, alphas=(2.0,))


def test_channels_without_values_stay_as_they_are() -> None:
    x, w = layer()
    x[:, 2] = 0
    w[:, 5] = 0
    got = smoothing_advice(x, w)
    assert got is not None
    assert all(math.isfinite(v) for s in got.smoothed for v in s["curve"].values())
    assert quantizer_of("int8").granularity == "channel"
