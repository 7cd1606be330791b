"""A norm added up a row in another order when 256 rows or more were launched together.

The launcher takes blocks of 1,024 threads for fewer than 256 tokens and of 256 for more. Each thread
adds up every n-th square of a row, and the threads' sums are added pairwise: another n, another last
bit. The batch-invariant mode left that as it was.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.museum.exhibit import Exhibit


def added(x: Tensor, threads: int) -> Tensor:
    """Add up rows as so many threads do."""
    sums = torch.zeros(len(x), threads)
    for first in range(0, x.shape[1], threads):
        part = x[:, first : first + threads]
        sums[:, : part.shape[1]] += part
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums


def norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def launched(x: Tensor, threads: int) -> Tensor:
    return x * (added(x.square(), threads) / x.shape[1] + 1e-6).rsqrt()


def always_1024_threads(x: Tensor) -> Tensor:
    return launched(x, 1024)


def threads_by_rows(x: Tensor) -> Tensor:
    return launched(x, 1024 if len(x) < 256 else 256)


def arguments(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(256, 1024, generator=generator),)


EXHIBIT = Exhibit(
    "vllm-project/vllm#48271",
    "invariance",
    "From 256 tokens on, a norm added the elements of a row in another order.",
    "107 values in 79 of 4,096 rows differ; 1.5–3 % of scored tokens differ from the decoded ones",
    "is not batch-invariant: .* values differ from the example's for the first 255 of 256",
    arguments, always_1024_threads, threads_by_rows, norm,
    options={"relations": ["prefix"], "invariant": True},
)  # fmt: skip
