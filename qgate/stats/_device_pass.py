"""`ErrorPass` for two tensors of one device, which stay there: the same sums, in large parts.

`qgate.kernels.comparing` returns sums, extremes and counts of tiles of a few thousand pairs, and
this file adds the tiles. Every sum has a fixed order, so it has the same bits on every device. They
are not the bits of `ErrorPass`, whose rows a BLAS adds up: both are within a few 1e-16 of the sum
of magnitudes. Counts, extremes and positions are the same.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qgate.kernels import comparing
from qgate.kernels.comparing import AT_ONCE, COUNTS, EXTREMES, SUMS, TILE, Partials
from qgate.kernels.launching import to_host
from qgate.stats._error_pass import SHIFT, DifferenceCounts, Element, NonFinite, PairTotals
from qgate.stats._sums import ErrorSums, push_sums

_PART = AT_ONCE
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_KINDS = ("nan", "posinf", "neginf")
_TILES_AT_ONCE = 2**22 // TILE


def serves(actual: Tensor, reference: Tensor) -> bool:
    """Tell whether both are on one CUDA device, of dtypes whose squares fit float64."""
    return (
        actual.device == reference.device
        and actual.device.type == "cuda"
        and actual.dtype in _NARROW
        and reference.dtype in _NARROW
    )


class DevicePass(PairTotals):
    """The totals of one pass over tensors of one shape on a device."""

    _keys: Tensor | None = None

    def run(self, actual: Tensor, reference: Tensor) -> bool:
        """Compare both to the end; they have one shape."""
        a, r = (side.reshape(-1).contiguous() for side in (actual, reference))
        for start in range(0, len(a), _PART):
            self._add(a[start : start + _PART], r[start : start + _PART])
        return True

    @property
    def differences(self) -> DifferenceCounts:
        if self._keys is None:
            return DifferenceCounts(np.empty(0, np.int64), np.empty(0, np.int64))
        keys = self._keys.nonzero().view(-1)
        return DifferenceCounts(*to_host(torch.stack([keys, self._keys[keys]])).numpy())

    def _add(self, actual: Tensor, reference: Tensor) -> None:
        partials = comparing.compare(actual, reference, SHIFT)
        if partials is None:
            partials = comparing.compare_by_torch(actual, reference, SHIFT)
        self._keys = partials.keys if self._keys is None else self._keys + partials.keys
        figures = _figures(partials, len(actual))
        if figures["pairs"] < len(actual):
            self._add_non_finite(figures, actual, reference)
        self.sign_flips += int(figures["flips"])
        if self._worst_room and figures["max_error"] > self._least_of_the_worst:
            self._find_worst(partials.extremes[0], actual, reference)
        self.elements += len(actual)
        push_sums(self._parts, _sums_of(figures))

    def _add_non_finite(self, figures: dict[str, float], actual: Tensor, reference: Tensor) -> None:
        self.actual = self.actual + NonFinite(*(int(figures[f"{kind}_a"]) for kind in _KINDS))
        self.reference = self.reference + NonFinite(*(int(figures[f"{kind}_r"]) for kind in _KINDS))
        self.mismatched += int(figures["mismatched"])
        if self.first_non_finite is None:
            begin = int(figures["first_bad_tile"]) * TILE
            a, r = (side[begin : begin + TILE] for side in (actual, reference))
            bad = ~(a.isfinite() & r.isfinite())
            index = begin + int(bad.to(torch.int8).argmax())
            self.first_non_finite = self._elements([index], actual, reference)[0]

    def _find_worst(self, largest: Tensor, actual: Tensor, reference: Tensor) -> None:
        """Keep the worst pairs.

        They are in the tiles with the largest differences, as many tiles as there are worst pairs;
        of equal tiles in the first.
        """
        tiles = _largest(largest, self._worst_room)
        tiles = tiles[largest[tiles] > self._least_of_the_worst]
        for some in tiles.split(_TILES_AT_ONCE):
            places = some[:, None] * TILE + torch.arange(TILE, device=largest.device)
            places = places.view(-1)
            places = places[places < len(actual)]
            a, r = (side[places].to(torch.float64) for side in (actual, reference))
            size = (a - r).abs().masked_fill_(~(a.isfinite() & r.isfinite()), 0.0)
            chosen = places[_largest(size, self._worst_room)].tolist()
            self._keep(self._elements(chosen, actual, reference))

    def _elements(self, places: list[int], actual: Tensor, reference: Tensor) -> list[Element]:
        at = torch.tensor(places, dtype=torch.int64, device=actual.device)
        a, r = torch.stack([side[at].to(torch.float64) for side in (actual, reference)]).tolist()
        return [Element(self.elements + i, x, y) for i, x, y in zip(places, a, r, strict=True)]


def _largest(size: Tensor, room: int) -> Tensor:
    """Return the indices of the largest, which are not 0, in order; of equals the first."""
    room = min(room, len(size))
    least = size.topk(room).values[-1]
    equal = (size == least) & (size > 0)
    return ((size > least) | (equal & (equal.cumsum(0) <= room))).nonzero().view(-1)


def _figures(partials: Partials, n: int) -> dict[str, float]:
    """Return all figures of a part that the host needs, in one transfer."""
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
    low, high = partials.extremes.amin(1), partials.extremes.amax(1)
    figures = [
        *zip(("sum_a", "sum_r", *SUMS[7:]), (*sums[:2], *sums[7:]), strict=True),
        *zip(("mean_a", "mean_r"), means, strict=True),
        *zip(SUMS[2:7], centered, strict=True),
        *zip(COUNTS, counts.sum(1).to(torch.float64), strict=True),
        *zip(EXTREMES, (high[0], low[1], high[2], low[3], high[4]), strict=True),
        ("first_bad_tile", bad.to(torch.int8).argmax()),
    ]
    values = torch.stack([figure.to(torch.float64) for _, figure in figures]).tolist()
    return {name: value for (name, _), value in zip(figures, values, strict=True)}


def _totals(x: Tensor) -> Tensor:
    """Add up each row, halves onto halves."""
    room = 1 << (x.shape[1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, room - x.shape[1]))
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _sums_of(f: dict[str, float]) -> ErrorSums:
    """Build the sums as `Portion.sums` does."""
    n = int(f["pairs"])
    if not n:
        return ErrorSums()
    mean_a, mean_r = f["mean_a"], f["mean_r"]
    m2_a, m2_r, co = f["m2_a"], f["m2_r"], f["co"]
    rest_a, rest_r = f["rest_a"], f["rest_r"]
    if f["least_a"] == f["most_a"]:
        mean_a, rest_a, m2_a, co = f["least_a"], 0.0, 0.0, 0.0
    if f["least_r"] == f["most_r"]:
        mean_r, rest_r, m2_r, co = f["least_r"], 0.0, 0.0, 0.0
    return ErrorSums(
        count=n,
        mean_actual=mean_a,
        mean_reference=mean_r,
        m2_actual=m2_a,
        m2_reference=m2_r,
        co=co,
        sum_square_actual=m2_a + n * mean_a * mean_a,
        sum_square_reference=m2_r + n * mean_r * mean_r,
        dot=co + n * mean_a * mean_r,
        sum_square_error=f["squares"],
        sum_abs_error=f["abs_error"],
        sum_error=f["error"],
        max_abs_error=f["max_error"],
        sum_abs_reference=f["abs_reference"],
        max_abs_reference=max(0.0, -f["least_r"], f["most_r"]),
        low_actual=rest_a / n,
        low_reference=rest_r / n,
    )
