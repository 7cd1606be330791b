"""Wrong softmaxes and masks: keys left out, other factors, tiles that are not rescaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qgate.causes.operator_calls import Arguments, Call, CallFault, Makers
from qgate.expected.intermediates import rounded
from qgate.stats.bits import short_name

HIDDEN = -1e3
"""Scores up to which an entry is taken to be masked."""
TILES = (8, 16, 32, 64, 128)
"""Tiles of keys that may be filled up with zeros, or after which a loop may end."""
ONLINE = (8, 16, 32, 64, 128, 256)
"""Tiles of keys between which an online softmax rescales."""
WIDTHS = (16, 32, 64, 96, 128, 160, 192, 256)
"""Widths that heads are filled up to."""
CAPS = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 50.0, 100.0)
"""Bounds of scores that models have."""
CLAMPS = (1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0, 16.0, 20.0, 30.0, 50.0)
"""Bounds that scores may be cut off at."""
SMALL = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 2.0**-14)
"""Probabilities below which they may become zero."""
SCALED = ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0))
"""Formats that probabilities fill with a scale, and their largest values."""
MOST_HEADS = 64
"""Heads of which each may be the one that is lost."""
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Keys by which a window may be too wide or too narrow."""
DEEP = 6
"""Operators between a product and the softmax of what it gave."""
Mask = Callable[[Tensor], Tensor]
Scores = Callable[[Tensor], Tensor]


def softmax_faults(call: Call) -> Iterator[CallFault]:
    """List the faults of a softmax over the last dimension."""
    if call.name not in ("_softmax", "_log_softmax"):
        return
    scores = call.args[0]
    if call.args[1] not in (-1, scores.dim() - 1) or scores.shape[-1] < 2:
        return
    for words, change in _hidden_keys(scores):
        yield CallFault(f"{words} left out of the softmax", _on_scores(change))
    if scores.dim() > 2 and scores.shape[-2] > 1 and not bool((scores <= HIDDEN).any()):
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        yield CallFault(
            "later keys are masked (causal), and should not be",
            _on_scores(lambda s: s.masked_fill(causal, -math.inf)),
        )
    for words, factor in _factors(_width(scores, call.makers)):
        yield CallFault(
            f"the scores of the softmax are {words} times as large as they should be",
            _on_scores(lambda s, factor=factor: s * factor),  # type: ignore[misc]
        )
    if scores.dim() > 1 and scores.shape[-2] > 1:
        yield from _distances(scores)
    for cap in CAPS:
        yield CallFault(
            f"the scores of the softmax are capped at {cap:g} by tanh, and should not be",
            _on_scores(lambda s, cap=cap: torch.where(s <= HIDDEN, s, cap * (s / cap).tanh())),  # type: ignore[misc]
        )
    for bound in CLAMPS:
        yield CallFault(
            f"the scores of the softmax are cut off at {bound:g}, and should not be",
            _on_scores(lambda s, bound=bound: torch.where(s <= HIDDEN, s, s.clamp(-bound, bound))),  # type: ignore[misc]
        )
        yield CallFault(
            f"the scores of the softmax are cut off above {bound:g}, and should not be",
            _on_scores(lambda s, bound=bound: s.clamp(max=bound)),  # type: ignore[misc]
        )
    if call.name == "_softmax":
        yield from _of_probabilities(scores)
        yield from _coarse_probabilities(scores)


def _distances(scores: Tensor) -> Iterator[CallFault]:
    """List biases that grow with the distance of a key, as those of ALiBi."""
    queries, keys = (torch.arange(length, device=scores.device) for length in scores.shape[-2:])
    far = (keys - queries[:, None]).to(scores.dtype)
    slopes: list[tuple[str, float | Tensor]] = [
        (f"{2.0**-power:g} per key", 2.0**-power) for power in range(9)
    ]
    if scores.dim() > 2 and scores.shape[-3] > 1:
        heads = scores.shape[-3]
        powers = torch.arange(1, heads + 1, device=scores.device) * (8 / heads)
        slopes.append(("the slopes of ALiBi", torch.exp2(-powers)[:, None, None].to(far.dtype)))
    for words, slope in slopes:
        yield CallFault(
            f"a bias by distance is added to the scores of the softmax: {words}",
            _on_scores(lambda s, slope=slope: s + far * slope),  # type: ignore[misc]
        )


def _of_probabilities(scores: Tensor) -> Iterator[CallFault]:
    keys = scores.shape[-1]
    for more in sorted({1, *(-keys % tile for tile in TILES)} - {0}):
        zeros = f"{more} more keys" if more > 1 else "one more key"
        yield CallFault(
            f"padding is counted in the softmax, as {zeros} of zeros would be",
            result=lambda a, p, more=more: _padded(a[0], p, more),  # type: ignore[misc]
        )
    yield CallFault(
        "the softmax is not divided by its sum",
        result=lambda a, _: torch.exp(a[0] - a[0].amax(-1, keepdim=True)),
    )
    for tile in (tile for tile in ONLINE if tile < keys):
        for part, sums, rows in (
            ("values", True, False), ("its sum", False, True), ("values and sum", False, False),
        ):  # fmt: skip
            yield CallFault(
                f"{part} of the tiles of {tile} keys before are not rescaled when the maximum of "
                "the softmax grows",
                result=lambda a, _, tile=tile, sums=sums, rows=rows: _not_rescaled(  # type: ignore[misc]
                    a[0], tile, sums, rows
                ),
            )


def _coarse_probabilities(scores: Tensor) -> Iterator[CallFault]:
    for least in SMALL:
        yield CallFault(
            f"probabilities of the softmax below {least:.2g} are zero",
            result=lambda _, p, least=least: p.where(p >= least, 0.0),  # type: ignore[misc]
        )
    for dtype, most in SCALED:
        yield CallFault(
            f"the probabilities of the softmax are rounded to {short_name(dtype)}, 1 at {most:g}",
            result=lambda _, p, dtype=dtype, most=most: rounded(p * most, dtype) / most,  # type: ignore[misc]
        )
    heads = scores.shape[-3] if scores.dim() > 2 else 1
    for head in range(heads) if 1 < heads <= MOST_HEADS else ():
        yield CallFault(
            f"head {head} of {heads} of the softmax is zero",
            result=lambda _, p, head=head: _without_head(p, head),  # type: ignore[misc]
        )


def _without_head(p: Tensor, head: int) -> Tensor:
    changed = p.clone()
    changed[..., head, :, :] = 0.0
    return changed


def _not_rescaled(scores: Tensor, tile: int, sums: bool, rows: bool) -> Tensor:
    """Return probabilities of an online softmax that rescales its sum alone, its rows or none."""
    keys = scores.shape[-1]
    last = (torch.arange(keys, device=scores.device) // tile + 1) * tile - 1
    running = scores.cummax(-1).values[..., last.clamp(max=keys - 1)]
    running = running.clamp_min(torch.finfo(scores.dtype).min / 2)
    top = running[..., -1:]
    total = torch.exp(scores - (top if sums else running)).sum(-1, keepdim=True)
    return torch.exp(scores - (top if rows else running)) / total


def _on_scores(change: Scores) -> Arguments:
    return lambda a: (change(a[0]), *a[1:])


def _hidden_keys(scores: Tensor) -> Iterator[tuple[str, Scores]]:
    keys = scores.shape[-1]
    last = f"entry {keys - 1} of {keys} (the last one)"
    yield f"{last} is", lambda s: _hide(s, slice(None), slice(-1, None))
    yield f"entry 0 of {keys} is", lambda s: _hide(s, slice(None), slice(0, 1))
    if scores.dim() > 1 and scores.shape[-2] > 1:
        yield f"{last} of the last row is", lambda s: _hide(s, slice(-1, None), slice(-1, None))
        yield f"{last} of the first row is", lambda s: _hide(s, slice(0, 1), slice(-1, None))
    firsts = {keys // tile * tile for tile in TILES} | {*TILES, 256}
    for first in sorted(first for first in firsts if 0 < first < keys - 1):
        yield (
            f"{keys - first} entries, {first} to {keys - 1} of {keys}, are",
            lambda s, first=first: _hide(s, slice(None), slice(first, None)),  # type: ignore[misc]
        )


def _hide(scores: Tensor, rows: slice, keys: slice) -> Tensor:
    changed = scores.clone()
    if scores.dim() > 1:
        changed[..., rows, keys] = -math.inf
    else:
        changed[keys] = -math.inf
    return changed


def _width(scores: Tensor, makers: Makers) -> int:
    """Return the terms of the product that scores were made by; 0 where it is not found."""
    value = scores
    for _ in range(DEEP):
        maker = makers.of(value)
        if maker is None or not maker.args or not isinstance(maker.args[0], Tensor):
            return 0
        if maker.name in ("mm", "bmm"):
            return int(maker.args[0].shape[-1])
        value = maker.args[0]
    return 0


def _factors(width: int) -> Iterator[tuple[str, float]]:
    yield "log2(e)", math.log2(math.e)
    yield "ln(2)", math.log(2)
    for size in (2, 4, 8, 16, 32, 64, 128, 256):
        yield f"sqrt({size})", math.sqrt(size)
        yield f"1/sqrt({size})", 1 / math.sqrt(size)
    if width < 2:
        return
    for padded in (padded for padded in WIDTHS if padded > width):
        yield f"sqrt({width}/{padded})", math.sqrt(width / padded)
    if width & (width - 1):
        yield f"sqrt({width})", math.sqrt(width)
        yield f"1/sqrt({width})", 1 / math.sqrt(width)


def _padded(scores: Tensor, p: Tensor, more: int) -> Tensor:
    """Return probabilities where so many more scores of zero are counted."""
    total = torch.logaddexp(
        scores.logsumexp(-1, keepdim=True), torch.tensor(math.log(more), dtype=scores.dtype)
    )
    return torch.exp(scores - total).to(p)


# Masks --------------------------------------------------------------------------------------------


def mask_faults(call: Call) -> Iterator[CallFault]:
    """List other masks that fill scores, are added to them, or multiply them."""
    args = call.args
    if call.name == "masked_fill" and float(args[2]) <= HIDDEN:
        for words, change in _masks(args[1]):
            yield CallFault(words, lambda a, change=change: (a[0], change(a[1]), *a[2:]))  # type: ignore[misc]
    elif call.name == "tril" and call.is_float:
        for step, words in ((1, "more"), (-1, "less")):
            diagonal = args[1] if len(args) > 1 else 0
            yield CallFault(
                f"the mask shows one key {words}",
                lambda a, diagonal=diagonal + step: (a[0], diagonal),  # type: ignore[misc]
            )
    elif call.name == "add" and len(args) > 1:
        other = args[1]
        if not isinstance(other, Tensor) or other.dim() < 2 or not bool((other <= HIDDEN).any()):
            return
        for words, change in _masks(other <= HIDDEN):
            yield CallFault(words, lambda a, change=change: (a[0], _masked(a[1], change), *a[2:]))  # type: ignore[misc]


def _masked(added: Tensor, change: Mask) -> Tensor:
    hidden = added <= HIDDEN
    visible = torch.where(hidden, torch.zeros_like(added), added)
    return torch.where(change(hidden), added[hidden].max(), visible)


def _masks(hidden: Tensor) -> Iterator[tuple[str, Mask]]:
    """List other masks of rows and keys; True hides."""
    if hidden.dim() < 2 or min(hidden.shape[-2:]) < 2 or not bool(hidden.any()):
        if hidden.dim() and hidden.shape[-1] > 1 and bool(hidden.any()):
            yield "the mask is not applied", torch.zeros_like
        return
    yield "the mask is not applied", torch.zeros_like
    yield "the mask shows one key more", lambda mask: _moved(mask, 1, fill=False)
    yield "the mask shows one key less", lambda mask: _moved(mask, -1, fill=True)
    yield "the mask is transposed", _transposed
    yield "the mask hides what it should show", lambda mask: ~mask
    rows, keys = hidden.shape[-2:]
    if rows != keys:
        for by, words in ((rows - keys, "first"), (keys - rows, "last")):
            yield (
                f"the mask is aligned at the {words} rows and keys",
                lambda mask, by=by: _moved(mask, by, fill=by < 0),  # type: ignore[misc]
            )


def window_faults(call: Call) -> Iterator[CallFault]:
    """List other windows of a mask that fills or is added: what is hidden before the first key."""
    args = call.args
    is_added = call.name == "add" and len(args) > 1 and isinstance(args[1], Tensor)
    if is_added and args[1].dim() > 1 and args[1].is_floating_point():
        for words, change in _windows(args[1] <= HIDDEN):
            yield CallFault(words, lambda a, change=change: (a[0], _masked(a[1], change), *a[2:]))  # type: ignore[misc]
    elif call.name == "masked_fill" and float(args[2]) <= HIDDEN and args[1].dim() > 1:
        for words, change in _windows(args[1]):
            yield CallFault(words, lambda a, change=change: (a[0], change(a[1]), *a[2:]))  # type: ignore[misc]


def _windows(hidden: Tensor) -> Iterator[tuple[str, Mask]]:
    if not bool(_early(hidden).any()):
        return
    yield "the window is not applied: all earlier keys are shown", lambda m: m & ~_early(m)
    for keys in (keys for keys in WINDOWS if keys < hidden.shape[-1]):
        count = "one earlier key" if keys == 1 else f"{keys} earlier keys"
        yield f"the window shows {count} more", lambda m, n=keys: _repeated(_wider, m, n)  # type: ignore[misc]
        yield f"the window shows {count} less", lambda m, n=keys: _repeated(_narrower, m, n)  # type: ignore[misc]


def _repeated(change: Mask, mask: Tensor, times: int) -> Tensor:
    for _ in range(times):
        mask = change(mask)
    return mask


def _early(mask: Tensor) -> Tensor:
    """Return what is hidden before the first key that a row shows."""
    return mask.long().cumprod(-1).bool() & ~mask.all(-1, keepdim=True)


def _wider(mask: Tensor) -> Tensor:
    """Show what the row before shows: the edge of a window moves by one key for each row."""
    early = _early(mask)
    before = torch.zeros_like(early)
    before[..., 1:, :] = early[..., :-1, :]
    return mask & ~(early & ~before)


def _narrower(mask: Tensor) -> Tensor:
    """Hide what the next row hides."""
    early = _early(mask)
    hidden = mask.clone()
    hidden[..., :-1, :] |= early[..., 1:, :]
    hidden[..., -1, 1:] |= early[..., -1, :-1]
    return hidden


def _moved(mask: Tensor, by: int, *, fill: bool) -> Tensor:
    """Move a mask along the keys; what is moved in hides, or not."""
    moved = mask.roll(by, -1)
    moved[..., slice(0, by) if by > 0 else slice(by, None)] = fill
    return moved


def _transposed(mask: Tensor) -> Tensor:
    return mask.mT if mask.shape[-1] == mask.shape[-2] else mask
