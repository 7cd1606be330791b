"""Which entries of its arguments each part of a kernel's result depends on, beside the reference.

An entry is turned to its negative, which leaves scales made from magnitudes as they are. What then
changes in the kernel's result and does not in the reference's, or the other way around, is what the
kernel reads that it should not, or does not read that it should: masks, positions, indices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.expected.narrow_floats import is_wide_float
from qgate.kernel_checks.runs import Failing
from qgate.kernel_checks.subject import KernelRefusal
from qgate.models.refusals import REFUSALS

LONGEST = 64
"""Entries along one dimension of an argument above which it is not looked into."""
LARGEST = 2**18
"""Elements of arguments and result above which a kernel is too slow to run for each entry."""
SLOW = ((0.1, 16), (0.02, 128))
"""Seconds of a processor that one call takes, and how often a kernel as slow is called."""
CHANGED, UNCHANGED = 4.0, 0.25
"""Widths of float noise from which a value has changed, and up to which it has not."""
FEW = 4
"""Entries too many or too few that need not be neighbors."""
UNEXPLAINED = 0.1
"""Share of the wrong rows that may depend on the right entries when others do not."""


@dataclass(frozen=True)
class _Difference:
    """Entries of one argument that lines of the result depend on, and those that they should.

    lines    wrong entries along one dimension of the result of which this is so
    kernel   what the first of them depends on; reference: what the reference's depends on
    missed   wrong entries along that dimension that depend on the right ones
    is_one   True if all those lines depend on the same entries too many or too few
    is_whole  True if this is so of the whole result
    """

    argument: int
    entry_word: str
    result_word: str
    lines: list[int]
    kernel: list[int]
    reference: list[int]
    missed: int
    is_one: bool
    is_whole: bool

    def rank(self) -> tuple[bool, int, int]:
        """Return a key by which the difference that says most comes first."""
        return self.is_one, self.missed, len(set(self.kernel) ^ set(self.reference))

    def words(self) -> str:
        more = len(self.lines) - 1
        also = f", and so for {more} more" if more else ""
        where = f"{_place(self.result_word, str(self.lines[0]))} of the result"
        if self.is_whole:
            where, also = "the result", ""
        return (
            f"{where} depends on {self._entries(self.kernel)} of argument {self.argument}, the "
            f"reference's on {self._entries(self.reference)}{also}"
        )

    def _entries(self, entries: list[int]) -> str:
        if not entries:
            of = (
                f"entry of {self.entry_word}"
                if self.entry_word.startswith("dim")
                else self.entry_word
            )
            return f"no {of}"
        first, last = entries[0], entries[-1]
        if len(entries) == 1:
            return _place(self.entry_word, str(first))
        if last - first == len(entries) - 1:
            return _place(self.entry_word, f"{first} to {last}", is_one=False)
        listed = ", ".join(map(str, entries[:4]))
        more = ", …" if len(entries) > 4 else ""
        return _place(self.entry_word, f"{listed}{more}", is_one=False)


def describe_dependence(case: Failing) -> str:
    """Say which part of the result depends on other entries than the reference's does."""
    tensors = [value for value in case.arguments if isinstance(value, Tensor)]
    if case.wrong.numel() + sum(tensor.numel() for tensor in tensors) > LARGEST:
        return ""
    differences = list(_differences(case))
    return min(differences, key=_Difference.rank).words() if differences else ""


def _differences(case: Failing) -> Iterator[_Difference]:
    begin = time.process_time()
    actual = case.subject.run(case.arguments)
    seconds = time.process_time() - begin
    calls = next((few for bound, few in SLOW if seconds > bound), math.inf)
    dims = [
        (argument.shape[dim], position, dim)
        for position, argument in enumerate(case.arguments)
        if is_wide_float(argument)
        for dim in range(argument.dim())
        if 1 < argument.shape[dim] <= LONGEST
    ]
    # The shortest first where there are few calls.
    for length, position, dim in sorted(dims) if calls < math.inf else dims:
        argument, calls = case.arguments[position], calls - length
        if calls < 0:
            return
        changes = [_changes(case, position, dim, entry, actual) for entry in range(length)]
        run = [change for change in changes if change is not None]
        if len(run) < len(changes):
            continue
        # Where there is no noise, what has not changed is no NaN.
        kernel, reference = (
            torch.stack([change[part] for change in run]).div(case.expected.width).nan_to_num(0.0)
            for part in (0, 1)
        )
        word = _axis_word(argument.dim(), dim)
        for output in range(case.wrong.dim()):
            yield from _by_line(position, word, output, kernel, reference, case.wrong)


def _by_line(
    position: int, word: str, output: int, kernel: Tensor, reference: Tensor, wrong: Tensor
) -> Iterator[_Difference]:
    """Tell what differs along one dimension of the result; changes are in widths of the noise."""
    by_line = [
        t.movedim(output + 1, 1).reshape(len(t), wrong.shape[output], -1).amax(2)
        for t in (kernel, reference)
    ]
    depends = [t > CHANGED for t in by_line]
    clear = depends[0] & (by_line[1] < UNCHANGED) | depends[1] & (by_line[0] < UNCHANGED)
    hit = wrong.movedim(output, 0).flatten(1).any(1) if wrong.dim() > 1 else wrong
    lines = (clear.any(0) & hit).nonzero().reshape(-1).tolist()
    missed = int(hit.sum()) - len(lines)
    if wrong.shape[output] < 2 or not lines or missed > UNEXPLAINED * int(hit.sum()):
        return
    entries = [[t[:, line].nonzero().reshape(-1).tolist() for t in depends] for line in lines]
    differing = [sorted(set(mine) ^ set(right)) for mine, right in entries]
    # What float noise hides here and there is no fault of positions: those are few, or one run.
    if not all(len(some) <= FEW or some[-1] - some[0] < len(some) for some in differing):
        return
    is_one = len({tuple(some) for some in differing}) == 1 and len(lines) > 1
    yield _Difference(
        argument=position,
        entry_word=word,
        result_word=_axis_word(wrong.dim(), output),
        lines=lines,
        kernel=entries[0][0],
        reference=entries[0][1],
        missed=missed,
        is_one=is_one,
        is_whole=is_one and len(lines) == wrong.shape[output],
    )


def _axis_word(dims: int, dim: int) -> str:
    if dims == 1:
        return "entry"
    return ("row", "column")[dim - dims] if dim >= dims - 2 else f"dimension {dim}"


def _place(word: str, numbers: str, *, is_one: bool = True) -> str:
    """Return words such as `row 3`, `columns 0 to 4`, `entry 0 of dimension 1`."""
    if word.startswith("dimension") or word == "entry":
        of = "" if word == "entry" else f" of {word}"
        return f"{'entry' if is_one else 'entries'} {numbers}{of}"
    return f"{word}{'' if is_one else 's'} {numbers}"


def _changes(
    case: Failing, position: int, dim: int, entry: int, actual: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return how far results of kernel and reference move when an entry changes its sign."""
    changed, expected = list(case.arguments), case.expected
    changed[position] = case.arguments[position].clone()
    changed[position].select(dim, entry).neg_()
    try:
        moved = case.subject.run(changed)
        values = case.subject.values(changed, case.choices)
    except (*REFUSALS, KernelRefusal, IndexError):
        return None
    if moved.shape != actual.shape or values.shape != expected.values.shape:
        return None
    return (moved.double() - actual.double()).abs(), (values - expected.values).abs()
