"""What is read of a tensor is what a plain loop over its values says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.capture.collect_figures import figures
from qgate.capture.collect_shares import shares
from qgate.capture.collect_values import COUNTABLE, read
from qgate.stats import counts

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
    for place, value in enumerate(spoil):
        x[place, 5 * place] = value
    x = x.to(dtype)
    found = figures(read(x, None, 0))
    wide = x.double()
    finite = wide[wide.isfinite()]
    assert found.nonfinite == {
        "nan": int(wide.isnan().sum()),
        "posinf": int((wide == math.inf).sum()),
        "neginf": int((wide == -math.inf).sum()),
    }
    assert found.stats["min"] == finite.min()
    assert found.stats["max"] == finite.max()
    assert found.stats["amax"] == finite.abs().max()
    assert found.stats["elements"] == len(finite)
    assert found.stats["mean"] == pytest.approx(finite.mean().item(), abs=1e-12)
    assert found.stats["std"] == pytest.approx(finite.std(correction=0).item())
    assert found.sampled == 1


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT], ids=str)
def test_counts_are_those_of_the_library(dtype: torch.dtype) -> None:
    x = made(torch.float32, 64, 65)
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38])
    x = x.to(dtype)
    found = figures(read(x, None, 0))
    exact = counts(x) if dtype in COUNTABLE else counts(x, via="bf16")
    assert found.counted_as == exact.dtype  # type: ignore[union-attr]
    assert found.counts is not None
    expanded = np.zeros(len(exact.counts), dtype=np.int64)  # type: ignore[union-attr]
    expanded[found.counts["patterns"]] = found.counts["counts"]
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
    again, found = figures(read(x, 4096, 1)), figures(read(x, 4096, 1))
    assert 0.9 * 4096 <= found.sampled * x.numel() <= 4096
    assert found.stats["max"] == torch.tensor(1e4, dtype=dtype)
    assert found.nonfinite["nan"] == x.isnan().sum()
    assert found.counts is not None
    assert again.counts is not None
    assert found.counts["counts"].sum() == round(found.sampled * x.numel())
    assert np.array_equal(found.counts["counts"], again.counts["counts"])
    values = set(x.bfloat16().view(torch.int16).flatten().tolist())
    assert {*found.counts["patterns"].view(np.int16).tolist()} - {0x7FC0} <= values


def test_the_share_is_fair() -> None:
    x = made(torch.float32, 1000, 512)
    found = figures(read(x, 2**16, 3))
    assert found.sampled < 0.2
    assert found.stats["mean"] == pytest.approx(0, abs=0.05)
    assert found.stats["std"] == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
def test_small_and_empty_tensors(shape: tuple[int, ...]) -> None:
    for dtype in [*FLOATS, torch.int64, torch.bool]:
        found = figures(read(torch.ones(shape).to(dtype), 64, 0))
        assert found.sampled == 1
        assert found.stats["elements"] == math.prod(shape)
        assert ("amax" in found.stats) == bool(math.prod(shape))
    found = figures(read(torch.full((2,), math.nan), 64, 0))
    assert found.stats == {"elements": 0}
    assert found.nonfinite["nan"] == 2


def test_integers_have_extremes_and_no_counts() -> None:
    found = figures(read(torch.arange(-5, 300), None, 0))
    assert (found.stats["min"], found.stats["max"], found.counts) == (-5, 299, None)


def test_what_the_labels_format_would_lose() -> None:
    x = torch.tensor([0.0, 1.0, 2.0**15, 2.0**16, -(2.0**17), 2.0**-24, 2.0**-22, math.inf])
    lost = shares("hifp8", figures(read(x, None, 0)))
    assert lost == {"hif8.saturated_share": 2 / 7, "hif8.zeroed_share": 1 / 7}
    assert shares("mxfp4", figures(read(x, None, 0))) == {}
    assert shares("a/b ü", figures(read(x, None, 0))) == {}


def test_reading_leaves_no_mark_on_the_tensor() -> None:
    x = made(torch.bfloat16, 64, 64)
    read(x, 100, 0)
    x.untyped_storage().resize_(0)  # what FSDP does; after x.numpy() it is refused
