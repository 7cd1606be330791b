"""What a fused kernel quantizes inside, declared in its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

import qgate
from qgate.testing import CheckFailure, check_kernel, quantized, tiles
from tests.kernel_checks.staged_kernels import STAGED, Staged
from tests.shares import proof, share

QUICK: dict[str, Any] = {"relations": ["odd"], "budget_s": 0}
BY_NAME = {staged.name: staged for staged in STAGED}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(24, 64, generator=GENERATOR)
W1 = torch.randn(96, 64, generator=GENERATOR) / 8
W2 = torch.randn(40, 96, generator=GENERATOR) / 10


def checked(staged: Staged, fault: str, dtype: torch.dtype, seed: int, **options: Any) -> Any:
    kernel = staged.kernel(fault, dtype)
    options = {**staged.options, **options}
    return check_kernel(kernel, *staged.example(dtype, seed), like=staged.like, **options)


@share(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("experts in int8", "f32"),
        ("experts in mxfp8", "f32"),
        ("swiglu in fp8", "f32"),
        ("swiglu in int8", "bf16"),
        ("attention, P in fp8", "f32"),
        ("attention, P in fp8 as it is", "bf16"),
        ("attention, P in int8 by blocks", "fp16"),
        ("attention by tiles, P in fp8", "f32"),
        ("rms norm in int8", "f32"),
        ("rms norm in int8", "bf16"),
        ("layer norm in mxfp4", "bf16"),
        ("two layers in int8", "f32"),
    ],
)
def test_right_kernels_are_green(name: str, dtype: str) -> None:
    report = checked(BY_NAME[name], "", DTYPES[dtype], seed=0, **QUICK)
    assert any(slot.startswith("stage ") for slot in report.conventions)


@share(4)
@pytest.mark.parametrize(
    ("name", "fault", "dtype"),
    [
        ("swiglu in int8", "missing", "bf16"),
        ("swiglu in int8", "per tensor", "f32"),
        ("attention, P in fp8", "normalized first", "f32"),
        ("attention, P in fp8", "saturates at 240", "bf16"),
        ("rms norm in int8", "before the gain", "f32"),
        ("layer norm in mxfp4", "truncated", "f32"),
    ],
)
def test_faults_inside_are_red_and_named(name: str, fault: str, dtype: str) -> None:
    staged = BY_NAME[name]
    with pytest.raises(CheckFailure) as caught:
        checked(staged, fault, DTYPES[dtype], seed=0, **QUICK)
    assert any(words in caught.value.cause for words in staged.faults[fault])


# A function of its own ----------------------------------------------------------------------------


def test_a_plain_call_gives_the_values_of_the_format() -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    scale = x.abs().amax(-1, keepdim=True) / 448
    # torch's own cast is the oracle.
    by_torch = (x / scale).to(torch.float8_e4m3fn).float() * scale
    by_row = quantized("h", x, "fp8_e4m3", granularity="channel", axis=0)
    assert torch.allclose(by_row, by_torch, rtol=1e-6, atol=0.0)
    plain = quantized("h", x.bfloat16(), qgate.Quantizer("fp8_e5m2"))
    assert torch.equal(plain, x.bfloat16().to(torch.float8_e5m2).bfloat16())
    assert torch.equal(quantized("h", x, torch.round), x.round())
    tiled = tiles("fp8_e4m3", 16, 32)
    whole = x.abs().max() / 448
    by_torch = (x / whole).to(torch.float8_e4m3fn).float() * whole
    assert torch.allclose(quantized("h", x, tiled), by_torch, rtol=1e-6, atol=0.0)


def test_the_gradient_passes_as_it_is() -> None:
    x = torch.tensor([0.3, -2.0, 900.0], requires_grad=True)  # the last one saturates
    weights = torch.tensor([1.0, 2.0, 3.0])
    (quantized("h", x, "fp8_e4m3") * weights).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


def two_products(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = quantized("h", silu(linear(x, w1)), "int8", granularity="channel", axis=0)
    return linear(h, w2)


def codes_of(h: Tensor) -> tuple[Tensor, Tensor]:
    scale = h.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (h / scale).round(), scale


def fused(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    a = x @ w1.T
    codes, scale = codes_of(a * torch.sigmoid(a))
    return (codes @ w2.T) * scale


# What float noise decides -------------------------------------------------------------------------


def with_code(change: Callable[[Tensor, Tensor], None]) -> Callable[..., Tensor]:
    """Return the kernel with codes changed: a function of the ratios to scales and the codes."""

    def kernel(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        a = x @ w1.T
        h = a * torch.sigmoid(a)
        codes, scale = codes_of(h)
        change(h / scale, codes)
        return (codes @ w2.T) * scale

    return kernel


def at_the_boundary(side: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    """Take the code that lies closest to a boundary to one side of it."""

    def change(ratios: Tensor, codes: Tensor) -> None:
        index = int((ratios - ratios.floor() - 0.5).abs().argmin())
        codes.view(-1)[index] = side(ratios.reshape(-1)[index])

    return change


def beside_its_own(ratios: Tensor, codes: Tensor) -> None:
    """Take one code to its other neighbor, where that is not the nearer one."""
    codes.view(-1)[7] = ratios.reshape(-1)[7].floor() + (
        1 if float(codes.reshape(-1)[7]) == float(ratios.reshape(-1)[7].floor()) else 0
    )


@proof
def test_a_code_that_noise_decides_may_be_either_and_no_other_one() -> None:
    options: dict[str, Any] = {"like": two_products, "relations": [], "budget_s": 0}
    with pytest.raises(CheckFailure):
        check_kernel(with_code(beside_its_own), X, W1, W2, **options)
    nearest = _beside_a_boundary(X)
    settled = 0
    for side in (torch.floor, torch.ceil):
        report = check_kernel(with_code(at_the_boundary(side)), nearest, W1, W2, **options)
        settled += report.conventions.get("arithmetic", "").startswith("exact sums; codes inside")
    assert settled == 1


def _beside_a_boundary(x: Tensor) -> Tensor:
    """Mix two rows until a code of the first lies at a boundary, as close as float64 tells."""
    ends = x.double().clone(), x.double().clone()
    ends[1][0] = x[1].double()
    low, high = 0.0, 1.0

    def ratio(share: float) -> Tensor:
        mixed = ends[0].clone()
        mixed[0] = (1 - share) * ends[0][0] + share * ends[1][0]
        h = silu(linear(mixed.float().double(), W1.double()))
        return (h / (h.abs().amax(-1, keepdim=True) / 127))[0]

    column = int((ratio(low).floor() != ratio(high).floor()).nonzero()[0])
    boundary = float(ratio(low)[column].round()) + 0.5
    boundary -= float(boundary > float(torch.maximum(ratio(low), ratio(high))[column]))
    rising = float(ratio(high)[column]) > float(ratio(low)[column])
    for _ in range(60):
        middle = (low + high) / 2
        below = float(ratio(middle)[column]) < boundary
        low, high = (middle, high) if below == rising else (low, middle)
    mixed = x.clone()
    mixed[0] = ((1 - low) * ends[0][0] + low * ends[1][0]).float()
    return mixed


# Other options ------------------------------------------------------------------------------------


class Fused(torch.autograd.Function):
    """The kernel with gradients of its own; `factor` is a fault of one of them."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        a = x @ w1.T
        codes, scale = codes_of(a * torch.sigmoid(a))
        ctx.save_for_backward(x, w1, w2, a, codes * scale)
        return (codes @ w2.T) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w1, w2, a, h = ctx.saved_tensors
        (g,) = gradients
        s = torch.sigmoid(a)
        inner = (g @ w2) * s * (1 + a * (1 - s))
        return inner @ w1, inner.T @ x, g.T @ h * Fused.factor


@proof
def test_gradients_are_those_of_a_straight_through_estimator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"like": two_products, "backward": True, "budget_s": 0}
    options["relations"] = []
    report = check_kernel(Fused.apply, X, W1, W2, **options)
    assert sorted(report.gradients) == ["argument 0", "argument 1", "argument 2"]
    assert report.gradients["argument 2"].conventions["stage h"] == "scale amax/127"
    monkeypatch.setattr(Fused, "factor", 1.01)
    with pytest.raises(CheckFailure, match="gradient of argument 2 of apply is wrong"):
        check_kernel(Fused.apply, X, W1, W2, **options)


def test_a_stage_is_known_in_a_process_of_its_own() -> None:
    report = check_kernel(fused, X, W1, W2, like=two_products, isolate=True, **QUICK)
    assert report.conventions["stage h"] == "scale amax/127"


def test_a_convention_of_a_stage_may_be_asked_for() -> None:
    def half(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = silu(linear(x, w1))
        scale = h.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127.5
        return ((h / scale).round().clamp(-128, 127) @ w2.T) * scale

    report = check_kernel(half, X, W1, W2, like=two_products, **QUICK)
    assert report.conventions["stage h"].startswith("scale amax/127.5")
    with pytest.raises(CheckFailure):
        check_kernel(fused, X, W1, W2, like=two_products, convention="amax/127.5", **QUICK)


# What cannot be used ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: quantized("h", x, "int9"), "stage 'h': format 'int9': unknown format 'int9'"),
        (lambda x: quantized("h", x.int(), "int8"), "stage 'h' gets torch.int32; give the"),
        (lambda x: quantized("h", x.to(torch.float8_e5m2), "int8"), "gets torch.float8_e5m2"),
        (lambda x: quantized("h", x.tolist(), "int8"), "stage 'h' gets list"),
        (lambda x: quantized(x, "int8", "h"), "the name of a stage is a tensor of shape"),
        (lambda x: quantized("", x, "int8"), "the name of a stage is ''"),
        (lambda x: quantized("h", x, 8), "stage 'h' is declared as 8; allowed are"),
        (lambda x: quantized("h", x, "int8", granular="row"), "has no option 'granular'"),
        (
            lambda x: quantized("h", x, qgate.Quantizer("int8"), axis=0),
            "stage 'h': axis came with .*; options go with a format's name only",
        ),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(
    call: Callable[[Tensor], Tensor], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        call(X)


def test_one_name_has_one_declaration() -> None:
    def like(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return linear(quantized("h", linear(quantized("h", x, "mxfp8"), w1), "mxfp4"), w2)

    with pytest.raises(
        ValueError, match=r"stage 'h' is declared twice: as .*mxfp8.* and as .*mxfp4"
    ):
        check_kernel(fused, X, W1, W2, like=like)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"convention": "mse"}, "convention 'mse' is not allowed with stages"),
        ({"convention": "amax/3"}, "stage 'h' has no convention 'amax/3'"),
    ],
)
def test_conventions_that_a_stage_does_not_have(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_kernel(fused, X, W1, W2, like=two_products, **options)


def test_a_stage_that_rounds_at_random_is_refused() -> None:
    def like(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return linear(quantized("h", linear(x, w1), "mxfp4", rounding="stochastic"), w2)

    with pytest.raises(ValueError, match="rounded at random has no expected value"):
        check_kernel(fused, X, W1, W2, like=like)
