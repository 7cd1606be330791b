"""Right models whose code is uncommon: computed weights, other dtypes, shared and wrapped parts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import prune

from tests.gate.structure_parts import WIDTH, WORDS, Attention, FeedForward
from tests.gate.structures_of_texts import OfTexts, Plain


class HookedWeights(nn.Module):
    """Weights that a hook computes before each call, as torch's older norm of weights does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(6, WIDTH))
        self.second = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        return cast(Tensor, self.head(x + F.silu(self.second(x))))


class PrunedWeights(nn.Module):
    """Weights with a mask that a hook multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        for layer in (self.first, self.second):
            prune.l1_unstructured(layer, "weight", amount=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        return cast(Tensor, self.head(x + F.silu(self.second(x))))


class TiedHead(Plain):
    """A head whose weight is the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight


class WholeTransformer(nn.Module):
    """torch's transformer of an encoder and a decoder, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 64, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            tgt.shape[1], dtype=self.head.weight.dtype
        )
        x = self.transformer(self.embed(src), self.embed(tgt), tgt_mask=mask, tgt_is_causal=True)
        return cast(Tensor, self.head(x))


class ProjectedRecurrent(OfTexts):
    """An LSTM with a projection of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, proj_size=16, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def mix(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.recurrent(x)[0])


class Bilinear(nn.Module):
    """Products of two inputs with a weight between them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(3, 8)
        self.both, self.head = nn.Bilinear(8, 8, 12), nn.Linear(12, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return cast(Tensor, self.head(torch.tanh(self.both(self.left(left), self.right(right)))))


class OrdinaryEquation(nn.Module):
    """One function that is added in small steps, at times that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.slope = nn.Sequential(nn.Linear(WIDTH + 1, 64), nn.Tanh(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for step in range(4):
            time = torch.full_like(x[..., :1], step / 4)
            x = x + self.slope(torch.cat([x, time], -1)) / 4
        return cast(Tensor, self.head(x))


class Circular(nn.Module):
    """Convolutions around the edges, shuffled channels, and pixels made of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, padding_mode="circular")
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4, padding_mode="reflect")
        self.head = nn.Conv2d(16, 12, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.prelu(self.first(images), images.new_full((1,), 0.2))
        x = self.grouped(F.channel_shuffle(x, 4))
        return F.pixel_shuffle(self.head(F.mish(x)), 2)


class Rotated(OfTexts):
    """Turned queries of several heads to one of keys, normed, with a soft limit of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * 16)
        self.query_norm, self.key_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        self.out, self.mixing = nn.Linear(WIDTH, WIDTH), FeedForward()

    def mix(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query = self.query(y).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in self.keys(y).chunk(2, -1))
        query, key = self._turned(self.query_norm(query)), self._turned(self.key_norm(key))
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = 20 * torch.tanh(query @ key.mT / 8**0.5 / 20)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).float().softmax(-1).to(x.dtype)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.mixing(x))

    @staticmethod
    def _turned(x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2])[:, None] / 100.0 ** (torch.arange(4) / 4)
        first_half, right = x.float().chunk(2, -1)
        cosine, sine = angles.cos(), angles.sin()
        turned = torch.cat(
            [first_half * cosine - right * sine, right * cosine + first_half * sine], -1
        )
        return turned.to(x.dtype)


class ClassToken(nn.Module):
    """Patches behind a learned token, whose own result alone is read."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(48, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 17, WIDTH) / 4)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), FeedForward()])
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 4, stride=4).mT
        x = torch.cat([self.token.expand(len(images), -1, -1), self.patches(patches)], 1)
        x = x + self.places
        for block in self.blocks:
            norm, attention, last, mixing = cast(nn.ModuleList, block)
            x = x + attention(norm(x))
            x = x + mixing(last(x))
        return cast(Tensor, self.head(self.norm(x)[:, 0]))


class Ensemble(nn.Module):
    """Four networks at once, whose weights are stacked in parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.weights = nn.ParameterDict(
            {
                "first": nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 6),
                "bias": nn.Parameter(torch.randn(4, 1, WIDTH) / 6),
                "last": nn.Parameter(torch.randn(4, WIDTH, 3) / 6),
            }
        )

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = F.relu(self.embed(x))
        x = torch.baddbmm(self.weights["bias"], x.expand(4, -1, -1), self.weights["first"])
        hidden = F.relu(x) @ self.weights["last"]
        return {"mean": hidden.mean(0), "spread": [hidden.var(0)]}


class OneNumber(nn.Module):
    """A single number for each row, without an axis of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixing, self.head = nn.Linear(6, WIDTH), FeedForward(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = F.relu(self.embed(x))
        return (self.head(x + self.mixing(x)).squeeze(-1),)


class OtherWeights(OfTexts):
    """A layer that is called with weights which code computes: a delta, and a factor of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.factors = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.delta = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.norm, self.mixing = nn.LayerNorm(WIDTH), FeedForward()

    def mix(self, x: Tensor) -> Tensor:
        factors = 1 + torch.tanh(self.factors(x.mean((0, 1))))
        weights = {"weight": self.part.weight * factors + self.delta}
        x = x + cast(Tensor, functional_call(self.part, weights, (x,)))
        return cast(Tensor, x + self.mixing(self.norm(x)))


class Buckets(OfTexts):
    """Rows of a table, and other tokens, that are looked up by integers which code computes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 2)
        self.norm, self.mixing = nn.LayerNorm(WIDTH), FeedForward()

    def mix(self, x: Tensor) -> Tensor:
        first, second = self.scores(x).unbind(-1)
        x = x + self.table(torch.bucketize(first, torch.linspace(-1, 1, 15).to(x.dtype)))
        places = (second.sigmoid() * x.shape[1]).long().clamp(0, x.shape[1] - 1)
        x = x + x.gather(1, places[..., None].expand_as(x))
        return cast(Tensor, x + self.mixing(self.norm(x)))


class Warped(nn.Module):
    """An image that is read at places which a convolution computes."""

    def __init__(self, mode: str = "bilinear") -> None:
        super().__init__()
        self.mode = mode
        self.conv, self.flow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(self.conv(images))
        places = torch.eye(2, 3)[None].expand(len(x), -1, -1)
        grid = F.affine_grid(places, list(images.shape), align_corners=False).to(x.dtype)
        grid = grid + 0.2 * torch.tanh(self.flow(x)).permute(0, 2, 3, 1)
        read = F.grid_sample(x, grid, mode=self.mode, align_corners=False)
        return cast(Tensor, self.head(x + read))


class MixedPrecision(Plain):
    """A network in bfloat16 whose norms are in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
        self.norm.float()

    def mix(self, x: Tensor) -> Tensor:
        y = self.norm(x.float()).to(x.dtype)
        x = x + self.attention(y, causal=True)
        return cast(Tensor, x + self.mixing(x))
