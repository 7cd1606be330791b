"""Right models of texts, each of another structure."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gate.structure_parts import WIDTH, WORDS, Attention, FeedForward


class OfTexts(nn.Module):
    """Embed ids, run `mix`, and return logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.mix(self.embed(ids))))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class SelectiveScan(OfTexts):
    """A state space of one's own: steps, inputs and outputs that depend on the token."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.chosen, self.step = nn.Linear(WIDTH, 2 + 2 * 8), nn.Linear(2, WIDTH)
        self.log_decay = nn.Parameter(torch.arange(1.0, 9.0).log().repeat(WIDTH, 1))
        self.direct = nn.Parameter(torch.ones(WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        value, gate = self.into(x).chunk(2, -1)
        value = F.silu(self.conv(value.mT)[..., : x.shape[1]].mT)
        step, enter, leave = self.chosen(value).split([2, 8, 8], -1)
        step = F.softplus(self.step(step)).float()
        decay = (step[..., None] * -self.log_decay.float().exp()).exp()
        entering = (step * value.float())[..., None] * enter.float()[:, :, None]
        state, outputs = torch.zeros_like(decay[:, 0]), []
        for token in range(x.shape[1]):
            state = decay[:, token] * state + entering[:, token]
            outputs.append((state * leave[:, token, None].float()).sum(-1))
        y = torch.stack(outputs, 1).to(x.dtype) + self.direct * value
        return cast(Tensor, x + self.out(y * F.silu(gate)))


class TokenShift(OfTexts):
    """Each token mixed with the one before it, and sums that fade by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.shares = nn.Parameter(torch.rand(3, WIDTH))
        self.key, self.value, self.receive, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        before = F.pad(y, (0, 0, 1, -1))
        key, value, receive = (
            layer(y * share + before * (1 - share))
            for layer, share in zip((self.key, self.value, self.receive), self.shares, strict=True)
        )
        weights, decay = key.float().exp(), (-self.decay.float().exp()).exp()
        top = bottom = torch.zeros_like(weights[:, 0])
        outputs = []
        for token in range(x.shape[1]):
            top = top * decay + weights[:, token] * value[:, token].float()
            bottom = bottom * decay + weights[:, token]
            outputs.append(top / bottom)
        mixed = torch.stack(outputs, 1).to(x.dtype)
        return cast(Tensor, x + self.out(receive.sigmoid() * mixed))


class LinearAttention(OfTexts):
    """Causal attention by sums of positive features, in place of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixing = FeedForward()

    def features(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1

    def mix(self, x: Tensor) -> Tensor:
        query, key, value = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.joined(x).chunk(3, -1)
        )
        query, key = self.features(query), self.features(key)
        sums = torch.einsum("bhtk,bhtv->bhtkv", key, value).cumsum(2)
        total = torch.einsum("bhtk,bhtk->bht", query, key.cumsum(2))
        mixed = torch.einsum("bhtk,bhtkv->bhtv", query, sums) / (total[..., None] + 1e-4)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.mixing(x))


class RandomFeatures(LinearAttention):
    """Linear attention with random features that are kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(WIDTH // 4, 16))

    def features(self, x: Tensor) -> Tensor:
        scaled = x / x.shape[-1] ** 0.25
        size = scaled.square().sum(-1, keepdim=True) / 2
        return (scaled @ self.get_buffer("directions") - size).exp() / 4 + 1e-4


class Associative(OfTexts):
    """Reading of learned patterns by softmax with a temperature, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns = nn.Parameter(torch.randn(20, WIDTH))
        self.query, self.mixing = nn.Linear(WIDTH, WIDTH), FeedForward()

    def mix(self, x: Tensor) -> Tensor:
        state = self.query(x)
        for _ in range(2):
            state = (state @ self.patterns.mT * 0.3).softmax(-1) @ self.patterns
        x = x + state
        return cast(Tensor, x + self.mixing(x))


class GroupedExperts(OfTexts):
    """Sigmoid scores, a bias that only chooses, groups of experts, and one that all tokens share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8, bias=False)
        self.register_buffer("correction", torch.randn(8) / 10)
        self.experts = nn.ModuleList(FeedForward() for _ in range(8))
        self.shared = FeedForward()

    def mix(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows).float().sigmoid()
        choice = (scores + self.get_buffer("correction").float()).view(-1, 4, 2)
        groups = choice.sum(-1).topk(2, -1).indices
        allowed = torch.zeros(len(rows), 4, dtype=torch.bool).scatter(1, groups, True)
        hidden = choice.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
        chosen = hidden.topk(2, -1).indices
        weights = scores.gather(1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True) * 1.5).to(x.dtype)
        y = self.shared(rows)
        for number, expert in enumerate(self.experts):
            row, slots = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, row, expert(rows[row]) * weights[row, slots, None])
        return x + y.view_as(x)


class SharedKeys(OfTexts):
    """Many queries of one head of keys and values, which all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Linear(WIDTH, 16)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
            for _ in range(3)
        )

    def mix(self, x: Tensor) -> Tensor:
        key, value = self.joined(x)[:, None].chunk(2, -1)
        for layer in self.layers:
            norm, query, out = cast(nn.ModuleList, layer)
            heads = query(norm(x)).unflatten(-1, (4, -1)).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(
                heads, key.expand(-1, 4, -1, -1), value.expand(-1, 4, -1, -1), is_causal=True
            )
            x = x + out(mixed.transpose(1, 2).flatten(2))
        return x


class SharedLayers(OfTexts):
    """One block that runs three times, and a small table of words that is widened."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.widen = nn.Embedding(WORDS, 8), nn.Linear(8, WIDTH)
        self.block = nn.ModuleDict(
            {
                "attention": Attention(),
                "norm": nn.LayerNorm(WIDTH),
                "mixing": FeedForward(),
                "last_norm": nn.LayerNorm(WIDTH),
            }
        )

    def mix(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        for _ in range(3):
            x = self.block["norm"](x + self.block["attention"](x))
            x = self.block["last_norm"](x + self.block["mixing"](x))
        return x


class RelativeBuckets(OfTexts):
    """A bias of attention by the distance's bucket, which all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                           nn.Linear(WIDTH, WIDTH, bias=False)])
            for _ in range(2)
        )  # fmt: skip

    def mix(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = places - places[:, None]
        size = distance.abs()
        far = 2 + ((size.clamp_min(1).float() / 2).log() / 3).long()
        bucket = torch.where(size < 2, size, far).clamp_max(3) + 4 * (distance > 0)
        bias = self.table(bucket).permute(2, 0, 1)
        for layer in self.layers:
            norm, joined, out = cast(nn.ModuleList, layer)
            query, key, value = (
                y.unflatten(-1, (4, -1)).transpose(1, 2) for y in joined(norm(x)).chunk(3, -1)
            )
            mixed = (query @ key.mT + bias).softmax(-1) @ value
            x = x + out(mixed.transpose(1, 2).flatten(2))
        return x


class ManyHeads(OfTexts):
    """A network that guesses the next words by heads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mixing = Attention(), FeedForward()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS, bias=False) for _ in range(2))

    def mix(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, causal=True)
        return cast(Tensor, x + self.mixing(x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.embed(ids))
        guesses = [
            head(x + F.silu(branch(x)))
            for branch, head in zip(self.branches, self.heads, strict=True)
        ]
        return torch.stack([self.head(x), *guesses])


class AdaptedLinear(nn.Linear):
    """A linear layer whose forward adds a product of two narrow matrices to the weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.down = nn.Parameter(torch.randn(4, width) / 32)
        self.up = nn.Parameter(torch.randn(width, 4) / 8)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight + self.up @ self.down, self.bias)


class Adapted(OfTexts):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AdaptedLinear(WIDTH) for _ in range(2))

    def mix(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class StopsEarly(OfTexts):
    """Tokens in a loop that ends behind the last one that is no padding."""

    padding = 0

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        state, outputs = torch.zeros_like(x[:, 0]), []
        for token in range(ids.shape[1]):
            if bool((ids[:, token:] == self.padding).all()):
                break
            state = torch.tanh(self.into(x[:, token]) + self.again(state))
            outputs.append(state)
        padding = [state] * (ids.shape[1] - len(outputs))
        return cast(Tensor, self.head(torch.stack(outputs + padding, 1)))


class MaskedEncoder(OfTexts):
    """torch's attention with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixing = nn.LayerNorm(WIDTH), FeedForward()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids)
        y = self.norm(x)
        mixed, _ = self.attention(y, y, y, key_padding_mask=padding, need_weights=False)
        x = x + mixed
        return cast(Tensor, self.head(x + self.mixing(x)))


class UnitEmbeddings(nn.Module):
    """Norms after each sum, and an embedding of length one for each text, as retrieval uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixing = nn.Embedding(WORDS, WIDTH), FeedForward()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        with torch.no_grad():  # as such models begin, so scores and their gradients are small
            for weight in (x for x in self.parameters() if x.dim() > 1):
                weight.normal_(0, 0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        x = self.norms[1](x + self.mixing(x))
        return F.normalize(x.mean(1), dim=-1), x


class BothWays(nn.Module):
    """A recurrent network that reads from both ends, and counts each text's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 6)
        self.recurrent = nn.GRU(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embed(ids))
        real = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None].to(states.dtype)
        return cast(Tensor, self.head((states * real).sum(1) / lengths[:, None].to(states.dtype)))


class PackedTexts(BothWays):
    """Reading from both ends of packed texts, each to its own end."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        _, last = self.recurrent(packed)
        return cast(Tensor, self.head(torch.cat([last[-2], last[-1]], -1)))


class Plain(OfTexts):
    """A causal block, for tests of dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mixing = nn.LayerNorm(WIDTH), Attention(), FeedForward()

    def mix(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), causal=True)
        return cast(Tensor, x + self.mixing(x))


class NativeBfloat16(Plain):
    """A network whose parameters are stored in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
