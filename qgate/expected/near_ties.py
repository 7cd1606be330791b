"""Roundings inside of a computation that float noise may make fall otherwise, one at a time.

A value next to a tie of rounding goes to either side, and all results of its row move with it. That
is no structure of a defect: with this one value on the other side the results have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qgate.expected.intermediates import Noise, rounded

NEAR = 8.0
"""Times the unit of noise that a value may be away from a tie."""
MOST = 100
"""Values that are tried."""
Evaluate = Callable[[Noise], Tensor]
Excess = Callable[[Tensor], Tensor]
Place = tuple[int, int]
"""Number of a rounding in order of execution, and the position in its flattened tensor."""


class NearTies(Noise):
    """Lists the values that lie next to a tie of rounding, and takes some to the other side.

    wrong   results that are to be explained: of tensors with as many rows, others are not listed
    """

    def __init__(
        self, dtype: torch.dtype, flipped: frozenset[Place] = frozenset(),
        wrong: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(0)
        self.dtype, self.flipped = dtype, flipped
        self.rows = None
        if wrong is not None and wrong.dim():  # a value of one dimension is one row of a sum
            self.rows = wrong.flatten(0, -2).any(-1) if wrong.dim() > 1 else wrong
        self.listed: list[tuple[float, Place]] = []
        self.calls = 0

    def __call__(self, values: Tensor, unit: float) -> Tensor:
        return self._visited(values, unit, values.new_zeros((), dtype=torch.bool))

    def inexact(self, values: Tensor, unit: float) -> Tensor:
        """Leave values that float32 holds: they are no rounded ones."""
        return self._visited(values, unit, values.float() == values)

    def _visited(self, values: Tensor, unit: float, exact: Tensor) -> Tensor:
        nearest = rounded(values, self.dtype)
        other = rounded(nearest + 2 * (values - nearest), self.dtype)
        if self.rows is not None and values.dim():
            self._list(values, (nearest + other) / 2, unit, exact | (nearest == other))
        chosen = [position for call, position in self.flipped if call == self.calls]
        self.calls += 1
        if not chosen:
            return values
        values = values.clone(memory_format=torch.contiguous_format)
        values.view(-1)[chosen] = other.reshape(-1)[chosen]
        return values

    def _list(self, values: Tensor, ties: Tensor, unit: float, fixed: Tensor) -> None:
        typical = values.square().mean(-1, keepdim=True).sqrt()
        room = NEAR * unit * torch.maximum(values.abs(), typical)
        shares = ((values - ties).abs() / room).masked_fill(fixed, math.inf).nan_to_num(math.inf)
        rows = shares.reshape(-1, values.shape[-1])
        if self.rows is not None and len(rows) == len(self.rows):
            rows = rows.masked_fill(~self.rows[:, None], math.inf)
        flat = rows.reshape(-1)
        places = (flat < 1).nonzero().flatten()
        self.listed += [
            (share, (self.calls, position))
            for share, position in zip(flat[places].tolist(), places.tolist(), strict=True)
        ]


def settle(evaluate: Evaluate, excess: Excess, dtype: torch.dtype) -> Tensor:
    """Return the values of a computation with values next to ties on the side that explains most.

    evaluate   computes with something that moves values before they are rounded
    excess     tells by how much results differ that values do not explain, 0 for others
    """
    values = evaluate(NearTies(dtype))
    unexplained = excess(values)
    ties = NearTies(dtype, wrong=unexplained != 0)
    evaluate(ties)
    chosen: frozenset[Place] = frozenset()
    for _, tie in sorted(ties.listed)[:MOST]:
        changed = evaluate(NearTies(dtype, chosen | {tie}))
        changed_excess = excess(changed)
        if float(changed_excess.norm()) < float(unexplained.norm()):
            chosen, values, unexplained = chosen | {tie}, changed, changed_excess
        if not bool(unexplained.any()):
            break
    return values
