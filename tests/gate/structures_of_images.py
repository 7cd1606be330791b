"""Right models of images, sounds and volumes, each of another structure."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.gate.structure_parts import WIDTH, Attention, FeedForward


class ShiftedWindows(nn.Module):
    """Attention in windows of an image, shifted in every second block, with a table of biases."""

    side, heads = 4, 4

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)]
            )
            for _ in range(2)
        )
        self.tables = nn.ParameterList(
            nn.Parameter(torch.randn((2 * self.side - 1) ** 2, self.heads)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 10)
        rows, columns = torch.meshgrid(
            torch.arange(self.side), torch.arange(self.side), indexing="ij"
        )
        across, along = (
            x.flatten()[:, None] - x.flatten() + self.side - 1 for x in (rows, columns)
        )
        self.register_buffer("places", across * (2 * self.side - 1) + along)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).permute(0, 2, 3, 1)
        for number, (block, table) in enumerate(zip(self.blocks, self.tables, strict=True)):
            norm, joined, out = cast(nn.ModuleList, block)
            shift = number * self.side // 2
            x = x + out(self._attend(joined(norm(x)), table, shift))
        return cast(Tensor, self.head(x.mean((1, 2))))

    def _attend(self, joined: Tensor, table: Tensor, shift: int) -> Tensor:
        size, side = joined.shape[1], self.side
        area = (torch.arange(size) + shift) // side
        areas = (area[:, None] * size + area).roll((-shift, -shift), (0, 1))
        joined = joined.roll((-shift, -shift), (1, 2))
        windows = self._cut(joined)
        query, key, value = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in windows.chunk(3, -1)
        )
        bias = table[self.get_buffer("places")].permute(2, 0, 1)
        scores = query @ key.mT / query.shape[-1] ** 0.5 + bias
        if shift:
            of_windows = self._cut(areas[None, :, :, None])[..., 0]
            other = of_windows[:, None] != of_windows[:, :, None]
            hidden = other.repeat(len(joined), 1, 1)[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        count = size // side
        whole = mixed.view(-1, count, count, side, side, mixed.shape[-1]).transpose(2, 3)
        return whole.flatten(1, 2).flatten(2, 3).roll((shift, shift), (1, 2))

    def _cut(self, x: Tensor) -> Tensor:
        count = x.shape[1] // self.side
        parts = x.view(len(x), count, self.side, count, self.side, -1).transpose(2, 3)
        return parts.flatten(3, 4).flatten(0, 2)


class ConvNext(nn.Module):
    """Depthwise convolutions, norms of channels that come last, and scales of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, 2)
        self.depthwise = nn.ModuleList(
            nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixing = nn.ModuleList(FeedForward() for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 0.3)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        parts = zip(self.depthwise, self.norms, self.mixing, self.scales, strict=True)
        for depthwise, norm, mixing, scale in parts:
            y = mixing(norm(depthwise(x).permute(0, 2, 3, 1))) * scale
            x = x + y.permute(0, 3, 1, 2)
        return cast(Tensor, self.head(x.mean((2, 3))))


class SqueezedMobile(nn.Module):
    """Inverted bottlenecks with gates of channels, of hard and smooth swish."""

    def __init__(self, hard: bool = True) -> None:
        super().__init__()
        self.hard = hard
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "widen": nn.Conv2d(16, 32, 1, bias=False),
                    "norm": nn.BatchNorm2d(32),
                    "depthwise": nn.Conv2d(32, 32, 3, padding=1, groups=32),
                    "squeeze": nn.Conv2d(32, 8, 1),
                    "excite": nn.Conv2d(8, 32, 1),
                    "narrow": nn.Conv2d(32, 16, 1),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        swish, gate = (F.hardswish, F.hardsigmoid) if self.hard else (F.silu, torch.sigmoid)
        x = swish(self.stem(images))
        for entry in self.blocks:
            block = cast(nn.ModuleDict, entry)
            y = swish(block["norm"](block["widen"](x)))
            y = swish(block["depthwise"](y))
            pooled = F.adaptive_avg_pool2d(y, 1)
            y = y * gate(block["excite"](F.relu(block["squeeze"](pooled))))
            x = x + block["narrow"](y)
        return cast(Tensor, self.head(x.mean((2, 3))))


class VolumeUnet(nn.Module):
    """Convolutions of volumes that go down and up again, joined with what they left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 16, 3, 2, 1)
        self.norm = nn.InstanceNorm3d(16, affine=True)
        self.up = nn.ConvTranspose3d(16, 8, 2, 2)
        self.last = nn.Conv3d(16, 2, 3, padding=1)

    def forward(self, volumes: Tensor) -> Tensor:
        skip = F.leaky_relu(self.first(volumes), 0.01)
        low = F.leaky_relu(self.norm(self.down(skip)), 0.01)
        return cast(Tensor, self.last(torch.cat([skip, self.up(low)], 1)))


class SpeechEncoder(nn.Module):
    """Strided convolutions of a wave, and positions by one of a normalized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv1d(1, 16, 10, 5, bias=False), nn.Conv1d(16, WIDTH, 3, 2, bias=False)]
        )
        self.group_norm, self.norm = nn.GroupNorm(16, 16), nn.LayerNorm(WIDTH)
        self.positions = parametrizations.weight_norm(
            nn.Conv1d(WIDTH, WIDTH, 7, padding=3, groups=4), dim=2
        )
        self.attention, self.mixing = Attention(), FeedForward()
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, waves: Tensor) -> Tensor:
        x = F.gelu(self.group_norm(self.convs[0](waves[:, None])))
        x = F.gelu(self.convs[1](x))
        x = x + F.gelu(self.positions(x)[..., : x.shape[-1]])
        x = self.norm(x.mT)
        x = x + self.attention(x)
        return cast(Tensor, self.head(x + self.mixing(x)))


class CausalConvolutions(nn.Module):
    """Dilated convolutions that are padded on the left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(5, 16, 1)
        self.layers = nn.ModuleList(nn.Conv1d(16, 32, 3, dilation=2**k) for k in range(3))
        self.out = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3))
        self.head = nn.Conv1d(16, 4, 1)

    def forward(self, series: Tensor) -> Tensor:
        x = self.first(series)
        total = torch.zeros_like(x)
        for number, (layer, out) in enumerate(zip(self.layers, self.out, strict=True)):
            value, gate = layer(F.pad(x, (2 * 2**number, 0))).chunk(2, 1)
            y = out(torch.tanh(value) * torch.sigmoid(gate))
            total = total + y
            x = x + y
        return cast(Tensor, self.head(F.relu(total)))


class Variational(nn.Module):
    """An autoencoder that returns the image, means and variances, and draws nothing in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1))
        self.moments = nn.Linear(256, 16)
        self.widen = nn.Linear(8, 256)
        self.decoder = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 3, padding=1), nn.SiLU(),
            nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.moments(self.encoder(images).flatten(1)).chunk(2, -1)
        latent = mean
        if self.training:
            latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(self.widen(latent).view(-1, 16, 4, 4)), mean, log_variance


class StandardizedConv2d(nn.Conv2d):
    """Standardize a filter at each call."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class StandardizedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [StandardizedConv2d(3, 16, 3, padding=1), StandardizedConv2d(16, 16, 3, padding=1)]
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return cast(Tensor, self.head(x.mean((2, 3))))


class Detector(nn.Module):
    """A decoder of learned queries over an image, with heads of classes and boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.places = nn.Parameter(torch.randn(16, WIDTH))
        self.queries = nn.Parameter(torch.randn(5, WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [Attention(), nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), FeedForward()]
            )
            for _ in range(2)
        )
        self.classes, self.boxes = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        memory = self.stem(images).flatten(2).mT + self.places
        x = self.queries.expand(len(images), -1, -1)
        for layer in self.layers:
            own, first, across, second, mixing = cast(nn.ModuleList, layer)
            x = first(x + own(x))
            x = second(x + across(x, memory))
            x = x + mixing(x)
        return {"logits": self.classes(x), "pred_boxes": self.boxes(x).sigmoid()}


class SharedTower(nn.Module):
    """One tower of two images, and their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 16),
        )  # fmt: skip

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.tower(left) - self.tower(right)).square().sum(-1).sqrt()
