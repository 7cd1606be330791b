"""Recurrences that lose their state, their decay or their order: Mamba-2, delta rules, convolutions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from tests.kernel_checks.pairs import INT8, Kernel, Pair, normal, uniform

TOKENS = 24
X, B, C = (normal(TOKENS, width) for width in (8, 6, 6))
DECAY = uniform(TOKENS, high=0.3)
STATE = normal(6, 8)
Q, K, V = (normal(TOKENS, 8) for _ in range(3))
K = normalize(K, dim=-1)
BETA = uniform(TOKENS)
GATE = uniform(TOKENS, low=0.05, high=0.4)
TAPS = normal(8, 4)


def steps(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Write Mamba-2's state, one token after the other."""
    state, results = x.new_zeros(b.shape[1], x.shape[1]), [x[:0]]
    for token in range(len(x)):
        state = state * torch.exp(-decay[token]) + torch.outer(b[token], x[token])
        results.append((c[token] @ state)[None])
    return torch.cat(results)


def chunked(
    size: int = 8, *, carries: bool = True, late: int = 0, skips: int = 0, twice: bool = False
) -> Kernel:
    """Return the same in chunks, right or with one fault."""

    def kernel(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        state, results = x.new_zeros(b.shape[1], x.shape[1]), [x[:0]]
        for start in range(0, len(x), size):
            inside = slice(start, start + size)
            sums = -decay[inside].cumsum(0)
            weights = torch.exp(sums[:, None] - sums[None, :]).tril(-skips)
            entering = torch.exp(sums - late * sums[0])[:, None] * (c[inside] @ state)
            results.append((c[inside] @ b[inside].T * weights) @ x[inside] + entering)
            leaving = torch.exp(sums[-1] - sums)[:, None] * b[inside]
            state = state * torch.exp(sums[-1] * (2 if twice else 1)) + leaving.T @ x[inside]
            state = state * carries
        return torch.cat(results)

    return kernel


def _decay_after(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Apply the decay of a token to what it adds, too."""
    state, results = x.new_zeros(b.shape[1], x.shape[1]), [x[:0]]
    for token in range(len(x)):
        state = (state + torch.outer(b[token], x[token])) * torch.exp(-decay[token])
        results.append((c[token] @ state)[None])
    return torch.cat(results)


def _without_exp(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state, results = x.new_zeros(b.shape[1], x.shape[1]), [x[:0]]
    for token in range(len(x)):
        state = state * (1 - decay[token]) + torch.outer(b[token], x[token])
        results.append((c[token] @ state)[None])
    return torch.cat(results)


def from_state(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    results = [x[:0]]
    for token in range(len(x)):
        state = state * torch.exp(-decay[token]) + torch.outer(b[token], x[token])
        results.append((c[token] @ state)[None])
    return torch.cat(results)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T).tril() @ v


def _linear_steps(late: bool = False, carried: int = 1000) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, results = v.new_zeros(k.shape[1], v.shape[1]), [v[:0]]
        for token in range(len(q)):
            if token % carried == 0:
                state = torch.zeros_like(state)
            after = state + torch.outer(k[token], v[token])
            results.append((q[token] @ (state if late else after))[None])
            state = after
        return torch.cat(results)

    return kernel


def gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor) -> Tensor:
    state, results = v.new_zeros(k.shape[1], v.shape[1]), [v[:0]]
    for token in range(len(q)):
        state = state * torch.exp(-gate[token])
        error = v[token] - k[token] @ state
        state = state + beta[token] * torch.outer(k[token], error)
        results.append((q[token] @ state)[None])
    return torch.cat(results)


def _delta(fault: str) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor) -> Tensor:
        state, results = v.new_zeros(k.shape[1], v.shape[1]), [v[:0]]
        for token in range(len(q)):
            if fault == "cut" and token % 16 == 0:
                state = torch.zeros_like(state)
            at = max(token - 1, 0) if fault == "late" else token
            before = state
            state = state * torch.exp(-gate[at])
            error = v[token] - k[token] @ (before if fault == "ungated error" else state)
            weight = beta[token] ** 2 if fault == "beta twice" else beta[token]
            state = state + weight * torch.outer(k[token], error)
            results.append((q[token] @ state)[None])
        return torch.cat(results)

    return kernel


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve each channel with its taps, from the past alone."""
    width = taps.shape[1]
    windows = pad(x, (0, 0, width - 1, 0)).unfold(0, width, 1)
    return (windows * taps).sum(-1)


def _late_convolution(x: Tensor, taps: Tensor) -> Tensor:
    return convolved(x.roll(1, 0) * (torch.arange(len(x)) > 0)[:, None], taps)


def _tiled_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve tiles of 16 tokens, each from zeros."""
    return torch.cat([convolved(part, taps) for part in x.split(16)]) if len(x) else x


def stored(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Store the state in int8 by row after each token."""
    return _stored(INT8)(x, decay, b, c)


def _stored(quantize: Kernel) -> Kernel:
    def kernel(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        state, results = x.new_zeros(b.shape[1], x.shape[1]), [x[:0]]
        for token in range(len(x)):
            state = quantize(state * torch.exp(-decay[token]) + torch.outer(b[token], x[token]))
            results.append((c[token] @ state)[None])
        return torch.cat(results)

    return kernel


class StaleScale:
    """Quantize with the scale of the state before, which may be too small."""

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def __call__(self, state: Tensor) -> Tensor:
        scale = state.abs().amax(1, keepdim=True) / 127
        used = scale if self.scale is None else self.scale
        self.scale = scale
        return (state / used.clamp_min(1e-30)).round().clamp(-127, 127) * used


def _stale(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return _stored(StaleScale())(x, decay, b, c)


MAMBA = (X, DECAY, B, C)
DELTA = (Q, K, V, BETA, GATE)
SHORT = {"relations": ["one"], "budget_s": 0.0}
CARRY = "not carried|is lost at|of what comes before"
PAIRS = (
    Pair("state not carried", CARRY, chunked(), chunked(carries=False), MAMBA, steps, {}, SHORT),
    Pair("decay twice at a boundary", "carried|rows 16 to 23 of 24", chunked(), chunked(twice=True), MAMBA, steps, {}, SHORT),
    Pair("decay late at a boundary", "rows 8 to 23 of 24", chunked(), chunked(late=1), MAMBA, steps, {}, SHORT),
    Pair("own token left out", "(own|same) (row|entry|token)|does not depend|depends on|not count", chunked(), chunked(skips=1), MAMBA, steps, {}, SHORT),
    Pair("decay after the update", "argument 1 |before the multiplication by the result of exp", chunked(), _decay_after, MAMBA, steps, {}, SHORT),
    Pair("no exponential of the decay", "exp|argument 1", chunked(), _without_exp, MAMBA, steps, {}, SHORT),
    Pair("decay of the next token", "argument 1 is read one entry too far",
         chunked(), lambda x, d, b, c: chunked()(x, d.roll(-1), b, c), MAMBA, steps, {}, SHORT),
    Pair("B and C swapped", "arguments 2 and 3 are swapped", chunked(), lambda x, d, b, c: chunked()(x, d, c, b), MAMBA, steps, {}, SHORT),
    Pair("first state not used", "argument 4 is not used: read as zeros",
         from_state, lambda x, d, b, c, _s: chunked()(x, d, b, c), (*MAMBA, STATE), from_state, {}, SHORT),
    Pair("first state transposed", "argument 4 is read transposed",
         from_state, lambda x, d, b, c, s: from_state(x, d, b, c, s.T if s.shape[0] == s.shape[1] else s),
         (normal(TOKENS, 6), DECAY, B, C, normal(6, 6)), from_state, {}, SHORT),
    Pair("linear attention without its own token", "the mask shows one key less|depends on",
         _linear_steps(), _linear_steps(late=True), (Q, K, V), linear_attention, {}, SHORT),
    Pair("linear attention in tiles of 16", CARRY, _linear_steps(), _linear_steps(carried=16), (Q, K, V), linear_attention, {}, SHORT),
    Pair("delta rule in tiles of 16", CARRY, _delta(""), _delta("cut"), DELTA, gated_delta, {}, SHORT),
    Pair("gate late by one", "argument 4 is read one entry too early", _delta(""), _delta("late"), DELTA, gated_delta, {}, SHORT),
    Pair("beta twice", "argument 3 is taken twice: as its square", _delta(""), _delta("beta twice"), DELTA, gated_delta, {}, SHORT),
    Pair("error before the gate", "argument 4|gate|exp", _delta(""), _delta("ungated error"), DELTA, gated_delta, {}, SHORT),
    Pair("taps reversed", "argument 1 is read in reverse order", convolved, lambda x, t: convolved(x, t.flip(1)), (X, TAPS), convolved, {}, SHORT),
    Pair("convolution late by one", "depends on no row of argument 0, the reference's on row 0|argument 0 is read one entry too early|hold what rows|hold others", convolved, _late_convolution, (X, TAPS), convolved, {}, SHORT),
    Pair("convolution of tiles", CARRY, convolved, _tiled_convolution, (X, TAPS), convolved, {}, SHORT),
    Pair("state with a stale scale", "stale|scale of", stored, _stale, tuple(t[:8] for t in MAMBA), stored, {}, SHORT),
    Pair("state by columns", "state|scale", stored, _stored(lambda s: INT8(s.T.contiguous()).T), tuple(t[:8] for t in MAMBA), stored, {}, SHORT),
    Pair("tokens beyond 128", "row 128 holds what a sequence gives that begins with it", chunked(), lambda *a: torch.cat([chunked()(*[t[:128] for t in a]), chunked()(*[t[128:] for t in a])]), MAMBA, steps, {},
         {"relations": ["long"], "budget_s": 1e9}),
)  # fmt: skip
