"""Right models of images, graphs and fields, two kinds of inputs at once among them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gate.structure_parts import WIDTH, WORDS, Attention, FeedForward


class Diffusion(nn.Module):
    """A transformer of image patches that a time step scales, shifts and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(4, WIDTH, 2, 2), nn.Linear(WIDTH, 16)
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH, elementwise_affine=False),
                    "attention": Attention(),
                    "last_norm": nn.LayerNorm(WIDTH, elementwise_affine=False),
                    "mixing": FeedForward(),
                    "factors": nn.Linear(WIDTH, 6 * WIDTH),
                }
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = torch.exp(-torch.arange(8) / 2.0) * t[:, None]
        time = self.time(torch.cat([waves.sin(), waves.cos()], 1).to(self.head.weight.dtype))
        h = self.patches(x).flatten(2).mT
        for entry in self.blocks:
            block = cast(nn.ModuleDict, entry)
            factors = block["factors"](F.silu(time))[:, None].chunk(6, -1)
            shift, scale, gate, last_shift, last_scale, last_gate = factors
            h = h + gate * block["attention"](block["norm"](h) * (1 + scale) + shift)
            y = block["last_norm"](h) * (1 + last_scale) + last_shift
            h = h + last_gate * block["mixing"](y)
        side = int(h.shape[1] ** 0.5)
        return F.pixel_shuffle(self.head(h).mT.unflatten(-1, (side, side)), 2)


class TwoTowers(nn.Module):
    """A tower of images and one of texts, and the products of all their pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.image_tower = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, WIDTH, 3, 2, 1),
        )  # fmt: skip
        self.embed, self.attention = nn.Embedding(WORDS, WIDTH), Attention()
        self.of_images, self.of_texts = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        pooled = self.image_tower(pixel_values).mean((2, 3))
        images = F.normalize(self.of_images(pooled), dim=-1)
        words = self.embed(input_ids)
        texts = F.normalize(self.of_texts((words + self.attention(words)).mean(1)), dim=-1)
        logits = self.scale.exp() * images @ texts.T
        return {
            "logits_per_image": logits, "logits_per_text": logits.T, "image_embeds": images
        }  # fmt: skip


class Residual(nn.Module):
    """Convolutions with batch norms that were trained, and grouped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
                nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1, groups=4),
                nn.BatchNorm2d(16),
            )
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(16, 10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                cast(Tensor, module.running_mean).normal_(0, 0.1)
                cast(Tensor, module.running_var).uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for layer in self.layers:
            x = F.relu_(x + layer(x))
        return cast(Tensor, self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class Vocoder(nn.Module):
    """Transposed convolutions that make a wave from the bands of a spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(20, 32, 7, padding=3), nn.Conv1d(8, 1, 7, padding=3)
        self.up = nn.ModuleList(
            [nn.ConvTranspose1d(32, 16, 8, 4, 2), nn.ConvTranspose1d(16, 8, 4, 2, 1)]
        )
        self.mixing = nn.ModuleList(
            [nn.Conv1d(16, 16, 3, dilation=3, padding=3), nn.Conv1d(8, 8, 3, padding=1)]
        )

    def forward(self, bands: Tensor) -> Tensor:
        x = self.first(bands)
        for up, mixing in zip(self.up, self.mixing, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = x + mixing(F.leaky_relu(x, 0.1))
        return torch.tanh(self.last(F.leaky_relu(x)))


class Graph(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"message": nn.Linear(2 * WIDTH, WIDTH), "merging": nn.Linear(2 * WIDTH, WIDTH)}
            )
            for _ in range(2)
        )

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.embed(nodes)
        start, end = edges
        for entry in self.layers:
            layer = cast(nn.ModuleDict, entry)
            messages = F.relu(layer["message"](torch.cat([h[start], h[end]], -1)))
            sums = torch.zeros_like(h).index_add_(0, end, messages)
            h = h + F.relu(layer["merging"](torch.cat([h, sums], -1)))
        return cast(Tensor, self.head(h))


class FourierOperator(nn.Module):
    """Products of the low frequencies with complex weights, beside a convolution."""

    kept = 8

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, self.kept, dtype=torch.cfloat) / WIDTH)
            for _ in range(2)
        )
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).mT
        for weight, conv in zip(self.weights, self.convs, strict=True):
            waves = torch.fft.rfft(h.float())
            low = torch.einsum("bik,iok->bok", waves[..., : self.kept], weight)
            padded = F.pad(low, (0, waves.shape[-1] - self.kept))
            h = F.gelu(torch.fft.irfft(padded, n=h.shape[-1]).to(h.dtype) + conv(h))
        return cast(Tensor, self.head(h.mT))


class Perceiver(nn.Module):
    """A few learned points that read many inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(6, WIDTH))
        self.embed, self.head = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 5)
        self.across, self.layers = Attention(), nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        points = self.points.expand(len(x), -1, -1)
        points = points + self.across(points, self.embed(x))
        for layer in self.layers:
            points = points + layer(points)
        return cast(Tensor, self.head(points.mean(1)))


class Segmentation(nn.Module):
    """Images that go down and are interpolated up again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.norm, self.narrow = nn.GroupNorm(4, 32), nn.Conv2d(32, 16, 1)
        self.head = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.first(x))
        low = self.narrow(F.silu(self.norm(self.second(skip))))
        up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        joined = self.head(torch.cat([skip, up], 1))
        return F.interpolate(joined, size=x.shape[-2:], mode="nearest")
