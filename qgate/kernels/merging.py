"""Figures of all tiles of `comparing`, and the pairs that differ most.

All sums are float64 in a fixed order, halves onto halves, defined by `figures_by_torch`. The kernel
does in two launches what torch does in 80: on a device those take longer than to read the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.kernels import cases, comparing, compiling, proving
from qgate.kernels.comparing import COUNTS, EXTREMES, SUMS, TILE, Partials
from qgate.kernels.launching import flat_bits
from qgate.kernels.shapes import kind_of

FIGURES = (
    "sum_a", "sum_r", *SUMS[7:], "mean_a", "mean_r", *SUMS[2:7], *COUNTS, *EXTREMES,
    "first_bad_tile",
)  # fmt: skip
_FEW = 32
"""The most pairs that a kernel searches: it goes once through the tiles for each."""
_THREADS = 1024
_TILES_AT_ONCE = 2**22 // TILE
_SHIFT = 45
_MANY = 40_001


def merge(partials: Partials, actual: Tensor, reference: Tensor, worst: int) -> Tensor:
    """Return in a row the bits of `FIGURES`, and pairs among which the `worst` are.

    The figures are float64. A pair is its place and the bits of two float64 numbers; `largest`
    chooses of them.
    """
    if _is_proven(actual, reference):
        few = worst if worst <= _FEW else 0
        merged = merge_by_blocks(partials, actual, reference, few)
    else:
        few, merged = 0, figures_by_torch(partials, len(actual)).view(torch.int64)
    if few == worst:
        return merged
    return torch.cat([merged, *pairs_by_torch(partials.extremes[0], actual, reference, worst)])


def _is_proven(actual: Tensor, reference: Tensor) -> bool:
    device, dtypes = actual.device, (actual.dtype, reference.dtype)
    if not proving.serves(device) or not compiling.serves(device) or None in map(kind_of, dtypes):
        return False
    wrong = partial(_wrong, device, *dtypes)
    return proving.prove_once(("merge in C", *dtypes), device, "totals of errors", wrong)


def merge_by_blocks(partials: Partials, actual: Tensor, reference: Tensor, worst: int) -> Tensor:
    """Merge by kernels in CUDA C: a block for each figure, and one for each tile to search."""
    n, tiles, device = len(actual), partials.sums.shape[1], partials.sums.device
    tiles_searched = min(worst, tiles)
    places = torch.empty(max(worst, 1), dtype=torch.int64, device=device)
    merged = torch.empty(
        len(FIGURES) + 3 * worst * tiles_searched, dtype=torch.int64, device=device
    )
    shared = 16 * _THREADS
    kernel = compiling.kernel("merging.cu", "merge_tiles", device, TILE=TILE)
    kernel(
        len(FIGURES) + (worst > 0), _THREADS, partials.sums, partials.extremes, partials.counts,
        merged, places, n, tiles, worst, shared=shared,
    )  # fmt: skip
    if worst:
        search = compiling.kernel("merging.cu", "worst_pairs", device, TILE=TILE)
        search(
            tiles_searched, _THREADS, flat_bits(actual), flat_bits(reference), places,
            merged[len(FIGURES) :], n, worst, kind_of(actual.dtype) or 0,
            kind_of(reference.dtype) or 0, shared=shared,
        )  # fmt: skip
    return merged


def largest(
    pairs: npt.NDArray[np.int64], worst: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return places and values of the pairs that differ most, of equals the first ones."""
    places, values = pairs[0::3], pairs.reshape(-1, 3)[:, 1:].copy().view(np.float64)
    with np.errstate(invalid="ignore"):
        sizes = np.abs(values[:, 0] - values[:, 1])
    differing = np.flatnonzero((sizes > 0) & (sizes < np.inf))
    _, first = np.unique(places[differing], return_index=True)  # in the order of places
    differing = differing[first]
    chosen = differing[np.argsort(-sizes[differing], kind="stable")[:worst]]
    return places[chosen], values[chosen]


def pairs_by_torch(
    largest_of_tiles: Tensor, actual: Tensor, reference: Tensor, worst: int
) -> Iterator[Tensor]:
    """Yield places and float64 values of pairs among which the worst are, as int64.

    They are in the tiles with the largest differences, as many tiles as there are worst pairs; of
    equal tiles in the first.
    """
    tiles = _first_largest(largest_of_tiles, worst).sort().values
    for some in tiles.split(_TILES_AT_ONCE) if worst else ():
        places = some[:, None] * TILE + torch.arange(TILE, device=actual.device)
        places = places.view(-1)
        exists = places < len(actual)
        places = places.clamp(max=len(actual) - 1)
        a, r = (side[places].to(torch.float64) for side in (actual, reference))
        size = (a - r).abs().masked_fill_(~(exists & a.isfinite() & r.isfinite()), 0.0)
        chosen = _first_largest(size, worst)
        pairs = (places, a.view(torch.int64), r.view(torch.int64))
        yield torch.stack(pairs, 1)[chosen].view(-1)


def _first_largest(size: Tensor, room: int) -> Tensor:
    """Return the indices of the largest, the first of equals."""
    return size.sort(descending=True, stable=True).indices[:room]


def figures_by_torch(partials: Partials, n: int) -> Tensor:
    """Return `FIGURES` of n pairs by the definition."""
    counts = partials.counts
    pairs = counts[0].to(torch.float64)
    total = pairs.sum()
    sums = _totals(partials.sums)
    means = sums[:2] / total.clamp(min=1)
    divisor = pairs.clamp(min=1)
    own_means, rests = partials.sums[:2] / divisor, partials.sums[2:4] / divisor
    offsets = ((own_means - means[:, None]) + rests).masked_fill_(pairs == 0, 0.0)
    shift_a, shift_r = pairs * offsets
    between = [shift_a, shift_r, shift_a * offsets[0], shift_r * offsets[1], shift_a * offsets[1]]
    within = partials.sums[2:7].clone()
    within[:2] = 0.0
    centered = _totals(torch.stack(between) + within)
    tiles = torch.arange(len(pairs), device=pairs.device)
    bad = counts[0] < (n - tiles * TILE).clamp(max=TILE)
    least, most = partials.extremes.amin(1), partials.extremes.amax(1)
    return torch.cat(
        [
            sums[:2],
            sums[7:],
            means,
            centered,
            counts.sum(1).to(torch.float64),
            torch.stack([most[0], least[1], most[2], least[3], most[4]]),
            bad.to(torch.int8).argmax().view(1).to(torch.float64),
        ]
    )


def _totals(x: Tensor) -> Tensor:
    """Add up each row, halves onto halves."""
    room = 1 << (x.shape[1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, room - x.shape[1]))
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _wrong(device: torch.device, actual: torch.dtype, reference: torch.dtype) -> str:
    """Describe where the kernels differ from the definition, on pairs and on many tiles."""
    for i, (a, r) in enumerate(_trials(actual, reference)):
        worst, partials = (10, 1, _FEW, 3)[i % 4], comparing.compare_by_torch(a, r, _SHIFT)
        there_a, there_r = (cases.move(side, device, i % 3) for side in (a, r))
        merged = merge_by_blocks(_moved(partials, device), there_a, there_r, worst).cpu()
        figures, pairs = merged[: len(FIGURES)], merged[len(FIGURES) :]
        expected = figures_by_torch(partials, len(a))
        if problem := proving.first_difference(figures.view(torch.float64), expected):
            return f"figures: {problem}"
        candidates = torch.cat([*pairs_by_torch(partials.extremes[0], a, r, worst)])
        by_kernel, by_torch = largest(pairs.numpy(), worst), largest(candidates.numpy(), worst)
        if not all(map(np.array_equal, by_kernel, by_torch)):
            return f"the worst pairs differ: {by_kernel[0]} instead of {by_torch[0]}"
    many, none = _many_tiles(), torch.empty(0, dtype=actual, device=device)
    merged = merge_by_blocks(_moved(many, device), none, none, 0).cpu()
    problem = proving.first_difference(merged.view(torch.float64), figures_by_torch(many, 0))
    return problem and f"figures of many tiles: {problem}"


def _moved(partials: Partials, device: torch.device) -> Partials:
    rows = (partials.sums, partials.extremes, partials.counts, partials.keys)
    return Partials(*(row.to(device) for row in rows))


def _trials(actual: torch.dtype, reference: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what `comparing` is proved on, and equal differences in more tiles than searched."""
    yield from comparing.trials(actual, reference)
    a, r = torch.zeros(35 * TILE + 3), torch.zeros(35 * TILE + 3)
    a[TILE + 1 :: 1000], r[2::1700] = -1.0, 0.5
    a[9 * TILE + 5], r[9 * TILE + 4], a[7], a[11 * TILE] = float("inf"), float("nan"), 3.0, -3.0
    a[11 * TILE + 1 :][: _FEW + 8] = float("inf")
    yield a.to(actual), r.to(reference)


def _many_tiles() -> Partials:
    """Return partial results of more tiles than a block of the kernel has threads."""
    noise = cases.bell_curve(torch.float32, count=(len(SUMS) + len(EXTREMES)) * _MANY).double()
    numbers = (noise * 0.3 + noise.flip(0) * 1e-9).view(-1, _MANY)
    counts = (numbers[: len(COUNTS)] * 1e3).to(torch.int32).abs_().clamp_(max=TILE)
    counts[0, ::7] = 0
    keys = torch.zeros(1, dtype=torch.int64)
    return Partials(numbers[: len(SUMS)], numbers[len(SUMS) :], counts, keys)
