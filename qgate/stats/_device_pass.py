"""The one pass over two tensors of a device, there: what `ErrorPass` collects, in large parts.

Sums are trees of pairs over rows, written out as additions of halves, so that they have the same
bits on every device. They are not the bits of `ErrorPass`, whose rows a BLAS adds up: both are
within a few 1e-16 of the sum of magnitudes. Counts, extremes and places are the same.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from qgate.stats._difference_counts import KEYS, SHIFT, DifferenceCounts
from qgate.stats._error_pass import Element, NonFinite
from qgate.stats._portion import NOISE
from qgate.stats._sums import ErrorSums, merged_sums, pushed

_ROW = 1024
_PART = 2**22
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_KINDS = {"nan": 1, "posinf": 2, "neginf": 3}


def serves(actual: Tensor, reference: Tensor) -> bool:
    """If both are on one CUDA device, of dtypes whose squares float64 has."""
    return (
        actual.device == reference.device
        and actual.device.type == "cuda"
        and actual.dtype in _NARROW
        and reference.dtype in _NARROW
    )


class DevicePass:
    """Runs once over tensors of one shape; then its attributes are what was found."""

    def __init__(self, worst: int) -> None:
        self._room = worst
        self._parts: list[tuple[int, ErrorSums]] = []
        self._keys: Tensor | None = None
        self.elements = 0
        self.actual = self.reference = NonFinite()
        self.mismatched = 0
        self.sign_flips = 0
        self.first_non_finite: Element | None = None
        self.worst: list[Element] = []

    def run(self, actual: Tensor, reference: Tensor) -> bool:
        """Always to the end: both have one shape."""
        a, r = actual.reshape(-1), reference.reshape(-1)
        for start in range(0, len(a), _PART):
            self._add(a[start : start + _PART], r[start : start + _PART])
        return True

    @property
    def sums(self) -> ErrorSums:
        return merged_sums(self._parts)

    @property
    def differences(self) -> DifferenceCounts:
        table = np.zeros(KEYS, np.int64) if self._keys is None else self._keys.cpu().numpy()
        keys = np.flatnonzero(table)
        return DifferenceCounts(keys, table[keys])

    def _add(self, actual: Tensor, reference: Tensor) -> None:
        n = len(actual)
        a, r = _padded(actual), _padded(reference)
        kinds_a, kinds_r = _kinds(a), _kinds(r)
        bad = (kinds_a != 0) | (kinds_r != 0)
        left_out = bad.clone()
        left_out[n:] = True
        a, r = a.masked_fill(bad, 0.0), r.masked_fill(bad, 0.0)
        error = a - r
        size = error.abs()
        self._count_keys(size, left_out)
        found = self._figures(a, r, error, size, kinds_a, kinds_r, bad, left_out)
        bad_pairs = int(found["bad"])
        if bad_pairs:
            self._note(found, actual, reference)
        self.sign_flips += int(found["flips"])
        if self._room and found["max_error"] > self._least_of_the_worst:
            self._keep_worst(size, actual, reference)
        self.elements += n
        pushed(self._parts, _sums_of(n - bad_pairs, found))

    def _count_keys(self, size: Tensor, left_out: Tensor) -> None:
        keys = (size.view(torch.int64) >> SHIFT).to(torch.int32)
        counted = torch.bincount(keys, minlength=KEYS)
        counted[0] -= left_out.sum()
        self._keys = counted if self._keys is None else self._keys + counted

    def _figures(
        self,
        a: Tensor,
        r: Tensor,
        error: Tensor,
        size: Tensor,
        kinds_a: Tensor,
        kinds_r: Tensor,
        bad: Tensor,
        left_out: Tensor,
    ) -> dict[str, float]:
        """All that the host has to know of a part, asked for at once."""
        n = (~left_out).sum().to(torch.float64).clamp(min=1)
        sum_a, sum_r = _total(a), _total(r)
        mean_a, mean_r = sum_a / n, sum_r / n
        off_a = (a - mean_a).masked_fill(left_out, 0.0)
        off_r = (r - mean_r).masked_fill(left_out, 0.0)
        there = {
            "bad": bad.sum(),
            **{f"{k}_a": (kinds_a == i).sum() for k, i in _KINDS.items()},
            **{f"{k}_r": (kinds_r == i).sum() for k, i in _KINDS.items()},
            "mismatched": (kinds_a != kinds_r).sum(),
            "flips": (a * r < 0).sum(),
            "first_bad": bad.to(torch.int8).argmax(),
            "sum_a": sum_a,
            "sum_r": sum_r,
            "mean_a": mean_a,
            "mean_r": mean_r,
            "m2_a": _total(off_a * off_a),
            "m2_r": _total(off_r * off_r),
            "co": _total(off_a * off_r),
            "rest_a": _total(off_a),
            "rest_r": _total(off_r),
            "squares": _total(error * error),
            "abs_error": _total(size),
            "error": _total(error),
            "abs_reference": _total(r.abs()),
            "max_error": size.max(),
            "max_reference": r.abs().max(),
            "least_a": a.masked_fill(left_out, math.inf).min(),
            "most_a": a.masked_fill(left_out, -math.inf).max(),
            "least_r": r.masked_fill(left_out, math.inf).min(),
            "most_r": r.masked_fill(left_out, -math.inf).max(),
        }
        values = torch.stack([each.to(torch.float64) for each in there.values()]).tolist()
        return dict(zip(there, values, strict=True))

    def _note(self, found: dict[str, float], actual: Tensor, reference: Tensor) -> None:
        self.actual = self.actual + NonFinite(*(int(found[f"{kind}_a"]) for kind in _KINDS))
        self.reference = self.reference + NonFinite(*(int(found[f"{kind}_r"]) for kind in _KINDS))
        self.mismatched += int(found["mismatched"])
        if self.first_non_finite is None:
            self.first_non_finite = self._element(int(found["first_bad"]), actual, reference)

    @property
    def _least_of_the_worst(self) -> float:
        return -self.worst[-1].badness[0] if len(self.worst) == self._room else 0.0

    def _keep_worst(self, size: Tensor, actual: Tensor, reference: Tensor) -> None:
        """The largest differences, of equals the first."""
        room = min(self._room, len(size))
        least = size.topk(room).values[-1]
        above = size > least
        equal = (size == least) & (size > 0)
        places = (above | (equal & (equal.cumsum(0) <= room))).nonzero().view(-1).tolist()
        found = [self._element(place, actual, reference) for place in places]
        self.worst = sorted([*self.worst, *found], key=lambda each: each.badness)[: self._room]

    def _element(self, i: int, actual: Tensor, reference: Tensor) -> Element:
        return Element(self.elements + i, float(actual[i]), float(reference[i]))


def _padded(x: Tensor) -> Tensor:
    """As float64, with zeros up to whole rows; the number of rows is a power of two."""
    rows = 1 << (-(-len(x) // _ROW) - 1).bit_length()
    wide = torch.zeros(rows * _ROW, dtype=torch.float64, device=x.device)
    wide[: len(x)] = x
    return wide


def _kinds(x: Tensor) -> Tensor:
    """0 finite, 1 NaN, 2 and 3 the infinities."""
    kinds = x.isnan().to(torch.int8)
    return kinds.masked_fill_(x == math.inf, 2).masked_fill_(x == -math.inf, 3)


def _total(x: Tensor) -> Tensor:
    """Halves onto halves: the places of a row first, then the rows."""
    x = x.view(-1, _ROW)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    x = x.view(-1)
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    return x[0]


def _sums_of(n: int, f: dict[str, float]) -> ErrorSums:
    """As `Portion.sums` puts them together."""
    if not n:
        return ErrorSums()
    mean_a, mean_r = f["mean_a"], f["mean_r"]
    m2_a, m2_r, co = f["m2_a"], f["m2_r"], f["co"]
    rest_a, rest_r = f["rest_a"], f["rest_r"]
    if m2_a <= n * (NOISE * mean_a) ** 2 and f["least_a"] == f["most_a"]:
        mean_a, rest_a, m2_a, co = f["least_a"], 0.0, 0.0, 0.0
    if m2_r <= n * (NOISE * mean_r) ** 2 and f["least_r"] == f["most_r"]:
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
        max_abs_reference=f["max_reference"],
        low_actual=rest_a / n,
        low_reference=rest_r / n,
    )
