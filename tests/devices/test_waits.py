"""How often statistics make the host wait for a device, and what two devices get."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qgate
from qgate.errors import QgateError
from qgate.stats import _device_pass, counts, errors
from tests.devices import simulated

COUNT, COPY = "aten.bincount.default", "to the CPU"
"""Torch alone counts with a wait, which kernels do not need."""


@pytest.fixture
def x() -> Tensor:
    simulated.register()
    generator = torch.Generator().manual_seed(0)
    return torch.randn(9000, generator=generator).bfloat16().to("sim")


def test_counts_and_sweeps_are_copied_once(x: Tensor) -> None:
    with simulated.transfers() as counted:
        totals = counts(x)
    assert counted.names == [COUNT, COPY]
    with simulated.transfers() as swept:
        qgate.sweep(x, "fp8_e4m3").to_dict()
    assert swept.names == [COUNT, COPY]
    with simulated.transfers() as read:
        qgate.sweep(totals, "fp8_e4m3")
        assert totals.percentile(50) < 1
    assert read.names == []


def test_errors_are_copied_once(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_pass, "serves", lambda *_: True)
    y = x.float() * 1.01
    with simulated.transfers() as waits:
        error_sums = errors(x, y)
    assert waits.names == [COUNT, COPY]
    assert len(error_sums.worst) == 10
    with simulated.transfers() as waits:
        error_sums = errors(x, y.masked_fill(y > 3, float("nan")))
    assert waits.names == [COUNT, COPY, COPY], "the first NaN is looked for"
    assert error_sums.first_non_finite is not None


@pytest.mark.parametrize("places", [("cpu", "sim:0"), ("sim:0", "sim:1")], ids="-".join)
def test_tensors_of_two_devices_are_refused(x: Tensor, places: tuple[str, str]) -> None:
    actual, reference = (x.cpu().to(device) for device in places)
    words = rf"^actual is on {places[0]} and reference on {places[1]}: .* one device\. Move one"
    with pytest.raises(QgateError, match=words):
        errors(actual, reference)
    assert errors([actual], [reference]).metric("mse") == 0, "chunks may be on any device"
