"""Gradients of code between quantizers: planted faults are named, right code is green."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import qgate
from qgate.gate.measuring.bench import Bench
from qgate.models import Sampling
from tests.campaigns.first_lines.planting import first_line_of
from tests.campaigns.first_lines.subjects import subject
from tests.gate.benches import LLAMA, MAMBA, bench, mode_of
from tests.gate.test_own_kernel_faults import gates_of
from tests.shares import share, slow_file

pytestmark = slow_file

Change = Callable[[Tensor], Tensor]
LAYER = "model.layers.1"


class _Changed(torch.autograd.Function):
    """A copy of a tensor whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


def changed(x: Tensor, change: Change) -> Tensor:
    return _Changed.apply(x, change)  # type: ignore[no-untyped-call, no-any-return]


def plant(module: nn.Module, port: str, change: Change) -> None:
    """Change the gradient at the input, the output or the weight of a module."""
    right, weight = module.forward, module._parameters.get("weight")

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if port == "weight":
            module._parameters["weight"] = changed(weight, change)  # type: ignore[arg-type, assignment]
        try:
            result = right(changed(x, change) if port == "input" else x, *args, **kwargs)
        finally:
            module._parameters["weight"] = weight
        return changed(result, change) if port == "output" else result

    module.forward = forward  # type: ignore[method-assign]


def times(factor: float) -> Change:
    return lambda g: g * factor


def without_one(g: Tensor) -> Tensor:
    g = g.clone()
    g[..., 5, :] = 0
    return g


def without_odd_rows(g: Tensor) -> Tensor:
    return g * (torch.arange(len(g)) % 2).reshape(-1, 1)


def cut(g: Tensor) -> Tensor:
    bound = g.abs().amax() / 2
    return g.clamp(-bound, bound)


def rounded(g: Tensor) -> Tensor:
    return g.bfloat16().to(g.dtype)


FAULTS: dict[str, tuple[str, str, Change, str, str]] = {
    "norm 1 % more": (
        f"{LAYER}.input_layernorm", "input", times(1.01), f"{LAYER}.input_layernorm:input", "1.01 times",
    ),
    "norm 0.3 % more": (
        f"{LAYER}.input_layernorm", "input", times(1.003), f"{LAYER}.input_layernorm:input",
        "1.003 times",
    ),
    "final norm 1 % less": ("model.norm", "input", times(0.99), "model.norm:input", r"0\.99\d* times"),
    "a token of the MLP": (
        f"{LAYER}.mlp", "output", without_one, f"{LAYER}.mlp.down_proj:output",
        r"no gradient arrives at 1 of 64 tokens \(5\)",
    ),
    "detached MLP": (
        f"{LAYER}.mlp", "input", times(0), f"{LAYER}.post_attention_layernorm:output",
        "no gradient arrives",
    ),
    "clipped": (
        f"{LAYER}.mlp", "input", cut, f"{LAYER}.post_attention_layernorm:output",
        "tokens|no value is above",
    ),
    "heads reversed": (
        f"{LAYER}.self_attn.o_proj", "input", lambda g: g.flip(-1), f"{LAYER}.self_attn.o_proj:input",
        "hold others",
    ),
    "keys 0.5 % more": (
        f"{LAYER}.self_attn.k_proj", "output", times(1.005), f"{LAYER}.self_attn.k_proj:input",
        "1.00[56] times",
    ),
    "embedding rows": (
        "model.embed_tokens", "weight", without_odd_rows, "model.embed_tokens:weight",
        r"\d+ of 256 rows .* are wrong",
    ),
    "a row of a weight": (
        f"{LAYER}.mlp.up_proj", "weight", lambda g: torch.cat([g[:3], 0 * g[3:4], g[4:]]),
        f"{LAYER}.mlp.up_proj:weight", r"no gradient arrives at 1 of 256 rows \(3\)",
    ),
}  # fmt: skip
OF_FP32 = {
    "gain 1 % less": (
        f"{LAYER}.input_layernorm", "weight", times(0.99), f"{LAYER}.input_layernorm:weight",
        "0.99 times",
    ),
    "norm in bfloat16": (
        f"{LAYER}.input_layernorm", "input", rounded, f"{LAYER}.input_layernorm:input", "",
    ),
    "weight in bfloat16": (
        f"{LAYER}.mlp.up_proj", "weight", rounded, f"{LAYER}.mlp.up_proj:weight", "",
    ),
}  # fmt: skip


def faults_of(of: Bench, mode: str) -> list[str]:
    """Return what is wrong with the gradients of a mode, each with its site."""
    rows = of.gradients(mode_of(of, mode))
    assert sum(figure.values for row in rows for figure in row.conformance) > 10_000
    faults = [(row.site, f.about) for row in rows for f in row.conformance if f.differing]
    return [about.removeprefix("the gradient at ") if " at " in about[:20] else f"{site} {about}"
            for site, about in faults]  # fmt: skip


@share(6)
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *((mode, name) for mode in ("int8", "mxfp4", "w4", "bf16", "fp16") for name in FAULTS),
        *((mode, name) for mode in ("int8", "nvfp4") for name in OF_FP32),
    ],
)
def test_a_wrong_gradient_is_named(mode: str, name: str) -> None:
    module, port, change, site, words = (FAULTS | OF_FP32)[name]
    of = bench(LLAMA, layers=2)
    plant(of.quantized(mode_of(of, mode)).model.module.get_submodule(module), port, change)
    faults = faults_of(of, mode)
    assert [fault.partition(" ")[0] for fault in faults][:1] == [site]
    assert len(faults) <= 2
    assert re.search(words, faults[0]), faults


@share(6)
@pytest.mark.parametrize("model", [LLAMA, MAMBA])
@pytest.mark.parametrize("mode", ["int8", "mxfp8", "mxfp4", "nvfp4", "hif8", "w4", "bf16", "fp16"])
def test_right_gradients_are_green(mode: str, model: str) -> None:
    assert faults_of(bench(model, layers=2), mode) == []


@share(6)
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_attention_in_16_bits_rounds_alike_in_all_rows(mode: str) -> None:
    """Most rows of a head look at one token of a long text, whose value is rounded once."""
    assert faults_of(bench(LLAMA, Sampling(samples=2)), mode) == []


class _AtOperator(TorchFunctionMode):
    """Change the gradient of what one call of a function returns."""

    def __init__(self, name: str, number: int, change: Change) -> None:
        super().__init__()
        self.name, self.remaining, self.change = name, number, change

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        has_gradient = isinstance(result, Tensor) and result.requires_grad
        if getattr(function, "__name__", "") == self.name and has_gradient:
            self.remaining -= 1
            if self.remaining == -1:
                return changed(result, self.change)
        return result


def without_middle(g: Tensor) -> Tensor:
    """Take the other sign in one row."""
    g = g.clone()
    g.reshape(-1, g.shape[-1])[g.numel() // g.shape[-1] // 2 + 3] *= -1
    return g


INNER: dict[str, tuple[str, int, Change]] = {
    "step lost": ("softplus", 0, times(0)), "step 1 % more": ("softplus", 0, times(1.01)),
    "sign of a channel of the step": ("softplus", 0, without_middle),
    "decay lost": ("exp", 0, times(0)), "a step of the state 1 % more": ("add", 25, times(1.01)),
    "a step of the state detached": ("add", 20, times(0)),
    "convolution 1 % less": ("conv1d", 0, times(0.99)),
    "sign of a row of the product with C": ("matmul", 24, without_middle),
}  # fmt: skip


@share(6)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16"])
@pytest.mark.parametrize("name", INNER)
def test_a_wrong_gradient_inside_of_a_mixer_is_red(name: str, mode: str, tmp_path: Path) -> None:
    def plant_inside(network: nn.Module) -> None:
        mixer: Any = network.get_submodule("backbone.layers.1.mixer")
        right = mixer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _AtOperator(*INNER[name]):
                return right(*args, **kwargs)

        mixer.forward = forward

    line = first_line_of(subject("mamba"), mode, plant_inside, "gradients", tmp_path)
    assert "makes of the gradients behind it" in line, line
    assert "backbone.layers.1" in line


SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, Any] = {
    "Gemma2": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16},
    "Qwen3Moe": {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "Starcoder2": {"intermediate_size": 96, "num_key_value_heads": 2},
    "Falcon": {},
}  # fmt: skip


@share(4)
@pytest.mark.parametrize("mode", ["int8", "w4", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_are_green(family: str, mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], use_cache=False)
    module = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(0.1)
    # Long ones: torch adds gradients of a layer norm's vectors up in the dtype of the tensors.
    model = qgate.Model(module, [torch.randint(0, 128, (1, 400)) for _ in range(2)], family.lower())
    assert faults_of(gates_of(model, tmp_path).bench, mode) == []


DELTA: dict[str, tuple[str, int, Change]] = {
    "beta 1 % more": ("sigmoid", 0, times(1.01)), "step lost": ("softplus", 0, times(0)),
    "decays of pairs 1 % more": ("exp", 1, times(1.01)), "decays added up lost": ("cumsum", 0, times(0)),
    "values 1 % less": ("linalg_solve_triangular", 0, times(0.99)),
    "keys lost": ("linalg_solve_triangular", 1, times(0)), "state detached": ("matmul", 7, times(0)),
    "sign of a row of scores": ("matmul", 1, without_middle), "norm of keys lost": ("rsqrt", 1, times(0)),
    "gate lost": ("silu", 1, times(0)),
}  # fmt: skip


@functools.cache
def delta_rule() -> qgate.Model:
    """Return a layer of the gated delta rule whose states reach beyond a chunk of 64 tokens."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, mlp_only_layers=[0],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention"], use_cache=False,
    )  # fmt: skip
    module = transformers.Qwen3NextForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1)
            if name.endswith("A_log"):
                parameter.fill_(-3.0)
    return qgate.Model(module, [torch.randint(1, 96, (1, 100)) for _ in range(2)], "delta")


@share(8)
@pytest.mark.parametrize("mode", ["int8", "mxfp4", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["none", *DELTA])
def test_a_wrong_gradient_inside_of_a_delta_rule_is_red(
    name: str, mode: str, tmp_path: Path
) -> None:
    def plant_inside(network: nn.Module) -> None:
        mixer: Any = network.get_submodule("model.layers.0.linear_attn")
        right = mixer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _AtOperator(*DELTA[name]):
                return right(*args, **kwargs)

        mixer.forward = forward if name in DELTA else right

    line = first_line_of(delta_rule(), mode, plant_inside, "gradients", tmp_path)
    assert ("makes of the gradients behind it" in line) == (name in DELTA), line
