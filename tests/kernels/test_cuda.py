"""The kernels on a CUDA device, where there is one; `python -m tests.devices` does the same there
without pytest. The kernels are run everywhere by tests/kernels, in triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import qgate
from qgate.formats import quantizer
from qgate.formats._work import widen
from qgate.formats.engine import on_device
from qgate.formats.engine.dtypes import narrow
from qgate.formats.engine.job import Job
from qgate.kernels import launching, proving
from tests.devices.public import CASES, ON_CUDA, WAYS
from tests.kernels.checks import CHECKS, IN_C
from tests.shares import share

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)


@share(4)
@needs_cuda
@pytest.mark.parametrize("name", [*CHECKS, *IN_C, *CASES, *ON_CUDA])
def test_a_device_gives_the_bits_of_the_cpu(name: str) -> None:
    assert (CHECKS | IN_C | CASES | ON_CUDA)[name](torch.device("cuda")) == ""


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
        assert len(launched) in (turn, 2 * turn, 3 * turn)


@share(4)
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
