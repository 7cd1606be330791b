"""Right models of sets, fields and tables, and of uncommon inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gate.structure_parts import WIDTH, Attention, FeedForward


class RadianceField(nn.Module):
    """Points and directions as waves, a layer that gets its input again, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(27, 64), nn.Linear(64, 64)
        self.third = nn.Linear(64 + 27, 64)
        self.density, self.feature = nn.Linear(64, 1), nn.Linear(64, 32)
        self.color = nn.Sequential(nn.Linear(32 + 15, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        x, view = self._waves(points, 4), self._waves(directions, 2)
        h = F.relu(self.second(F.relu(self.first(x))))
        h = F.relu(self.third(torch.cat([h, x], -1)))
        color = self.color(torch.cat([self.feature(h), view], -1)).sigmoid()
        return F.softplus(self.density(h)), color

    @staticmethod
    def _waves(x: Tensor, count: int) -> Tensor:
        scaled = (x[..., None] * 2.0 ** torch.arange(count)).flatten(-2).to(x.dtype)
        return torch.cat([x, scaled.sin(), scaled.cos()], -1)


class PointCloud(nn.Module):
    """Layers of each point, and the largest value over the points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, WIDTH, 1)
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, points: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.points(points.mT).max(-1).values))


class SetTransformer(nn.Module):
    """Blocks that attend through a few learned points, and pooling by a learned seed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.induced = nn.ParameterList(nn.Parameter(torch.randn(4, WIDTH)) for _ in range(2))
        self.into = nn.ModuleList(Attention() for _ in range(2))
        self.back = nn.ModuleList(Attention() for _ in range(2))
        self.seed, self.pool = nn.Parameter(torch.randn(1, WIDTH)), Attention()
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, points: Tensor) -> Tensor:
        x = self.embed(points)
        for seeds, into, back in zip(self.induced, self.into, self.back, strict=True):
            x = x + back(x, into(seeds.expand(len(x), -1, -1), x))
        pooled = self.pool(self.seed.expand(len(x), -1, -1), x)
        return cast(Tensor, self.head(pooled[:, 0]))


class TiedAutoencoder(nn.Module):
    """A decoder that multiplies by the encoder's weights, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([nn.Linear(24, 16), nn.Linear(16, 8)])
        self.biases = nn.ParameterList(
            [nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(24))]
        )

    def forward(self, x: Tensor) -> Tensor:
        for encoder in self.encoders:
            x = torch.tanh(encoder(x))
        weights = [cast(Tensor, encoder.weight) for encoder in self.encoders]
        for weight, bias in zip(reversed(weights), self.biases, strict=True):
            x = F.linear(x, weight.t(), bias)
        return x


class OnlyKeywords(nn.Module):
    """A network that takes its inputs by name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.other = nn.Linear(6, WIDTH), nn.Linear(3, WIDTH)
        self.mixing, self.head = FeedForward(), nn.Linear(WIDTH, 4)

    def forward(self, *, features: Tensor, context: Tensor, scale: float = 1.0) -> Tensor:
        x = F.relu(self.dense(features) * scale + self.other(context))
        return cast(Tensor, self.head(x + self.mixing(x)))


class TwoResults(NamedTuple):
    """The results of a network as a named tuple."""

    scores: Tensor
    hidden: Tensor


class NamedResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixing, self.head = nn.Linear(6, WIDTH), FeedForward(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> TwoResults:
        x = self.embed(x)
        x = x + self.mixing(x)
        return TwoResults(self.head(x), x)


@dataclass
class ResultsOfFields:
    """The results of a network as a dataclass."""

    scores: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class DataclassResults(NamedResults):
    def forward(self, x: Tensor) -> ResultsOfFields:  # type: ignore[override]
        return ResultsOfFields(*super().forward(x))


class NestedInputs(nn.Module):
    """A network of one dictionary of lists, which may hold an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList([nn.Linear(6, WIDTH), nn.Linear(3, WIDTH)])
        self.extra, self.mixing, self.head = nn.Linear(5, WIDTH), FeedForward(), nn.Linear(WIDTH, 4)

    def forward(self, batch: dict[str, list[Tensor]]) -> Tensor:
        views = zip(self.embeds, batch["views"], strict=True)
        x = torch.stack([embed(view) for embed, view in views]).sum(0)
        for more in batch["extra"]:
            if more.numel():
                x = x + self.extra(more)
        return cast(Tensor, self.head(x + self.mixing(x)))


class OptionalEmpty(nn.Module):
    """A network whose second input may have no rows to add."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.prompt = nn.Linear(6, WIDTH), nn.Linear(5, WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        x = self.embed(x)
        if prompt.shape[1]:
            x = torch.cat([self.prompt(prompt), x], 1)
        return cast(Tensor, self.head(x + self.attention(x)))


class MovingAverage(nn.Module):
    """A network that follows the mean of what it reads, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixing, self.head = nn.Linear(6, WIDTH), FeedForward(), nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mean = self.get_buffer("mean")
        mean.mul_(0.9).add_(x.detach().float().flatten(0, -2).mean(0).to(mean.dtype), alpha=0.1)
        self.get_buffer("calls").add_(1)
        self.count += 1
        return cast(Tensor, self.head(x + self.mixing(x)))


class AddsInPlace(nn.Module):
    """Branches whose results the residual stream is added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.mixings = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, (attention, mixing) in enumerate(
            zip(self.attentions, self.mixings, strict=True)
        ):
            y = attention(self.norms[2 * number](x))
            y += x
            x = mixing(self.norms[2 * number + 1](y)).add_(y)
        return cast(Tensor, self.head(x))


class ComplexSignals(nn.Module):
    """Complex inputs, multiplied by a complex filter and read as two real channels."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(16, dtype=torch.cfloat))
        self.embed, self.mixing, self.head = (
            nn.Linear(32, WIDTH),
            FeedForward(),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, signals: Tensor) -> Tensor:
        x = torch.view_as_real(signals * self.filter).flatten(-2).to(self.head.weight.dtype)
        x = self.embed(x)
        return cast(Tensor, self.head(x + self.mixing(x)))
