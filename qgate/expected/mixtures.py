"""Routing that the output of a mixture of experts shows, whatever computed it.

The output of a token is the sum of its experts' outputs, each times a weight. Fitted to the outputs
of all experts on that token, it gives the weights back: which experts a kernel count, and how much
each of them counted. Permuted experts, lost tokens and wrong weights differ there by their nature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.text import listed

# Of right kernels in four formats both were within 1e-6; other conventions of scales need room.
_OFF, _MANY, _LOST, _UNEXPLAINED, _EXPLAINED, _ZERO = 0.1, 0.02, 0.25, 0.3, 1e-3, 1e-4


@dataclass(frozen=True)
class MixtureOutputs:
    """The output (tokens, width) of a mixture, and what its reference gives for the same input.

    experts  output of every expert on every token (tokens, experts, width)
    weights  weights of the experts (tokens, experts), 0 for those that the router did not choose
    shares   share of each expert before the weights of the chosen ones were made to add up to one
    readings  makes words and outputs of the first tokens, of weights that are read wrongly
    is_exact  the experts are quantized as those of the mixture, so that sizes can be compared
    """

    actual: Tensor
    experts: Tensor
    weights: Tensor
    shares: Tensor | None = None
    readings: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
    is_exact: bool = True

    def recovered(self) -> Tensor:
        """Return the weights that fit the output best, by least squares for each token."""
        columns = self.experts.double().transpose(1, 2)
        gram = columns.transpose(1, 2) @ columns
        # Experts without output on a token get no weight, and no singular matrix.
        ridge = 1e-9 * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
        gram = gram + ridge[:, None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype)
        right = columns.transpose(1, 2) @ self.actual.double()[..., None]
        solved: Tensor = torch.linalg.solve(gram, right)
        return solved[..., 0]

    def fault(self) -> MixtureFault | None:
        """Name what is wrong with the output; None where it is what the weights make of experts."""
        size = torch.einsum("te,ted->td", self.weights, self.experts).norm(dim=-1)
        zero = (self.actual.norm(dim=-1) < _ZERO * size) & (size > 0)
        if bool(zero.any()):
            return _named(f"{int(zero.sum())} of {len(zero)} tokens got no expert", zero, self)
        recovered, weights = self.recovered(), self.weights.double()
        of_sizes = (_other_reading, _other_experts, _lost_tokens, _gains) if self.is_exact else ()
        searches: tuple[_Search, ...] = (_other_weights, _permuted, *of_sizes)
        faults = (search(self, recovered, weights) for search in searches)
        return next((fault for fault in faults if fault is not None), None)


@dataclass(frozen=True)
class MixtureFault:
    """Words for what is wrong with a mixture, and how many of its tokens it changes."""

    words: str
    tokens: int
    of: int


_Search = Callable[[MixtureOutputs, Tensor, Tensor], MixtureFault | None]


def routing_changes(actual: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token if its set of experts is another, and how far its weights moved.

    The shift is half the sum of all changes: 1 where a token has all its weight elsewhere.
    """
    flips = ((actual != 0) != (reference != 0)).any(-1)
    return flips, (actual.double() - reference.double()).abs().sum(-1) / 2


def _named(words: str, tokens: Tensor, of: MixtureOutputs) -> MixtureFault:
    first = int(tokens.nonzero()[0]) if bool(tokens.any()) else 0
    return MixtureFault(f"{words}, first token {first}", int(tokens.sum()), len(of.actual))


def _other_weights(of: MixtureOutputs, recovered: Tensor, weights: Tensor) -> MixtureFault | None:
    """Compare with weights that a kernel makes of the same logits by mistake."""
    chosen = weights != 0
    count = int(chosen.sum(-1).max())
    right = _distance(recovered, weights, chosen)
    if right <= _OFF / 2 or count < 2:
        return None
    ranks = weights.argsort(-1, descending=True)[:, :count]
    turned = weights.gather(1, ranks).flip(1)
    most = weights.amax(-1, keepdim=True)
    readings = {
        "the weights of a token's experts are exchanged": weights.scatter(1, ranks, turned),
        "only the first expert of each token counts": torch.where(weights == most, weights, 0),
        f"each of {count} experts has the same weight": chosen / chosen.sum(-1, keepdim=True),
        "experts are added up without weights": chosen.double(),
        "experts are weighted twice": weights * weights,
    }
    if of.shares is not None:
        raw = torch.where(chosen, of.shares.double(), 0)
        total = float(raw.sum(-1).mean())
        readings[
            f"the weights of a token's experts are not renormalized: they add up to {total:.2f}"
        ] = raw
    distances = {words: _distance(recovered, w, chosen) for words, w in readings.items()}
    words = min(distances, key=distances.__getitem__)
    if distances[words] > right / 3:
        return None
    return MixtureFault(words, len(weights), len(weights))


def _distance(recovered: Tensor, weights: Tensor, chosen: Tensor) -> float:
    """Return the mean difference from weights at the experts that tokens chose."""
    return float((recovered - weights).abs()[chosen].clamp_max(1).mean())


def _permuted(of: MixtureOutputs, recovered: Tensor, weights: Tensor) -> MixtureFault | None:
    """Find experts whose tokens another expert computed."""
    mixing = _mixing(recovered, weights)
    swapped = {
        expert: int(row.argmax())
        for expert, row in enumerate(mixing)
        if int(row.argmax()) != expert and float(row.max()) > 0.5 and float(row[expert]) < 0.5
    }
    if not swapped:
        return None
    moves = [f"those of expert {a} by expert {b}" for a, b in swapped.items()]
    tokens = (weights[:, list(swapped)] != 0).any(-1)
    return _named(f"tokens are computed by other experts: {listed(moves, 3)}", tokens, of)


def _mixing(recovered: Tensor, weights: Tensor) -> Tensor:
    """Return how much each expert counts where the router gave all weight to one of them."""
    experts = weights.shape[-1]
    used = (weights != 0).any(0)
    mixing = torch.eye(experts, dtype=weights.dtype)
    if bool(used.any()):
        solved = torch.linalg.lstsq(weights[:, used], recovered, driver="gelsd").solution
        mixing[used] = solved
    return mixing


def _other_experts(of: MixtureOutputs, recovered: Tensor, weights: Tensor) -> MixtureFault | None:
    """Find tokens that have most of their weight at experts that the router did not choose."""
    stray = torch.where(weights == 0, recovered, 0).abs().amax(-1) > 0.5 * weights.amax(-1) / 2
    least = torch.where(weights != 0, recovered, torch.inf).amin(-1)
    moved = stray & (least < _LOST * torch.where(weights != 0, weights, torch.inf).amin(-1))
    if float(moved.double().mean()) < _MANY / 4:
        return None
    share = f"{int(moved.sum())} of {len(moved)} tokens"
    words = f"{share} go to other experts than the router has to choose for the same input"
    return _named(words, moved, of)


def _lost_tokens(of: MixtureOutputs, recovered: Tensor, weights: Tensor) -> MixtureFault | None:
    """Find experts that leave out some of the tokens that the router gave them."""
    worst: tuple[float, int, Tensor] = (0.0, 0, torch.zeros(0))
    for expert in range(weights.shape[-1]):
        own = weights[:, expert] > 0.15
        lost = own & (recovered[:, expert].abs() < _LOST * weights[:, expert])
        share = float(lost.sum()) / max(int(own.sum()), 1)
        if int(lost.sum()) > 2 and share > worst[0]:
            worst = (share, expert, lost)
    share, expert, lost = worst
    if share < _MANY:
        return None
    count = int((weights[:, expert] > 0.15).sum())
    return _named(f"expert {expert} leaves out {int(lost.sum())} of {count} tokens", lost, of)


def _other_reading(of: MixtureOutputs, _recovered: Tensor, weights: Tensor) -> MixtureFault | None:
    """Find a wrong way to read the weights of experts that explains the output."""
    size = of.actual.norm()
    missed = _mixed(of.experts, weights) - of.actual
    if of.readings is None or not bool(missed.norm() > _EXPLAINED * size):
        return None
    best, least = "", _UNEXPLAINED
    for words, outputs in of.readings():
        count = len(outputs)
        left = _mixed(outputs, weights[:count]) - of.actual[:count]
        if float(left.norm() / missed[:count].norm()) < least:
            best, least = words, float(left.norm() / missed[:count].norm())
    return MixtureFault(best, len(weights), len(weights)) if best else None


def _mixed(experts: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("te,ted->td", weights.to(experts.dtype), experts)


def _gains(of: MixtureOutputs, recovered: Tensor, weights: Tensor) -> MixtureFault | None:
    """Find experts whose output is a multiple of what it should be."""
    gains = _mixing(recovered, weights).diagonal()
    wrong = (gains - 1).abs() > _OFF
    if not bool(wrong.any()):
        return None
    expert = int((gains.clamp_min(1e-3).log()).abs().argmax())
    words = f"the output of expert {expert} is {float(gains[expert]):.2f} times what it should be"
    if len(also_wrong := [n for n in wrong.nonzero().flatten().tolist() if n != expert]):
        words += f", wrong too: experts {listed([str(n) for n in also_wrong], 8)}"
    tokens = (weights[:, wrong] != 0).any(-1)
    return _named(words, tokens, of)
