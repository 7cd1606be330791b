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

from qgate.expected.noise import Expected

Pattern = Callable[[Tensor, Expected, Tensor], str]
MOST_CHANCE, SMALL, ONE_SIGN = 32, 0.1, 0.97
"""Wrong values from which their signs say something, their relative size, and their share."""
TILES = (256, 128, 64, 32, 16, 8)
"""Tile sizes that kernels use; a fault after the last whole one is said to be of the tail."""


def describe_ruin(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say what is wrong with a result that holds no numbers to speak of; empty if it does."""
    return _first(_RUINS, actual, expected, wrong)


def describe(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say in a few words what is wrong with a result; `wrong` marks elements outside the noise."""
    return _first((*_WHOLE, *_PLACES), actual, expected, wrong)


def describe_whole(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say what one change of the whole expected result explains the actual one; empty if none."""
    return _first(_WHOLE, actual, expected, wrong)


def describe_places(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name the rows, columns, heads or tiles that hold all that is wrong; empty if all do."""
    return _first(_PLACES, actual, expected, wrong)


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


def _non_finite(actual: Tensor, expected: Expected, _wrong: Tensor) -> str:
    bad = ~actual.isfinite() & expected.values.isfinite()
    hidden = actual.isfinite() & expected.values.isnan()
    if bool(bad.any()):
        kind = "NaN" if bool(actual[bad].isnan().any()) else "Inf"
        count = f"{int(bad.sum()):,} of {bad.numel():,}"
        lines = _lines(bad)
        where = f" ({lines[1]})" if lines else ""
        return f"{count} results are {kind} where finite ones are expected{where}"
    if bool(hidden.any()):
        return f"{int(hidden.sum()):,} NaN of the definition became finite numbers"
    return ""


def _factor(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name one factor that explains the whole difference."""
    large = expected.values.abs() > expected.values.nan_to_num().square().mean().sqrt() / 2
    if not bool(wrong.any()) or int(large.sum()) < 2:
        return ""
    factor = float((actual[large] / expected.values[large]).median())
    if not math.isfinite(factor) or abs(factor - 1) < 1e-9:
        return ""
    width = (expected.high - expected.low) / 2 * max(1.0, abs(factor))
    rounding = expected.values.abs() * (abs(factor) * _resolution(actual))
    if not bool(((actual - factor * expected.values).abs() <= width + rounding).all()):
        return ""
    power = round(math.log2(abs(factor))) if factor else 0
    if factor and abs(abs(factor) / 2.0**power - 1) < 1e-6:
        if factor < 0 and power == 0:
            return "the result has the opposite sign"
        plain = f"{2.0**power:g}" if abs(power) <= 8 else f"2^{power}"
        size = f"{'minus ' if factor < 0 else ''}{plain}"
        return f"the result is {size} times the expected one: a scale off by a power of two"
    return f"the result is {factor:.5g} times the expected one: a scale or factor is off"


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


def _row_factors(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Name factors, one for each row, that explain the whole difference."""
    if actual.dim() < 2 or actual.shape[-1] < 4 or not bool(wrong.any()):
        return ""
    rows, values, width = (
        tensor.reshape(-1, actual.shape[-1])
        for tensor in (actual, expected.values, (expected.high - expected.low) / 2)
    )
    energy = values.square().sum(1, keepdim=True)
    few = float(wrong.reshape(rows.shape).any(1).double().mean()) <= 0.5
    if len(rows) < 3 or few or not bool((energy > 0).all()):
        return ""
    factors = (rows * values).sum(1, keepdim=True) / energy
    if bool((factors == 0).any()):
        return ""
    room = width * factors.abs().clamp_min(1.0) + (factors * values).abs() * _resolution(actual)
    if not bool(((rows - factors * values).abs() <= room).all()):
        return ""
    return (
        f"each row is a factor of its own times the expected one, {float(factors.min()):.4g} to "
        f"{float(factors.max()):.4g}: a scale or weight per row is off, or rows are not normalized"
    )


def _logarithm(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """Say that the exponentials of a result, normalized, are the expected values."""
    values = expected.values
    if actual.dim() < 1 or actual.shape[-1] < 3 or not bool(wrong.any() and (values > 0).all()):
        return ""
    offsets = actual - values.log()
    spread = (offsets - offsets.mean(-1, keepdim=True)).abs()
    width = (expected.high - expected.low) / values + _resolution(actual) * actual.abs()
    if not bool((spread <= width).all()):
        return ""
    return "the result is the logarithm of the expected one up to a number per row: no softmax"


def _resolution(actual: Tensor) -> float:
    """Return the relative rounding error of the narrowest dtype that holds all values."""
    for dtype in (torch.bfloat16, torch.float16):
        if bool((actual.to(dtype).double() == actual).all()):
            return torch.finfo(dtype).eps
    return 2.0**-18


def _transposed(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    if actual.dim() < 2 or actual.shape[-1] != actual.shape[-2] or not bool(wrong.any()):
        return ""
    far = float((actual - expected.values).square().sum())
    near = float((actual.transpose(-1, -2) - expected.values).square().sum())
    return "the result is transposed" if near < 1e-6 * far else ""


def _magnitude(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    far = float((actual - expected.values).square().sum())
    near = float((actual - expected.values.abs()).square().sum())
    return "the result has lost its sign" if bool(wrong.any()) and near < 1e-6 * far else ""


def _offset(actual: Tensor, expected: Expected, wrong: Tensor) -> str:
    """The same vector is missing or added in every row: a bias."""
    if actual.dim() < 2 or not bool(wrong.any()):
        return ""
    rows = (actual - expected.values).reshape(-1, actual.shape[-1])
    if len(rows) < 3:
        return ""
    mean = rows.mean(0, keepdim=True)
    if float((rows - mean).square().sum()) > 1e-4 * float(rows.square().sum()):
        return ""
    return "every row is off by the same vector: a bias is dropped or added twice"


def _positions(actual: Tensor, _expected: Expected, wrong: Tensor) -> str:
    """Name rows, columns, heads or tiles that hold all that is wrong."""
    lines = _lines(wrong)
    if lines is None:
        return ""
    dim, words, bad = lines
    zero = actual.index_select(dim, torch.tensor(bad, device=actual.device))
    verb = "are" if len(bad) > 1 else "is"
    state = "zero" if bool((zero == 0).all()) else "wrong"
    return f"{words} {verb} {state}"


def _lines(wrong: Tensor) -> tuple[int, str, list[int]] | None:
    """Return the dimension, words and entries of the fewest lines that hold all that is wrong."""
    if not wrong.dim() or not bool(wrong.any()):
        return None
    shares = []
    for dim in range(wrong.dim()):
        hit = wrong.movedim(dim, 0).flatten(1).any(1) if wrong.dim() > 1 else wrong
        bad = hit.nonzero().reshape(-1).tolist()
        if len(bad) < wrong.shape[dim]:
            shares.append((len(bad) / wrong.shape[dim], dim, bad))
    if not shares:
        return None
    _, dim, bad = min(shares)
    return dim, place_words(bad, wrong.shape[dim], _axis_word(wrong.dim(), dim)), bad


def _axis_word(dims: int, dim: int) -> str:
    if dim == dims - 1:
        return "column"
    return "row" if dim == dims - 2 else f"index of dimension {dim}"


def place_words(bad: list[int], length: int, what: str) -> str:
    """Name places along an axis: a run, a tail after whole tiles, every n-th, or the first few."""
    many = what.replace("index", "indices") if what.startswith("index") else f"{what}s"
    if len(bad) == 1:
        last = ", the last one" if bad[0] == length - 1 and length > 1 else ""
        return f"{what} {bad[0]} of {length}{last}"
    steps = {b - a for a, b in itertools.pairwise(bad)}
    if steps == {1}:
        if bad[-1] == length - 1:
            tile = next((t for t in TILES if bad[0] and bad[0] % t == 0 and len(bad) < t), None)
            tail = f", beyond the last whole tile of {tile}" if tile else ", to the end"
            return f"{many} {bad[0]} to {bad[-1]} of {length}{tail}"
        tile = next((t for t in TILES if len(bad) == t and bad[0] % t == 0), None)
        return f"{many} {bad[0]} to {bad[-1]} of {length}{f', one tile of {tile}' if tile else ''}"
    if len(steps) == 1:
        return f"every {steps.pop()}th of {length} {many} from {bad[0]}"
    listed = ", ".join(map(str, bad[:5]))
    return f"{len(bad)} of {length} {many} ({listed}{', …' if len(bad) > 5 else ''})"


def _tiles(_actual: Tensor, _expected: Expected, wrong: Tensor) -> str:
    """Name one tile of the last two dimensions."""
    if wrong.dim() < 2 or not bool(wrong.any()):
        return ""
    flat = wrong.reshape(-1, *wrong.shape[-2:]).any(0)
    rows, columns = flat.any(1).nonzero().reshape(-1), flat.any(0).nonzero().reshape(-1)
    height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
    is_line = height in (1, flat.shape[0]) or width in (1, flat.shape[1])
    if is_line or height * width * 4 > flat.numel() or int(flat.sum()) * 4 < height * width:
        return ""
    return (
        f"rows {int(rows[0])} to {int(rows[-1])} and columns {int(columns[0])} to "
        f"{int(columns[-1])} are wrong: one tile of {height}x{width}"
    )


_RUINS: tuple[Pattern, ...] = (_non_finite, _constant)
_WHOLE: tuple[Pattern, ...] = (
    _factor, _transposed, _magnitude, _offset, _logarithm, _row_factors,
)  # fmt: skip
_PLACES: tuple[Pattern, ...] = (_tiles, _positions)
