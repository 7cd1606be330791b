"""Kernels that end their device, or find too little memory there: one sentence, and no verdict."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from qgate.device_errors import DeviceMemoryError, LostDeviceError
from qgate.testing import check, check_kernel

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later."
X, W = torch.randn(8, 64), torch.randn(16, 64)


@pytest.mark.parametrize("calls", [0, 1, 4])
def test_a_kernel_that_ends_its_device_is_no_refusal_of_an_input(calls: int) -> None:
    allowed_calls = [calls]

    def fragile(x: Tensor, w: Tensor) -> Tensor:
        allowed_calls[0] -= 1
        if allowed_calls[0] < 0:
            raise RuntimeError(ASSERT)
        return linear(x, w)

    with pytest.raises(LostDeviceError) as caught:
        check_kernel(fragile, X, W, like=linear)
    assert str(caught.value) == (
        "a kernel stopped the device for this process (device-side assert triggered), while fragile "
        "ran or earlier: nothing runs on that device in this process any more. "
        "CUDA_LAUNCH_BLOCKING=1 shows which kernel it was."
    )
    assert allowed_calls == [-1], "nothing is called again"
    assert caught.value.__suppress_context__


def test_an_example_that_does_not_fit_is_one_sentence() -> None:
    def hungry(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 12.00 MiB.")

    with pytest.raises(DeviceMemoryError) as caught:
        check_kernel(hungry, X, W, like=linear)
    assert str(caught.value) == (
        "the memory of the device (12.00 MiB more wanted) is too small for hungry. Give smaller "
        "tensors, or those of a device with more memory, such as the CPU."
    )


def test_a_larger_input_that_does_not_fit_is_left_out() -> None:
    def hungry(x: Tensor, w: Tensor) -> Tensor:
        if len(x) > len(X):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return linear(x, w)

    report = check_kernel(hungry, X, W, like=linear, shapes=[[(80, 64), (16, 64)]])
    assert "OutOfMemoryError" in report.left_out["shapes 80x64, 16x64"]


def test_a_cast_on_a_lost_device_is_one_sentence() -> None:
    def broken(_: Tensor) -> Tensor:
        raise RuntimeError("Triton Error [CUDA]: misaligned address")

    with pytest.raises(
        LostDeviceError, match=r"\(misaligned address\), while what was checked ran"
    ):
        check(X, X, format=broken)
