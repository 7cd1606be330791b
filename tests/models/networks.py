"""Small models of every kind that a gate meets, with random weights and seeded samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qgate import Model


class ConvNet(nn.Module):
    """Two convolutions with batch norm and a classifier, none of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.classifier(x.mean((2, 3)))


class Residual(nn.Module):
    """A residual block of two convolutions that writes in place, as those of torchvision."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        out = channels * stride
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        shortcut = [nn.Conv2d(channels, out, 1, stride=stride), nn.BatchNorm2d(out)]
        self.downsample = nn.Sequential(*shortcut) if stride > 1 else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """Stages of residual blocks, each a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(16), Residual(16))
        self.layer2 = nn.Sequential(Residual(16, 2), Residual(32))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.conv1(x))).mean((2, 3)))


class Mixed(nn.Module):
    """A depthwise separable block with squeeze and excitation, as those of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(16, 32, 1, bias=False)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project = nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.silu(self.depthwise(nn.functional.silu(self.expand(x))))
        weight = torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        return x + self.project(y * torch.sigmoid(self.excite(weight)))


class MixedNet(nn.Module):
    """A stem and blocks in one sequence, of more than one class."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.blocks = nn.Sequential(stem, *(Mixed() for _ in range(3)))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


class Tagger(nn.Module):
    """An embedding, two LSTM layers and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.out = nn.Linear(64, 7)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return self.out(hidden)


class Attending(nn.Module):
    """An encoder of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Decoding(nn.Module):
    """A decoder of torch's own layers, which attends to what a linear layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(32, 32)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(32, 4, 64, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


def flat() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


class Upsampling(nn.Module):
    """Convolutions over one, two and three axes, transposed ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(8, 16, 3, padding="same", dilation=2)
        self.up = nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1, groups=2)
        self.wide = nn.Conv3d(2, 8, (1, 3, 3), padding_mode="circular", padding=(0, 1, 1))
        self.out = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.down(x)))
        x = self.wide(x.reshape(len(x), 2, 1, 4, -1))
        return self.out(x[:, :, 0])


class Tied(nn.Module):
    """Two layers of one weight, one that nothing calls, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.idle, self.twice = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.twice(torch.relu(self.twice(x)))


def images(rows: int = 4, size: int = 16, count: int = 3) -> list[Tensor]:
    return [_drawn(seed, rows, 3, size, size) for seed in range(count)]


def ids(rows: int, length: int = 24, count: int = 3, top: int = 100) -> list[Tensor]:
    return [
        torch.randint(0, top, (rows, length), generator=torch.Generator().manual_seed(seed))
        for seed in range(count)
    ]


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


_MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "convnet": (ConvNet, images),
    "resnet": (ResNet, images),
    "mixed": (MixedNet, images),
    "flat": (flat, lambda: [_drawn(seed, 8, 64) for seed in range(3)]),
    "tagger": (Tagger, lambda: ids(4)),
    "attending": (Attending, lambda: [_drawn(seed, 2, 16, 32) for seed in range(3)]),
    "decoding": (Decoding, lambda: [_drawn(seed, 2, 16, 32) for seed in range(3)]),
    "tied": (Tied, lambda: [_drawn(seed, 6, 32) for seed in range(2)]),
    "upsampling": (Upsampling, lambda: [_drawn(seed, 2, 8, 12) for seed in range(2)]),
}
NAMES = tuple(_MODULES)


def network(name: str, **more: Any) -> Model:
    """Return a model by name, the same every time."""
    torch.manual_seed(0)
    build, samples = _MODULES[name]
    module = build()
    # Statistics as after training: those of new layers are 0 and 1.
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 2)
    return Model(module, samples(), name, **more)
