"""What a device returned is right, its arithmetic is named, and the same with a fault is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate.arithmetics.known import ATTENTIONS, PRODUCTS
from qgate.testing import CheckFailure, CheckReport, check, check_kernel
from tests.arithmetics.recordings import calls_of
from tests.kernel_checks.recorded_kernels import NAMES, RecordedKernel, recorded_kernel
from tests.shares import share

EXACT = ""
RECORDED = [(name.split("/")[0], name) for name in NAMES]


def held(kernel: RecordedKernel, **options: Any) -> CheckReport:
    return check_kernel(lambda *_: kernel.result, *kernel.arguments, **kernel.options, **options)


def words_of(name: str) -> str:
    """Return how the report of a recorded call names its arithmetic: a regular expression."""
    kind, *details = name.split("/")
    if kind.startswith("scaled_mm"):
        # Of one tile of 128 both ways are the same chain.
        is_short = details[0] in ("K32", "K64", "K96", "K128") or kind == "scaled_mm_bits"
        if is_short and "uniform_sign" in details:  # products of ones and numbers of 4 bits
            return EXACT
        if is_short or "slow" in details:
            return "Hopper FP8, every 128 products added in float32"
        return "Hopper FP8, fast accumulation" + ", K split 3 ways" * (details[0] == "K8192")
    if kind in ("mm", "mm_full"):
        return "Hopper TF32" if details[0] == "tf32" else EXACT
    if kind == "sdpa":
        return EXACT if details[-1] == "math" else "fused attention .* divided last"
    if kind == "sdpa_backward":
        return "_softmax .* bfloat16" if details[-1] == "dv" else "FlashAttention on Hopper"
    if details[-1] == "linear_gelu":
        return "the results of mm rounded to bfloat16"
    if kind == "eager":
        return {
            "swiglu": "the results of silu rounded to bfloat16",
            "rms_fp8": "the result of each operator rounded to bfloat16",
        }.get(details[-1], EXACT)
    return EXACT


@share(one_in=24, by=("kind",))
@pytest.mark.parametrize(("kind", "name"), RECORDED)
def test_a_recorded_result_is_right(kind: str, name: str) -> None:
    assert name.startswith(kind)
    report = held(recorded_kernel(name))
    arithmetic = report.conventions.get("arithmetic", EXACT)
    assert re.search(words_of(name), arithmetic) if words_of(name) else arithmetic == EXACT
    assert report.held == ["the example"]
    assert len(report.notes) == bool(arithmetic)


@share(2)
@pytest.mark.parametrize(("dtype", "beyond"), [("e4m3", "NaN"), ("e5m2", "Inf")])
def test_recorded_casts_do_not_saturate(dtype: str, beyond: str) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    cast = calls_of("casts")[f"cast/bf16_{dtype}"]["y"]
    report = check(cast, every, format=f"fp8_{dtype}", scale=1.0)
    assert report.conventions["values"] == f"the scale given, overflow to {beyond}, bit for bit"
    for options in ({"saturate": True}, {"convention": "the scale given, overflow to 0"}):
        with pytest.raises((CheckFailure, ValueError)):
            check(cast, every, format=f"fp8_{dtype}", scale=1.0, **options)
    saturated = cast.float().nan_to_num(448.0, 57344.0, -57344.0)
    wrong = torch.where((every.abs() > 1) & (every.abs() < 2), -saturated, cast.float())
    with pytest.raises(CheckFailure):
        check(wrong, every, format=f"fp8_{dtype}", scale=1.0)


# The other side: what a defect makes of the recorded results -------------------------------------


def wrong_row_scale(kernel: RecordedKernel) -> Tensor:
    result = kernel.result.clone()
    result[3] = (result[3].double() * 1.01).to(result.dtype)
    return result


def factor(kernel: RecordedKernel) -> Tensor:
    """Multiply by 1.002 before the last rounding, which hides it in bf16 otherwise."""
    result = kernel.result.double()
    if kernel.result.dtype is torch.bfloat16:
        exact = kernel.like(*(argument.double() for argument in kernel.arguments))
        result = torch.where((exact - result).abs() < 2.0**-8 * exact.abs(), exact, result)
    return (result * 1.002).to(kernel.result.dtype)


def without_32_terms(kernel: RecordedKernel) -> Tensor:
    a, b, *scales = kernel.arguments
    lost = kernel.like(a[..., 64:96].double(), b[..., 64:96].double(), *scales)
    return (kernel.result.double() - lost).to(kernel.result.dtype)


def narrower(kernel: RecordedKernel) -> Tensor:
    return kernel.result.bfloat16().to(kernel.result.dtype)


def _attention(kernel: RecordedKernel, scale: float, masked: int | None = None) -> Tensor:
    q, k, v = kernel.arguments
    sees = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    if masked is not None:
        sees[:, masked] = False
    flash = ATTENTIONS["hopper-flash"]
    return flash.values(q, k, v, scale, sees, q.dtype).to(q.dtype)


def softmax_scale(kernel: RecordedKernel) -> Tensor:
    return _attention(kernel, 0.125 * 1.002)


def masked_key(kernel: RecordedKernel) -> Tensor:
    return _attention(kernel, 0.125, masked=41)


FLASH = tuple(f"sdpa/{dtype}/full/flash_attention" for dtype in ("bf16", "fp16"))
LONG = ("scaled_mm/K1024/fast/f32", "scaled_mm/K2048/slow/bf16", "scaled_mm_unit/K1024/gauss/fast")
FAULTS: dict[Callable[[RecordedKernel], Tensor], tuple[str, ...]] = {
    wrong_row_scale: (
        "scaled_mm_rowwise/K256/slow", "scaled_mm_rowwise/K4096/fast", "mm/bf16/K512",
        "mm/tf32/K512", "eager/rms_norm", "eager/swiglu",
    ),
    factor: (
        *LONG, "mm/fp16/K4096", "mm/tf32/K4096", "mm/fp32/K64", *FLASH, "compiled/swiglu",
        "eager/swiglu", "eager/linear_gelu", "conv2d/bf16",
    ),
    without_32_terms: (*LONG, "scaled_mm_e5m2/K512/fast", "mm/bf16/K4096", "mm/tf32/K512"),
    softmax_scale: FLASH,
    masked_key: FLASH,
    narrower: ("scaled_mm/K1024/slow/f32", "mm/tf32/K512", "mm/fp16/K512", "mm/fp32/K512"),
}  # fmt: skip
WRONG = [(fault, name) for fault, names in FAULTS.items() for name in names]


@share(24)
@pytest.mark.parametrize(("fault", "name"), WRONG)
def test_a_recorded_result_with_a_fault_is_wrong(
    fault: Callable[[RecordedKernel], Tensor], name: str
) -> None:
    kernel = recorded_kernel(name)
    with pytest.raises(CheckFailure, match="is wrong: "):
        held(replace(kernel, result=fault(kernel)))


def test_emulated_attention_without_a_fault_is_right() -> None:
    kernel = recorded_kernel(FLASH[0])
    held(replace(kernel, result=_attention(kernel, 0.125)))


# What a user asks for ----------------------------------------------------------------------------


@share(4)
@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        ("scaled_mm/K1024/fast/f32", "hopper-fp8-fast"),
        ("scaled_mm/K1024/slow/bf16", "hopper-fp8-slow"),
        ("mm/fp16/K4096", "hopper-16bit"),
        ("mm/tf32/K512", "hopper-tf32"),
        ("mm/fp32/K512", "fma-chain"),
        ("int_mm/K1024", "int-exact"),
        (FLASH[0], "hopper-flash"),
        (FLASH[1], "hopper-cudnn"),
        ("sdpa/bf16/full/efficient_attention", "hopper-efficient"),
    ],
)
def test_a_kernel_is_held_at_one_arithmetic(name: str, arithmetic: str) -> None:
    report = held(recorded_kernel(name), arithmetic=arithmetic)
    declared = PRODUCTS[arithmetic] if arithmetic in PRODUCTS else ATTENTIONS[arithmetic]
    assert report.conventions["arithmetic"].startswith(declared.words)


@pytest.mark.parametrize(
    ("name", "arithmetic", "words"),
    [
        (
            "scaled_mm/K1024/slow/f32", "hopper-fp8-fast",
            "the kernel does not follow 'hopper-fp8-fast' (Hopper FP8, fast accumulation): it "
            "follows Hopper FP8, every 128 products added in float32",
        ),
        ("scaled_mm/K1024/fast/f32", "hopper-fp8-slow", "it follows Hopper FP8, fast accumulation"),
        ("mm/fp32/K512", "hopper-tf32", "it follows exact sums within float noise"),
        ("sdpa/bf16/full/math", "hopper-flash", "it follows exact sums within float noise"),
    ],
)  # fmt: skip
def test_another_arithmetic_is_said_to_be_one(name: str, arithmetic: str, words: str) -> None:
    with pytest.raises(CheckFailure, match=re.escape(words)):
        held(recorded_kernel(name), arithmetic=arithmetic)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eager/swiglu", "forbids the results of silu rounded to bfloat16"),
        (FLASH[0], "forbids fused attention .* P rounded to bfloat16"),
    ],
)
def test_rounded_intermediates_are_forbidden_on_demand(name: str, words: str) -> None:
    with pytest.raises(CheckFailure, match=f"is wrong: intermediates='float32' {words}"):
        held(recorded_kernel(name), intermediates="float32")
    assert held(recorded_kernel("compiled/swiglu"), intermediates="float32").held


def test_names_that_are_unknown_are_listed() -> None:
    kernel = recorded_kernel("mm/fp32/K64")
    with pytest.raises(ValueError, match=r"unknown arithmetic 'hopper-fp8'\..*-fast") as info:
        held(kernel, arithmetic="hopper-fp8")
    assert all(name in str(info.value) for name in (*PRODUCTS, *ATTENTIONS, "tf32", "float32"))
    with pytest.raises(ValueError, match=r"unknown intermediates .* float32, rounded"):
        held(kernel, intermediates="float16")
    with pytest.raises(ValueError, match="intermediates='float32' forbids; leave one"):
        held(kernel, arithmetic="hopper-flash", intermediates="float32")


def test_the_cost_of_an_arithmetic_is_in_the_report() -> None:
    """Fast accumulation loses 6.6 % of positive data at K = 4096, which is no defect."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 4096, generator=draw).abs().to(torch.float8_e4m3fn) for _ in range(2))

    def fast(a: Tensor, b: Tensor) -> Tensor:
        return PRODUCTS["hopper-fp8-fast"].sums(a, b, (a.dtype, b.dtype))

    report = check_kernel(fast, a, b, like=lambda a, b: a @ b.mT, relations=[])
    (note,) = report.notes
    match = re.match("Hopper FP8, fast accumulation: results are (.+) % too small on these", note)
    assert match
    assert 6.4 < float(match[1]) < 7.2
    assert note in str(report)


# Parts of K -----------------------------------------------------------------------------------------


def split(parts: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        sums = [
            (a.float() @ b.float().mT).to(dtype).float()
            for a, b in zip(x.chunk(parts, 1), w.chunk(parts, 1), strict=True)
        ]
        return torch.stack(sums).sum(0).to(dtype)

    return kernel


@share(3)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_that_are_rounded_to_fp16_are_named(parts: int) -> None:
    draw = torch.Generator().manual_seed(parts)
    x, w = (torch.randn(24, 1024, generator=draw) for _ in range(2))
    kernel = split(parts, torch.half)
    options: dict[str, Any] = {"like": torch.nn.functional.linear}
    report = check_kernel(kernel, x.half(), w.half(), relations=["odd"], **options)
    words = f"parts of K rounded to float16 before they are added, K split {parts} ways"
    assert report.conventions["arithmetic"] == words
    with pytest.raises(CheckFailure, match=f"intermediates='float32' forbids {words}"):
        check_kernel(kernel, x.half(), w.half(), relations=[], intermediates="float32", **options)
    with pytest.raises(CheckFailure, match="is wrong"):
        check_kernel(
            lambda x, w: (kernel(x, w).float() * 1.002).half(), x.half(), w.half(), relations=[],
            **options,
        )  # fmt: skip
    bf16 = split(parts, torch.bfloat16)
    with pytest.raises(CheckFailure, match="is wrong"):
        check_kernel(bf16, x.bfloat16(), w.bfloat16(), relations=[], **options)
