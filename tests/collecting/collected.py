"""Networks and loops for tests of the collector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qgate
from qgate.dumps import Dump, Record

WIDTH = 16


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.proj(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.fc2(self.act(self.fc1(x)))


class Network(nn.Module):
    """Two blocks around which nothing else happens."""

    def __init__(self, blocks: int = 2, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.around is None else self.around(layer, x)
        return self.head(x)


def network(**how: Any) -> Network:
    torch.manual_seed(0)
    return Network(**how)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x)
    return (result[0] if isinstance(result, tuple) else result).square().mean()


def train(model: nn.Module, steps: int = 3, *, passes: int = 1) -> list[float]:
    """A plain loop; the loss of each pass."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for count in range(passes):
            loss = loss_of(model, batch(step * passes + count))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def collect_step(model: nn.Module, folder: Path, x: Tensor | None = None, **how: Any) -> Any:
    """Collect a forward and a backward pass, of which nothing is missing; return its loss."""
    with qgate.collect(model, folder, **how) as collector:
        loss = loss_of(model, batch() if x is None else x)
        loss.backward()
    assert not collector.missing
    return loss


def records(folder: Path) -> list[Record]:
    return list(Dump.open(folder).records())


def found(folder: Path, **wanted: Any) -> list[tuple[Record, Tensor]]:
    """Records of which all of this is true, with their values."""
    dump = Dump.open(folder)
    return [
        (record, dump.tensor(record))
        for record in dump.records()
        if all(getattr(record, name) == value for name, value in wanted.items())
    ]


def one(folder: Path, **wanted: Any) -> Tensor:
    """The values of the only such record."""
    (only,) = found(folder, **wanted)
    return only[1]


def has_hooks(model: nn.Module) -> bool:
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules()
    )
