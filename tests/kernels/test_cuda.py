"""The same on CUDA as on the CPU. What needs a device is skipped without one; the kernels are run
everywhere by tests/kernels, in triton's interpreter."""

from __future__ import annotations

import warnings

import pytest
import torch

import qgate
from qgate.formats._work import widen
from qgate.formats.engine.dtypes import narrow
from qgate.formats.engine.job import Job
from qgate.kernels import cases, comparing, proving
from qgate.stats.error_stats import errors
from qgate.stats.value_counts import counts
from tests.kernels import checks

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WAYS = {
    "mxfp8": {}, "mxfp4": {"axis": 0}, "nvfp4": {}, "hif4": {}, "hif8": {}, "fp8_e4m3": {"saturate": False},
    "int8": {}, "int4": {"granularity": "channel", "axis": 1}, "fp8_e5m2": {"granularity": "block"},
}  # fmt: skip


@needs_cuda
@pytest.mark.parametrize("name", checks.CHECKS)
def test_the_kernel_gives_the_definitions_bits(name: str) -> None:
    assert checks.CHECKS[name](torch.device("cuda")) == ""


@needs_cuda
@pytest.mark.parametrize("name", checks.IN_C)
def test_the_kernel_in_c_gives_the_definitions_bits(name: str) -> None:
    assert checks.IN_C[name](torch.device("cuda")) == ""


@needs_cuda
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("fmt", WAYS)
def test_quantize_gives_the_bits_of_the_cpu(fmt: str, dtype: torch.dtype) -> None:
    x = cases.numbers(torch.float32 if dtype == torch.float64 else dtype).to(dtype)
    x = x[: len(x) // 97 * 97].view(-1, 97)
    with warnings.catch_warnings():
        warnings.simplefilter("error", proving.KernelWarning)
        found = qgate.quantize(x.cuda(), fmt, **WAYS[fmt])
    assert found.is_cuda
    assert proving.first_difference(found, qgate.quantize(x, fmt, **WAYS[fmt]), x) == ""


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_errors_and_sweeps_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    x = cases.bell_curve(dtype, count=200_001)
    y = qgate.quantize(x, "fp8_e4m3")
    with warnings.catch_warnings():
        warnings.simplefilter("error", proving.KernelWarning)
        if dtype != torch.float32:
            assert counts(x.cuda()) == counts(x)
        there, here = errors(y.cuda(), x.cuda()), errors(y, x)
        swept = qgate.sweep(x.cuda(), "fp8_e4m3")
    assert checks.errors_apart(there, here) == ""
    assert there.metric("relative_mse") == pytest.approx(here.metric("relative_mse"), rel=1e-14)
    assert swept.exponent == qgate.sweep(x, "fp8_e4m3").exponent
    assert errors(y.cuda(), x.cuda()).sums == there.sums, "twice the same is not the same"


@needs_cuda
@pytest.mark.parametrize("reference", DTYPES)
@pytest.mark.parametrize("actual", DTYPES)
def test_errors_of_hard_pairs_are_those_of_the_cpu(
    actual: torch.dtype, reference: torch.dtype
) -> None:
    pairs = list(comparing.trials(actual, reference))
    pairs += [(a[1::3], r[1::3]) for a, r in pairs[:2]]
    with warnings.catch_warnings():
        warnings.simplefilter("error", proving.KernelWarning)
        for a, r in pairs:
            there = errors(a.cuda(), r.cuda(), worst=30)
            assert checks.errors_apart(there, errors(a, r, worst=30)) == ""
            with_gaps = torch.stack([a, a], 1).cuda()[:, 0]
            assert errors(with_gaps, r.cuda(), worst=30).sums == there.sums
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(proving, "serves", lambda _: False)
                assert errors(a.cuda(), r.cuda(), worst=30).sums == there.sums


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_views_with_gaps_are_counted_without_what_is_in_them(dtype: torch.dtype) -> None:
    x = cases.bell_curve(dtype, count=20_000).view(-1, 2)
    assert counts(x.cuda()[:, 0]) == counts(x[:, 0])
    found = qgate.quantize(x.cuda()[:, 0], "int8")
    assert proving.first_difference(found, qgate.quantize(x[:, 0], "int8")) == ""


@pytest.mark.parametrize("shape", [(6, 70), (64,)], ids=str)
@pytest.mark.parametrize("fmt", WAYS)
def test_nothing_mixes_devices_or_waits(fmt: str, shape: tuple[int, ...]) -> None:
    """Tensors of another device that hold nothing: an operation with one of the CPU is refused, and
    so is every question for a number, for which a device would be waited for."""
    if WAYS[fmt].get("axis") and len(shape) == 1:
        shape = (64, 1)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError):
        x + torch.ones(shape)
    with pytest.raises(RuntimeError):
        bool(x.sum() > 0)
    job = Job(x, qgate.Quantizer(fmt, **WAYS[fmt]))
    for chunk, context in job.contexts():
        parts = job.q.format.split(widen(chunk.data(job.data)), context)
        y = narrow(parts.elements * parts.scale, torch.bfloat16)
        assert y.device.type == "meta"
