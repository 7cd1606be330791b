"""Patterns by which a result differs from the expected one, in words.

Patterns are tried from the plainest to the most general; each looks at the difference between
actual and expected values that float noise does not explain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qgate.causes.epilogues import (
    activated,
    clamped,
    coarse,
    half_width,
    resolution,
    shifted,
    softly_capped,
)
from qgate.causes.layouts import tiles_transposed
from qgate.causes.places import TILES, axis_word, factor_words, place_words, range_words
from qgate.expected.noise import Expected

Pattern = Callable[[Tensor, Expected, Tensor], str]
MOST_CHANCE, SMALL, ONE_SIGN = 32, 0.1, 0.97
"""Wrong values from which their signs say something, their relative size, and their share."""

MOST_PARTS = 2048
"""Rows or columns among which those that a part holds are looked for."""
FEW = 8
"""Values of a part that one number explains by more than chance."""
SIGNIFICANT = 7.0
"""Times its standard error from which on a factor is more than what rounding makes."""
TINY = torch.finfo(torch.float64).tiny
UNEXPLAINED = 0.1
"""Share of a difference that is left where a part of the result is off by about one factor."""


def describe_ruin(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say what is wrong with a result that holds no numbers to speak of; empty if it does."""
    return _first(_RUINS, actual, expected, wrong)


def describe(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say in a few words what is wrong with a result; `wrong` marks elements outside the noise."""
    return _first((*_WHOLE, *_PARTS, _positions), actual, expected, wrong)


def describe_whole(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say what one change of the whole expected result explains the actual one; empty if none."""
    return _first(_WHOLE, actual, expected, wrong)


def describe_moved(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say that right values stand in other places or have another form; empty if they do not."""
    return _first(_MOVED, actual, expected, wrong)


def describe_parts(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say what is off about rows, columns or tiles of a result; empty if nothing plain is."""
    return _first(_PARTS, actual, expected, wrong)


def describe_places(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name the rows, columns or heads that hold all that is wrong; empty if all do."""
    return _positions(actual.double(), expected, wrong)


def _first(patterns: Sequence[Pattern], actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    listed = (pattern(actual.double(), expected, wrong) for pattern in patterns)
    return next((words for words in listed if words), "")


def scattered(wrong: Tensor) -> str:
    """Say how many elements are outside the noise, and which comes first."""
    positions = wrong.nonzero()
    first = ", ".join(str(int(i)) for i in positions[0]) if len(positions) else ""
    return f"{int(wrong.sum()):,} of {wrong.numel():,} elements are wrong, the first at [{first}]"


def _constant(actual: Tensor, expected: Expected, _wrong: Tensor) -> str:
    if actual.numel() < 2 or bool((expected.values == expected.values.reshape(-1)[0]).all()):
        return ""
    value = actual.reshape(-1)[0]
    if bool((actual == value).all()):
        return (
            "the result is all zeros"
            if float(value) == 0
            else f"the result is {float(value):.4g} everywhere"
        )
    return ""


def _non_finite(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    bad = ~actual.isfinite() & expected.values.isfinite() & wrong
    hidden = actual.isfinite() & expected.values.isnan() & wrong
    if bool(bad.any()):
        kind = "NaN" if bool(actual[bad].isnan().any()) else "Inf"
        count = f"{int(bad.sum()):,} of {bad.numel():,}"
        where = _where(bad)
        where = where and f": {where}"
        if expected.reach is not None and not bool((bad & expected.reach).any()):
            return (
                f"{count} results are {kind}, which the NaN or Inf of the arguments does not "
                f"reach{where}"
            )
        return f"{count} results are {kind} where finite ones are expected{where}"
    if bool(hidden.any()):
        return f"{int(hidden.sum()):,} NaN of the definition became finite numbers"
    return ""


def _factor(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name one factor that explains the whole difference."""
    large = expected.values.abs() > expected.values.nan_to_num().square().mean().sqrt() / 2
    enough = 2 if expected.values.dim() else 1
    if not bool(wrong.any()) or int(large.sum()) < enough:
        return ""
    values = expected.values
    energy = values.square().sum()
    factor = float((actual * values).sum() / energy)
    remainder = (actual - factor * values).square()
    error = math.sqrt(float((remainder * values.square()).sum())) / float(energy)
    if not math.isfinite(factor) or abs(factor - 1) <= max(1e-9, SIGNIFICANT * error):
        return ""
    width = half_width(expected) * max(1.0, abs(factor))
    rounding = expected.values.abs() * (abs(factor) * resolution(actual))
    if not bool(((actual - factor * expected.values).abs() <= width + rounding).all()):
        return ""
    power = round(math.log2(abs(factor))) if factor else 0
    if factor and abs(abs(factor) / 2.0**power - 1) < 1e-6:
        if factor < 0 and power == 0:
            return "the result has the opposite sign"
        plain = f"{2.0**power:g}" if abs(power) <= 8 else f"2^{power}"
        size = f"{'minus ' if factor < 0 else ''}{plain}"
        return f"the result is {size} times the expected one: a scale off by a power of two"
    times = factor_words(factor, error)
    return f"the result is {times} times the expected one: a scale or factor is off"


def describe_cut(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say that small errors all have one sign, as those of sums that are cut off have."""
    errors = actual.double()[wrong] - expected.values[wrong]
    values = expected.values[wrong]
    if len(errors) < MOST_CHANCE or not float(errors.norm()) < SMALL * float(values.norm()):
        return ""
    for signs, words in ((errors, "downward"), (errors * values.sign(), "toward zero")):
        if float((signs < 0).double().mean()) > ONE_SIGN:
            return f"errors look like rounding {words} alone: sums are cut off, not rounded"
    return ""


def _logarithm(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say that the exponentials of a result, normalized, are the expected values."""
    values = expected.values
    if actual.dim() < 1 or actual.shape[-1] < 3 or not bool(wrong.any() and (values > 0).all()):
        return ""
    offsets = actual - values.log()
    spread = (offsets - offsets.mean(-1, keepdim=True)).abs()
    width = (expected.high - expected.low) / values + resolution(actual) * actual.abs()
    if not bool((spread <= width).all()):
        return ""
    return "the result is the logarithm of the expected one up to a number per row: no softmax"


def _along(dim: int, *tensors: Tensor) -> list[Tensor]:
    """Return tensors as matrices, with a row for each index of a dimension."""
    return [tensor.movedim(dim, 0).flatten(1) for tensor in tensors]


def _misplaced(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name rows or columns that hold what others should."""
    if wrong.dim() < 2 or not bool(wrong.any()):
        return ""
    for dim in reversed(range(wrong.dim())):
        a, e, half, hit = _along(dim, actual, expected.values, half_width(expected), wrong)
        bad = hit.any(1).nonzero().reshape(-1).tolist()
        if a.shape[1] < 2 or not 1 < len(a) <= MOST_PARTS:
            continue
        sources = torch.cdist(a[bad], e).argmin(1)
        room = half[sources] + e[sources].abs() * resolution(actual)
        if not bool(((a[bad] - e[sources]).abs() <= room).all()):
            continue
        # A part that should hold the same is no other one.
        moved = ((e[bad] - e[sources]).abs() > room).any(1)
        if not bool(moved.any()):
            continue
        sources, bad = (
            sources[moved],
            [i for i, other in zip(bad, moved.tolist(), strict=True) if other],
        )
        run = _first_run(bad, sources.tolist())
        if 1 < run < len(bad):
            sources, bad = sources[:run], bad[:run]
        axis = axis_word(wrong.dim(), dim)
        verb = "hold" if len(bad) > 1 else "holds"
        if len(sources) > 1 and not bool((sources.diff() == 1).all()):
            listed = ", ".join(
                f"{index} what {source} should"
                for index, source in list(zip(bad, sources.tolist(), strict=True))[:3]
            )
            return f"{place_words(bad, len(a), axis)} {verb} others: {axis} {listed}"
        return (
            f"{place_words(bad, len(a), axis)} {verb} what "
            f"{place_words(sources.tolist(), len(a), axis)} should"
        )
    return ""


def _first_run(places: list[int], sources: list[int]) -> int:
    """Return how many of the first places hold what as many places in a row should."""
    count = 1
    for (index, next_index), (source, next_source) in zip(
        itertools.pairwise(places), itertools.pairwise(sources), strict=True
    ):
        if next_index != index + 1 or next_source != source + 1:
            break
        count += 1
    return count


def _part_factors(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name rows or columns that are off by a factor each, as where their scales are off."""
    if wrong.dim() < 2 or not bool(wrong.any()):
        return ""
    for dim in reversed(range(wrong.dim())):
        a, e, half, hit = _along(dim, actual, expected.values, half_width(expected), wrong)
        if a.shape[1] < 2:
            continue
        bad = hit.any(1).nonzero().reshape(-1).tolist()
        where = place_words(bad, len(a), axis_word(wrong.dim(), dim))
        are = "are" if len(bad) > 1 else "is"
        a, e, half = a[bad], e[bad], half[bad]
        factors = (a * e).sum(1, keepdim=True) / e.square().sum(1, keepdim=True).clamp_min(TINY)
        room = half * factors.abs().clamp_min(1.0) + (factors * e).abs() * resolution(actual)
        low, high = float(factors.min()), float(factors.max())
        if low * high > 0 and bool(((a - factors * e).abs() <= room).all()):
            if high - low <= 1e-4 * abs(high):
                return f"{where} {are} {low:.5g} times the expected: a scale of this part is off"
            return (
                f"{where} are off by a factor each, {range_words(low, high)}: their scales are off"
            )
        if len(bad) == wrong.shape[dim]:
            continue
        factor = float((a * e).sum() / e.square().sum().clamp_min(TINY))
        remainder, difference = (a - factor * e).square().sum(), (a - e).square().sum()
        if abs(factor) > UNEXPLAINED < abs(factor - 1) and float(remainder) <= UNEXPLAINED * float(
            difference
        ):
            return (
                f"{where} {are} about {factor:.2g} times the expected: a scale of this part is off"
            )
    return ""


def _tile_factors(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name a size of tiles each of which is off by a factor of its own."""
    if wrong.dim() != 2 or not bool(wrong.any()):
        return ""
    half = half_width(expected)
    for size in TILES:
        if any(length % size or length == size for length in wrong.shape):
            continue
        rows, columns = (length // size for length in wrong.shape)
        a, e, room = (
            tensor.reshape(rows, size, columns, size).movedim(2, 1).flatten(2)
            for tensor in (actual, expected.values, half)
        )
        energy = e.square().sum(2, keepdim=True).clamp_min(TINY)
        factors = (a * e).sum(2, keepdim=True) / energy
        room = room * factors.abs().clamp_min(1.0) + (factors * e).abs() * resolution(actual)
        if bool(((a - factors * e).abs() <= room).all()) and bool((factors != 0).all()):
            off = factors[(factors - 1).abs() > 1e-6]
            return (
                f"{len(off)} of {factors.numel()} tiles of {size}x{size} are off by a factor each, "
                f"{range_words(float(off.min()), float(off.max()))}: their scales are off"
            )
    return ""


def _part_offsets(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name rows or columns whose wrong values are off by one number each, as by a zero point."""
    if wrong.dim() < 2 or not bool(wrong.any()):
        return ""
    for dim in range(wrong.dim()):
        off, hit = _along(dim, actual - expected.values, wrong)
        bad = hit.any(1).nonzero().reshape(-1).tolist()
        off, counts = off * hit, hit.sum(1, keepdim=True)
        means = off.sum(1, keepdim=True) / counts.clamp_min(1)
        remainder = (off - means * hit).square().sum()
        if int(counts.sum()) < FEW * len(bad) or float(remainder) > 1e-4 * float(
            off.square().sum()
        ):
            continue
        where = place_words(bad, wrong.shape[dim], axis_word(wrong.dim(), dim))
        low, high = float(means[bad].min()), float(means[bad].max())
        are = "are" if len(bad) > 1 else "is"
        return f"{where} {are} off by a number each, {low:.4g} to {high:.4g}: a zero point is off"
    return ""


def _transposed(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say that the result, or all or some of its tiles, are transposed."""
    if actual.dim() < 2 or not bool(wrong.any()):
        return ""
    half, shape, values = half_width(expected), actual.shape[-2:], expected.values
    if shape[0] == shape[1]:
        far, near = (float((side - values).square().sum()) for side in (actual, actual.mT))
        if near < 1e-6 * far:
            return "the result is transposed"
    for size in TILES:
        if any(length % size for length in shape) or max(shape) == size:
            continue
        right = tiles_transposed(values, size)
        room = tiles_transposed(half, size) + right.abs() * resolution(actual)
        if bool(((actual - right).abs() <= room)[wrong].all()):
            some = "" if 2 * int(wrong.sum()) > wrong.numel() else "some "
            return f"{some}tiles of {size}x{size} are transposed"
    return ""


def _magnitude(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    far = float((actual - expected.values).square().sum())
    near = float((actual - expected.values.abs()).square().sum())
    return "the result has lost its sign" if bool(wrong.any()) and near < 1e-6 * far else ""


def _offset(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """The same vector is missing or added in every row: a bias."""
    if actual.dim() < 2 or not bool(wrong.any()) or actual.numel() < 3 * actual.shape[-1]:
        return ""
    rows = (actual - expected.values).reshape(-1, actual.shape[-1])
    mean = rows.mean(0, keepdim=True)
    if float((rows - mean).square().sum()) > 1e-4 * float(rows.square().sum()):
        return ""
    return "every row is off by the same vector: a bias is dropped or added twice"


def _positions(actual: Tensor, _expected: Expected, wrong: Tensor) -> str:
    """Name rows, columns, heads or tiles that hold all that is wrong."""
    narrowest = _narrowest(wrong)
    if narrowest is None:
        return ""
    dim, bad = narrowest
    zero = actual.index_select(dim, torch.tensor(bad, device=actual.device))
    verb = "are" if len(bad) > 1 else "is"
    state = "zero" if bool((zero == 0).all()) else "wrong"
    return f"{_where(wrong)} {verb} {state}"


def _narrowest(wrong: Tensor) -> tuple[int, list[int]] | None:
    """Return the dimension of which the fewest indices hold all that is wrong, and these."""
    if not wrong.dim() or not bool(wrong.any()):
        return None
    shares = []
    for dim in range(wrong.dim()):
        hit = wrong.movedim(dim, 0).flatten(1).any(1) if wrong.dim() > 1 else wrong
        bad = hit.nonzero().reshape(-1).tolist()
        if len(bad) < wrong.shape[dim]:
            shares.append((len(bad) / wrong.shape[dim], dim, bad))
    return min(shares)[1:] if shares else None


def _where(wrong: Tensor) -> str:
    """Name the rows, columns or heads that hold all that is wrong; empty where none does."""
    narrowest = _narrowest(wrong)
    if narrowest is None:
        return ""
    dim, bad = narrowest
    return place_words(bad, wrong.shape[dim], axis_word(wrong.dim(), dim))


def _tiles(_actual: Tensor, _expected: Expected, wrong: Tensor) -> str:
    """Name one tile of the last two dimensions."""
    if wrong.dim() < 2 or not bool(wrong.any()):
        return ""
    flat = wrong.reshape(-1, *wrong.shape[-2:]).any(0)
    rows, columns = flat.any(1).nonzero().reshape(-1), flat.any(0).nonzero().reshape(-1)
    height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
    is_line = height in (1, flat.shape[0]) or width in (1, flat.shape[1])
    if is_line or height * width * 4 > flat.numel() or int(flat.sum()) * 2 < height * width:
        return ""
    return (
        f"rows {int(rows[0])} to {int(rows[-1])} and columns {int(columns[0])} to "
        f"{int(columns[-1])} are wrong: one tile of {height}x{width}"
    )


_MOVED: tuple[Pattern, ...] = (
    _transposed, _magnitude, _logarithm, activated, clamped, softly_capped, shifted, _misplaced,
)  # fmt: skip
_RUINS: tuple[Pattern, ...] = (_non_finite, _constant)
_WHOLE: tuple[Pattern, ...] = (_factor, coarse, shifted, _offset, *_MOVED)
_PARTS: tuple[Pattern, ...] = (_part_factors, _tile_factors, _tiles, _part_offsets)
