"""Shapes that no sample has, in which the modules of a mode are called one at a time.

The rows of a recorded call are repeated to other numbers of tokens and samples. Each row keeps its
result, so no accepted value is needed. Kernels choose tiles and code by shape: lengths lie at and
beside the powers of two, and between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qgate.text import counted

LENGTHS = (1, 3, 8, 17, 33, 64, 100, 129, 200, 256, 257, 384, 513, 768, 1025, 2049, 4097, 8192)
"""Numbers of tokens, or of samples without tokens."""
_FEW_TOKENS = 7
BATCHES = (2, 5, 16, 64)
"""Numbers of samples, of one token and of a few each; of the last one also the most rows."""
_UNBATCHED = (1, 17, 129, 513)
_FEW = ((1, 17), (1, 200), (1, 700), (None, 129), (16, _FEW_TOKENS), (64, 1))
_MOST_ROWS = LENGTHS[-1]
_MOST_ELEMENTS, _MOST_PRODUCTS = 2**24, 2**36
"""Of one call: elements of an argument or result, and products with a weight, about a second."""


@dataclass(frozen=True)
class CallShape:
    """So many samples of so many tokens; without that axis where there is none."""

    samples: int | None
    tokens: int | None

    @property
    def rows(self) -> int:
        return (self.samples or 1) * (self.tokens or 1)

    def __str__(self) -> str:
        samples, tokens = counted(self.samples or 0, "sample"), counted(self.tokens or 0, "token")
        if self.tokens is None:
            return samples
        if self.samples is None:
            return f"{tokens} without a batch axis"
        return tokens if self.samples == 1 else f"{samples} of {tokens}"


def most_rows(module: nn.Module, arguments: Sequence[Any]) -> int:
    """Return how many rows a call of a module may have to take about a second."""
    widths = [x.shape[-1] for x in arguments if isinstance(x, Tensor) and x.dim()]
    weight = getattr(module, "weight", None)
    products = weight.numel() if isinstance(weight, Tensor) else 1
    return max(
        1,
        min(_MOST_ROWS, _MOST_ELEMENTS // max(widths, default=1), _MOST_PRODUCTS // (2 * products)),
    )


def few_shapes(rows: int, *, has_tokens: bool) -> Iterator[CallShape]:
    """List a few shapes of at most so many rows: between powers of two, and beside them."""
    for samples, tokens in _FEW:
        if has_tokens:
            shape = CallShape(samples, tokens)
        else:
            shape = CallShape((samples or 1) * tokens, None)
        if shape.rows <= rows:
            yield shape


def call_shapes(rows: int, *, has_tokens: bool) -> Iterator[CallShape]:
    """List shapes of at most so many rows."""
    lengths = [length for length in LENGTHS if length <= rows]
    if not has_tokens:
        yield from (CallShape(length, None) for length in lengths)
        return
    yield from (CallShape(1, length) for length in lengths)
    yield from (CallShape(None, length) for length in _UNBATCHED if length <= rows)
    for samples in BATCHES:
        most = rows // samples if samples == BATCHES[-1] else 1
        for tokens in sorted({1, _FEW_TOKENS, most}):
            if 0 < tokens * samples <= rows:
                yield CallShape(samples, tokens)


def range_of(wrong: Sequence[CallShape], right: Sequence[CallShape]) -> str:
    """Say at which shapes a module is wrong: what tells them from those at which it is right."""
    if len(wrong) == 1:
        return f"at {wrong[0]}"
    if not right:
        return "in every shape that was tried"
    if all(shape.samples is None for shape in wrong):
        return "without a batch axis"
    for words, count in _COUNTED.items():
        bad, good = {count(shape) for shape in wrong}, {count(shape) for shape in right}
        if any(min(bad) <= number <= max(bad) for number in good):
            continue
        below = [f"{max(few):,}"] if (few := [n for n in good if n < min(bad)]) else []
        above = [f"{min(many):,}"] if (many := [n for n in good if n > max(bad)]) else []
        reach = f"{min(bad):,}" + f" to {max(bad):,}" * (len(bad) > 1)
        reach = reach if above else f"{min(bad):,} and more"
        return f"at {reach} {words} (right at {' and '.join(below + above)})"
    listed = ", ".join(map(str, wrong[:3]))
    return f"at {listed}" + (f" and {len(wrong) - 3} more shapes" if len(wrong) > 3 else "")


_COUNTED: dict[str, Callable[[CallShape], int]] = {
    "rows": lambda shape: shape.rows,
    "tokens": lambda shape: shape.tokens or 0,
    "samples": lambda shape: shape.samples or 0,
}
