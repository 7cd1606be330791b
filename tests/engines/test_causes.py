"""Faults that logits tell, on positions whose logits have the same values in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qgate.engines.causes import find_causes

LENGTH, SAMPLES, VOCABULARY = 24, 6, 512


class Scored:
    """Scores of one sample, as far as causes read them."""

    def __init__(self, logits: Tensor) -> None:
        self.values = logits

    def __len__(self) -> int:
        return len(self.values)

    def logits(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]


def causes(fault: Callable[[Tensor], Tensor], noise: float = 1e-3) -> list[str]:
    g = torch.Generator().manual_seed(0)
    reference = torch.randn(SAMPLES, LENGTH, VOCABULARY, generator=g) * 3
    actual = fault(reference) + noise * torch.randn(reference.shape, generator=g)
    return find_causes([(Scored(a), Scored(r)) for a, r in zip(actual, reference, strict=True)])  # type: ignore[misc]


def in_another_order(logits: Tensor) -> Tensor:
    return logits[..., torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))]


def of_other_positions(logits: Tensor) -> Tensor:
    return logits[:, torch.randperm(LENGTH, generator=torch.Generator().manual_seed(3))]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda logits: logits.roll(1, 1), "those of one position before it"),
        (lambda logits: logits.roll(-1, 1), "those of one position after it"),
        (in_another_order, "in another order of the vocabulary"),
        (lambda logits: logits / 0.7, "temperature"),
    ],
    ids=["late", "early", "vocabulary", "temperature"],
)
def test_a_fault_of_logits_is_named(fault: Callable[[Tensor], Tensor], words: str) -> None:
    """Sorted, the logits of any two positions are alike, so order alone names nothing."""
    (named,) = causes(fault)
    assert words in named


def test_logits_of_anything_else_are_not_named() -> None:
    assert causes(of_other_positions) == []
    assert causes(lambda logits: logits.flip(0)) == []
