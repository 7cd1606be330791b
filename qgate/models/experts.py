"""Experts of a mixture: fused in 3-D weights, or one module each, called with aligned tokens.

A fused weight is (experts, out, in), as transformers and GPT-OSS store it; nothing calls the layer
of a single expert, so that no mode can name it. `slice_experts` puts in its place one linear layer
per expert, whose weight is a slice of the same storage.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

Gate = Callable[[Tensor], Tensor]


def top_experts(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return weights, which add up to 1, and numbers of each token's experts: (…, count)."""
    weights, chosen = torch.softmax(logits.float(), -1).topk(count, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen


class FusedExperts(nn.Module):
    """Experts in two 3-D weights; each multiplies the tokens that the router sends to it."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows, result = hidden.flatten(0, -2), torch.zeros_like(hidden.flatten(0, -2))
        chosen, weights = chosen.flatten(0, -2), weights.flatten(0, -2)
        for expert, (gate_up, down) in enumerate(
            zip(self.gate_up_proj, self.down_proj, strict=True)
        ):
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            part = linear(self._apply_gate(linear(rows[token], gate_up)), down)
            result = result.index_add(0, token, part * weights[token, rank, None])
        return result.view_as(hidden)


class FusedExpert(nn.Module):
    """One expert whose gate and up projection are one layer; `gate` joins their outputs."""

    def __init__(self, gate_up: nn.Linear, down: nn.Linear, gate: Gate) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self._gate = gate_up, down, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._gate(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class ListedExpert(nn.Module):
    """One expert with a layer for each of gate, up and down, as in Mixtral."""

    def __init__(self, gate_up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        gate, up = gate_up.weight.detach().chunk(2, 0)
        self.gate_proj, self.up_proj, self.down_proj = _layer(gate), _layer(up), down

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Routing(nn.Module):
    """Spread the weights of the chosen experts over all of them; 0 for those not chosen."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, weights: Tensor, chosen: Tensor) -> Tensor:
        return weights.new_zeros(*chosen.shape[:-1], self.experts).scatter(-1, chosen, weights)


class AlignedExperts(nn.Module):
    """Experts as modules of their own, each called with all tokens, those of others being zero.

    So a site has the same shape whatever the router chooses: tensors of a quantized model and of
    its reference can be compared token by token, and a sample alone equals the same in a batch.
    """

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.routing = Routing(len(experts))
        self.count = len(experts)
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        routed = self.routing(weights, chosen)
        result = torch.zeros_like(hidden)
        for number in range(self.count):
            own = routed[..., number, None]
            expert: Any = getattr(self, str(number))
            part = expert(torch.where(own != 0, hidden, 0)) * own
            # Routers of transformers may weight in float32 where the rest is in 16 bits.
            result = result + part.to(result.dtype)
        return result


def slice_experts(network: nn.Module, *, listed: bool = False) -> list[str]:
    """Replace fused experts by modules around slices of their weights, and name where.

    `listed` gives gate and up a layer each, else they stay one layer. Fused experts of transformers
    are replaced where the slices compute the same.
    """
    names = [name for name, module in network.named_modules() if _is_fused(module)]
    replaced = []
    for name in names:
        fused: Any = network.get_submodule(name)
        aligned = AlignedExperts(_experts_of(fused, listed))
        if not isinstance(fused, FusedExperts) and not _agrees(fused, aligned):
            continue
        # What is left of it applies the gate.
        for parameter in list(fused._parameters):
            del fused._parameters[parameter]
        network.set_submodule(name, aligned)
        replaced.append(name)
    return replaced


def _is_fused(module: nn.Module) -> bool:
    """Tell if a module has gate and up of all experts in one 3-D weight, and down in another."""
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return (
        all(weight is not None and weight.dim() == 3 for weight in weights)
        and hasattr(module, "_apply_gate")
        and getattr(module, "has_gate", True)
        and not getattr(module, "has_post_expert_norm", False)
    )


def _experts_of(fused: Any, listed: bool) -> list[nn.Module]:
    turned = getattr(fused, "is_transposed", False)
    layers = [
        [
            _layer(weight.T if turned else weight, None if biases is None else biases[expert])
            for expert, weight in enumerate(getattr(fused, name).detach())
        ]
        for name in ("gate_up_proj", "down_proj")
        for biases in [fused._parameters.get(f"{name}_bias")]
    ]
    pairs = zip(*layers, strict=True)
    if listed:
        return [ListedExpert(gate_up, down) for gate_up, down in pairs]
    return [FusedExpert(gate_up, down, fused._apply_gate) for gate_up, down in pairs]


def _agrees(fused: nn.Module, aligned: AlignedExperts) -> bool:
    """Tell if slices give what fused experts give for a few random tokens."""
    down: Any = getattr(aligned, "0").down_proj
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * aligned.count, down.out_features, generator=draw).to(down.weight)
    chosen = torch.arange(len(x), device=x.device)[:, None] % aligned.count
    weights = torch.rand(len(x), 1, generator=draw).to(x)
    try:
        with torch.no_grad():
            expected, actual = fused(x, chosen, weights), aligned(x, chosen, weights)
    except (RuntimeError, TypeError, IndexError):
        return False
    return bool((actual - expected).norm() <= 1e-4 * expected.norm())


def _layer(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer around a weight, which stays in the storage it is in."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach())
    return layer


def mixtures_of(root: nn.Module) -> list[str]:
    """Return the names of modules whose experts are modules of their own."""
    names = [name for name, m in root.named_modules() if isinstance(m, AlignedExperts)]
    return [name.rpartition(".")[0] for name in names]


def chooses(network: nn.Module) -> bool:
    """Tell if code of a module chooses the largest or least numbers, as routers of one's own do."""
    return _calls_any(network, _CHOOSING)


def makes_integers(network: nn.Module) -> bool:
    """Tell if code of a module may make integers of what it computes, as look-ups do."""
    return _calls_any(network, _CHOOSING | _MAKING_INTEGERS)


def _calls_any(network: nn.Module, names: frozenset[str]) -> bool:
    """Tell if code of a module has one of some names.

    Methods that a forward calls are looked through, and functions of the same file.
    """
    looked: set[CodeType] = set()
    for kind in {type(module) for module in network.modules()}:
        waiting: list[Any] = [kind.forward]
        while waiting:
            function = waiting.pop()
            code = getattr(function, "__code__", None)
            if not isinstance(code, CodeType) or code in looked:
                continue
            if not names.isdisjoint(code.co_names):
                return True
            looked.add(code)
            of_file = function.__globals__
            called = [vars(kind).get(name, of_file.get(name)) for name in code.co_names]
            waiting += [of for of in called if getattr(of, "__module__", "") == kind.__module__]
    return False


_CHOOSING = frozenset(("topk", "argmax", "argmin", "max", "min"))
_MAKING_INTEGERS = frozenset(("long", "int", "int64", "bucketize", "searchsorted"))


def routers_of(root: nn.Module) -> list[str]:
    """Return the names of modules that may choose experts: with a matrix and code of their own."""
    return [name for name, module in root.named_modules() if _may_route(module)]


def _may_route(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    is_plain = isinstance(module, nn.Linear | nn.Embedding)
    return weight is not None and weight.dim() == 2 and not is_plain
