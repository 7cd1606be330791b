"""Wrong readings of a function's arguments: what a kernel may take in place of what it is given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.causes.faults import Fault
from qgate.causes.layouts import tiles_transposed

MOST_NUMBERS = 64
"""Numbers from zero that an integer argument is tried as."""
_HALF_POWERS = [power for power in range(-10, 11) if power]
"""Factors that come from a dimension or its root: in units of a half power of two."""
PAGES = (16, 32, 64)
"""Entries of a first tile or page."""
WRAPS = (8, 16, 32, 48, 64, 96, 128)
"""Entries after which a kernel may begin anew."""
CLAMPS = (0.5, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 16.0, 20.0)
"""Bounds that models clamp values to."""
TRANSPOSED = (8, 16, 32, 64, 128)
"""Tiles that may each be transposed."""
FEW_ENTRIES = 16
"""Integers of which each is tried one higher and one lower."""
LARGEST_ARGUMENT = 2**20
"""Elements of an argument above which its entries are not tried in other orders."""


def wrong_readings(arguments: Sequence[Any], declared: Sequence[int]) -> Iterator[Fault[list[Any]]]:
    """List arguments that are read wrongly, the plainest first; `declared` ones are quantized."""
    # An index that is read wrongly looks like a table in another order, which is less plain.
    for position in sorted(range(len(arguments)), key=lambda place: _is_float(arguments[place])):
        argument = arguments[position]
        for words, value in _values(argument, position in declared):
            changed = list(arguments)
            changed[position] = value
            yield Fault(f"argument {position} is {words}", changed)
    yield from _all_rounded(arguments, declared)
    yield from _moved_together(arguments)
    for first, second in itertools.combinations(range(len(arguments)), 2):
        if _are_alike(arguments[first], arguments[second]):
            changed = list(arguments)
            changed[first], changed[second] = arguments[second], arguments[first]
            yield Fault(f"arguments {first} and {second} are swapped", changed)
            for words, pair in _of_one_row(arguments[first], arguments[second]):
                changed = list(arguments)
                changed[first], changed[second] = pair
                yield Fault(f"arguments {first} and {second} are {words}", changed)


def _of_one_row(first: Any, second: Any) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """List readings of two arguments that one product makes: in halves, or element by element."""
    if not (_is_float(first) and first.dim() and first.numel() <= LARGEST_ARGUMENT):
        return
    turns, halves = torch.stack([first, second], -1).flatten(-2), torch.cat([first, second], -1)
    length = first.shape[-1]
    yield (
        "read as halves of one row, but stand in turns",
        (turns[..., :length], turns[..., length:]),
    )
    yield "read in turns from one row, but are its halves", (halves[..., ::2], halves[..., 1::2])


def _all_rounded(arguments: Sequence[Any], declared: Sequence[int]) -> Iterator[Fault[list[Any]]]:
    """List the formats to which all arguments may be rounded that are not quantized."""
    floats = [position for position, argument in enumerate(arguments) if _is_float(argument)]
    free = [position for position in floats if position not in declared]
    if len(free) < 2:
        return
    for name, change in _ROUNDED.items():
        changed = [
            change(argument) if position in free else argument
            for position, argument in enumerate(arguments)
        ]
        to = _rounding_words(name, [(arguments[position], changed[position]) for position in free])
        words = f"each of arguments {', '.join(map(str, free))} is rounded to {to}"
        yield Fault(words, changed)


def _moved_together(arguments: Sequence[Any]) -> Iterator[Fault[list[Any]]]:
    """List two arguments of one length that are both read in another order, as tables are."""
    places = [p for p, x in enumerate(arguments) if isinstance(x, Tensor) and x.dim()]
    for first, second in itertools.combinations(places, 2):
        sides = arguments[first], arguments[second]
        if max(side.numel() for side in sides) > LARGEST_ARGUMENT or sides[0].shape[0] < 2:
            continue
        if sides[0].shape[0] != sides[1].shape[0] or sides[0].dim() != sides[1].dim():
            continue
        listed = zip(*(_orders(side, 0) for side in sides), strict=False)
        for (words, one), (same, other) in listed:
            if words == same:
                changed = list(arguments)
                changed[first], changed[second] = one, other
                yield Fault(f"arguments {first}, {second} are {words}", changed)


def _rounding_words(name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> str:
    """Name the formats that may have rounded: float16 and tf32 have 11 bits both."""
    if name != "float16":
        return name
    alike = all(
        bool(((rounded - x).abs() <= x.abs() * 2.0**-11 + 2.0**-25).all()) for x, rounded in pairs
    )  # no value is too large for float16; what is too small for it matters nowhere
    return "float16 or tf32" if alike else name


def _is_float(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


def _are_alike(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and not torch.equal(first, second)
    return type(first) is type(second) and isinstance(first, int | float) and first != second


def _values(argument: Any, is_declared: bool) -> Iterator[tuple[str, Any]]:
    """List what one argument may be taken for, with words after `argument 3 is`."""
    if isinstance(argument, bool):
        yield f"taken as {not argument}, not {argument}", not argument
    elif isinstance(argument, int):
        for other in sorted(range(MOST_NUMBERS), key=lambda other: abs(other - argument)):
            if other != argument:
                yield f"taken as {other}, not {argument}", other
    elif isinstance(argument, float):
        yield from _numbers(argument)
    elif isinstance(argument, Tensor) and 0 < argument.numel() <= LARGEST_ARGUMENT:
        if argument.is_floating_point():
            yield from _floats(argument, is_declared)
        elif argument.dtype == torch.bool:
            yield "taken as its opposite", ~argument
            yield "not used: read as True everywhere", torch.ones_like(argument)
            yield "not used: read as False everywhere", torch.zeros_like(argument)
        else:
            yield from _integers(argument)
        for dim in range(argument.dim()):
            yield from _orders(argument, dim)
        yield from _later_tiles(argument)


def _numbers(number: float) -> Iterator[tuple[str, float]]:
    listed = {"1": 1.0, "0": 0.0, "its square": number**2}
    if number > 0:
        listed |= {"its reciprocal": 1 / number, "its square root": number**0.5}
    for words, other in listed.items():
        if other != number:
            yield f"taken as {words}, not {number:g}", other


def _floats(x: Tensor, is_declared: bool) -> Iterator[tuple[str, Tensor]]:
    yield "not used: read as zeros", torch.zeros_like(x)
    yield "not used: read as ones", torch.ones_like(x)
    if bool((x != 0).all()):
        yield "taken as its reciprocal", 1 / x
    if x.dim() == 1:
        yield "taken with the opposite sign", -x
    yield "not used: read as minus infinity", torch.full_like(x, -torch.inf)
    yield "taken twice: as its square", x * x
    yield "read without the one that is added to it", x - 1
    yield "read with one added", x + 1
    if x.dim() > 1 and x.shape[-1] == x.shape[-2]:
        yield "read transposed", x.mT
        for tile in (tile for tile in TRANSPOSED if x.shape[-1] % tile == 0 < x.shape[-1] - tile):
            yield f"read with its tiles of {tile}x{tile} transposed", tiles_transposed(x, tile)
    if x.dim() and x.shape[-1] > 1:
        yield "taken without its mean", x - x.mean(-1, keepdim=True)
    for bound in CLAMPS:
        if bool((x > bound).any()):
            yield f"clamped to at most {bound:g}", x.clamp(max=bound)
        if bool((x < -bound).any()):
            yield f"clamped to -{bound:g} and {bound:g}", x.clamp(-bound, bound)
    for half_power in _HALF_POWERS:
        factor = 2.0 ** (half_power / 2)
        yield f"counted {'twice' if factor == 2 else f'{factor:.4g} times'}", x * factor
    if not is_declared:
        for name, change in _ROUNDED.items():
            rounded = change(x)
            if not torch.equal(rounded, x):
                yield f"rounded to {_rounding_words(name, [(x, rounded)])}", rounded


def _tf32(x: Tensor) -> Tensor:
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)


_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "float16": lambda x: x.to(torch.float16).to(x.dtype),
    "tf32": _tf32,
}
"""Narrower numbers that a kernel may compute with."""


def _integers(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "taken one too high", x + 1
    yield "taken one too low", x - 1
    for entry in range(x.numel() if x.numel() <= FEW_ENTRIES else 0):
        for step, words in ((1, "high"), (-1, "low")):
            changed = x.clone().reshape(-1)
            changed[entry] += step
            yield f"taken one too {words} at entry {entry}", changed.reshape(x.shape)
    for number in range(MOST_NUMBERS):
        yield f"not used: read as {number} everywhere", torch.full_like(x, number)


def _orders(x: Tensor, dim: int) -> Iterator[tuple[str, Tensor]]:
    """List other orders of the entries along one dimension."""
    length = x.shape[dim]
    if length < 2:
        return
    index = torch.arange(length, device=x.device)
    along = f" along dimension {dim}" if x.dim() > 1 else ""
    half = length // 2
    orders = [
        (f"read one entry too far{along}", index.roll(-1)),
        (f"read one entry too early{along}", index.roll(1)),
        (f"read in reverse order{along}", index.flip(0)),
        (f"read with its first entry for all{along}", torch.zeros_like(index)),
    ]
    orders += [
        (f"read from its first entry again, from entry {count} on{along}", index % count)
        for count in sorted({*WRAPS, half})
        if 1 < count < length
    ]
    if length % 2 == 0 and length > 2:
        pairs = index.reshape(half, 2)
        orders += [
            (f"read with its halves swapped{along}", index.roll(half)),
            (f"read with neighbors swapped{along}", pairs.flip(1).reshape(-1)),
            (f"read as halves, but it is interleaved{along}", index.reshape(2, half).T.reshape(-1)),
            (f"read as interleaved, but it is in halves{along}", pairs.T.reshape(-1)),
        ]
    for words, order in orders:
        moved = x.index_select(dim, order)
        if not torch.equal(moved, x):
            yield words, moved


def _later_tiles(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """List entries after the first tile or page of a dimension that come from a neighbor."""
    for dim, other in itertools.permutations(range(x.dim()), 2):
        if x.shape[other] < 2:
            continue
        for start in (tile for tile in PAGES if tile < x.shape[dim]):
            first, tail = x.narrow(dim, 0, start), x.narrow(dim, start, x.shape[dim] - start)
            for step, way in ((1, "early"), (-1, "far")):
                moved = torch.cat([first, tail.roll(step, other)], dim)
                if not torch.equal(moved, x):
                    along = f"dimension {other} from entry {start} of dimension {dim} on"
                    yield f"read one entry too {way} along {along}", moved
