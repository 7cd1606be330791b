"""Casts of recurrent states, which are stored after every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qgate.arithmetic import divided
from qgate.formats import Quantizer
from qgate.modes.states.choices import StateChoice
from qgate.modes.states.draws import Draws, site_key

Scale = float | Tensor | None
"""A scale of the tensor, one for each channel, or None for a cast without one."""


class StoredState(nn.Module):
    """The cast of one state: what later tokens read of it.

    A scan gives its state after one token, (states, batch, channels); a convolution gives its
    inputs, (batch, tokens, channels). `scale` is a static one.
    """

    def __init__(self, site: str, choice: StateChoice, scale: Scale, seed: int = 0) -> None:
        super().__init__()
        self.site, self.choice, self.scale = site, choice, scale
        self.draws = Draws(site_key(site, seed))
        self._is_scan = site.partition(":")[0].endswith(".scan")
        self.quantizer = quantizer_of(choice.format, choice.share, scale, self._axis)
        self.remainder = quantizer_of(choice.remainder, "token", None, self._axis)

    @property
    def _axis(self) -> int:
        """Axis of the elements that share a scale made at each token."""
        return 0 if self._is_scan else -1

    def forward(self, x: Tensor, first: int) -> Tensor:
        """Return what is stored of a tensor whose first token has this number."""
        with torch.no_grad():
            stored = self._stored(x.detach(), first)
        return _Straight.apply(x, stored) if x.requires_grad else stored  # type: ignore[no-untyped-call]

    def _stored(self, x: Tensor, first: int) -> Tensor:
        assert self.quantizer is not None
        if self.choice.stochastic:
            return self._rounded_at_random(x, first)
        stored = self.quantizer(x)
        return stored if self.remainder is None else stored + self.remainder(x - stored)

    def _rounded_at_random(self, x: Tensor, first: int) -> Tensor:
        assert self.quantizer is not None
        element = self.quantizer.format.element
        scale = self._scale_of(x)
        ratios = x.double() if scale is None else x.double() / scale
        cast = element.at_random(ratios, self._draws(x, first))
        return (cast if scale is None else cast * scale).float()

    def _scale_of(self, x: Tensor) -> Any:
        """Return the scale of a tensor in float64, as quantizers make it."""
        if self.choice.share == "none":
            return None
        if self.choice.share == "token":
            largest = x.abs().amax(self._axis, keepdim=True).double()
            assert self.quantizer is not None
            highest = self.quantizer.format.element.max
            scale = divided(largest, highest).float().double()
            smallest = torch.finfo(torch.float32).smallest_normal * 2.0**-23
            return scale.clamp_min(smallest).where(largest > 0, 1.0)
        return torch.as_tensor(self.scale, dtype=torch.float32, device=x.device).double()

    def _draws(self, x: Tensor, first: int) -> Tensor:
        if not self._is_scan:
            return self.draws.of_tokens(first, x.shape[1], x.shape[2], x.device)
        states, _, channels = x.shape
        draws = self.draws.of_tokens(first, 1, channels * states, x.device)
        return draws.view(channels, states).t().unsqueeze(1)

    def extra_repr(self) -> str:
        return f"{self.site}: {self.choice.words()}"


class _Straight(torch.autograd.Function):
    """The stored state, through which gradients pass unchanged."""

    @staticmethod
    def forward(_ctx: Any, _x: Tensor, stored: Tensor) -> Tensor:
        return stored

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def quantizer_of(name: str, share: str, scale: Scale, axis: int) -> Quantizer | None:
    """Return the quantizer of a format; None without one."""
    if not name:
        return None
    sharing: Mapping[str, Any] = {}
    if share == "token":
        # A block that is too long stands for all elements along its axis.
        sharing = {"granularity": "block", "block": 2**30, "axis": axis}
    elif share == "channel":
        sharing = {"granularity": "channel", "axis": -1, "scale": scale}
    elif share == "tensor":
        sharing = {"scale": scale}
    return Quantizer(name, **sharing)
