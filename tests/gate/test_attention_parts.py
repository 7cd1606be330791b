"""Faults of scores, masks and probabilities of attention are red in 4, 8 and 16 bits, and named."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qgate
from tests.campaigns.first_lines.planting import MODES, after, first_line_of, times
from tests.gate.attention_models import GROUPS, HEADS, Parts, attention_model, planted
from tests.shares import share, slow_file

pytestmark = slow_file

MODELS: dict[str, dict[str, Any]] = {
    "plain": {}, "capped": {"cap": 5.0}, "sinks": {"has_sinks": True, "window": 8},
}  # fmt: skip
Change = Callable[[Tensor], Tensor]


def at_head(head: int, change: Change) -> Change:
    def changed(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, head] = change(y[:, head])
        return y

    return changed


def at_row(row: int, change: Change) -> Change:
    def changed(x: Tensor) -> Tensor:
        y = x.clone()
        y[..., row : row + 1, :] = change(y[..., row : row + 1, :])
        return y

    return changed


def tiled(x: Tensor) -> Tensor:
    """Repeat keys of groups one after the other, not each for its queries."""
    return x[:, :: HEADS // GROUPS].repeat(1, HEADS // GROUPS, 1, 1)


def in_fp8(p: Tensor) -> Tensor:
    return p.to(torch.float8_e4m3fn).to(p.dtype)


def in_fp8_at_448(p: Tensor) -> Tensor:
    return in_fp8(448 * p) / 448


def without_sum(scores: Tensor, dim: int) -> Tensor:
    return (scores - scores.amax(dim, keepdim=True)).exp()


FAULTS: list[tuple[str, str, Parts, str]] = [
    ("plain", "scale 0.3 %", {"scores": lambda s: 1.003 * s}, "scores of the softmax are 1.003 times"),
    ("plain", "P in FP8", {"p": in_fp8}, "float8_e4m3fn"),
    ("plain", "P in FP8 at 448", {"p": in_fp8_at_448}, "float8_e4m3fn, 1 at 448"),
    ("plain", "P in INT8", {"p": lambda p: (127 * p).round() / 127}, "steps of 1/127"),
    ("plain", "scores cut off", {"scores": lambda s: s.clamp(-3, 3)}, "scores of the softmax are cut off at 3"),
    ("plain", "no sum", {"softmax": without_sum}, "not divided by its sum"),
    ("plain", "small P", {"p": lambda p: p.where(p >= 1e-3, 0.0)}, "tokens .* are wrong"),  # the place alone
    ("plain", "head of zeros", {"p": at_head(2, torch.zeros_like)}, "head 2 of 4|channels 32 to 47"),
    ("plain", "head 2 % off", {"scores": at_head(2, lambda s: 1.02 * s)}, "channels 32 to 47"),
    ("plain", "query 2 % off", {"q": at_row(2, lambda q: 1.1 * q)}, "(token|row) 2|1.1 times"),
    ("plain", "keys of other groups", {"k": tiled}, "channels 16 to 47|k_proj"),
    ("plain", "mask late", {"seen": lambda m: torch.ones_like(m).tril(1)}, "mask shows one key more"),
    ("plain", "dropped at random", {"p": lambda p: torch.nn.functional.dropout(p, 0.1)}, "other values when it runs again"),
    ("plain", "capped", {"scores": lambda s: 10 * torch.tanh(s / 10)}, "capped at 10 by tanh"),
    ("capped", "no cap", {"cap": lambda _: 1e6}, "tanh is left out"),
    ("capped", "cap 2 % off", {"cap": lambda c: 1.02 * c}, r"bound of tanh \(a soft cap\) is 1.02 times"),
    ("sinks", "sinks of other heads", {"sinks": lambda s: s.roll(1)}, "sinks is read one entry"),
    ("sinks", "no sinks", {"sinks": lambda s: s - torch.inf}, "left out of the softmax"),
    ("sinks", "sinks 2 % off", {"sinks": lambda s: 1.02 * s}, "sinks"),
    ("sinks", "window of 9", {"seen": lambda m: torch.ones_like(m).tril().triu(-8)}, "window shows one earlier key more"),
    ("sinks", "window of 12", {"seen": lambda m: torch.ones_like(m).tril().triu(-11)}, "window shows 4 earlier keys more"),
    ("sinks", "no window", {"seen": lambda m: torch.ones_like(m).tril()}, "the window is not applied"),
]  # fmt: skip


def wide(side: Tensor) -> Tensor:
    return side.float()


def by_tiles(scores: Tensor, dim: int) -> Tensor:
    """Divide what tiles of keys give by the sum of all, in another order."""
    top = scores.amax(dim, keepdim=True)
    parts = [(part - top).exp() for part in scores.split(8, dim)]
    total = sum((part.sum(dim, keepdim=True) for part in parts), torch.zeros(()))
    return torch.cat(parts, dim) / total


RIGHT: dict[str, Parts] = {
    "none": {}, "scores in float32": {"q": wide, "k": wide},
    "all in float32": {"q": wide, "k": wide, "v": wide}, "softmax by tiles": {"softmax": by_tiles},
}  # fmt: skip


@functools.cache
def model(name: str) -> qgate.Model:
    return attention_model(**MODELS[name])


@share(20)
@pytest.mark.parametrize("mode", [*MODES.values(), "fp16"])
@pytest.mark.parametrize(
    ("name", "fault", "parts", "words"), FAULTS, ids=[fault for _, fault, _, _ in FAULTS]
)
def test_a_fault_in_a_part_of_attention_is_named(
    name: str, fault: str, parts: Parts, words: str, mode: str, tmp_path: Path
) -> None:
    line = first_line_of(model(name), mode, planted(parts), "forward", tmp_path)
    assert line.startswith("layers.1.attention.o_proj:input "), f"{fault}: {line}"
    assert re.search(words, line), line


@share(8)
@pytest.mark.parametrize("mode", [*MODES.values(), "fp16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("right", RIGHT)
def test_right_attention_is_green(right: str, name: str, mode: str, tmp_path: Path) -> None:
    for suite in ("forward", "gradients"):
        assert first_line_of(model(name), mode, planted(RIGHT[right]), suite, tmp_path) == ""


class TorchAttention(nn.Module):
    """Torch's own attention, which computes in another way where its parts are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(64), nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        hidden = torch.ones(2 * x.shape[1:2], dtype=torch.bool).triu(1)
        q = h if self.factor == 1 else self.factor * h  # one product makes all where q is k is v
        y, _ = self.attention(q, h, h, attn_mask=hidden, need_weights=False)
        x = x + y
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class TorchNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 64)
        self.layers = nn.ModuleList(TorchAttention() for _ in range(3))
        self.head = nn.Linear(64, 97)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("mode", ["bf16", "fp16", "int8"])
def test_attention_of_torch_is_green_and_its_scale_is_held(mode: str, tmp_path: Path) -> None:
    def plant(network: nn.Module) -> None:
        network.get_submodule("layers.1").factor = 1.003

    torch.manual_seed(0)
    network = TorchNetwork()
    tokens = [torch.randint(97, (2, 40)) for _ in range(4)]
    model = qgate.Model(network, tokens[:3], name="torch", calibration=tokens[3:])
    assert first_line_of(model, mode, lambda _: None, "forward", tmp_path) == ""
    line = first_line_of(model, mode, plant, "forward", tmp_path)
    assert line.startswith("layers.1.attention"), line
    assert "1.003 times" in line
    channel = after("layers.1.attention", times(1.02, slice(5, 6)))
    line = first_line_of(model, mode, channel, "forward", tmp_path)
    assert "channel 5 of 64" in line
    assert "1.02 times" in line
