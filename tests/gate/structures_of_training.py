"""Right models as they are written for training: checkpoints, codebooks, scaled weights."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.gate.structure_parts import WIDTH, WORDS, Attention, FeedForward
from tests.gate.structures_of_texts import OfTexts


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mixing = Attention(), FeedForward()
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), causal=True)
        return cast(Tensor, x + self.mixing(self.last_norm(x)))


class Checkpointed(OfTexts):
    """Blocks that run once more on the way back, as large models train."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(Block() for _ in range(2)), reentrant

    def mix(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Codebook(nn.Module):
    """The nearest entry of a table in place of a code, whose gradient passes straight."""

    def __init__(self, squares: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
        self.decoder = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 12))
        self.table, self.squares = nn.Embedding(16, 8), squares

    def nearest(self, codes: Tensor) -> Tensor:
        entries = self.table.weight
        if not self.squares:
            return torch.cdist(codes, entries).argmin(-1)
        distances = codes.square().sum(-1, keepdim=True) - 2 * codes @ entries.T
        return torch.argmin(distances + entries.square().sum(-1), -1)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.encoder(x)
        chosen = self.table(self.nearest(codes))
        return cast(Tensor, self.decoder(codes + (chosen - codes).detach()))


class SpectralNorms(nn.Module):
    """Weights divided by their largest singular value, which training follows in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(12, WIDTH))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.second(F.leaky_relu(self.first(x), 0.2)), 0.2)
        return cast(Tensor, self.head(x))


class EqualRate(nn.Linear):
    """A weight of variance 1, scaled when it is used."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        nn.init.normal_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        scale = 1 / math.sqrt(self.in_features)
        return F.linear(input, self.weight * scale, self.bias)


class StyledImages(nn.Module):
    """Styles that scale the weights of a convolution, another one for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(
            EqualRate(8, WIDTH), nn.LeakyReLU(0.2), EqualRate(WIDTH, WIDTH)
        )
        self.style, self.colors = EqualRate(WIDTH, 16), nn.Conv2d(8, 3, 1)
        self.kernel = nn.Parameter(torch.randn(8, 16, 3, 3))
        self.constant = nn.Parameter(torch.randn(1, 16, 4, 4))

    def forward(self, z: Tensor) -> Tensor:
        style = self.style(self.mapping(F.normalize(z, dim=-1))) + 1
        kernels = self.kernel[None] * style[:, None, :, None, None]
        size = kernels.square().sum((2, 3, 4), keepdim=True)
        kernels = (kernels * torch.rsqrt(size + 1e-8)).flatten(0, 1)
        images = self.constant.expand(len(z), -1, -1, -1).reshape(1, -1, 4, 4)
        mixed = F.conv2d(images, kernels, padding=1, groups=len(z)).view(len(z), 8, 4, 4)
        return cast(Tensor, self.colors(F.leaky_relu(mixed, 0.2)))


class Transducer(nn.Module):
    """All pairs of sounds and words, added up before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sounds, self.embed = nn.Linear(10, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.words = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, audio: Tensor, ids: Tensor) -> Tensor:
        words, _ = self.words(self.embed(ids))
        return cast(Tensor, self.head(torch.tanh(self.sounds(audio)[:, :, None] + words[:, None])))


class HyperConnections(OfTexts):
    """Several residual streams, which blocks read and write by weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(FeedForward() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.reads, self.by_token = nn.Parameter(torch.rand(2, 3)), nn.Linear(WIDTH, 3)
        self.mixes = nn.Parameter(torch.eye(3).repeat(2, 1, 1) + 0.1 * torch.randn(2, 3, 3))

    def mix(self, x: Tensor) -> Tensor:
        streams = x[:, :, None].expand(-1, -1, 3, -1)
        for block, read, mixing in zip(self.blocks, self.reads, self.mixes, strict=True):
            read = read + 0.1 * torch.tanh(self.by_token(self.norm(streams.mean(2))))
            written = block((read[..., None] * streams).sum(2))
            streams = torch.einsum("ij,btjd->btid", mixing, streams) + written[:, :, None]
        return streams.sum(2)


class SortedExperts(OfTexts):
    """Rows sorted by expert, multiplied in groups, and added up where they came from."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
        groups = rows[order // 2].split(counts)
        results = [expert(group) for expert, group in zip(self.experts, groups, strict=True)]
        weighted = torch.cat(results) * weights.flatten()[order, None]
        return x + torch.zeros_like(rows).index_add(0, order // 2, weighted).view_as(x)


class PatchesInTexts(nn.Module):
    """Patches of an image in the places of a word that stands for them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.embed = nn.Conv2d(3, WIDTH, 8, 8), nn.Embedding(WORDS, WIDTH)
        self.attention, self.mixing, self.head = Attention(), FeedForward(), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        x, places = self.embed(input_ids), (input_ids == 0)[..., None]
        patches = self.patches(pixel_values).flatten(2).mT.reshape(-1, WIDTH)
        x = x.masked_scatter(places.expand_as(x), patches.to(x.dtype))
        x = x + self.attention(x)
        return cast(Tensor, self.head(x + self.mixing(x)))


class ScaleOfTheLayerBefore(nn.Module):
    """A fault: layers behind checkpoints share a scale, which the last one that ran has set."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(FeedForward() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        self.scale = torch.ones_like(x[0, 0, 0])
        for layer in self.layers:
            x = checkpoint(self._scaled, layer, x, use_reentrant=False)
        return cast(Tensor, self.head(x))

    def _scaled(self, layer: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = x + layer(x) * self.scale
        self.scale = y.detach().abs().amax()
        return y
