"""Entries of a reduced dimension that change nothing, though they should decide the result."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qgate.kernel_checks.runs import Failing

LOST = 0.1
"""Share of what an entry should change up to which it is called lost."""
MOST_NAMED = 3


def describe_uncounted(failing: Sequence[Failing]) -> str:
    """Name entries of a dimension whose rows look as if they were as small as the others."""
    for case in failing:
        if case.source is None or case.source.raised is None or case.subject.output:
            continue
        position, dim = case.source.raised
        x = case.ideal[position]
        if not isinstance(x, Tensor) or case.actual.numel() * x.shape[dim] != x.numel():
            continue
        columns = x.argmax(dim).reshape(-1)
        middle = x.median(dim, keepdim=True).values
        plain = x.scatter(dim, x.argmax(dim, keepdim=True), middle)
        without = case.result_of([*case.ideal[:position], plain, *case.ideal[position + 1 :]])
        should = (case.expected.values - without).reshape(-1).abs()
        does = (case.actual.double() - without).reshape(-1).abs()
        lost = (does < LOST * should) & case.wrong.reshape(-1)
        entries = columns[lost].unique().tolist()
        if 0 < len(entries) <= len(columns.unique()) / 4:
            listed = ", ".join(map(str, entries[:MOST_NAMED]))
            more = ", …" if len(entries) > MOST_NAMED else ""
            which, verb = ("entries", "do") if len(entries) > 1 else ("entry", "does")
            last = " (the last one)" if entries == [x.shape[dim] - 1] else ""
            return (
                f"{which} {listed}{more} of {x.shape[dim]:,}{last} along dimension {dim} of "
                f"argument {position} {verb} not count"
            )
    return ""
