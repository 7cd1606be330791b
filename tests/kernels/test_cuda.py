"""The kernels on a CUDA device, where there is one; `python -m tests.devices` does the same there
without pytest. The kernels are run everywhere by tests/kernels, in triton's interpreter."""

from __future__ import annotations

<<<<<<< HEAD
=======
import warnings
from typing import Any

>>>>>>> wt-a
import pytest
import torch

import qgate
from qgate.formats import quantizer
from qgate.formats._work import widen
from qgate.formats.engine import on_device
from qgate.formats.engine.dtypes import narrow
from qgate.formats.engine.job import Job
<<<<<<< HEAD
from tests.devices.public import CASES, WAYS
from tests.kernels.checks import CHECKS, IN_C
=======
from qgate.kernels import cases, comparing, launching, proving
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
    "fp4_e2m1": {"granularity": "channel", "axis": 0}, "fp6_e2m3": {"scale": 0.3},
}  # fmt: skip
>>>>>>> wt-a


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("name", [*CHECKS, *IN_C, *CASES])
def test_a_device_gives_the_bits_of_the_cpu(name: str) -> None:
    assert (CHECKS | IN_C | CASES)[name](torch.device("cuda")) == ""


@needs_cuda
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8", "hif8"])
def test_scales_of_channels_may_be_on_the_device(fmt: str, axis: int) -> None:
    x = cases.bell_curve(torch.bfloat16, count=2**17).view(512, 256)
    scale = torch.rand(x.shape[axis], generator=torch.Generator().manual_seed(0)) + 0.1
    options: dict[str, Any] = {"granularity": "channel", "axis": axis}
    with warnings.catch_warnings():
        warnings.simplefilter("error", proving.KernelWarning)
        q = qgate.Quantizer(fmt, scale=scale.cuda(), **options)
        for _ in range(3):
            found = q(x.cuda())
            expected = qgate.quantize(x, fmt, scale=scale, **options)
            assert proving.first_difference(found, expected, x) == ""
            scale *= 0.7
            q.scale.mul_(0.7)


@needs_cuda
@pytest.mark.parametrize("fmt", [fmt for fmt in WAYS if fmt != "hif8"])
def test_a_call_waits_for_nothing_and_can_be_captured(fmt: str) -> None:
    q = qgate.Quantizer(fmt, **WAYS[fmt])
    x = cases.bell_curve(torch.bfloat16, count=2**18).view(512, 512)
    there = x.cuda()
    q(there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        q(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = q(there)
    there.copy_(x.flip(0))
    graph.replay()
    assert proving.first_difference(y, q(x.flip(0)), x) == ""


@pytest.mark.parametrize("fmt", [fmt for fmt in WAYS if "scale" not in WAYS[fmt]])
def test_a_call_of_a_kernel_asks_for_no_number(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that holds nothing all goes as far as the launches, twice."""
    launched: list[object] = []
    monkeypatch.setattr(proving, "DEVICES", {"meta"})
    monkeypatch.setattr(proving, "serves", lambda _: True)
    monkeypatch.setattr(proving, "prove_once", lambda *_: True)
    monkeypatch.setattr(on_device, "SMALL", 0)
    monkeypatch.setattr(launching, "launch", lambda program, *_, **__: launched.append(program))
    pytest.importorskip("triton", reason="there is no triton for this platform")
    q, x = qgate.Quantizer(fmt, **WAYS[fmt]), torch.empty(96, 64, device="meta").bfloat16()
    for turn in (1, 2):
        y = q(x)
        assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")
        assert len(launched) in (turn, 2 * turn)


@pytest.mark.parametrize("shape", [(6, 70), (64,)], ids=str)
@pytest.mark.parametrize("fmt", [fmt for fmt in WAYS if "scale" not in WAYS[fmt]])
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
    assert quantizer.by_definition(job).device.type == "meta"
    for chunk, context in job.contexts():
        parts = job.q.format.split(widen(chunk.data(job.data)), context)
        y = narrow(parts.elements * parts.scale, torch.bfloat16)
        assert y.device.type == "meta"
