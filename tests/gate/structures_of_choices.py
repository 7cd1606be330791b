"""Right models that choose: experts by tokens, tokens by experts, rows of tables, layers to leave."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gate.structure_parts import WIDTH, WORDS, Attention, FeedForward
from tests.gate.structures_of_texts import OfTexts


class ExpertChoice(OfTexts):
    """Experts that choose the tokens of the whole call they work on."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        y = torch.zeros_like(rows)
        for expert, row, weight in zip(self.experts, *self._choose(rows), strict=True):
            y = y.index_add(0, row, expert(rows[row]) * weight[:, None])
        return x + y.view_as(x)

    def _choose(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        weights, chosen = self.router(rows).softmax(-1).T.topk(len(rows) // 2, -1)
        return list(chosen), list(weights)


class LimitedExperts(ExpertChoice):
    """Experts that leave out tokens beyond their capacity."""

    def _choose(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        weights, expert = self.router(rows).softmax(-1).max(-1)
        capacity = len(rows) // 4
        chosen = [(expert == number).nonzero().flatten()[:capacity] for number in range(4)]
        return chosen, [weights[row] for row in chosen]


class SkippedTokens(OfTexts):
    """Blocks that work on the half of a text's tokens that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"router": nn.Linear(WIDTH, 1), "mixing": FeedForward()})
            for _ in range(2)
        )

    def mix(self, x: Tensor) -> Tensor:
        for entry in self.blocks:
            block = cast(nn.ModuleDict, entry)
            scores = block["router"](x).squeeze(-1)
            places = scores.topk(x.shape[1] // 2, 1).indices.sort(1).values
            weights = scores.gather(1, places).sigmoid()[..., None]
            rows = places[..., None].expand(-1, -1, WIDTH)
            x = x.scatter_add(1, rows, block["mixing"](x.gather(1, rows)) * weights)
        return x


class Recommender(nn.Module):
    """Bags of table rows and dense features, and the products of all pairs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        first = self.bottom(dense)
        listed = [bag(sparse[:, number]) for number, bag in enumerate(self.bags)]
        stacked = torch.stack([first, *listed], 1)
        rows, right = torch.tril_indices(4, 4, -1)
        pairs = (stacked @ stacked.mT)[:, rows, right]
        return torch.sigmoid(self.top(torch.cat([first, pairs], 1)))


class LeavesEarly(OfTexts):
    """A list of logits, one of each depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in range(3))

    def forward(self, ids: Tensor) -> list[Tensor]:  # type: ignore[override]
        x, outputs = self.embed(ids), []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = x + layer(x)
            outputs.append(head(x))
        return outputs


class Translator(nn.Module):
    """An encoder of one text and a decoder of another that attends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.encoder = nn.ModuleList(self._layer(1) for _ in range(2))
        self.decoder = nn.ModuleList(self._layer(2) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    @staticmethod
    def _layer(attentions: int) -> nn.ModuleList:
        modules = [*(Attention() for _ in range(attentions)), FeedForward()]
        return nn.ModuleList(x for module in modules for x in (nn.LayerNorm(WIDTH), module))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory, x = (self.embed(y) + self.places(torch.arange(y.shape[1])) for y in (src, tgt))
        for layer in self.encoder:
            norm, attention, last, mixing = cast(nn.ModuleList, layer)
            memory = memory + attention(norm(memory))
            memory = memory + mixing(last(memory))
        for layer in self.decoder:
            norm, attention, middle, across, last, mixing = cast(nn.ModuleList, layer)
            x = x + attention(norm(x), causal=True)
            x = x + across(middle(x), memory)
            x = x + mixing(last(x))
        return cast(Tensor, self.head(x))


class Looped(OfTexts):
    """One attention and one feed-forward that run three times behind one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mixing = nn.LayerNorm(WIDTH), Attention(), FeedForward()

    def mix(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.attention(self.norm(x), causal=True)
            x = x + self.mixing(self.norm(x))
        return x


class RawParameters(OfTexts):
    """Products of parameters that no module holds, by `@` and `einsum`."""

    def __init__(self) -> None:
        super().__init__()
        self.widening = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 6)
        self.narrowing = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8)
        self.last = nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        x = x + torch.einsum("btk,kd->btd", F.silu(x @ self.widening), self.narrowing)
        return cast(Tensor, x + self.last(x))


class TorchEncoder(OfTexts):
    """The encoder that torch brings."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def mix(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.encoder(x))


class HyperNetwork(OfTexts):
    """A layer whose weight another layer makes, for each text its own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4, WORDS)

    def mix(self, x: Tensor) -> Tensor:
        weight = self.maker(x.mean(1)).view(-1, 4, WIDTH)
        return torch.tanh(x @ weight.mT)


class RecurrentCell(OfTexts):
    """A cell of an LSTM in a loop over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        hidden = memory = x.new_zeros(len(x), WIDTH)
        outputs = []
        for token in range(x.shape[1]):
            hidden, memory = self.cell(x[:, token], (hidden, memory))
            outputs.append(hidden)
        return torch.stack(outputs, 1)


class DistanceBias(OfTexts):
    """Causal attention with a bias that grows with distance, within each packed text."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5).float())

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids)
        query, key, value = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.joined(x).chunk(3, -1)
        )
        positions = torch.arange(ids.shape[1])
        distance = (positions[:, None] - positions).abs()
        bias = -self.get_buffer("slopes")[:, None, None].to(x.dtype) * distance
        mask = (segments[:, :, None] == segments[:, None]) & (positions[:, None] >= positions)
        scores = (query @ key.mT / 8**0.5 + bias).masked_fill(~mask[:, None], float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return cast(Tensor, self.head(x + self.out(mixed)))
