"""Places in a result, and factors, in words."""

from __future__ import annotations

import itertools
import math

TILES = (256, 128, 64, 32, 16, 8)
"""Tile sizes that kernels use; a fault after the last whole one is said to be of the tail."""
_ENDINGS = {2: "nd", 3: "rd"}
EXCESS_DIGITS, MOST_DIGITS = 2, 6
"""Digits of what a factor is too much, and of a factor."""


def factor_words(factor: float, noise: float) -> str:
    """Write a factor with the digits that its noise leaves, and at most two of what is too much."""
    excess = abs(factor - 1)
    digits = MOST_DIGITS if noise <= 0 else -math.floor(math.log10(noise))
    if excess > 0:
        digits = min(digits, EXCESS_DIGITS - 1 - math.floor(math.log10(excess)))
    digits = min(max(digits, 0), MOST_DIGITS)
    text = f"{factor:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def range_words(low: float, high: float) -> str:
    """Write two factors with as many digits as tell them from each other and from 1."""
    for digits in range(4, 8):
        texts = [f"{factor:.{digits}g}" for factor in (low, high)]
        if texts[0] != texts[1] and "1" not in texts:
            break
    return " to ".join(texts)


def axis_word(dims: int, dim: int) -> str:
    if dim == dims - 1:
        return "column"
    return "row" if dim == dims - 2 else f"index of dimension {dim}"


def place_words(bad: list[int], length: int, what: str) -> str:
    """Name places along an axis: a run, a tail after whole tiles, every n-th, or the first few."""
    one, _, dimension = what.partition(" of ")
    many = "indices" if one == "index" else f"{one}s"
    named = f"{many} in {dimension}" if dimension else many
    where = f"{length} in {dimension}" if dimension else f"{length}"
    if len(bad) == 1:
        last = " (the last one)" if bad[0] == length - 1 and length > 1 else ""
        return f"{one} {bad[0]} of {where}{last}"
    if len(bad) == length:
        return f"all {length} {named}"
    steps = {b - a for a, b in itertools.pairwise(bad)}
    if steps == {1}:
        if bad[-1] == length - 1:
            tile = next((t for t in TILES if bad[0] and bad[0] % t == 0 and len(bad) < t), None)
            tail = f"beyond the last whole tile of {tile}" if tile else "to the end"
            return f"{many} {bad[0]} to {bad[-1]} of {where} ({tail})"
        tile = next((t for t in TILES if len(bad) == t and bad[0] % t == 0), None)
        return f"{many} {bad[0]} to {bad[-1]} of {where}{f' (one tile of {tile})' if tile else ''}"
    if len(steps) == 1 and len(bad) > 2 and bad[-1] + min(steps) >= length:
        step = steps.pop()
        return f"every {step}{_ENDINGS.get(step, 'th')} of {length} {named} from {bad[0]}"
    listed = ", ".join(map(str, bad[:5]))
    return f"{len(bad)} of {length} {named} ({listed}{', …' if len(bad) > 5 else ''})"
