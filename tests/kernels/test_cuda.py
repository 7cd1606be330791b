"""The kernels on a CUDA device, where there is one; `python -m tests.devices` does the same there
without pytest. The kernels are run everywhere by tests/kernels, in triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import qgate
from qgate.formats._work import widen
from qgate.formats.engine.dtypes import narrow
from qgate.formats.engine.job import Job
from tests.devices.public import CASES, WAYS
from tests.kernels.checks import CHECKS, IN_C


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("name", [*CHECKS, *IN_C, *CASES])
def test_a_device_gives_the_bits_of_the_cpu(name: str) -> None:
    assert (CHECKS | IN_C | CASES)[name](torch.device("cuda")) == ""


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
