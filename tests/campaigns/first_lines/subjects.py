"""Five small models of a user, with random weights: what faults of first lines are planted in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import qgate

_SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
_DECODER = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 320}


def _texts(count: int = 2, tokens: int = 48) -> list[Tensor]:
    return [torch.randint(1, 96, (1, tokens)) for _ in range(count)]


def _enlarged(module: nn.Module) -> nn.Module:
    """Give random weights a size at which attention and gates matter, as trained ones have."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(
                0.1 * torch.randn_like(parameter)
            )
    return module.eval()


def _decoder() -> qgate.Model:
    """Return a decoder of grouped queries, whose head is its embedding."""
    config = transformers.Qwen3Config(
        **_SIZES, **_DECODER, intermediate_size=96, tie_word_embeddings=True
    )
    module = _enlarged(transformers.Qwen3ForCausalLM(config))
    texts = _texts()
    return qgate.Model(module, texts, "decoder", calibration=texts)


def _mamba() -> qgate.Model:
    config = transformers.MambaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8, time_step_rank=4,
        use_mambapy=False, use_cache=False,
    )  # fmt: skip
    module = _enlarged(transformers.MambaForCausalLM(config))
    texts = _texts()
    return qgate.Model(module, texts, "mamba", calibration=texts)


def _mixture() -> qgate.Model:
    config = transformers.Qwen3MoeConfig(
        **_SIZES, **_DECODER, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
        intermediate_size=96, norm_topk_prob=True,
    )  # fmt: skip
    module = _enlarged(transformers.Qwen3MoeForCausalLM(config))
    texts = _texts()
    return qgate.Model(module, texts, "mixture", calibration=texts)


def _encoder() -> qgate.Model:
    """Return an encoder of padded batches."""
    config = transformers.BertConfig(
        **_SIZES, intermediate_size=96, max_position_embeddings=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = _enlarged(transformers.BertModel(config))
    mask = (torch.arange(24) < torch.tensor([24, 17, 9])[:, None]).long()
    samples = [
        {"input_ids": torch.randint(1, 96, (3, 24)), "attention_mask": mask} for _ in range(2)
    ]
    return qgate.Model(module, samples, "encoder", calibration=samples)


class Block(nn.Module):
    """Two convolutions behind group norms, a shift by the time, and a shortcut."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.shortcut = nn.Linear(32, out), nn.Conv2d(channels, out, 1)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(self.act(self.norm1(x)))
        hidden = hidden + self.time(self.act(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.act(self.norm2(hidden)))  # type: ignore[no-any-return]


class PixelAttention(nn.Module):
    """Attention of all pixels to all, in two heads."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)
        self.scale = 1 / math.sqrt(channels // 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.flatten(2).unflatten(1, (2, -1)) for y in self.qkv(self.norm(x)).chunk(3, 1))
        weights = (q.mT @ k * self.scale).softmax(-1)
        mixed: Tensor = self.out((v @ weights.mT).flatten(1, 2).unflatten(-1, x.shape[2:]))
        return x + mixed


class UNet(nn.Module):
    """One step down and one up, with attention at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(16, 32)
        self.first, self.smaller = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, padding=1)
        self.blocks = nn.ModuleList([Block(16, 16), Block(24, 8)])
        self.attention, self.larger = PixelAttention(16), nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.norm, self.last = nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        angles = step[:, None] * torch.exp(-torch.arange(8) / 2.0)
        waves = torch.cat([angles.sin(), angles.cos()], 1).to(self.time.weight.dtype)
        time, large = self.time(waves), self.first(image)
        small = self.attention(self.blocks[0](self.smaller(large), time))
        x = self.blocks[1](torch.cat([self.larger(small), large], 1), time)
        return self.last(functional.silu(self.norm(x)))  # type: ignore[no-any-return]


def _unet() -> qgate.Model:
    samples = [
        {"image": torch.randn(2, 3, 10, 10), "step": torch.tensor([1.0, 17.0])} for _ in range(2)
    ]
    return qgate.Model(UNet().eval(), samples, "unet", calibration=samples)


BUILDERS: dict[str, Callable[[], qgate.Model]] = {
    "decoder": _decoder, "mamba": _mamba, "mixture": _mixture, "unet": _unet, "encoder": _encoder,
}  # fmt: skip


@functools.cache
def subject(name: str) -> qgate.Model:
    """Return a model, which all faults in it share: they are planted in copies."""
    torch.manual_seed(0)
    return BUILDERS[name]()
