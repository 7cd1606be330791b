"""Rows that hold what a sequence gives that begins with them: nothing is carried over to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from qgate.causes.places import axis_word, place_words
from qgate.expected.derived import CutAxis, find_axes
from qgate.expected.noise import Expected
from qgate.kernel_checks.runs import Failing
from qgate.models.refusals import LENGTH_REFUSALS

FEWEST = 3
"""Wrong rows that must be explained, or all of them."""


def describe_restart(case: Failing) -> str:
    """Name the row from which on a result is that of a sequence which begins there."""
    if case.subject.output or not bool(case.actual.isfinite().all()) or case.wrong.dim() < 2:
        return ""
    for axis in _sequences(case):
        dim = axis.output
        assert dim is not None
        bad = case.wrong.movedim(dim, 0).flatten(1).any(1)
        places = bad.nonzero().reshape(-1).tolist()
        first = places[0] if places else 0
        if not first:
            continue
        later = torch.arange(first, axis.length)
        try:
            result = case.result_of(axis.take(case.ideal, later))
        except LENGTH_REFUSALS:
            continue
        actual = case.actual.index_select(dim, later.to(case.actual.device))
        if result.shape != actual.shape:
            continue
        width = case.expected.select(dim, later).width
        outside = Expected.around(result, width).outside(actual)
        explained = (~outside.movedim(dim, 0).flatten(1).any(1)).long().cumprod(0)
        count = int(explained.sum())
        if int(bad[first : first + count].sum()) < min(FEWEST, len(places)):
            continue
        axis_name = axis_word(case.wrong.dim(), dim)
        where = place_words(places, axis.length, axis_name)
        return (
            f"{where} {'are' if len(places) > 1 else 'is'} wrong: {axis_name} {first} holds what a "
            "sequence gives that begins with it, so what comes before is not carried over"
        )
    return ""


def _sequences(case: Failing) -> Iterator[CutAxis]:
    """List dimensions of the result with all those of arguments that are as long."""
    axes = find_axes(case.subject.like, case.ideal)
    for axis in axes:
        if axis.output is None or case.wrong.shape[axis.output] != axis.length:
            continue
        alike = [other.dimensions for other in axes if other.length == axis.length]
        together = tuple(sorted({dimension for listed in alike for dimension in listed}))
        positions = [position for position, _ in together]
        yield axis
        if together != axis.dimensions and len(positions) == len(set(positions)):
            yield replace(axis, dimensions=together)
