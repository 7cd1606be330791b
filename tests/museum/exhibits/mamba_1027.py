"""Prefill kept the outputs of a convolution as its state, where decoding needs the inputs.

An attention layer convolves its queries, keys and values along time; the state of a causal
convolution is its last inputs. After a prompt it held what the convolution had made of them, so the
next decoding step read a wrong history.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit

_WIDTH = 4


def convolved(prompt: Tensor, token: Tensor, weight: Tensor) -> Tensor:
    """Return the convolution at the token after a prompt, [request, channel]."""
    window = torch.cat([prompt, token[:, None]], 1)[:, -_WIDTH:]
    return torch.einsum("rwc,wc->rc", window, weight)


def _decoded(state: Tensor, token: Tensor, weight: Tensor) -> Tensor:
    return (state * weight[:-1]).sum(1) + token * weight[-1]


def keeping_inputs(prompt: Tensor, token: Tensor, weight: Tensor) -> Tensor:
    return _decoded(prompt[:, 1 - _WIDTH :], token, weight)


def keeping_outputs(prompt: Tensor, token: Tensor, weight: Tensor) -> Tensor:
    padded = torch.cat([torch.zeros_like(prompt[:, 1:_WIDTH]), prompt], 1)
    outputs = (padded.unfold(1, _WIDTH, 1) * weight.t()).sum(-1)
    return _decoded(outputs[:, 1 - _WIDTH :], token, weight)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((5, 12, 24), (5, 24), (_WIDTH, 24))
    prompt, token, weight = (torch.randn(*size, generator=generator) for size in sizes)
    return prompt, token, weight / 2


EXHIBIT = Exhibit(
    "state-spaces/mamba#1027",
    "caches",
    "Prefill stored outputs of a convolution as its state, where decoding reads inputs.",
    "the next decoding step sees the wrong causal history",
    "the result depends on rows 6 to 11 of argument 0, the reference.s on rows 9 to 11",
    arguments, keeping_inputs, keeping_outputs, convolved,
    options={"relations": ["permuted"]},
)  # fmt: skip
