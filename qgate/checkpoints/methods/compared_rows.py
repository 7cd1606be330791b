"""Values of a tensor of the child beside the parent's, read some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.compute import DecodedRows, SourceRows
from qgate.checkpoints.grids import leading_rows, row_spans

LEADING = 1 << 22
"""Elements of the leading rows that stand for a weight where few rows tell enough."""


@dataclass(frozen=True)
class ComparedRows:
    """A matrix of the child beside the parent's.

    read   returns the child's values from one row to another, which `spans` names
    """

    shape: tuple[int, int]
    read: Callable[[int, int], Tensor]
    spans: Callable[[], Iterable[tuple[int, int]]]
    parent: SourceRows

    @classmethod
    def of_quantized(cls, weight: DecodedRows, parent: SourceRows) -> ComparedRows:
        """Compare a quantized weight."""

        def read(start: int, stop: int) -> Tensor:
            return weight.rows(start, stop).values()

        return cls(weight.shape, read, weight.spans, parent)

    @classmethod
    def of_plain(
        cls, values: SourceRows, parent: SourceRows, shape: tuple[int, int]
    ) -> ComparedRows:
        """Compare a tensor that is not quantized."""

        def read(start: int, stop: int) -> Tensor:
            return values[start:stop]

        return cls(shape, read, lambda: row_spans(shape, 1), parent)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Read the values of both in float32, span by span."""
        for start, stop in self.spans():
            yield self.read(start, stop).float(), self.parent[start:stop].float()

    def leading(self) -> tuple[Tensor, Tensor]:
        """Read as many leading rows as are enough."""
        limit = leading_rows(self.shape, 1, LEADING)
        values, parents, count = [], [], 0
        for own, parent in self.pairs():
            values.append(own)
            parents.append(parent)
            count += len(own)
            if count >= limit:
                break
        return torch.cat(values)[:limit], torch.cat(parents)[:limit]

    def columns(self, most: int) -> tuple[Tensor, Tensor]:
        """Read so many of the columns at most, as rows."""
        step = -(-self.shape[1] // most)
        parts = [(own[:, ::step].T, parent[:, ::step].T) for own, parent in self.pairs()]
        own, parent = (torch.cat(side, 1) for side in zip(*parts, strict=True))
        return own, parent

    def parents(self) -> Iterator[Tensor]:
        """Read the parent's rows, span by span."""
        for start, stop in row_spans(self.shape, 1):
            yield self.parent[start:stop].float()
