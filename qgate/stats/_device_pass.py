"""`ErrorPass` for two tensors of one device, which stay there: the same sums, in large parts.

`qgate.kernels.comparing` returns sums, extremes and counts of tiles of a few thousand pairs, and
`qgate.kernels.merging` adds the tiles. Every sum has a fixed order, so it has the same bits on
every device. They are not the bits of `ErrorPass`, whose rows a BLAS adds up: both are within a few
1e-16 of the sum of magnitudes. Counts, extremes and positions are the same.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qgate.kernels import comparing, merging
from qgate.kernels.comparing import AT_ONCE, TILE
from qgate.kernels.launching import to_host
from qgate.kernels.merging import FIGURES
from qgate.stats._error_pass import SHIFT, DifferenceCounts, Element, NonFinite, PairTotals
from qgate.stats._sums import ErrorSums, push_sums
from qgate.stats.summary import Ints

_PART = AT_ONCE
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_KINDS = ("nan", "posinf", "neginf")


def serves(actual: Tensor, reference: Tensor) -> bool:
    """Tell whether both are on one CUDA device, of dtypes whose squares fit float64."""
    return (
        actual.device == reference.device
        and actual.device.type == "cuda"
        and actual.dtype in _NARROW
        and reference.dtype in _NARROW
    )


class DevicePass(PairTotals):
    """The totals of one pass over tensors of one shape on a device.

    The host waits once for each part, for all of its results, and again for the first pair that is
    not finite.
    """

    def __init__(self, worst: int) -> None:
        super().__init__(worst)
        self._counts = np.zeros(0, np.int64)

    def run(self, actual: Tensor, reference: Tensor) -> bool:
        """Compare both to the end; they have one shape."""
        a, r = (side.reshape(-1).contiguous() for side in (actual, reference))
        for start in range(0, len(a), _PART):
            self._add(a[start : start + _PART], r[start : start + _PART])
        return True

    @property
    def differences(self) -> DifferenceCounts:
        places = np.flatnonzero(self._counts)
        first, _ = comparing.key_window(SHIFT)
        return DifferenceCounts(np.where(places, places - 1 + first, 0), self._counts[places])

    def _add(self, actual: Tensor, reference: Tensor) -> None:
        partials = comparing.compare(actual, reference, SHIFT)
        if partials is None:
            partials = comparing.compare_by_torch(actual, reference, SHIFT)
        first, room = comparing.key_window(SHIFT)
        results = [
            partials.keys[:1],
            partials.keys[first : first + room],
            merging.merge(partials, actual, reference, self._worst_room),
        ]
        on_host = to_host(torch.cat(results)).numpy()
        counts, values, pairs = np.split(on_host, [1 + room, 1 + room + len(FIGURES)])
        self._counts = counts if not len(self._counts) else self._counts + counts
        figures = dict(zip(FIGURES, values.view(np.float64).tolist(), strict=True))
        if figures["pairs"] < len(actual):
            self._add_non_finite(figures, actual, reference)
        self.sign_flips += int(figures["flips"])
        if figures["max_error"] > self._least_of_the_worst:
            self._keep_pairs(pairs)
        self.elements += len(actual)
        push_sums(self._parts, _sums_of(figures))

    def _add_non_finite(self, figures: dict[str, float], actual: Tensor, reference: Tensor) -> None:
        self.actual = self.actual + NonFinite(*(int(figures[f"{kind}_a"]) for kind in _KINDS))
        self.reference = self.reference + NonFinite(*(int(figures[f"{kind}_r"]) for kind in _KINDS))
        self.mismatched += int(figures["mismatched"])
        if self.first_non_finite is None:
            begin = int(figures["first_bad_tile"]) * TILE
            a, r = (side[begin : begin + TILE].to(torch.float64) for side in (actual, reference))
            pairs = to_host(torch.stack([a, r])).numpy()
            index = int(np.argmin(np.isfinite(pairs).all(axis=0)))
            x, y = pairs[:, index].tolist()
            self.first_non_finite = Element(self.elements + begin + index, x, y)

    def _keep_pairs(self, pairs: Ints) -> None:
        places, values = merging.largest(pairs, self._worst_room)
        self._keep(
            [
                Element(self.elements + i, x, y)
                for i, (x, y) in zip(places.tolist(), values.tolist(), strict=True)
            ]
        )


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
