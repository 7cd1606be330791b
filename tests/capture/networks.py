"""Small networks whose blocks are called and answer in the ways that real ones do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgate import Model

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.mix(self.norm(x)).relu()


class Masked(Block):
    """As Hugging Face's: called by keyword, the mask perhaps first."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states) * attention_mask


class InTuple(Block):
    def forward(self, x: Tensor) -> Any:
        return None, super().forward(x), {"cache": 1}


class InDict(Block):
    def forward(self, x: Tensor) -> Any:
        return {"past": None, "hidden": super().forward(x), "more": x}


class Output(dict):  # type: ignore[type-arg]
    """A dictionary whose values are attributes too, like transformers' ModelOutput."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class InOutput(Block):
    def forward(self, x: Tensor) -> Any:
        return Output(last_hidden_state=super().forward(x), attentions=None)


@dataclass
class Opaque:
    hidden: Tensor


class InObject(Block):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))


class Net(nn.Module):
    """Embedding, blocks, head. `unused` runs on samples shorter than `unused_from`, or never."""

    def __init__(
        self,
        block: type[Block] = Block,
        blocks: int = 3,
        twice: bool = False,
        unused_from: int = 0,
    ) -> None:
        super().__init__()
        self.unused_from = unused_from
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, 32, bias=False)
        self.twice = twice

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if ids.shape[1] < self.unused_from:
            x = self.unused(x)
        for layer in self.layers:
            x = self._after(layer, x)
        if self.twice:
            x = self._after(self.layers[-1], x)
        return self.lm_head(x)  # type: ignore[no-any-return]

    def _after(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, Masked):
            mask = torch.ones(x.shape[-2], 1)
            return layer(attention_mask=mask, hidden_states=x, use_cache=False)  # type: ignore[no-any-return]
        output = layer(x)
        if isinstance(layer, InTuple):
            return output[1]  # type: ignore[no-any-return]
        if isinstance(layer, InDict):
            return output["hidden"]  # type: ignore[no-any-return]
        if isinstance(layer, InOutput):
            return output.last_hidden_state  # type: ignore[no-any-return]
        return output.hidden if isinstance(layer, InObject) else output  # type: ignore[no-any-return]


def model(
    block: type[Block] = Block, lengths: tuple[int, ...] = (5, 9, 9, 1), **sizes: Any
) -> Model:
    """Samples of several lengths; the same weights for every kind of block."""
    torch.manual_seed(0)
    net = Net(block, **sizes)
    draw = torch.Generator().manual_seed(1)
    return Model(net, [torch.randint(32, (1, n), generator=draw) for n in lengths], "net")
