"""What a device has to give bit for bit as the CPU does: one case for each way to use it.

`CASES` has a function for each: it takes a device and returns what is wrong, or nothing. The data
are hard: all sizes of a dtype, ties, subnormal numbers, zeros, NaN and Inf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import qgate
from qgate import formats, stats
from qgate.errors import QgateError
from qgate.kernels import cases
from qgate.kernels.proving import first_difference
from tests.kernels.checks import errors_apart

Case = Callable[[torch.device], str]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROUNDINGS: tuple[Mapping[str, Any], ...] = tuple({"rounding": r} for r in ("away", "zero"))
PER_TENSOR = {"granularity": "tensor"}
# Options of elements; those that a format does not take are left out of the table by its errors.
OF_ELEMENTS: tuple[Mapping[str, Any], ...] = (
    {}, *ROUNDINGS, {"saturate": False}, {"saturate": False, "rounding": "zero"}, PER_TENSOR,
    {"granularity": "tensor", "inf": "saturate"}, {"granularity": "channel", "axis": 0},
    {"granularity": "channel", "axis": 1, "rounding": "away"}, {"granularity": "block", "axis": 0},
    {"granularity": "block", "axis": -1, "block": 24}, {"granularity": "block", "block": (8, 24)},
    {"scale": 0.3}, {"scale": "per channel", "granularity": "channel", "axis": 0},
    {"scale": "per channel", "granularity": "channel", "axis": -1, "saturate": False},
    {"scale": 0.1, "zero_point": 3}, {"zero_point": "minmax", "granularity": "channel", "axis": 0},
    {"zero_point": "minmax", "granularity": "block", "block": 16}, {"narrow": False, **PER_TENSOR},
    {"rotation": [1, -1] * 8, **PER_TENSOR}, {"dtype": torch.float32, **PER_TENSOR},
)  # fmt: skip
OF_BLOCKS: tuple[Mapping[str, Any], ...] = (
    {}, *ROUNDINGS, {"axis": 0}, {"axis": -1, "inf": "saturate"}, {"block": 24},
    {"block": (8, 24)}, {"scale_rule": "ceil"}, {"scale_rule": "even"}, {"scale_rule": "rceil"},
    {"scale_bits": 4, "scale_rule": "ceil"}, {"rotation": [1, -1] * 8}, {"dtype": torch.float32},
)  # fmt: skip


def numbers(dtype: torch.dtype) -> Tensor:
    """Draw rows of unlike sizes: a bell curve, hard patterns, ties, zeros, NaN and Inf."""
    return _numbers(dtype).clone()


@functools.cache
def _numbers(dtype: torch.dtype, rows: int = 24, columns: int = 72) -> Tensor:
    count = rows * columns
    x = cases.bell_curve(torch.float32, 0, count).to(dtype).view(rows, columns)
    narrow = dtype if dtype.itemsize == 2 else torch.float16
    hard = cases.patterns(narrow)
    hard = hard[hard.isfinite()]
    hard = hard[torch.linspace(0, len(hard) - 1, 4 * columns).long()]
    x[-4:] = hard.view(4, columns).to(dtype)
    x[0], x[1, ::3] = 0.0, -0.0
    x[2] = torch.arange(columns).to(dtype) * 0.25 - 4
    x[3, 5], x[4, 7], x[5, 9] = float("nan"), float("inf"), -float("inf")
    x[6] *= 2.0**-12
    return x


def _layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "rows", x
    yield "odd", x[:-5, :-3].contiguous()
    yield "strided", x.t()[3:, ::2]
    yield "three axes", x.view(4, 6, -1)


def _filled(options: Mapping[str, Any], x: Tensor) -> dict[str, Any]:
    """Return the options with a tensor of scales where they ask for one."""
    if options.get("scale") != "per channel":
        return dict(options)
    count = x.shape[options["axis"]]
    return {**options, "scale": torch.linspace(0.01, 3.0, count)}


def _on(device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) and value.dim() else value
        for name, value in options.items()
    }


def _quantized(name: str, dtype: torch.dtype, options: Mapping[str, Any]) -> Case:
    def case(device: torch.device) -> str:
        for layout, x in _layouts(numbers(dtype)):
            filled_options = _filled(options, x)
            expected = qgate.quantize(x, name, **filled_options)
            device_tensor = x.to(device)
            if not x.is_contiguous():
                device_tensor = numbers(dtype).to(device).t()[3:, ::2]
            actual = qgate.quantize(device_tensor, name, **_on(device, filled_options))
            if actual.device != device_tensor.device:
                return f"{layout}: the result is on {actual.device}"
            if problem := first_difference(actual, expected, x):
                return f"{layout}: {problem}"
        return ""

    return case


def _encoded(name: str, dtype: torch.dtype) -> Case:
    def case(device: torch.device) -> str:
        x = numbers(dtype).nan_to_num(0.0, 3.0, -3.0)
        cpu_encoded, device_encoded = (
            qgate.encode(side, name, nan="zero") for side in (x, x.to(device))
        )
        for part in vars(cpu_encoded):
            mine, other = getattr(device_encoded, part), getattr(cpu_encoded, part)
            if isinstance(other, Tensor) and (problem := first_difference(mine, other)):
                return f"{part}: {problem}"
        return first_difference(device_encoded.decode(), cpu_encoded.decode(), x)

    return case


def _reported(name: str, dtype: torch.dtype) -> Case:
    def case(device: torch.device) -> str:
        x = numbers(dtype)
        cpu_report, device_report = (formats.report(side, name) for side in (x, x.to(device)))
        return (
            ""
            if repr(cpu_report) == repr(device_report)
            else f"{device_report} instead of {cpu_report}"
        )

    return case


def _gradients(name: str, dtype: torch.dtype) -> Case:
    def case(device: torch.device) -> str:
        gradients = []
        for target in (torch.device("cpu"), device):
            x = numbers(dtype).to(target).requires_grad_()
            weights = torch.arange(x.numel(), device=target).view(x.shape).to(dtype)
            qgate.quantize(x, name).mul(weights).nansum().backward()
            assert x.grad is not None
            gradients.append(x.grad.cpu())
        return first_difference(gradients[1], gradients[0])

    return case


def _counted(dtype: torch.dtype) -> Case:
    def case(device: torch.device) -> str:
        for layout, x in _layouts(numbers(dtype)):
            cpu_counts, device_counts = (stats.counts(side) for side in (x, x.to(device)))
            if (cpu_counts.dtype, cpu_counts.n, cpu_counts.finite) != (
                device_counts.dtype,
                device_counts.n,
                device_counts.finite,
            ):
                return f"{layout}: {device_counts.finite} of {device_counts.n} elements are finite, not {cpu_counts.finite}"
            if cpu_counts.moments.figures() != device_counts.moments.figures():
                return f"{layout}: {device_counts.moments.figures()} instead of {cpu_counts.moments.figures()}"
            for part in range(2):
                if not np.array_equal(cpu_counts.weighted()[part], device_counts.weighted()[part]):
                    return f"{layout}: values or counts are others"
        return ""

    return case


def _compared(actual: torch.dtype, reference: torch.dtype) -> Case:
    def case(device: torch.device) -> str:
        r, a = numbers(reference), numbers(actual)
        a[8:] = qgate.quantize(a, "int8")[8:]
        cpu_errors = stats.errors(a, r)
        return errors_apart(stats.errors(a.to(device), r.to(device)), cpu_errors)

    return case


def _swept(name: str, dtype: torch.dtype) -> Case:
    def case(device: torch.device) -> str:
        x = numbers(dtype)[8:]
        cpu_sweep, device_sweep = (qgate.sweep(side, name).to_dict() for side in (x, x.to(device)))
        return "" if repr(cpu_sweep) == repr(device_sweep) else "other levels or advice"

    return case


def _takes(name: str, options: Mapping[str, Any]) -> bool:
    """Tell if a format takes options; what it refuses is no case."""
    x = torch.ones(24, 72)
    try:
        qgate.Quantizer(name, **_filled(options, x))(x)
    except QgateError:
        return False
    return True


def _short(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={len(value)} signs" if name == "rotation" else f"{name}={value}"
        for name, value in options.items()
    )


def _label(*parts: object) -> str:
    return " ".join(str(part).removeprefix("torch.") for part in parts if part != "")


def _cases() -> Iterator[tuple[str, Case]]:
    for name in formats.names():
        fmt = formats.get(name)
        for options in OF_ELEMENTS if fmt.kind == "element" else OF_BLOCKS:
            if _takes(name, options):
                for dtype in DTYPES:
                    case = _quantized(name, dtype, options)
                    yield _label("quantize", name, dtype, _short(options)), case
        for dtype in (torch.bfloat16, torch.float32):
            yield _label("encode", name, dtype), _encoded(name, dtype)
            yield _label("report", name, dtype), _reported(name, dtype)
            yield _label("gradients", name, dtype), _gradients(name, dtype)
    for dtype in (*DTYPES, torch.float8_e4m3fn):
        if dtype.itemsize > 1:
            yield _label("counts", dtype), _counted(dtype)
            for name in ("fp8_e4m3", "int8", "mxfp4", "hif8"):
                yield _label("sweep", name, dtype), _swept(name, dtype)
    for pair in ((0, 0), (1, 2), (2, 2), (0, 3), (3, 3)):
        actual, reference = (DTYPES[i] for i in pair)
        yield _label("errors", actual, reference), _compared(actual, reference)


CASES: dict[str, Case] = dict(_cases())
