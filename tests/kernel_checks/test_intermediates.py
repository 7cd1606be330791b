"""Roundings between operators: the bits of eager code, found and named, and defects beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm, scaled_dot_product_attention, silu

import qgate
from qgate.expected.intermediates import Arithmetic, AttentionRule, attend, eager_sites
from qgate.expected.operators import evaluate_as
from qgate.expected.operators import trace as operators_of
from qgate.testing import CheckFailure, check_kernel
from tests.shares import share

BF16, FP16 = torch.bfloat16, torch.float16
INT8 = qgate.Quantizer("int8", granularity="channel", axis=0)


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = BF16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator) * shape[-1] ** -0.25).to(dtype) for shape in shapes
    ]


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(linear(x, w, b))


def norm(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, (x.shape[-1],), w, 1e-6)


def norm_of_llama(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Round before the weight, as transformers' LlamaRMSNorm does."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


MLP = normal((24, 64), (48, 64), (48, 64), (32, 48))
ROTARY = normal((3, 24, 32), (24, 32), (24, 32))
BIASED = normal((24, 64), (48, 64), (48,))
NORM = normal((24, 96), (96,))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("like", "arguments"), [(mlp, MLP), (rotary, ROTARY), (biased, BIASED), (norm, NORM)]
)
def test_eager_roundings_give_the_bits_of_torch(
    like: Callable[..., Tensor], arguments: list[Tensor], dtype: torch.dtype
) -> None:
    """torch's own 16-bit operators are the oracle; few values may be near a tie of rounding."""
    narrow = [x.to(dtype) for x in arguments]
    wide = [x.double() for x in narrow]
    names = tuple(operators_of(like, wide).names)
    eager = Arithmetic(dtype, eager_sites(names), names=names)
    result = like(*narrow)
    equal = evaluate_as(like, wide, eager).to(dtype) == result
    assert float(equal.double().mean()) > 0.99
    exact = like(*wide).to(dtype) == result
    if len(eager.sites) > 1:  # else nothing is rounded that exact sums do not round
        assert float(exact.double().mean()) < 0.9


def test_operators_inside_of_others_are_sites_of_their_own() -> None:
    x, w, b = (x.double() for x in BIASED)
    names = operators_of(biased, (x, w, b)).names
    assert names[0] == "addmm.mm"
    assert "addmm" in names
    assert {names[site] for site in eager_sites(names)} == {"addmm"}
    assert names[-1] == "gelu"


@pytest.mark.parametrize("tile", [0, 7, 16])
@pytest.mark.parametrize("ascending", [True, False])
def test_fused_attention_is_attention(tile: int, ascending: bool) -> None:
    scores, values = torch.randn(2, 5, 40).double(), torch.randn(2, 40, 6).double()
    scores[..., 30:] = -torch.inf
    rule = AttentionRule(torch.float64, tile, ascending)
    assert torch.allclose(attend(scores, values, rule), scores.softmax(-1) @ values, rtol=1e-12)
    narrow = attend(scores, values, replace(rule, dtype=BF16))
    assert 1e-5 < float((narrow - scores.softmax(-1) @ values).abs().max()) < 2e-2


def attention_in_tiles(q: Tensor, k: Tensor, v: Tensor, tile: int, scale: float = 1.0) -> Tensor:
    """Attend in float32 with a running largest score; P is rounded tile by tile."""
    scores = (q.float() @ k.float().mT) * (scale / q.shape[-1] ** 0.5)
    top = torch.full_like(scores[..., :1], -torch.inf)
    total, sums = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
    for start in range(0, k.shape[-2], tile):
        part = scores[..., start : start + tile]
        larger = torch.maximum(top, part.amax(-1, keepdim=True))
        p, shrink = (part - larger).exp(), (top - larger).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        sums = sums * shrink + p.to(q.dtype).float() @ v[..., start : start + tile, :].float()
        top = larger
    return (sums / total).to(q.dtype)


HEADS = normal((1, 2, 48, 32), (1, 2, 48, 32), (1, 2, 48, 32), seed=1)


@pytest.mark.parametrize("tile", [16, 32, 64])
def test_attention_in_tiles_is_named(tile: int) -> None:
    report = check_kernel(
        lambda q, k, v: attention_in_tiles(q, k, v, tile),
        *HEADS,
        like=scaled_dot_product_attention,
        relations=["one", "prefix"],
    )
    words = report.conventions["arithmetic"]
    assert (f"in tiles of {tile} keys" if tile < 48 else "all keys at once") in words
    assert "P rounded to bfloat16 and divided last" in words


def attention_with_rounded_probabilities(
    q: Tensor, k: Tensor, v: Tensor, rounds_scores: bool = False
) -> Tensor:
    """Divide probabilities by their sum before they are rounded; round scores twice, or not."""
    scores = q.float() @ k.float().mT
    if rounds_scores:
        scores = scores.to(q.dtype).float()
    scores = scores * q.shape[-1] ** -0.5
    if rounds_scores:
        scores = scores.to(q.dtype).float()
    p = scores.softmax(-1).to(q.dtype)
    return (p.float() @ v.float()).to(q.dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rounds_scores", [False, True])
def test_attention_with_normalized_probabilities_is_explained_by_its_roundings(
    rounds_scores: bool, dtype: torch.dtype
) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_with_rounded_probabilities(q, k, v, rounds_scores)

    heads = [x.to(dtype) for x in HEADS]
    report = check_kernel(kernel, *heads, like=scaled_dot_product_attention, relations=["one"])
    named = "the result of each operator" if rounds_scores else "_softmax in attention"
    assert named in report.conventions["arithmetic"]


def int8_weights(x: Tensor, w: Tensor) -> Tensor:
    return linear(x, qgate.quantize(w, "int8", granularity="channel", axis=0))


def codes_first(x: Tensor, w: Tensor) -> Tensor:
    """Round the product of codes before the scale, as torchao's int8 weights do."""
    scale = w.float().abs().amax(1) / 127
    codes = (w.float() / scale[:, None]).round()
    return (linear(x, codes.to(x.dtype)).float() * scale).to(x.dtype)


WEIGHTS = normal((24, 64), (48, 64), seed=2)


@pytest.mark.parametrize(
    ("kernel", "arguments", "like", "inputs", "words"),
    [
        (mlp, MLP, mlp, {}, "the result of each operator rounded to bfloat16"),
        (norm_of_llama, NORM, norm, {}, "the results of mul in rms_norm rounded to bfloat16"),
        (int8_weights, WEIGHTS, linear, {1: INT8}, "dequantized values of argument 1 rounded"),
        (codes_first, WEIGHTS, linear, {1: INT8}, "the product of codes in mm rounded"),
        (lambda x, w, b: linear(x, w) + b, BIASED, linear, {}, "mm in addmm rounded to bfloat16"),
    ],
)
def test_a_rounding_is_named(
    kernel: Any, arguments: list[Tensor], like: Any, inputs: dict[int, Any], words: str
) -> None:
    report = check_kernel(kernel, *arguments, like=like, inputs=inputs, relations=["one", "odd"])
    assert words in report.conventions["arithmetic"]
    assert report.smallest_defect["a factor on all values"] < 0.01


def times(kernel: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    return lambda *arguments: (kernel(*arguments).float() * factor).to(BF16)


def gate_too_high(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return mlp(x, (gate.float() * 1.01).to(BF16), up, down)


def a_term_weaker(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weaker = down.clone()
    weaker[:, 5:6] *= 0.9
    return mlp(x, gate, up, weaker)


def one_scale(x: Tensor, w: Tensor) -> Tensor:
    quantized = qgate.quantize(w, "int8", granularity="channel", axis=0)
    quantized[7:8] *= 1.02
    return linear(x, quantized)


def activations_too(x: Tensor, w: Tensor) -> Tensor:
    return int8_weights(qgate.quantize(x, "int8", granularity="channel", axis=0), w)


@share(4)
@pytest.mark.parametrize(
    ("kernel", "arguments", "like", "inputs"),
    [
        (times(mlp, 1.003), MLP, mlp, {}),
        (gate_too_high, MLP, mlp, {}),
        (a_term_weaker, MLP, mlp, {}),
        (lambda x, w: norm_of_llama(x, w, 1e-3), NORM, norm, {}),
        (one_scale, WEIGHTS, linear, {1: INT8}),
        (activations_too, WEIGHTS, linear, {1: INT8}),
        (lambda q, k, v: attention_in_tiles(q, k, v, 16, 1.002), HEADS, scaled_dot_product_attention, {}),
        (lambda q, k, v: attention_in_tiles(q, k[..., 1:, :], v[..., 1:, :], 16), HEADS, scaled_dot_product_attention, {}),
    ],
)  # fmt: skip
def test_roundings_explain_no_defect(
    kernel: Any, arguments: list[Tensor], like: Any, inputs: dict[int, Any]
) -> None:
    with pytest.raises(CheckFailure):
        check_kernel(kernel, *arguments, like=like, inputs=inputs, relations=[])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_attention_of_torch_on_this_processor_is_right(dtype: torch.dtype) -> None:
    heads = [x.to(dtype) for x in HEADS]
    report = check_kernel(
        lambda q, k, v: scaled_dot_product_attention(q, k, v),
        *heads,
        like=scaled_dot_product_attention,
    )
    assert "fused attention" in report.conventions["arithmetic"]


# Other bits in a second run ------------------------------------------------------------------------


class NoisyNorm:
    """A norm whose float32 sum has other bits in each call, as sums of atomic operations have.

    ulps   steps of float32 that the sum is moved by in every second call
    """

    def __init__(self, ulps: int) -> None:
        self.ulps, self.calls = ulps, 0

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True)
        self.calls += 1
        moved = mean * (1 + self.ulps * 2.0**-23 * (self.calls % 2))
        return w * (wide * torch.rsqrt(moved + 1e-6)).to(x.dtype)


LARGE_NORM = normal((400, 256), (256,), seed=3)


@pytest.mark.parametrize("arguments", [normal((96, 512), (512,), seed=3), LARGE_NORM])
def test_float_noise_between_calls_is_a_note_beside_rounded_intermediates(
    arguments: list[Tensor],
) -> None:
    options: dict[str, Any] = {"like": norm, "relations": ["one"]}
    report = check_kernel(NoisyNorm(16), *arguments, **options)
    assert "rounded to bfloat16" in report.conventions["arithmetic"]
    assert any(note.startswith("other bits in run") for note in report.notes)
    with pytest.raises(CheckFailure, match="is not repeatable"):
        check_kernel(NoisyNorm(16), *arguments, repeatable=True, **options)


def test_more_than_float_noise_between_calls_is_not_repeatable() -> None:
    right = NoisyNorm(0)

    def racing(x: Tensor, w: Tensor) -> Tensor:
        y = right(x, w)
        if right.calls > 2:  # the example, and the one derived input
            y[3, 5] *= 1.1
        return y

    with pytest.raises(CheckFailure, match="is not repeatable: 1 of"):
        check_kernel(racing, *NORM, like=norm, relations=["zero rows"])


def test_a_factor_of_a_noisy_kernel_is_not_called_noise() -> None:
    noisy = NoisyNorm(16)

    def too_large(x: Tensor, w: Tensor) -> Tensor:
        return (noisy(x, w).float() * 1.01).to(x.dtype)

    with pytest.raises(CheckFailure, match=r"is 1\.0098 times the expected") as failure:
        check_kernel(too_large, *LARGE_NORM, like=norm, relations=["one"])
    assert "not repeatable" not in str(failure.value)


@pytest.mark.parametrize("option", ["", "repeatable", "invariant"])
def test_an_example_runs_three_times_whatever_is_asked(option: str) -> None:
    counts: list[Tensor] = []

    def counted(x: Tensor, w: Tensor) -> Tensor:
        counts.append(x)
        return (x[:, None, :] * w).sum(-1)

    x, w = normal((5, 32), (7, 32), dtype=torch.float32)
    options = {option: True} if option else {}
    check_kernel(counted, x, w, like=linear, relations=["one"], **options)
    assert (
        sum(argument.shape == x.shape and torch.equal(argument, x) for argument in counts) == 3 + 2
    )


def test_a_code_at_a_tie_may_be_either_under_an_arithmetic_too() -> None:
    """Of two ties one goes up and one down, as no convention has it."""
    int8 = qgate.Quantizer("int8", granularity="channel", axis=0)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(24, 64, generator=generator).half() for _ in range(2))
    x = x.clamp(-3.5, 3.5)
    x[3, 0] = x[7, 0] = 127 / 32
    x[3, 1] = x[7, 1] = 62.5 / 32
    upward = x[3].clone()

    def product(x: Tensor, w: Tensor, wrong: bool = False) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        codes = torch.round(x.float() / scale)
        codes[(x == upward).all(-1), 1] = 63
        if wrong:
            codes[5, 0] += 1
        return torch.tanh((codes.half() @ w.T).float() * scale).half()

    def like(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w.T)

    options: dict[str, Any] = {"like": like, "inputs": {0: int8}, "relations": ["strided"]}
    report = check_kernel(product, x, w, **options)
    assert "product of codes in mm rounded to float16" in report.conventions["arithmetic"]
    with pytest.raises(CheckFailure):
        check_kernel(lambda x, w: product(x, w, wrong=True), x, w, **options)
