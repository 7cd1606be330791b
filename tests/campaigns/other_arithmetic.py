"""A pytest plugin of the clean runs: correct arithmetic of other kernels, and tests in another order.

QGATE_TEST_ARITHMETIC names the kernels, QGATE_TEST_ORDER seeds the order. All of them are right: they
round sums in another order, or the last bit, or what is below the normal numbers. It has to be loaded
before qgate's models, which take torch's functions by name.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

_PARTS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of one session draw the same order, as xdist demands."""
    random.Random(os.environ["QGATE_TEST_ORDER"]).shuffle(items)


def _wrap(name: str, make: Callable[[Any], Any]) -> None:
    setattr(functional, name, make(getattr(functional, name)))


def split_sums() -> None:
    """Add linear layers in parts of K, as kernels do whose K is split over blocks.

    The parts are added in float32, whatever the tensors are: sums in float16 would be a fault.
    """

    def split(linear: Any) -> Any:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if not x.is_floating_point() or x.shape[-1] < _PARTS:
                return linear(x, weight, bias)
            a, b = (t if t.dtype is torch.float64 else t.float() for t in (x, weight))
            parts = zip(a.tensor_split(_PARTS, -1), b.tensor_split(_PARTS, -1), strict=True)
            y = sum(linear(some, of) for some, of in parts)
            return (y if bias is None else y + bias).to(x.dtype)

        return product

    _wrap("linear", split)


def last_bits() -> None:
    """Move half of the numbers that a linear layer returns by one unit in the last place."""

    def noisy(linear: Any) -> Any:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = linear(x, weight, bias)
            if y.dtype is not torch.float32:
                return y
            values = y.detach()
            # Which way depends on the number alone: the same input has the same output again.
            hashed = (values.view(torch.int32) * -1640531527) >> 20
            ends = torch.where(hashed & 1 == 0, values, math.inf)
            ends = torch.where(hashed & 3 == 3, -math.inf, ends)
            return y + (torch.nextafter(values, ends) - values).nan_to_num(0.0, 0.0, 0.0)

        return product

    _wrap("linear", noisy)


def eager_attention() -> None:
    """Compute attention by its definition, and not by one fused kernel.

    Scores and probabilities stay float32, as in the fused kernels: rounded to bfloat16 they double the
    error of a layer, which is a fault and planted as one ("attention in bf16").
    """

    def eager(_fused: Any) -> Any:
        def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
            dtype = q.dtype
            q, k, v = (
                t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in (q, k, v)
            )
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if is_causal:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            return (scores.softmax(-1) @ v).to(dtype)

        return attention

    _wrap("scaled_dot_product_attention", eager)


def flushed() -> None:
    """Take numbers below the normal ones for zero, as fast modes of processors do."""
    assert torch.set_flush_denormal(True), "this processor cannot"


def other_batches() -> None:
    """Put three samples side by side where qgate puts eight."""
    from qgate.gate.measuring import passes
    from qgate.modes import calibration

    passes.AT_ONCE = 3
    calibration._BATCH = 3


KINDS: dict[str, Callable[[], None]] = {
    "own": lambda: None,
    "split-sums": split_sums,
    "last-bits": last_bits,
    "eager-attention": eager_attention,
    "flushed": flushed,
    "batches-of-3": other_batches,
}

KINDS[os.environ.get("QGATE_TEST_ARITHMETIC", "own")]()
