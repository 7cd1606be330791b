"""What users call, on a device and on the CPU: the same bits, counts and sums, by kernels."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest import mock

import torch

import qgate
from qgate.kernels import cases, comparing, proving
from qgate.stats.error_stats import errors
from qgate.stats.value_counts import counts
from tests.kernels.checks import Check, errors_apart

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WAYS: dict[str, dict[str, Any]] = {
    "mxfp8": {}, "mxfp4": {"axis": 0}, "nvfp4": {}, "hif4": {}, "hif8": {},
    "fp8_e4m3": {"saturate": False}, "int8": {}, "int4": {"granularity": "channel", "axis": 1},
    "fp8_e5m2": {"granularity": "block"}, "fp4_e2m1": {"granularity": "channel", "axis": 0},
    "fp6_e2m3": {"scale": 0.3},
}  # fmt: skip
_TWICE = "sums of the same tensors are others the second time"


def _strict(check: Check) -> Check:
    """A kernel that was not used, and says so, is wrong."""

    def run(device: torch.device) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("error", proving.KernelWarning)
            return check(device)

    return run


def quantized(fmt: str, dtype: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        x = cases.numbers(torch.float32 if dtype == torch.float64 else dtype).to(dtype)
        x = x[: len(x) // 97 * 97].view(-1, 97)
        quantized_tensor = qgate.quantize(x.to(device), fmt, **WAYS[fmt])
        if quantized_tensor.device.type != device.type:
            return f"the result is on {quantized_tensor.device}"
        return proving.first_difference(quantized_tensor, qgate.quantize(x, fmt, **WAYS[fmt]), x)

    return check


def check_counts(dtype: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        x = cases.bell_curve(dtype, count=200_001)
        pairs = torch.stack([x, x.flip(0)], 1)
        if counts(x.to(device)) != counts(x):
            return "counts are others than the CPU's"
        if counts(pairs.to(device)[:, 0]) != counts(x):
            return "counts of a view with gaps are others than the CPU's"
        return ""

    return check


def check_sweep(dtype: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        x = cases.bell_curve(dtype, count=200_001)
        device_exponent, cpu_exponent = (
            qgate.sweep(t, "fp8_e4m3").exponent for t in (x.to(device), x)
        )
        return (
            ""
            if device_exponent == cpu_exponent
            else f"the exponent is {device_exponent} instead of {cpu_exponent}"
        )

    return check


def check_errors(dtype: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        x = cases.bell_curve(dtype, count=200_001)
        y = qgate.quantize(x, "fp8_e4m3")
        device_errors, cpu_errors = errors(y.to(device), x.to(device)), errors(y, x)
        a, b = (side.metric("relative_mse") for side in (device_errors, cpu_errors))
        if not math.isclose(a, b, rel_tol=1e-14):
            return f"relative_mse: {a} instead of {b}"
        repeated_sums = errors(y.to(device), x.to(device)).sums
        return errors_apart(device_errors, cpu_errors) or (
            "" if repeated_sums == device_errors.sums else _TWICE
        )

    return check


def check_hard_errors(actual: torch.dtype, reference: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        pairs = list(comparing.trials(actual, reference))
        pairs += [(a[1::3], r[1::3]) for a, r in pairs[:2]]
        for a, r in pairs:
            x, y = a.to(device), r.to(device)
            device_errors = errors(x, y, worst=30)
            if difference := errors_apart(device_errors, errors(a, r, worst=30)):
                return difference
            if errors(torch.stack([x, x], 1)[:, 0], y, worst=30).sums != device_errors.sums:
                return "sums of a view with gaps are others"
            with mock.patch.object(proving, "serves", return_value=False):
                if errors(x, y, worst=30).sums != device_errors.sums:
                    return "sums without the kernel are others"
        return ""

    return check


def check_gaps(dtype: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        x = cases.bell_curve(dtype, count=20_000).view(-1, 2)
        quantized_column = qgate.quantize(x.to(device)[:, 0], "int8")
        return proving.first_difference(quantized_column, qgate.quantize(x[:, 0], "int8"))

    return check


def check_device_scales(fmt: str, axis: int) -> Check:
    """Scales of channels on the device, which change between calls."""

    def check(device: torch.device) -> str:
        x = cases.bell_curve(torch.bfloat16, count=2**17).view(512, 256)
        scale = torch.rand(x.shape[axis], generator=torch.Generator().manual_seed(0)) + 0.1
        options: dict[str, Any] = {"granularity": "channel", "axis": axis}
        q = qgate.Quantizer(fmt, scale=scale.to(device, copy=True), **options)
        assert isinstance(q.scale, torch.Tensor)
        for _ in range(3):
            expected = qgate.quantize(x, fmt, scale=scale, **options)
            if problem := proving.first_difference(q(x.to(device)), expected, x):
                return problem
            scale *= 0.7
            q.scale.mul_(0.7)
        return ""

    return check


def check_graph_capture(fmt: str) -> Check:
    """A call that waits for nothing and can be check_graph_capture in a CUDA graph."""

    def check(device: torch.device) -> str:
        q = qgate.Quantizer(fmt, **WAYS[fmt])
        x = cases.bell_curve(torch.bfloat16, count=2**18).view(512, 512)
        device_tensor = x.to(device, copy=True)
        q(device_tensor)
        torch.cuda.set_sync_debug_mode("error")
        try:
            q(device_tensor)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = q(device_tensor)
        device_tensor.copy_(x.flip(0))
        graph.replay()
        return proving.first_difference(y, q(x.flip(0)), x)

    return check


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CASES: dict[str, Check] = {
    name: _strict(check)
    for name, check in {
        **{
            f"public: {fmt} {_name(of)}": quantized(fmt, of)
            for fmt in WAYS
            for of in (*DTYPES, torch.float64)
        },
        **{f"public: counts {_name(of)}": check_counts(of) for of in DTYPES[:2]},
        **{f"public: sweep {_name(of)}": check_sweep(of) for of in DTYPES},
        **{f"public: errors {_name(of)}": check_errors(of) for of in DTYPES},
        **{
            f"public: errors of hard pairs {_name(a)}, {_name(r)}": check_hard_errors(a, r)
            for a in DTYPES
            for r in DTYPES
        },
        **{f"public: int8 of a view with gaps {_name(of)}": check_gaps(of) for of in DTYPES[:2]},
        **{
            f"public: {fmt} with scales on the device, axis {axis}": check_device_scales(fmt, axis)
            for fmt in ("fp8_e4m3", "int8", "hif8")
            for axis in (0, 1)
        },
    }.items()
}
ON_CUDA: dict[str, Check] = {
    f"public: {fmt} waits for nothing": _strict(check_graph_capture(fmt))
    for fmt in WAYS
    if fmt != "hif8"
}
