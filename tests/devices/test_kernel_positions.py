"""Arguments of a device: a reference meets a position out of range on the CPU, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from qgate.testing import CheckFailure, check_kernel
from tests.devices import simulated

ASSERT = "CUDA error: device-side assert triggered"
GENERATOR = torch.Generator().manual_seed(1)
LOGITS = torch.randn(24, 10, generator=GENERATOR)
ENDED: list[str] = []
LABELS = torch.randint(10, (24,), generator=GENERATOR)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute losses; a label out of range ends the device, and is an exception on the CPU."""
    if logits.device.type != "cpu" and labels.numel() and int(labels.max()) >= logits.shape[1]:
        ENDED.append(ASSERT)
        raise RuntimeError(ASSERT)
    return cross_entropy(logits, labels, reduction="none")


class _Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((10,), 1.5))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _losses(logits * self.scale, labels)


@pytest.fixture(autouse=True)
def _device_lives() -> Iterator[None]:
    ENDED.clear()
    yield
    assert not ENDED, "the device was lost"


def test_a_reference_never_reads_outside_on_the_device() -> None:
    with simulated.plugged():
        options = {"relations": ["one", "odd", "prefix", "permuted", "empty"]}
        report = check_kernel(_losses, LOGITS.to("sim"), LABELS.to("sim"), like=_losses, **options)
        assert "3 of 24 along dimension 0 of argument 0, dimension 0 of argument 1" in report.held
        assert "dimension 1 of argument 0" not in "".join(report.held)
        module = _Losses().to("sim")
        report = check_kernel(module, LOGITS, LABELS, like=module, device="sim", **options)
        assert "3 of 24 along dimension 0 of argument 0, dimension 0 of argument 1" in report.held


def test_a_reference_that_keeps_tensors_of_a_device_is_not_cut_there() -> None:
    with simulated.plugged():
        scale = torch.full((10,), 1.5).to("sim")

        def scaled(logits: Tensor, labels: Tensor) -> Tensor:
            return _losses(logits * scale.to(logits.dtype), labels)

        arguments = LOGITS.to("sim"), LABELS.to("sim")
        report = check_kernel(scaled, *arguments, like=scaled)
        assert "integers may be positions" in report.left_out["inputs of other lengths"]
        assert "strided views (argument 0)" in report.held
        w = torch.randn(8, 10, generator=GENERATOR).to("sim")
        report = check_kernel(
            lambda x, w: linear(x * scale, w),
            LOGITS.to("sim"), w,
            like=lambda x, w: linear(x * scale.to(x.dtype), w),
            relations=["odd"],
        )  # fmt: skip
        assert any("3 of 24" in name for name in report.held), "without integers nothing is lost"


def test_other_readings_of_integers_are_tried_on_the_cpu_first() -> None:
    def shifted(logits: Tensor, labels: Tensor) -> Tensor:
        return _losses(logits, (labels + 1) % logits.shape[1])

    assert 9 in LABELS
    with simulated.plugged():
        arguments = LOGITS.to("sim"), LABELS.to("sim")
        with pytest.raises(CheckFailure, match="shifted is wrong"):
            check_kernel(shifted, *arguments, like=_losses)


def test_shapes_asked_for_are_tried_on_the_cpu_first() -> None:
    with simulated.plugged():
        report = check_kernel(
            _losses, LOGITS.to("sim"), LABELS.to("sim"), like=_losses, relations=["one"],
            shapes=[[(24, 5), (24,)], [(30, 10), (30,)]],
        )  # fmt: skip
    assert report.left_out["shapes 24x5, 24"].startswith("the reference refused: IndexError")
    assert "shapes 30x10, 30" in report.held
