"""Choices between two grids that right implementations of one format make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from qgate.expected.group_scales import by_groups
from qgate.formats.choosing import ChoosingFormat
from qgate.formats.options import Floats
from qgate.formats.settings import QuantizerSettings


def other_choices(fmt: ChoosingFormat) -> Iterator[tuple[str, ChoosingFormat]]:
    """List the ways in which implementations of a format choose, in words, but for its own."""
    sums = {"mae": "sums of absolute errors", "mse": "sums of squared errors"}
    largest = (448.0, 256.0) if not fmt.signed else (fmt.largest_scale,)
    for error, at_most in itertools.product(sums, largest):
        if (error, at_most) != (fmt.error, fmt.largest_scale):
            words = f"blocks chosen by {sums[error]}"
            words += f", largest scale {at_most:g}" if len(largest) > 1 else ""
            yield words, replace(fmt, error=error, largest_scale=at_most)  # type: ignore[arg-type]


def choosing(q: QuantizerSettings, fmt: ChoosingFormat) -> Callable[[Floats, float], Floats]:
    """Quantize blocks to the better grid; a nudge decides between errors that nearly agree."""

    def values(x: Floats, nudge: float) -> Floats:
        state, favor = fmt.define_state(x), 1 + 2**4 * (nudge - 1)
        return by_groups(x, q, lambda rows: fmt.define(rows, q, state, False, favor))

    return values
