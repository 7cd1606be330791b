"""Faults that are tried: each new word has a kernel with the fault, and a right one beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear, silu

import qgate
from qgate.causes.operator_faults import operator_faults
from qgate.expected.noise import evaluate
from qgate.expected.operators import trace
from qgate.kernel_checks import diagnosis, kernels
from qgate.testing import CheckFailure, CheckReport, check_kernel
from tests.shares import proof, share

BF16 = torch.bfloat16
Kernel = Callable[..., Tensor]


def normal(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def check(kernel: Kernel, arguments: Sequence[Tensor], like: Kernel, **options: Any) -> CheckReport:
    return check_kernel(kernel, *arguments, like=like, **{"relations": ["permuted"], **options})


def first_line(kernel: Kernel, arguments: Sequence[Tensor], like: Kernel, **options: Any) -> str:
    with pytest.raises(CheckFailure) as failure:
        check(kernel, arguments, like, **options)
    return str(failure.value).splitlines()[0].partition(": ")[2]


# Operators ----------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, diagonal: int = 0) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal + 1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def in_bf16(function: Kernel) -> Kernel:
    """Compute in float32, and round the result alone."""

    def kernel(*arguments: Tensor) -> Tensor:
        return function(*[argument.float() for argument in arguments]).to(BF16)

    return kernel


def with_p(change: Callable[[Tensor], Tensor]) -> Kernel:
    return in_bf16(lambda q, k, v: change((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)) @ v)


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Count the zeros that fill the last tile of 16 keys."""
    more = -k.shape[-2] % 16
    k, v = (functional.pad(side, (0, 0, 0, more)) for side in (k, v))
    return attention(q, k, v)


def without_the_last_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k[:, :-1], v[:, :-1])


def norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def shifted_norm(x: Tensor, w: Tensor) -> Tensor:
    return norm(x, 1 + w)


def centered_norm(x: Tensor, w: Tensor) -> Tensor:
    return norm(x - x.mean(-1, keepdim=True), w)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def mlp_with(change: Kernel) -> Kernel:
    return lambda x, gate, up, down: linear(change(linear(x, gate)) * linear(x, up), down)


def without_a_hidden_value(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = silu(linear(x, gate)) * linear(x, up)
    hidden[..., 17:18] = 0
    return linear(hidden, down)


def next_page(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, torch.cat([k[:, :16], k[:, 16:].roll(1, 0)], 1), v)


HEADS = normal(1, (3, 40, 32), (3, 40, 32), (3, 40, 32))
NORM = [x * 0.05 for x in normal(2, (32, 64), (64,))]
MLP = [x * s for x, s in zip(normal(3, (32, 64), (48, 64), (48, 64), (64, 48)), (1, 0.1, 0.1, 0.1), strict=True)]  # fmt: skip
FAULTS: list[tuple[str, Kernel, list[Tensor], Kernel, Kernel]] = [
    ("the mask shows one key more", in_bf16(lambda *a: causal(*a, diagonal=1)), HEADS, causal, in_bf16(causal)),
    ("the mask shows one key less", in_bf16(lambda *a: causal(*a, diagonal=-1).nan_to_num(0.0)), HEADS, causal, in_bf16(causal)),
    ("later keys are masked (causal), and should not be", in_bf16(causal), HEADS, attention, in_bf16(attention)),
    ("entry 39 of 40 (the last one) is left out of the softmax", in_bf16(without_the_last_key), HEADS, attention, in_bf16(attention)),
    ("padding is counted in the softmax, as 8 more keys of zeros would be", in_bf16(padded), HEADS, attention, in_bf16(attention)),
    ("the probabilities of the softmax are rounded to float8_e4m3fn", with_p(lambda p: p.to(torch.float8_e4m3fn).float()), HEADS, attention, with_p(lambda p: p)),
    ("argument 1 is read one entry too early along dimension 0 from entry 16 of dimension 1 on", in_bf16(next_page), HEADS, attention, in_bf16(attention)),
    ("eps is 0.001, not 1e-06", in_bf16(lambda x, w: norm(x, w, 1e-3)), NORM, norm, in_bf16(norm)),
    ("argument 1 is read without the one that is added to it", in_bf16(norm), NORM, shifted_norm, in_bf16(shifted_norm)),
    ("argument 0 is taken without its mean", in_bf16(centered_norm), NORM, norm, in_bf16(norm)),
    ("silu is rounded to float8_e5m2", mlp_with(lambda h: silu(h).to(torch.float8_e5m2).to(h)), MLP, mlp, mlp),
    ("gelu is computed in the place of silu", mlp_with(functional.gelu), MLP, mlp, mlp),
    ("term 17 of the last sum over 48 is lost", without_a_hidden_value, MLP, mlp, mlp),
]  # fmt: skip


@share(4)
@pytest.mark.parametrize(("words", "faulty", "arguments", "like", "right"), FAULTS, ids=[f[0] for f in FAULTS])  # fmt: skip
def test_a_fault_of_an_operator_is_named_and_its_right_twin_passes(
    words: str, faulty: Kernel, arguments: list[Tensor], like: Kernel, right: Kernel
) -> None:
    assert first_line(faulty, arguments, like) == words
    check(right, arguments, like)


@pytest.mark.parametrize("factor", [1.003, 0.995])
def test_a_factor_is_no_eps_and_no_mean_of_one_value_less(factor: float) -> None:
    line = first_line(in_bf16(lambda x, w: norm(x, w) * factor), NORM, norm)
    assert f"the result is {factor:g}"[:-1] in line


@pytest.mark.parametrize(
    "output", ["mxfp8", qgate.Quantizer("fp8_e4m3", granularity="channel", axis=0)]
)
def test_a_wrong_eps_is_named_where_the_result_is_quantized(output: Any) -> None:
    quantizer = qgate.Quantizer(output) if isinstance(output, str) else output

    def kernel(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
        return quantizer(norm(x, w, eps))

    arguments = normal(3, (16, 96), (96,), dtype=torch.float32)
    check(kernel, arguments, norm, output=output)
    words = first_line(lambda x, w: kernel(x, w, 1e-3), arguments, norm, output=output)
    assert words == "eps is 0.001, not 1e-06"


def test_a_fault_that_none_of_these_is_gets_none_of_their_names() -> None:
    noise = normal(4, (3, 40, 32))[0].float()
    line = first_line(in_bf16(lambda *a: attention(*a) + 0.05 * noise), HEADS, attention)
    listed = operator_faults(attention, [h.double() for h in HEADS], torch.zeros(1))
    assert not any(fault.words in line for fault in listed)


def test_faults_of_fused_attention_stand_where_its_operators_are_traced() -> None:
    heads = [head.double() for head in HEADS]
    like = functional.scaled_dot_product_attention
    for fault in operator_faults(like, heads, torch.zeros(1)):
        faulty = fault.within(like)
        before = evaluate(faulty, heads)
        assert trace(faulty, heads).names, fault.words
        assert torch.equal(before.isnan(), evaluate(faulty, heads).isnan())


# Casts under the conventions of others ------------------------------------------------------------

X, W = normal(5, (32, 128), (64, 128))
W = W / 16
INT8 = qgate.Quantizer("int8", granularity="channel", axis=0)
INT4 = qgate.Quantizer("int4", granularity="block", block=32)


def codes_of(w: Tensor, most: float, group: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of amax / (most + 0.5) in bf16, as torchao has them."""
    groups = w.float().reshape(-1, group)
    scale = (groups.abs().amax(1, keepdim=True) / (most + 0.5)).to(BF16).float()
    return (groups / scale).round().clamp(-most - 1, most), scale


def layer(most: float, group: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Kernel:  # fmt: skip
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        codes, scale = change(*codes_of(w, most, group))
        return linear(x, (codes * scale).to(BF16).reshape(w.shape))

    return kernel


def unchanged(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes, scale


CASTS: list[tuple[str, Kernel, Any, Kernel]] = [
    ("argument 1 has every code decoded 1 too high (the zero point is off)", layer(127, 128, lambda c, s: (c + 1, s)), INT8, layer(127, 128, unchanged)),
    ("argument 1 is decoded with every scale moved to the next group", layer(127, 128, lambda c, s: (c, s.roll(1, 0))), INT8, layer(127, 128, unchanged)),
    ("argument 1 has blocks of 64, not of 32", layer(7, 64, unchanged), INT4, layer(7, 32, unchanged)),
    ("argument 1 is decoded with every scale moved to the next group of its row", layer(7, 32, lambda c, s: (c, s.reshape(64, 4).roll(1, 1).reshape(-1, 1))), INT4, layer(7, 32, unchanged)),
]  # fmt: skip


@share(4)
@pytest.mark.parametrize(("words", "faulty", "declared", "right"), CASTS, ids=[c[0] for c in CASTS])
def test_a_fault_of_codes_is_named_whatever_their_convention(
    words: str, faulty: Kernel, declared: Any, right: Kernel
) -> None:
    assert first_line(faulty, (X, W), linear, inputs={1: declared}) == words
    check(right, (X, W), linear, inputs={1: declared})


@proof
def test_a_last_column_of_zeros_is_named_beside_the_convention_and_roundings() -> None:
    right = layer(127, 128, unchanged)

    def faulty(x: Tensor, w: Tensor) -> Tensor:
        y = right(x, w)
        y[..., -1:] = 0
        return y

    line = first_line(faulty, (X, W), linear, inputs={1: INT8})
    assert line == "column 63 of 64 (the last one) is zero"


def test_activations_in_int8_are_named_beside_weights_that_are_a_function() -> None:
    def decoded(w: Tensor) -> Tensor:
        codes, scale = codes_of(w, 127, 128)
        return (codes * scale).reshape(w.shape)

    def faulty(x: Tensor, w: Tensor) -> Tensor:
        return linear(qgate.quantize(x, INT8), decoded(w).to(BF16))

    line = first_line(faulty, (X, W), linear, inputs={1: decoded})
    assert line.startswith("argument 0 is quantized, and not declared to be: declare inputs={0:")
    check(lambda x, w: linear(x, decoded(w).to(BF16)), (X, W), linear, inputs={1: decoded})


# Inputs and cost ----------------------------------------------------------------------------------


def test_a_fault_of_a_derived_input_is_named_there_and_not_called_coarse_sums() -> None:
    def eager(x: Tensor, w: Tensor) -> Tensor:
        return silu(linear(x, w)) * 3

    def faulty(x: Tensor, w: Tensor) -> Tensor:
        y = eager(x, w)
        if len(x) == 1:
            y[:, 20:] = 0
        return y

    def like(x: Tensor, w: Tensor) -> Tensor:
        return silu(linear(x, w)) * 3

    line = first_line(faulty, (X, W), like, relations=["one", "permuted"])
    assert "columns 20 to 63 of 64 (to the end) are zero" in line
    assert "declare" not in line
    with pytest.raises(CheckFailure, match=r"wrong for the (first|last) of 32 along"):
        check(faulty, (X, W), like, relations=["one", "permuted"])
    check(eager, (X, W), like, relations=["one", "permuted"])


def test_the_diagnosis_of_a_large_result_computes_a_share_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = normal(6, (256, 64), (256, 64))
    sizes: list[int] = []

    def like(x: Tensor, w: Tensor) -> Tensor:
        sizes.append(len(x) * len(w))
        return linear(x, w)

    def explain(*arguments: Any) -> Any:
        sizes.clear()
        return diagnosis.explain(*arguments)

    monkeypatch.setattr(kernels, "explain", explain)
    coarse = qgate.Quantizer("int4", granularity="channel", axis=0)
    narrow = qgate.Quantizer("int8", granularity="channel", axis=0, rounding="even")
    line = first_line(lambda x, w: linear(x, qgate.quantize(w, coarse)), (x, w), like, inputs={1: narrow})  # fmt: skip
    assert "argument 1" in line
    assert "int4" in line
    assert sum(size < 128 * 128 for size in sizes) > 4 * sum(size > 128 * 128 for size in sizes)
