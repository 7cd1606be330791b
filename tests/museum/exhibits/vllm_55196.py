"""An INT8 state of a linear attention was rounded at every step, and the errors piled up.

Each step decodes the state, adds to it and rounds it again. What rounding took away is lost unless
the step keeps it and adds it the next time: error feedback.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import qgate
from tests.museum.exhibit import Exhibit

STATE = qgate.Quantizer("int8", granularity="channel", axis=0)


def stepped(state: Tensor, residual: Tensor, decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the state [value, key] after one token; the residual is what rounding took from it."""
    return (state + residual) * decay + v[:, None] * k


def with_feedback(state: Tensor, residual: Tensor, decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return STATE(stepped(STATE(state), residual, decay, k, v))


def without_feedback(
    state: Tensor, _residual: Tensor, decay: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    return STATE(STATE(state) * decay + v[:, None] * k)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    exact = torch.randn(16, 32, generator=generator)
    state = STATE(exact)
    decay = torch.rand(1, generator=generator) * 0.1 + 0.9
    k, v = (torch.randn(size, generator=generator) / 8 for size in (32, 16))
    return state, exact - state, decay, k, v


EXHIBIT = Exhibit(
    "vllm-project/vllm#55196",
    "caches",
    "Rounding errors of an INT8 state piled up from step to step.",
    "GSM8K 81 % → 41 %, and 81 % again with error feedback",
    "argument 1 is not used: read as zeros",
    arguments, with_feedback, without_feedback, stepped, {0: STATE}, STATE,
    {"relations": ["prefix"]}, terms=0,
)  # fmt: skip
