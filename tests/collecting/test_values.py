"""What is read of a tensor is what a plain loop over its values says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qgate
from qgate.collecting import device
from qgate.collecting.figures import blocks_of, figures_of, shares_of
from qgate.collecting.values import COUNTABLE, array_of, read
from qgate.stats import counts
from qgate.stats.bits import decoded
from tests.shares import share

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2]


def made(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(3).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT], ids=str)
@pytest.mark.parametrize("spoil", [(), (math.nan,), (math.inf, math.nan), (-math.inf, math.inf)])
def test_figures_are_those_of_the_finite_values(
    dtype: torch.dtype, spoil: tuple[float, ...]
) -> None:
    x = made(torch.float32, 7, 33)
    for row, value in enumerate(spoil):
        x[row, 5 * row] = value
    x = x.to(dtype)
    figures = figures_of(read(x, None, 0))
    wide = x.double()
    finite = wide[wide.isfinite()]
    assert figures.nonfinite == {
        "nan": int(wide.isnan().sum()),
        "posinf": int((wide == math.inf).sum()),
        "neginf": int((wide == -math.inf).sum()),
    }
    assert figures.stats["min"] == finite.min()
    assert figures.stats["max"] == finite.max()
    assert figures.stats["amax"] == finite.abs().max()
    assert figures.stats["elements"] == len(finite)
    assert figures.stats["mean"] == pytest.approx(finite.mean().item(), abs=1e-12)
    assert figures.stats["std"] == pytest.approx(finite.std(correction=0).item())
    assert figures.sampled == 1


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT], ids=str)
def test_counts_are_those_of_the_library(dtype: torch.dtype) -> None:
    x = made(torch.float32, 64, 65)
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38])
    x = x.to(dtype)
    figures = figures_of(read(x, None, 0))
    exact = counts(x) if dtype in COUNTABLE else counts(x, via="bf16")
    assert figures.counted_as == exact.dtype  # type: ignore[union-attr]
    assert figures.counts is not None
    expanded = np.zeros(len(exact.counts), dtype=np.int64)  # type: ignore[union-attr]
    expanded[figures.counts["patterns"]] = figures.counts["counts"]
    other = exact.counts.copy()  # type: ignore[union-attr]
    for table in (expanded, other) if dtype in FLOATS[:2] else ():
        nan = table[0x7F81:0x8000].sum() + table[0xFF81:].sum()  # one is as good as another
        table[0x7F81:0x8000] = table[0xFF81:] = 0
        table[0x7FC0] = nan
    assert np.array_equal(expanded, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2],
        lambda x: x[..., 3:51],
        lambda x: x[:1].expand(8, -1, -1),
        lambda x: x.flatten()[5:],
    ],
)
def test_a_share_of_large_tensors_is_counted_and_extremes_are_of_all(
    dtype: torch.dtype, view: object
) -> None:
    x: Tensor = view(made(dtype, 16, 80, 64))  # type: ignore[operator]
    flat = x if x.dim() == 1 else x[-1].select(-1, 7)
    flat[-3] = 1e4
    (x if x.dim() == 1 else x[0].select(-1, 1))[1] = math.nan
    repeated_figures, figures = figures_of(read(x, 4096, 1)), figures_of(read(x, 4096, 1))
    assert 0.9 * 4096 <= figures.sampled * x.numel() <= 4096
    assert figures.stats["max"] == torch.tensor(1e4, dtype=dtype)
    assert figures.nonfinite["nan"] == x.isnan().sum()
    assert figures.counts is not None
    assert repeated_figures.counts is not None
    assert figures.counts["counts"].sum() == round(figures.sampled * x.numel())
    assert np.array_equal(figures.counts["counts"], repeated_figures.counts["counts"])
    values = set(x.bfloat16().view(torch.int16).flatten().tolist())
    assert {*figures.counts["patterns"].view(np.int16).tolist()} - {0x7FC0} <= values


def test_the_share_is_fair() -> None:
    x = made(torch.float32, 1000, 512)
    figures = figures_of(read(x, 2**16, 3))
    assert figures.sampled < 0.2
    assert figures.stats["mean"] == pytest.approx(0, abs=0.05)
    assert figures.stats["std"] == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
def test_small_and_empty_tensors(shape: tuple[int, ...]) -> None:
    for dtype in [*FLOATS, torch.int64, torch.bool]:
        figures = figures_of(read(torch.ones(shape).to(dtype), 64, 0))
        assert figures.sampled == 1
        assert figures.stats["elements"] == math.prod(shape)
        assert ("amax" in figures.stats) == bool(math.prod(shape))
    figures = figures_of(read(torch.full((2,), math.nan), 64, 0))
    assert figures.stats == {"elements": 0}
    assert figures.nonfinite["nan"] == 2


def test_integers_have_extremes_and_no_counts() -> None:
    figures = figures_of(read(torch.arange(-5, 300), None, 0))
    assert (figures.stats["min"], figures.stats["max"], figures.counts) == (-5, 299, None)


def lost(label: str, x: Tensor, most: int | None = None) -> dict[str, float]:
    reading = read(x, most, 0)
    return shares_of(label, figures_of(reading), blocks_of(reading))


def test_what_the_labels_format_would_lose() -> None:
    x = torch.tensor([0.0, 1.0, 2.0**15, 2.0**16, -(2.0**17), 2.0**-24, 2.0**-22, math.inf])
    assert lost("hifp8", x) == {"hif8.saturated_share": 2 / 7, "hif8.flushed_share": 1 / 7}
    assert lost("a/b ü", x) == {}
    assert lost("int8", x) == {}  # of what granularity its scale is, the label does not tell
    tie = torch.tensor([2.0**-23, 2.0**-10])
    assert lost("hifp8", tie)["hif8.flushed_share"] == 0  # ties go away from zero
    assert lost("fp8", tie)["fp8_e4m3.flushed_share"] == 1  # and to the even neighbor


@share(8)
@pytest.mark.parametrize("label", ["mxfp8", "mxfp4", "mxfp6", "mxfp8_e5m2", "fp8_e4m3", "hif8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(40, 64), (7, 3, 50), (129,), (3, 5, 8), (1,)], ids=str)
def test_losses_are_those_that_quantizing_makes(
    label: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    name = {"mxfp6": "mxfp6_e3m2"}.get(label, label)
    x = (made(torch.float64, *shape) * torch.exp2(made(torch.float64, *shape, seed=1))).to(dtype)
    if label == "fp8_e4m3" and dtype in (torch.float32, torch.float64):
        x = x.bfloat16().to(dtype)  # counted after rounding to bf16
    effects = qgate.formats.report(x, name)
    losses = {key.rpartition(".")[2]: value for key, value in lost(label, x).items()}
    assert losses["saturated_share"] * x.numel() == pytest.approx(effects.saturated)
    assert losses["flushed_share"] * x.numel() == pytest.approx(effects.flushed)


def test_figures_of_blocks() -> None:
    x = torch.ones(4, 64)
    x[0, :32], x[1, 5], x[2, 40], x[3] = 0, 2.0**10, -(2.0**7), 2.0**-6
    blocks = blocks_of(read(x, None, 0))
    assert blocks is not None
    assert blocks.stats == {"block32.spread_binades": 16, "block32.zero_share": 1 / 8}
    x[1, 6] = math.inf
    blocks = blocks_of(read(x, None, 0))
    assert blocks is not None
    assert blocks.stats == {"block32.spread_binades": 13, "block32.zero_share": 1 / 7}
    assert len(blocks.sizes) == 7 * 32
    for empty in (torch.ones(3, 0), torch.full((2, 40), math.nan)):
        blocks = blocks_of(read(empty, None, 0))
        assert blocks is not None
        assert blocks.stats == {}
        assert blocks.losses(qgate.formats.get("mxfp8")).elements == 0  # type: ignore[arg-type]
    assert blocks_of(read(torch.arange(64), None, 0)) is None


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.transpose(0, 2),
        lambda x: x[..., 3:51],
        lambda x: x.flatten()[5:],
        lambda x: x[:, ::2].unflatten(-1, (2, -1)).transpose(1, 2),
    ],
)
def test_what_is_sampled_is_whole_blocks(view: Any) -> None:
    x = view(torch.arange(16 * 80 * 64, dtype=torch.float32).view(16, 80, 64))
    reading = read(x, 4096, 1)
    assert reading.sample is not None
    assert reading.lengths is not None
    assert reading.lengths.sum() == len(reading.sample) == reading.counted
    rows = [tuple(row.tolist()) for row in x.reshape(-1, x.shape[-1])]
    whole = {row[start : start + 32] for row in rows for start in range(0, len(row), 32)}
    ends = np.cumsum(reading.lengths)
    got = {
        tuple(reading.sample[end - n : end].tolist())
        for end, n in zip(ends, reading.lengths, strict=True)
    }
    assert got <= whole
    assert len(got) == len(reading.lengths) > 100


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [30, 300])
def test_a_device_reads_what_the_host_reads(dtype: torch.dtype, size: int) -> None:
    x = made(dtype, size, 3, 96).transpose(0, 1)
    x[0, 0, :2] = torch.tensor([math.nan, math.inf], dtype=dtype)
    host = read(x, None, 5)
    low, high, nan, posinf, neginf, total, squares = device._figures(x).tolist()
    assert (low, high) == (host.low, host.high)
    assert host.nonfinite == {"nan": nan, "posinf": posinf, "neginf": neginf}
    finite = x.double()[x.isfinite()]
    assert total == pytest.approx(finite.sum().item(), rel=1e-5, abs=1e-3)
    assert squares == pytest.approx(finite.square().sum().item(), rel=1e-5)
    patterns = figures_of(host).counts
    assert patterns is not None
    counted = device._counts(x).numpy()
    finite_patterns = np.isfinite(decoded(dtype if dtype in COUNTABLE else torch.bfloat16))
    expanded = np.zeros_like(counted)
    expanded[patterns["patterns"]] = patterns["counts"]
    assert np.array_equal(counted[finite_patterns], expanded[finite_patterns])
    sample, lengths = device._blocks(x, 2**16, 5)
    right = read(x, 2**16, 5)
    assert np.array_equal(array_of(sample), right.sample, equal_nan=dtype not in COUNTABLE)
    assert np.array_equal(lengths, right.lengths)  # type: ignore[arg-type]


def test_reading_leaves_no_mark_on_the_tensor() -> None:
    x = made(torch.bfloat16, 64, 64)
    read(x, 100, 0)
    x.untyped_storage().resize_(0)  # what FSDP does; after x.numpy() it is refused
