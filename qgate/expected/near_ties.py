"""Roundings inside of a computation that float noise may make fall otherwise, one at a time.

A value next to a tie of rounding goes to either side, and all results of its row move with it. That
is no structure of a defect: with this one value on the other side the results have the same bits.
Codes of what a function quantizes inside are such values, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from qgate.expected.intermediates import Noise, rounded
from qgate.expected.noise import noise_of, other_codes
from qgate.expected.stages import StageCast

NEAR = 8.0
"""Times the unit of noise that a value may be away from a tie."""
MOST = 100
"""Values that are tried."""
Evaluate = Callable[[Noise], Tensor]
Excess = Callable[[Tensor], Tensor]
Place = tuple[int, int, int]
"""Number of a rounding in order, the position in its flattened tensor, and the way of a code."""
LEVELS = (1 / 32, 1 / 4, 1.0)
"""Shares of the noise before a cast within which codes are looked for, the nearest first."""
EVERY_ROW = -1
"""Stands for the row of a value that belongs to no row of the result."""
ROUNDS = 3
"""Times that codes are looked for anew: those of a later cast follow those of an earlier one."""


class NearTies(Noise):
    """Lists the values that lie next to a tie of rounding, and takes some to the other side.

    wrong   results that are to be explained: of tensors with as many rows, others are not listed
    widths  how far noise may move the values before each cast inside, in order
    """

    def __init__(
        self, dtype: torch.dtype, flipped: frozenset[Place] = frozenset(),
        wrong: Tensor | None = None, widths: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__(0)
        self.dtype, self.flipped, self.widths = dtype, flipped, widths
        self.casts = 0
        self.rows = None
        if wrong is not None and wrong.dim():  # a value of one dimension is one row of a sum
            self.rows = wrong.flatten(0, -2).any(-1) if wrong.dim() > 1 else wrong
        self.listed: list[tuple[float, Place]] = []
        self.rows_of: dict[Place, int] = {}
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
        chosen = [position for call, position, way in self.flipped if call == self.calls]
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
        for share, position in zip(flat[places].tolist(), places.tolist(), strict=True):
            self._add(share, (self.calls, position, 0), values)

    def _add(self, share: float, place: Place, values: Tensor) -> None:
        self.listed.append((share, place))
        if self.rows is not None and values.numel() == values.shape[-1] * len(self.rows):
            self.rows_of[place] = place[1] // values.shape[-1]

    def restart(self) -> None:
        self.calls = self.casts = 0
        self.listed.clear()

    def cast(self, values: Tensor, cast: StageCast) -> Tensor:
        """Return the codes of values, those of some places as values beside them have."""
        result = cast(values)
        width = self.widths[self.casts] if self.casts < len(self.widths) else None
        if width is not None and width.shape != values.shape:
            width = None
        if width is not None and self.rows is not None and values.dim():
            self._list_codes(values, result, width, cast)
        chosen = [
            (position, way) for call, position, way in self.flipped if call == self.calls and way
        ]
        self.calls, self.casts = self.calls + 1, self.casts + 1
        if not chosen or width is None:
            return result
        places = torch.tensor([position for position, _ in chosen], device=values.device)
        ways = torch.tensor([way for _, way in chosen], device=values.device)
        near = values.clone(memory_format=torch.contiguous_format)
        near.view(-1)[places] += ways * noise_of(values, width).reshape(-1)[places]
        result = result.clone(memory_format=torch.contiguous_format)
        result.view(-1)[places] = cast(near).reshape(-1)[places]
        return result

    def _list_codes(self, values: Tensor, result: Tensor, width: Tensor, cast: StageCast) -> None:
        listed: set[Place] = set()
        assert self.rows is not None
        for level in LEVELS:
            for way, differs, _ in other_codes(cast, values, result, level * width):
                rows = differs.reshape(-1, values.shape[-1])
                if len(rows) == len(self.rows):
                    rows = rows & self.rows[:, None]
                for position in rows.reshape(-1).nonzero().flatten().tolist():
                    code = self.calls, position, way
                    if code not in listed:
                        listed.add(code)
                        self._add(level, code, values)


def settle(
    evaluate: Evaluate, excess: Excess, dtype: torch.dtype, widths: Sequence[Tensor] = ()
) -> Tensor:
    """Return the values of a computation with values next to ties on the side that explains most.

    evaluate   computes with something that moves values before they are rounded
    excess     tells by how much results differ that values do not explain, 0 for others
    widths     how far noise may move the values before each cast inside, in order
    """
    if widths:
        return _settle_by_row(evaluate, excess, dtype, widths)
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


def _settle_by_row(
    evaluate: Evaluate, excess: Excess, dtype: torch.dtype, widths: Sequence[Tensor]
) -> Tensor:
    """Settle values next to ties of all rows at a time, one of each row: rows are independent."""
    values = evaluate(NearTies(dtype, widths=widths)).contiguous()
    unexplained = excess(values).contiguous()
    chosen: frozenset[Place] = frozenset()
    for _ in range(ROUNDS):
        ties = NearTies(dtype, chosen, unexplained != 0, widths)
        evaluate(ties)
        by_row: dict[int, list[Place]] = {}
        for _, tie in sorted(ties.listed):
            by_row.setdefault(ties.rows_of.get(tie, EVERY_ROW), []).append(tie)
        before = chosen
        for number in range(min(max(map(len, by_row.values()), default=0), MOST)):
            if not bool(unexplained.any()):
                return values
            is_wrong = _rows(unexplained).any(-1).tolist()
            listed = {
                row: of[number]
                for row, of in by_row.items()
                if number < len(of) and (row == EVERY_ROW or is_wrong[row])
            }
            everywhere = listed.pop(EVERY_ROW, None)
            for some in (listed, {} if everywhere is None else {EVERY_ROW: everywhere}):
                if not some:
                    continue
                flipped = chosen ^ frozenset(some.values())
                changed = evaluate(NearTies(dtype, flipped, widths=widths)).contiguous()
                changed_excess = excess(changed).contiguous()
                better = _better_rows(changed_excess, unexplained, some)
                chosen ^= frozenset(tie for row, tie in some.items() if row in better)
                if EVERY_ROW in better:
                    values, unexplained = changed, changed_excess
                elif better:
                    index = torch.tensor(sorted(better), device=values.device)
                    for old, new in ((values, changed), (unexplained, changed_excess)):
                        _rows(old)[index] = _rows(new)[index]
        if chosen == before:
            break
        values = evaluate(NearTies(dtype, chosen, widths=widths)).contiguous()
        unexplained = excess(values).contiguous()
        if not bool(unexplained.any()):
            break
    return values


def _rows(result: Tensor) -> Tensor:
    """Return a result as a matrix; a value of one dimension is a row of a sum."""
    return result.view(-1, 1) if result.dim() < 2 else result.view(-1, result.shape[-1])


def _better_rows(changed: Tensor, before: Tensor, of: Mapping[int, Place]) -> set[int]:
    """Return the rows of which less is unexplained than before."""
    if EVERY_ROW in of:
        return {EVERY_ROW} if float(changed.norm()) < float(before.norm()) else set()
    sides = (_rows(side).norm(dim=-1).tolist() for side in (changed, before))
    less = [new < old for new, old in zip(*sides, strict=True)]
    return {row for row in of if less[row]}
