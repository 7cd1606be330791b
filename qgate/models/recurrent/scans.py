"""Recurrences token by token: each token reads the state that `store` made after the one before.

A state is (batch, channels, elements): a channel of Mamba-2 is one of a head's, with an element for
each of its states; a channel of the delta rule is one of a head's values, with one for each key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from qgate.models.mamba.network import causal_conv, stored_window
from qgate.models.mamba.scanning import Scan, ScanResult, Store
from qgate.models.mamba.state import MixerState

NORM_EPSILON = 1e-6
"""Added to the squares of a query or key before their root, as in transformers and FLA."""
Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Returns the state after a token and its output, given the state that it reads."""


def run_tokens(
    step: Step, tokens: int, zeros: Tensor, cache: MixerState | None, store: Store | None
) -> ScanResult:
    """Return the outputs of all tokens; states are (elements, batch, channels)."""
    begin = None if cache is None else cache.ssm
    state = zeros if begin is None else begin.permute(2, 0, 1).contiguous()
    first, outputs = 0 if cache is None else cache.length, []
    for token in range(tokens):
        state, output = step(state, token)
        outputs.append(output)
        # The output is made of the state before it is stored, as kernels do.
        state = state if store is None else store(state, first + token)
    result = ScanResult(torch.stack(outputs, 1), state.permute(1, 2, 0))
    if cache is not None:
        cache.ssm = result.state
    return result


def _of_channels(x: Tensor, channels: int) -> Tensor:
    """Repeat (batch, heads, …) for the channels of each head."""
    return x.repeat_interleave(channels // x.shape[1], 1)


def _first_elements(x: Tensor, channels: int) -> Tensor:
    """Turn (batch, heads, elements) into (elements, batch, channels)."""
    return _of_channels(x, channels).permute(2, 0, 1)


class Mamba2Scan(nn.Module):
    """The recurrence of Mamba-2: one decay per head, B and C shared by groups of heads."""

    kind = "mamba2"
    ports = ("u", "dt", "B", "C")

    def __init__(self) -> None:
        super().__init__()
        self.store: Store | None = None

    def forward(
        self,
        u: Tensor,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        A: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        limit: Sequence[float],
        cache: MixerState | None = None,
    ) -> ScanResult:
        """Scan u (batch, tokens, heads, channels), dt (…, heads), B and C (…, groups, states)."""
        u, dt, B, C, A, D = (x.float() for x in (u, dt, B, C, A, D))
        delta = softplus(dt + dt_bias.float()).clamp(*limit)
        decays, inputs = (delta * A).exp(), (delta.unsqueeze(-1) * u).flatten(2)
        skip, channels = (D.unsqueeze(-1) * u).flatten(2), inputs.shape[2]

        def step(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
            increment = _first_elements(B[:, token], channels) * inputs[:, token]
            state = _of_channels(decays[:, token], channels) * state + increment
            read = (state * _first_elements(C[:, token], channels)).sum(0)
            return state, read + skip[:, token]

        zeros = u.new_zeros(B.shape[3], len(u), channels)
        return run_tokens(step, u.shape[1], zeros, cache, self.store)


class DeltaScan(nn.Module):
    """The gated delta rule: a state decays, forgets what it has for a key, and takes a value."""

    kind = "delta"
    ports = ("q", "k", "v", "g", "beta")

    def __init__(self) -> None:
        super().__init__()
        self.store: Store | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cache: MixerState | None = None,
    ) -> ScanResult:
        """Scan q, k, v (batch, tokens, heads, width) by decays g, of a head or of its keys."""
        q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
        heads, channels = v.shape[2], v.shape[2] * v.shape[3]
        width = torch.tensor(float(q.shape[-1]), device=q.device)
        q, k = (_normed(x).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
        q, v = q / width.sqrt(), v.flatten(2)
        decays = g.exp() if g.dim() == 4 else g.exp().unsqueeze(-1)

        def step(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
            key = _first_elements(k[:, token], channels)
            state = _first_elements(decays[:, token], channels) * state
            change = (v[:, token] - (state * key).sum(0)) * _of_channels(beta[:, token], channels)
            state = state + key * change
            return state, (state * _first_elements(q[:, token], channels)).sum(0)

        zeros = v.new_zeros(k.shape[3], len(v), channels)
        return run_tokens(step, v.shape[1], zeros, cache, self.store)


def _normed(x: Tensor) -> Tensor:
    """Divide the vectors of a query or key by their length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


class ShortConv(nn.Module):
    """A depthwise convolution of tokens, (batch, tokens, channels), over the inputs it stored."""

    ports = ("input",)

    def __init__(self) -> None:
        super().__init__()
        self.store: Store | None = None

    def forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, cache: MixerState | None = None
    ) -> Tensor:
        window = stored_window(input, weight.shape[-1] - 1, self.store, cache)
        return causal_conv(input, weight, bias, window)


StateScan = Scan | Mamba2Scan | DeltaScan
