"""A small mixture of experts: the blocks of the small Llama, with a router in front of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from qgate.models.experts import FusedExperts, top_experts
from qgate.models.llama import Llama, LlamaConfig


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """Sizes of a Llama whose `d_ff` is that of one expert; `top_k` experts answer each token."""

    experts: int = 8
    top_k: int = 2


class Mixture(nn.Module):
    """A router and its experts; the weights of a token's experts add up to one, as in Mixtral."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.d_model, config.experts, bias=False)
        self.experts = FusedExperts(config.experts, config.d_model, config.d_ff)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = top_experts(self.router(hidden), self.top_k)
        return self.experts(hidden, chosen, weights)  # type: ignore[no-any-return]


class Moe(Llama):
    """A language model: token ids (batch, tokens) to logits; the head is tied."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        for block in self.model.layers:
            block.mlp = Mixture(config)
