"""A served mixture of experts: tokens sorted by expert, one grouped product, and its defects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import qgate
from qgate.models import Model

Weights = Callable[[Tensor], Tensor]


@dataclass
class Defects:
    """What is wrong with a kernel; the defaults are a right one."""

    renormalized: bool = True
    order: tuple[int, ...] = ()
    exchanged: bool = False
    router: str = ""
    capacity: int = 0
    one_scale: int | None = None
    half: int | None = None
    lost_expert: int | None = None
    first_alone: bool = False
    unweighted: bool = False
    gain: tuple[int, float] | None = None
    weighted_twice: bool = False


class GroupedMixture(nn.Module):
    """Quantized fused weights (experts, out, in), and a product per group of sorted tokens."""

    def __init__(self, mixture: Any, fmt: str, defects: Defects) -> None:
        super().__init__()
        self.defects, self.fmt, self.top_k = defects, fmt, mixture.top_k
        self.router = mixture.router
        experts = [getattr(mixture.experts, str(k)) for k in range(mixture.experts.count)]
        self.gate_up = self._fused([e.gate_up_proj.weight.detach() for e in experts], halves=True)
        self.down = self._fused([e.down_proj.weight.detach() for e in experts])

    def _fused(self, weights: list[Tensor], halves: bool = False) -> Tensor:
        quantized = torch.stack([qgate.quantize(w, **self._options(0)) for w in weights])
        if self.defects.one_scale is not None:
            sizes = torch.stack([w.abs().amax() for w in weights])
            quantized *= (sizes[self.defects.one_scale] / sizes)[:, None, None]
        if self.defects.half is not None and halves:
            for weight, matrix in zip(weights, quantized, strict=True):
                sizes = [float(half.abs().amax()) for half in weight.chunk(2)]
                own = self.defects.half
                matrix.chunk(2)[own].mul_(sizes[1 - own] / sizes[own])
        if self.defects.gain is not None:
            expert, gain = self.defects.gain
            quantized[expert] *= gain**0.5
        return quantized

    def _options(self, axis: int) -> dict[str, Any]:
        if self.fmt.startswith("mx"):
            return {"fmt": self.fmt}
        return {"fmt": self.fmt, "granularity": "channel", "axis": axis}

    def forward(self, hidden: Tensor) -> Tensor:
        bad, x = self.defects, hidden.flatten(0, -2)
        logits = self.router(x)
        if bad.router:
            weight = qgate.quantize(self.router.weight, bad.router)
            logits = qgate.quantize(x, bad.router) @ weight.T
        weights, chosen = torch.softmax(logits, -1).topk(self.top_k, -1)
        if bad.renormalized:
            weights = weights / weights.sum(-1, keepdim=True)
        if bad.exchanged:
            weights = weights.flip(-1)
        if bad.weighted_twice:
            weights = weights * weights
        if bad.unweighted:
            weights = torch.ones_like(weights)
        if bad.first_alone:
            weights = weights * torch.tensor([1.0] + [0.0] * (self.top_k - 1))
        tokens = torch.arange(len(x)).repeat_interleave(self.top_k)
        order = chosen.flatten().argsort(stable=True)
        sizes = chosen.flatten().bincount(minlength=len(self.down))
        y, start = torch.zeros_like(x), 0
        for expert, size in enumerate(sizes.tolist()):
            rows = order[start : start + size]
            start += size
            if bad.lost_expert == expert:
                continue
            if bad.capacity:
                rows = rows[: bad.capacity]
            used = bad.order[expert] if bad.order else expert
            part = self._product(x[tokens[rows]], self.gate_up[used])
            gate, up = part.chunk(2, -1)
            part = self._product(silu(gate) * up, self.down[used])
            y = y.index_add(0, tokens[rows], part * weights.flatten()[rows, None])
        return y.view_as(hidden)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return qgate.quantize(x, **self._options(0)) @ weight.T if len(x) else x @ weight.T


def served(fmt: str = "fp8_e4m3", layer: int = 1, **defects: Any) -> Callable[[Model], nn.Module]:
    """Return a mode of its own with grouped products in all layers, with defects in one."""

    def build(model: Model) -> nn.Module:
        network = copy.deepcopy(model.module)
        for number, block in enumerate(network.model.layers):
            wrong = Defects(**defects) if number == layer else Defects()
            block.mlp = GroupedMixture(block.mlp, fmt, wrong)
        return network

    return build
