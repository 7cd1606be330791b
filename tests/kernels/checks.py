"""The checks of a device: each compares one kernel with torch on the CPU, bit for bit."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import qgate
from qgate.formats import quantizer
from qgate.formats.engine import on_device
from qgate.formats.engine.job import Job
from qgate.kernels import cases, comparing, merging, proving, recurrences, reductions
from qgate.kernels.casts import ElementCast, MxCast
from qgate.kernels.launching import interpreted, launch
from qgate.kernels.shapes import ROUNDINGS, MemoryLayout, kind_of
from qgate.stats._error_pass import SHIFT
from qgate.stats.error_stats import ErrorStats

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Check = Callable[[torch.device], str]
LONG = MemoryLayout(1, 2**20, 1, 2**20)


def quantized(x: Tensor, device: torch.device, fmt: str, **options: Any) -> str:
    """Quantize x by the kernel for these options alone, without its proof."""
    q = qgate.Quantizer(fmt, **options)
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    moved_job = Job(x.to(device), qgate.Quantizer(fmt, **moved))
    cast = on_device.cast_for(moved_job.x, moved_job.q, moved_job.layout)
    assert cast is not None, f"no kernel for {fmt} with {options}"
    layout = moved_job.layout
    out = torch.empty(
        layout.outer, layout.length, layout.inner, dtype=moved_job.dtype, device=device
    ).fill_(77)
    on_device.run(cast, moved_job, out)
    return proving.first_difference(layout.restore(out), quantizer.by_definition(Job(x, q)), x)


def numbers(dtype: torch.dtype) -> Tensor:
    """Every pattern in the order of size, and some of them in other company."""
    x, every = cases.numbers(dtype), cases.patterns(dtype)
    finite = int(every.isfinite().sum())
    return torch.cat([x[:finite], every[~every.isfinite()], x[finite::16], x[-(2**13) :]])


def rows(dtype: torch.dtype, length: int) -> Tensor:
    x = numbers(dtype)
    return x[: len(x) // length * length].view(-1, length)


def blocks(fmt: str, of: torch.dtype, length: int, **options: Any) -> Check:
    return lambda device: quantized(rows(of, length), device, fmt, **options)


def plain(fmt: str, of: torch.dtype, **options: Any) -> Check:
    return lambda device: quantized(numbers(of), device, fmt, **options)


def finite(fmt: str, of: torch.dtype, length: int, **options: Any) -> Check:
    def check(device: torch.device) -> str:
        x = numbers(of)
        x = x[x.isfinite() & (x.abs() < 2.0**12) & (x.abs() > 2.0**-20)]
        return quantized(x[: len(x) // length * length].view(-1, length), device, fmt, **options)

    return check


def powers_of_two(device: torch.device) -> str:
    """Blocks of IF3 on E2M0 with one number at each of its ties, at scales that divide nothing."""
    block = torch.tensor([4.0, 4, 2, 2, 1, 1, 0, 0, 4, 2, 1, 4, 2, 1, 0, 0])
    x = torch.stack([block.index_fill(0, torch.tensor([15]), tie) for tie in (0.5, 1.5, 3.0)])
    x = torch.cat([x, -x, torch.full((1, 16), 1792.0)])
    assert qgate.encode(x, "if3").scales[:-1].max() < 128, "a block is on the other grid"
    return quantized(x, device, "if3")


def small(fmt: str, of: torch.dtype, **options: Any) -> Check:
    """Numbers near one, of which HiF8 takes no scale."""
    return lambda device: quantized(cases.bell_curve(of).view(-1, 64), device, fmt, **options)


def called(fmt: str, of: torch.dtype, *shapes: tuple[int, ...], **options: Any) -> Check:
    """Quantize as users do, with the proof before it, and again by what was kept."""

    def check(device: torch.device) -> str:
        with (
            as_cuda(device),
            mock.patch.object(on_device, "SMALL", 0),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", proving.KernelWarning)
            q = qgate.Quantizer(fmt, **options)
            moved_quantizer = copy.copy(q)
            if isinstance(q.scale, Tensor) and q.scale.dim():
                moved_quantizer.scale = q.scale.to(device)
            for shape in shapes:
                x = numbers(of)[: math.prod(shape)].view(shape)
                expected = quantizer.by_definition(Job(x, q))
                for _ in range(2):
                    quantized_x = on_device.quantize(
                        x.to(device), moved_quantizer, quantizer.by_definition
                    )
                    if quantized_x is None:
                        return "no kernel was used"
                    if problem := proving.first_difference(quantized_x, expected, x):
                        return problem
        return ""

    return check


def as_cuda(device: torch.device) -> AbstractContextManager[object]:
    """In the interpreter as if the CPU had kernels that no one has proved."""
    if device.type == "cuda":
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(mock.patch.multiple(proving, DEVICES={"cpu"}, _verdicts={}))
    stack.enter_context(mock.patch.object(proving, "serves", return_value=True))
    return stack


def ties(fmt: str, of: torch.dtype, **options: Any) -> Check:
    """Numbers at and beside ties of the element, in rows with scales of all sizes."""

    def check(device: torch.device) -> str:
        draw = torch.Generator().manual_seed(0)
        even = (1 + torch.rand(24, generator=draw)) * 2.0 ** torch.arange(-12, 12)
        tiny = [2.0**-149, 3 * 2.0**-149, 0x7FFFFF * 2.0**-149, 0x2AAAAB * 2.0**-147]
        ends = [2.0**-126, 1.3 * 2.0**-126, 1.7 * 2.0**-112, 1.9 * 2.0**126, 3.4028234e38]
        tenths = [1.0, 1 / 3, 0.75, 1e-30, 7e-9, 1e30, 65504 / 127, 448 / 127]
        # Products with an element that are beside a tie of bf16, on it in float32.
        beside = [257 / 3, 259 / 3, 385 / 7, 387 / 7, 393 / 5, 395 / 5]
        scales = torch.tensor([*tiny, *ends, *tenths, *beside], dtype=torch.float64)
        scale = torch.cat([even, scales])
        scale = scale.to(torch.float32).double()
        element = qgate.Quantizer(fmt).format.element
        values = torch.tensor(element.values(), dtype=torch.float64)
        values = values[values > 0]
        values = torch.cat([values, values[-1:] * 1.25, values[:1] / 2])
        between = torch.cat([values, (values[1:] + values[:-1]) / 2])
        between = between[:: max(len(between) // 150, 1)]
        x = (scale[:, None] * between).to(torch.float32).to(of)
        raw = x.view(torch.int16 if of.itemsize == 2 else torch.int32)
        x = torch.cat([(raw + step).view(of) for step in (-1, 0, 1)], 1)
        x = torch.cat([x, -x], 1).nan_to_num(nan=0.0)
        rows = {"scale": scale.to(torch.float32), "granularity": "channel", "axis": 0}
        return quantized(x, device, fmt, **rows, **options)

    return check


def few_are_slow(fmt: str, of: torch.dtype, most: int = 0) -> Check:
    """Plan a scale for every significand: all but a few let `quick` cast their group."""

    def check(device: torch.device) -> str:
        from qgate.kernels.programs import elements

        first = 2**7 if of == BF16 else 2**10
        amax = torch.arange(first, 2 * first, dtype=torch.float32, device=device)
        job = Job(amax.to(of), qgate.Quantizer(fmt, granularity="tensor"))
        cast = on_device.cast_for(job.x, job.q, job.layout)
        assert isinstance(cast, ElementCast)
        plans = torch.zeros(3 * first, dtype=torch.float32, device=device)
        rounding = ROUNDINGS[cast.grid.rounding]
        launch(
            elements.plan_groups, first // 128, amax.view(torch.int32), plans, first,
            cast.grid.largest, GROUPS=128, SOURCE=elements.OWN.value, INF_SATURATES=False,
            KIND=kind_of(of), OUT=kind_of(of), ROUNDING=rounding, TIES=cast.ties(LONG, of),
        )  # fmt: skip
        scale, inverse, nudge = plans.cpu().view(3, first)
        if not torch.allclose(scale * inverse, torch.ones(first), rtol=3e-7):
            return "inverses are wrong"
        slow = int((nudge == 0).sum())
        return f"{slow} of {first} scales go the exact way" if slow > most else ""

    return check


def slanted(device: torch.device) -> str:
    """A view with strides, not contiguous, of an odd offset."""
    x = rows(BF16, 97).t()[3:, ::2]
    assert not x.is_contiguous()
    return quantized(x, device, "mxfp8_e4m3")


def nvfp4_scales(dtype: torch.dtype, exponents: tuple[int, ...]) -> Check:
    """Tensors of many sizes: each has another scale, down to where results are subnormal."""

    def check(device: torch.device) -> str:
        problems = (
            quantized(cases.bell_curve(dtype, e, 2048).view(-1, 64), device, "nvfp4")
            for e in exponents
        )
        return next(filter(None, problems), "")

    return check


def nvfp4_beside_ties(device: torch.device) -> str:
    """Tensors whose scale, times 3, is beside a tie of bf16 and in float32 on it."""
    problems = []
    for tie in (257, 259, 263, 265):
        start = torch.tensor([2688 * tie / 3 / 1024]).view(torch.int32)
        amax = (start + torch.arange(-8, 9, dtype=torch.int32)).view(torch.float32)
        scale = 1 / (2688 / amax)
        chosen = amax[(scale * 3 == tie / 1024) & (scale.double() * 3 != tie / 1024)]
        assert len(chosen), f"no tensor with a scale beside {tie}"
        for largest in chosen[[0, -1]]:
            e = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 5, 6] * 2) / 6
            x = largest * e * torch.arange(1, 8)[:, None] / 7
            problems.append(quantized(x, device, "nvfp4", dtype=BF16))
    return next(filter(None, problems), "")


def counted(
    dtype: torch.dtype, count: Callable[[Tensor], Tensor] = reductions.count_by_kernel
) -> Check:
    def check(device: torch.device) -> str:
        patterns = 256**dtype.itemsize
        rng = np.random.default_rng(0)
        skewed = np.minimum(rng.geometric(0.001, 150_001) - 1, patterns - 1)
        for values in (
            skewed,
            np.arange(patterns),
            np.zeros(70_001, int),
            np.array([0, patterns // 2, 5])[rng.integers(0, 3, 90_001)],
            np.array([patterns - 1]),
        ):
            expected = np.bincount(values, minlength=patterns)
            narrow = values.astype(np.uint8 if patterns == 256 else np.uint16)
            x = torch.from_numpy(narrow.view(np.int16) if patterns > 256 else narrow)
            with_gaps = torch.stack([x, x.flip(0)], 1).view(dtype).to(device)[:, 0]
            moved = (cases.move(x.view(dtype), device, before) for before in (0, 1, 7))
            for tensor in (*moved, with_gaps):
                got = count(tensor).cpu().numpy()
                if not np.array_equal(got, expected):
                    return f"{int((got != expected).sum())} patterns are counted wrong"
        return ""

    return check


def largest(of: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        every = cases.numbers(of)
        numbers = every[every.isfinite()]
        for x in (numbers, numbers[:70_001], numbers[-3:], every, numbers[:-2:3]):
            expected = x.double().abs().max()
            bits = reductions.largest_by_kernel(x.to(device)).cpu()
            got = bits.to(torch.int16).view(of) if of.itemsize == 2 else bits.view(of)
            if got.double() != expected and not (got.isnan() and expected.isnan()):
                return f"{got.item()} instead of {expected.item()}"
        return ""

    return check


def wide() -> AbstractContextManager[object]:
    """In the interpreter more pairs at once: it takes as long for one as for thousands."""
    if not interpreted():
        return nullcontext()
    return mock.patch.multiple(comparing, TILE=2**15, _WIDTH=2**13)


def errors_by_warps(actual: torch.dtype, reference: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        tensor, other = (torch.empty(0, dtype=of, device=device) for of in (actual, reference))
        return comparing._wrong(comparing.compare_by_warps, tensor, other, SHIFT)

    return check


def merged(actual: torch.dtype, reference: torch.dtype) -> Check:
    return lambda device: merging._wrong(device, actual, reference)


def errors(actual: torch.dtype, reference: torch.dtype) -> Check:
    def check(device: torch.device) -> str:
        with wide():
            tensor, other = (torch.empty(0, dtype=of, device=device) for of in (actual, reference))
            return comparing._wrong(comparing.compare_by_kernel, tensor, other, SHIFT)

    return check


def errors_apart(there: ErrorStats, here: ErrorStats) -> str:
    """Describe how two results differ; sums may be 4e-15 of the sum of magnitudes apart."""
    for name in (
        "elements", "actual_non_finite", "reference_non_finite", "mismatched", "sign_flips",
        "worst", "first_non_finite",
    ):  # fmt: skip
        actual, expected = getattr(there, name), getattr(here, name)
        if repr(actual) != repr(expected):
            return f"{name}: {actual} instead of {expected}"
    for name in ("keys", "counts"):
        if not np.array_equal(getattr(there.differences, name), getattr(here.differences, name)):
            return f"{name} of differences are others"
    actual, expected = there.sums, here.sums
    for name in ("count", "max_abs_error", "max_abs_reference"):
        if getattr(actual, name) != getattr(expected, name):
            return f"{name}: {getattr(actual, name)} instead of {getattr(expected, name)}"
    a, r = math.sqrt(expected.sum_square_actual), math.sqrt(expected.sum_square_reference)
    n = math.sqrt(max(expected.count, 1))
    for name, size in {
        "mean_actual": a / n, "mean_reference": r / n, "m2_actual": a * a, "m2_reference": r * r,
        "co": a * r, "sum_square_actual": a * a, "sum_square_reference": r * r, "dot": a * r,
        "sum_square_error": expected.sum_square_error, "sum_abs_error": expected.sum_abs_error,
        "sum_error": expected.sum_abs_error, "sum_abs_reference": expected.sum_abs_reference,
    }.items():  # fmt: skip
        if not abs(getattr(actual, name) - getattr(expected, name)) <= 4e-15 * size:
            return f"{name}: {getattr(actual, name)} instead of {getattr(expected, name)}"
    return ""


def errors_of_real_tiles(device: torch.device) -> str:
    """As they are on a device, few enough for the interpreter: one is full, one has one pair."""
    n = comparing.TILE + 1
    a, r = (numbers(BF16)[i : i + 7 * n : 7] for i in (0, 9))
    partials = comparing.compare_by_kernel(a.to(device), r.to(device), SHIFT)
    return comparing.first_difference(partials, comparing.compare_by_torch(a, r, SHIFT))


def recurring(backward: bool) -> Check:
    return lambda device: recurrences._wrong(device, backward)


MX = ("mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")

CHECKS: dict[str, Check] = {
    "mx": blocks("mxfp8_e4m3", BF16, 64),
    "mx fp16": blocks("mxfp8_e4m3", FP16, 64),
    "mx fp32": blocks("mxfp8_e4m3", FP32, 64),
    **{f"mx {fmt}": blocks(fmt, BF16, 64, scale_rule="even") for fmt in MX},
    **{f"mx {fmt} fp32": blocks(fmt, FP32, 64, scale_rule="rceil") for fmt in MX[-2:]},
    "mx to zero, ceil": blocks("mxfp8_e5m2", FP32, 64, scale_rule="ceil", rounding="zero"),
    "mx away, rceil": blocks("mxint8", FP16, 64, scale_rule="rceil", rounding="away"),
    "mx Inf saturates": blocks("mxfp4", BF16, 64, inf="saturate", rounding="away"),
    "mx narrow scale": blocks("mxfp6_e3m2", FP32, 64, scale_bits=5),
    "mx narrow scale, Inf": blocks(
        "mxfp4", BF16, 64, scale_bits=3, inf="saturate", scale_rule="ceil"
    ),
    "mx to float32": blocks("mxfp8_e4m3", BF16, 64, dtype=FP32, scale_rule="ceil"),
    "mx to float16": blocks("mxfp8_e5m2", FP32, 64, dtype=FP16),
    "mx short last block": blocks("mxfp8_e4m3", BF16, 97),
    "mx odd block": blocks("mxfp8_e4m3", BF16, 60, block=20),
    "mx one block": blocks("mxfp8_e4m3", BF16, 7),
    "mx other axis": blocks("mxfp4", BF16, 600, axis=0),
    "mx other axis, odd": blocks("mxint8", FP32, 333, axis=0, block=24),
    "mx other axis, long": blocks("mxfp8_e4m3", BF16, 600, axis=0, block=80),
    "mx other axis, one number": blocks("mxfp6_e3m2", FP16, 9000, axis=0, block=1),
    "mx other axis, one block": blocks("mxfp4", FP16, 4099, axis=0),
    "mx strides": slanted,
    "nvfp4": blocks("nvfp4", BF16, 64),
    "nvfp4 fp16": blocks("nvfp4", FP16, 40, inf="saturate"),
    "nvfp4 fp32": blocks("nvfp4", FP32, 64, rounding="away"),
    "nvfp4 usual": finite("nvfp4", FP32, 48, dtype=BF16),
    "nvfp4 usual fp16": finite("nvfp4", FP16, 48),
    "nvfp4 scales": nvfp4_scales(FP32, (-146, -120, -92, -90, -60, 60, 110)),
    "nvfp4 scales bf16": nvfp4_scales(BF16, (-128, -110, -90, -5, 3, 110)),
    "nvfp4 scales fp16": nvfp4_scales(FP16, (-20, -8, 0)),
    "nvfp4 beside ties": nvfp4_beside_ties,
    "nvfp4_ue5m3": blocks("nvfp4_ue5m3", BF16, 64),
    "nvfp4_ue5m3 fp32": blocks("nvfp4_ue5m3", FP32, 40, inf="saturate"),
    "nvfp4_ue5m3 other axis": finite("nvfp4_ue5m3", BF16, 500, axis=0),
    "choosing if4": blocks("if4", BF16, 64),
    "choosing if4 fp32": finite("if4", FP32, 40),
    "choosing if3": blocks("if3", BF16, 64),
    "choosing if3 fp32": finite("if3", FP32, 40, axis=0),
    "choosing if3 ties": powers_of_two,
    "choosing if6": finite("if6_e2m3", FP16, 64, inf="saturate"),
    "choosing if6_e3m2": finite("if6_e3m2", BF16, 48, axis=0),
    "choosing mixfp4": blocks("mixfp4", FP16, 64),
    "choosing 4over6": finite("nvfp4_4over6", BF16, 64),
    "choosing 4over6 256": blocks("nvfp4_4over6_mse_256", FP32, 40, axis=0),
    "nvfp4 other axis": finite("nvfp4", BF16, 500, axis=0),
    "nvfp4 other axis, long": finite("nvfp4", FP16, 500, axis=0, block=70),
    "nvfp4 other axis, usual": finite("nvfp4", FP16, 1500, axis=0, inf="saturate"),
    "nvfp4 other axis, bad": blocks("nvfp4", FP32, 900, axis=0, dtype=BF16),
    "hif4": blocks("hif4", BF16, 128),
    "hif4 fp32": blocks("hif4", FP32, 100),
    "hif4 usual fp16": finite("hif4", FP16, 64, rounding="even"),
    "hif4 Inf saturates": blocks("hif4", FP32, 64, inf="saturate", rounding="zero"),
    "hif4 other axis": finite("hif4", BF16, 97, axis=0),
    "hif4 other axis fp32": blocks("hif4", FP32, 901, axis=0),
    **{f"{fmt}": plain(fmt, BF16) for fmt in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3")},
    **{f"{fmt} fp32": plain(fmt, FP32) for fmt in ("fp8_e4m3", "fp4_e2m1", "hif8", "fp16", "bf16")},
    "hif8": plain("hif8", BF16),
    "hif8 even": plain("hif8", FP32, rounding="even", saturate=False),
    "hif8 to zero": plain("hif8", FP32, rounding="zero", saturate=False),
    "e5m2 to Inf": plain("fp8_e5m2", FP32, saturate=False, rounding="zero"),
    "e4m3 to NaN": plain("fp8_e4m3", FP16, saturate=False, rounding="away"),
    "bf16 to Inf": plain("bf16", FP32, saturate=False, rounding="away"),
    "bf16 as fp16": plain("bf16", FP32, dtype=FP16),
    "int8": finite("int8", BF16, 64),
    "int8 fp32": finite("int8", FP32, 64),
    "int8 by a third": plain("int8", FP32, scale=1 / 3, narrow=False),
    "int8 by little": plain("int8", FP32, scale=2.0**-130, dtype=FP16),
    "int8 channels first": finite("int8", BF16, 9000, granularity="channel", axis=0),
    "int8 channels last": finite("int8", FP16, 120, granularity="channel", axis=1),
    "int8 blocks": blocks("int8", BF16, 300, granularity="block"),
    "int4 blocks fp32": finite("int4", FP32, 300, granularity="block", axis=0, block=16),
    "hif8 scaled": finite("hif8", FP32, 64, granularity="tensor"),
    "hif8 scaled by 1": small("hif8", BF16, granularity="tensor"),
    "hif8 rows": finite("hif8", FP32, 1200, granularity="channel", axis=0),
    "hif8 columns": finite("hif8", BF16, 120, granularity="channel", axis=1),
    "hif8 blocks": blocks("hif8", BF16, 300, granularity="block"),
    "e5m2 scaled, to Inf": plain("fp8_e5m2", FP16, scale=1e-3, saturate=False),
    **{
        f"ties of {fmt}, {rounding}, {str(of)[6:]}": ties(fmt, of, rounding=rounding)
        for fmt in ("int8", "fp8_e4m3", "hif8")
        for of, rounding in ((BF16, "even"), (FP16, "away"), (FP32, "zero"))
    },
    "fp8 rows": finite("fp8_e4m3", BF16, 1200, granularity="channel", axis=0),
    "int8 rows fp16": finite("int8", FP16, 1024, granularity="channel", axis=0),
    "fp8 columns": finite("fp8_e4m3", BF16, 120, granularity="channel", axis=1),
    **{f"few are slow, {fmt}": few_are_slow(fmt, BF16) for fmt in ("int8", "fp8_e4m3", "int4")},
    "few are slow, int8 fp16": few_are_slow("int8", FP16, 300),
    "ties of int8, whole": ties("int8", BF16, rounding="away", narrow=False),
    "ties of int4 to float16": ties("int4", FP32, dtype=FP16),
    "ties of e5m2 to bf16": ties("fp8_e5m2", FP32, dtype=BF16),
    "ties of e5m2 to Inf": ties("fp8_e5m2", FP32, saturate=False, dtype=BF16),
    "ties of e5m2 to Inf, zero": ties("fp8_e5m2", BF16, saturate=False, rounding="zero"),
    "ties of e4m3 to NaN": ties("fp8_e4m3", FP32, saturate=False, rounding="away"),
    "ties of fp16": ties("fp16", FP32),
    "ties of bf16": ties("bf16", FP32),
    "called mx": called("mxfp8_e4m3", BF16, (64, 64), (5, 70)),
    "called nvfp4": called("nvfp4", FP16, (64, 64)),
    "called int8": called("int8", BF16, (40, 64), (9, 2000)),
    "called by row": called("fp8_e4m3", BF16, (40, 64), granularity="channel", axis=0),
    "called by column": called("int8", FP32, (40, 24), granularity="channel", axis=1),
    "called by middle": called("int8", BF16, (4, 40, 24), granularity="channel", axis=1),
    "called with a number": called("int8", BF16, (40, 64), scale=0.3),
    "called with a scalar": called("fp8_e4m3", FP16, (40, 64), scale=torch.tensor(0.3)),
    "called with scales of rows": called(
        "int8", BF16, (24, 40), scale=torch.arange(1, 25) / 7, granularity="channel", axis=0
    ),
    "called with scales of columns": called(
        "hif8", FP32, (40, 24), scale=torch.arange(1, 25) / 7, granularity="channel", axis=1
    ),
    "called with scales in float64": called(
        "fp8_e4m3",
        FP32,
        (40, 24),
        scale=torch.arange(1, 25).double() / 7,
        granularity="channel",
        axis=1,
    ),
    "called with scales of blocks": called(
        "fp8_e4m3",
        BF16,
        (4, 64),
        scale=torch.arange(1, 9).view(4, 2) / 7,
        granularity="block",
        block=32,
    ),
    "called hif8 by row": called("hif8", BF16, (9, 64), granularity="channel", axis=0),
    **{f"largest {str(of)[6:]}": largest(of) for of in (BF16, FP16, FP32)},
    "count bf16": counted(BF16),
    "count fp16": counted(FP16),
    "count fp8": counted(torch.float8_e4m3fn),
    "recurrence": recurring(backward=False),
    "recurrence, backward": recurring(backward=True),
    "errors bf16": errors(BF16, BF16),
    "errors fp16, fp32": errors(FP16, FP32),
    "errors fp32": errors(FP32, FP32),
    "errors, real tiles": errors_of_real_tiles,
}

IN_C: dict[str, Check] = {
    "count bf16 in C": counted(BF16, reductions.count_in_shared_memory),
    "count fp8 in C": counted(torch.float8_e4m3fn, reductions.count_in_shared_memory),
    "errors bf16 in C": errors_by_warps(BF16, BF16),
    "errors fp16, fp32 in C": errors_by_warps(FP16, FP32),
    "errors fp32, bf16 in C": errors_by_warps(FP32, BF16),
    "merged bf16 in C": merged(BF16, BF16),
    "merged fp16, fp32 in C": merged(FP16, FP32),
}
"""The checks of the kernels in CUDA C, which triton's interpreter does not run."""


def run(names: Iterable[str], device: torch.device) -> Iterator[tuple[str, str]]:
    """Each check's name, and what was wrong or nothing."""
    for name in names:
        try:
            yield name, CHECKS[name](device)
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"


def a_wrong_kernel(device: torch.device) -> str:
    """Check an MX kernel whose scales follow another rule."""
    q, x = qgate.Quantizer("mxfp8_e4m3"), rows(BF16, 64)
    job = Job(x.to(device), q)
    cast = on_device.cast_for(job.x, q, job.layout)
    assert isinstance(cast, MxCast)
    out = torch.empty(job.layout.outer, job.layout.length, 1, dtype=x.dtype, device=device)
    on_device.run(replace(cast, carry=2**23 - 1), job, out)
    return proving.first_difference(job.layout.restore(out), quantizer.by_definition(Job(x, q)), x)


def wrong_errors(device: torch.device) -> str:
    """Prove sums for which the numbers from 2**127 on are not finite."""
    import triton.language as tl

    from qgate.kernels.programs import comparing as programs

    with mock.patch.object(programs, "INFINITY", tl.constexpr(0x7F000000)):
        return errors(BF16, BF16)(device)
