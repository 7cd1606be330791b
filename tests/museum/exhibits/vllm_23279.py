"""The initial state of a request was decayed by the tokens of the request before it.

Requests lie one after the other in chunks of fixed size. Decays were summed from the start of the
chunk, so a request that begins inside a chunk got those of its neighbor, too.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit

_CHUNK = 16


def decayed(initial: Tensor, log_decay: Tensor, request: Tensor) -> Tensor:
    """Return what is left of each token's initial state, [token, channel]."""
    rows = []
    for token, number in enumerate(request.tolist()):
        first = request.tolist().index(number)
        rows.append(initial[number] * log_decay[first : token + 1].sum(0).exp())
    return torch.stack(rows)


def _from(initial: Tensor, log_decay: Tensor, request: Tensor, starts: list[int]) -> Tensor:
    sums = torch.cat([torch.zeros_like(log_decay[:1]), log_decay.cumsum(0)])
    total = sums[1:] - sums[torch.tensor(starts)]
    return initial[request] * total.exp()


def from_the_request(initial: Tensor, log_decay: Tensor, request: Tensor) -> Tensor:
    numbers = request.tolist()
    return _from(initial, log_decay, request, [numbers.index(number) for number in numbers])


def from_the_chunk(initial: Tensor, log_decay: Tensor, request: Tensor) -> Tensor:
    numbers = request.tolist()
    # A request that goes on from a chunk before still begins where it began.
    starts = [min(numbers.index(n), t // _CHUNK * _CHUNK) for t, n in enumerate(numbers)]
    return _from(initial, log_decay, request, starts)


def arguments(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    request = torch.tensor([0] * 10 + [1] * 14 + [2] * 24)
    log_decay = -torch.rand(48, 12, generator=generator) / 8
    return torch.randn(3, 12, generator=generator), log_decay, request


EXHIBIT = Exhibit(
    "vllm-project/vllm#23279",
    "caches",
    "A request that began inside a chunk had its state decayed by its neighbor's tokens.",
    "prefill in chunks differs from the whole sequence",
    "14 of 48 rows .10, 11, 12, 13, 14, …. are about .* a scale of this part is off",
    arguments, from_the_request, from_the_chunk, decayed, options={"relations": []},
)  # fmt: skip
