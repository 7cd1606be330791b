"""Every feature gives the same figures for the losses of a format."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qgate
from qgate.collecting.figures import blocks_of, figures_of, shares_of
from qgate.collecting.values import read
from qgate.dumps import Dump
from qgate.dumps.gate_sites import (
    Sites,
    losses_of_pool,
    losses_of_tensors,
    needs_values,
    pool,
)
from qgate.summaries.pooling import pool_of
from tests.dumps.making import write

EXAMPLE = [1.0, 460.0, 1000.0, math.inf, math.nan, 2.0**-10, 2.0**-12, 0.0]
Shares = tuple[float, float]


def by_report(x: Tensor, name: str, _folder: Path) -> Shares:
    losses = qgate.formats.report(x, name)
    return losses.saturated_share, losses.flushed_share


def by_drawing(x: Tensor, name: str, _folder: Path) -> Shares:
    summary = pool_of(x, [name]).summary()["formats"][name]
    return summary["upper"] + summary["lower"], summary["flushed"]


def by_gate(x: Tensor, name: str, folder: Path) -> Shares:
    write(folder, [x])
    dump = Dump.open(folder)
    (site,) = Sites.of(dump).sites
    if needs_values(name):
        losses = losses_of_tensors(dump, site.records, name)
    else:
        losses = losses_of_pool(pool(dump, site.records), name)
    return losses.saturated_share, losses.flushed_share


def by_collector(x: Tensor, name: str, _folder: Path) -> Shares:
    reading = read(x, None, 0)
    shares = shares_of(name, figures_of(reading), blocks_of(reading))
    return shares[f"{name}.saturated_share"], shares[f"{name}.flushed_share"]


def by_sweep(x: Tensor, name: str, _folder: Path) -> Shares:
    if name.startswith("mx"):
        swept = qgate.sweep(x, name, granularity="block", max_exp=0, min_exp=0)
    else:
        swept = qgate.sweep(x, name, max_exp=0, min_exp=0)
    (level,) = (sweep_level for sweep_level in swept.levels if sweep_level["exponent"] == 0)
    return level["overflow_share"], level["flush_share"]


CALLERS = {"report": by_report, "drawing": by_drawing, "gate": by_gate,
           "collector": by_collector, "sweep": by_sweep}  # fmt: skip
Caller = Callable[[Tensor, str, Path], Shares]


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest) -> Caller:
    return CALLERS[request.param]


def test_the_example_has_one_answer(caller: Caller, tmp_path: Path) -> None:
    x = torch.tensor(EXAMPLE).bfloat16()
    assert caller(x, "fp8_e4m3", tmp_path / "d") == (1 / 6, 2 / 6)


def hard(dtype: torch.dtype) -> Tensor:
    """Both signs, ties at the ends of formats, subnormals, infinities, NaN and zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, generator=generator) * torch.exp2(
        torch.randint(-24, 18, (16, 64), generator=generator)
    )
    ends = [464.0, -464.0, 466.0, 61440.0, -61440.0, 40960.0, -40960.0, 32768.0, 7.0, -7.0, 0.0]
    ends += [2.0**-10, -(2.0**-10), 2.0**-17, -(2.0**-17), 2.0**-23, -(2.0**-23), 2.0**-24, -0.0]
    x[0, : len(ends)] = torch.tensor(ends)
    x[1, :5] = torch.tensor([math.inf, -math.inf, -math.inf, math.nan, 1.0])
    x[2, 40] = math.inf
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name",
    ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "hif8", "fp16", "bf16",
     "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"],
)  # fmt: skip
def test_there_is_one_answer(name: str, dtype: torch.dtype, caller: Caller, tmp_path: Path) -> None:
    x = hard(dtype).bfloat16().to(dtype)  # wider tensors are counted after rounding to bf16
    losses = qgate.formats.report(x, name)
    assert losses.inf > 0 < losses.nan
    assert caller(x, name, tmp_path / "d") == pytest.approx(
        (losses.saturated_share, losses.flushed_share), rel=1e-12
    )


def test_drawing_and_report_know_the_overflow_ratio_of_a_cast() -> None:
    """Count the share of all elements beyond the range, infinities included, before rounding."""
    x = torch.tensor(EXAMPLE).bfloat16()
    summary = pool_of(x, ["fp8_e4m3"]).summary()["formats"]["fp8_e4m3"]
    assert (
        summary["beyond_range"] == qgate.formats.report(x, "fp8_e4m3").beyond_range_share == 3 / 8
    )
    assert "beyond_range" not in pool_of(x, ["mxfp4"]).summary()["formats"]["mxfp4_e2m1"]
