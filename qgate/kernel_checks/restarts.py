"""Rows that hold what a sequence gives that begins with them: nothing is carried over to them."""

from __future__ import annotations

import torch

from qgate.causes.places import axis_word, place_words
from qgate.expected.derived import find_axes
from qgate.expected.noise import Expected
from qgate.kernel_checks.runs import LENGTH_REFUSALS, Failing

FEWEST, SHARE = 3, 0.5
"""Rows in a row that must be explained, or all that remain, and the share of them that was wrong."""


def describe_restart(case: Failing) -> str:
    """Name the row from which on a result is that of a sequence which begins there."""
    if case.subject.output or not bool(case.actual.isfinite().all()):
        return ""
    for axis in find_axes(case.subject.like, case.ideal):
        dim = axis.output
        if dim is None or case.wrong.dim() < 2 or case.wrong.shape[dim] != axis.length:
            continue
        bad = case.wrong.movedim(dim, 0).flatten(1).any(1)
        places = bad.nonzero().reshape(-1).tolist()
        first = places[0] if places else 0
        if not first:
            continue
        rest = torch.arange(first, axis.length)
        try:
            result = case.result_of(axis.take(case.ideal, rest))
        except LENGTH_REFUSALS:
            continue
        actual = case.actual.index_select(dim, rest.to(case.actual.device))
        if result.shape != actual.shape:
            continue
        width = case.expected.select(dim, rest).width
        outside = Expected.around(result, width).outside(actual)
        explained = (~outside.movedim(dim, 0).flatten(1).any(1)).long().cumprod(0)
        count = int(explained.sum())
        if count < min(FEWEST, len(rest)) or float(bad[first : first + count].double().mean()) < SHARE:  # fmt: skip
            continue
        axis_name = axis_word(case.wrong.dim(), dim)
        where = place_words(places, axis.length, axis_name)
        return (
            f"{where} {'are' if len(places) > 1 else 'is'} wrong: {axis_name} {first} holds what a "
            "sequence gives that begins with it, so what comes before is not carried over"
        )
    return ""
