"""Experts of a mixture: fused in 3-D weights, or one module each, called with aligned tokens.

A fused weight is (experts, out, in), as transformers and GPT-OSS store it; nothing calls the layer
of a single expert, so that no mode can name it. `slice_experts` puts in its place one linear layer
per expert, whose weight is a slice of the same storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu


def top_experts(logits: Tensor, asked: int) -> tuple[Tensor, Tensor]:
    """Return weights and numbers (…, asked) of the experts of each token; its weights add up to 1."""
    weights, chosen = torch.softmax(logits.float(), -1).topk(asked, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen


class FusedExperts(nn.Module):
    """Experts in two 3-D weights; each multiplies the tokens that the router sends to it."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows, result = hidden.flatten(0, -2), torch.zeros_like(hidden.flatten(0, -2))
        chosen, weights = chosen.flatten(0, -2), weights.flatten(0, -2)
        for expert, (gate_up, down) in enumerate(
            zip(self.gate_up_proj, self.down_proj, strict=True)
        ):
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            gate, up = linear(rows[token], gate_up).chunk(2, -1)
            part = linear(silu(gate) * up, down) * weights[token, rank, None]
            result = result.index_add(0, token, part)
        return result.view_as(hidden)


class FusedExpert(nn.Module):
    """One expert whose gate and up projection are one layer: the gate is the first half."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = _layer(gate_up), _layer(down)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(silu(gate) * up)  # type: ignore[no-any-return]


class ListedExpert(nn.Module):
    """One expert with a layer for each of gate, up and down, as in Mixtral."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2, 0)
        self.gate_proj, self.up_proj, self.down_proj = _layer(gate), _layer(up), _layer(down)

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
            result = result + own * expert(torch.where(own != 0, hidden, 0))
        return result


def slice_experts(network: nn.Module, *, listed: bool = False) -> list[str]:
    """Replace fused experts by modules around slices of their weights, and name where.

    `listed` gives gate and up a layer each, else they stay one layer.
    """
    names = [name for name, m in network.named_modules() if isinstance(m, FusedExperts)]
    for name in names:
        fused = network.get_submodule(name)
        kind = ListedExpert if listed else FusedExpert
        pairs = zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True)  # type: ignore[arg-type]
        experts: list[nn.Module] = [kind(gate_up, down) for gate_up, down in pairs]
        network.set_submodule(name, AlignedExperts(experts))
    return names


def _layer(weight: Tensor) -> nn.Linear:
    """Return a linear layer around a weight, which stays in the storage it is in."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer
