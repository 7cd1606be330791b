"""Pools of tensors, from values or from what a dump kept of them: the source of every portrait."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.errors import QgateError, unknown
from qgate.stats import Counts, counts, serial
from qgate.stats.bits import BY_NAME, CHUNK, COUNTABLE, slabs
from qgate.summaries.channels import channels_of
from qgate.summaries.ends import ExactFigures, ValueSums, chunks_of, ends_and_sums, share_of_rows
from qgate.summaries.outcomes import (
    FateSums,
    Limit,
    Target,
    edges_of,
    fate_of_counts,
    fate_of_limit,
    target_of,
)
from qgate.summaries.pool import Pool, Pooling, of_counts
from qgate.summaries.row_outcomes import fate_of_rows

__all__ = [
    "Pool",
    "Pooling",
    "channels_of",
    "edges_of",
    "pool_of",
    "pool_of_counts",
    "pool_of_statistics",
]

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.bfloat16, torch.float16)


def pool_of(tensor: Tensor, formats: Sequence[str] = (), rows: int = 2**16, seed: int = 0) -> Pool:
    """One tensor, gone through part by part.

    16-bit and 8-bit values are counted exactly, the latter as bfloat16, which holds them all. Wider
    ones are counted after rounding to bfloat16; their ends, sums, zeros and non-finite values are
    exact. Signal and noise are of a seeded share of about `rows` elements where the tensor is wider
    than 16 bits or the format has scales of its own; of those formats all figures are.
    """
    targets = {t.name: t for t in map(target_of, formats)}
    narrow = tensor.dtype.itemsize == 1 and tensor.is_floating_point()
    if tensor.dtype not in (*_WIDE, *_NARROW) and not narrow:
        raise QgateError(f"a portrait is of floating point numbers, not of {tensor.dtype}.")
    if rows < 1:
        raise QgateError(f"rows {rows} is not allowed; a share has at least 1 element.")
    x = tensor.detach().cpu().resolve_neg().contiguous()
    with serial():
        if narrow and x.dtype not in COUNTABLE:
            empty = torch.empty(0, dtype=torch.bfloat16)
            parts = (part.to(torch.bfloat16) for part in slabs(x, CHUNK))
            counted = counts(itertools.chain([empty], parts))
        else:
            counted = counts(x, via="bf16" if x.dtype in _WIDE else None)
        assert isinstance(counted, Counts)
        pool = of_counts(counted.dtype, counted.counts)
        if x.dtype in _WIDE:
            pool = _with_ends(pool, *ends_and_sums(x))
        share = share_of_rows(x, rows, seed)
        share = share.to(torch.bfloat16) if narrow else share
        fates = {name: _fate(target, pool, x, share) for name, target in targets.items()}
    return replace(pool, fates=fates)


def pool_of_counts(
    patterns: npt.ArrayLike,
    counts: npt.ArrayLike,
    counted_as: str,
    stats: Mapping[str, float],
    nonfinite: Mapping[str, int],
    elements: int,
    formats: Sequence[str] = (),
    dtype: str = "",
) -> Pool:
    """One tensor of which a dump has counts: of all its elements or of a share, in its own `dtype`
    or rounded. Formats with scales of their own are left out: counts know no rows."""
    if counted_as not in BY_NAME or BY_NAME[counted_as] not in COUNTABLE:
        raise unknown("dtype of counts", counted_as, [str(d)[6:] for d in COUNTABLE])
    places = np.asarray(patterns, dtype=np.int64).reshape(-1)
    found = np.asarray(counts, dtype=np.int64).reshape(-1)
    size = 2 ** (8 * BY_NAME[counted_as].itemsize)
    if (
        places.shape != found.shape
        or (places >= size).any()
        or (np.minimum(places, found) < 0).any()
    ):
        raise QgateError(f"counts that do not fit {counted_as}: patterns and numbers disagree.")
    dense = np.zeros(size, dtype=np.int64)
    np.add.at(dense, places, found)
    pool = of_counts(counted_as, dense)
    pool = replace(pool, elements=elements, source="counts", **_known(stats, nonfinite))
    if dtype.removeprefix("torch.") in ("float32", "float64"):
        pool = replace(pool, sums=_known_sums(stats, int(pool.weighted[1].sum())))
    targets = [t for t in map(target_of, formats) if t.kind != "block" and not t.always_scaled]
    fates = {t.name: fate_of_counts(t, pool, massive=pool.massive) for t in targets}
    return replace(pool, fates=fates)


def pool_of_statistics(
    stats: Mapping[str, float], nonfinite: Mapping[str, int], elements: int
) -> Pool:
    """One tensor of which a dump has ends and moments and no counts."""
    none = np.empty(0, dtype=np.int64)
    pool = Pool(1, elements, "", "statistics", none.astype(np.uint16), none)
    finite = elements - sum(nonfinite.values())
    return replace(pool, sums=_known_sums(stats, finite), **_known(stats, nonfinite))


def _known(stats: Mapping[str, float], nonfinite: Mapping[str, int]) -> dict[str, Any]:
    """Exact figures of a record; the others stay what the counts say."""
    kinds = {kind: int(nonfinite.get(kind, 0)) for kind in ("nan", "posinf", "neginf")}
    ends = {"low": stats.get("min", math.nan), "high": stats.get("max", math.nan)}
    return kinds | {name: float(end) for name, end in ends.items() if math.isfinite(end)}


def _known_sums(stats: Mapping[str, float], finite: int) -> ValueSums | None:
    mean, std = stats.get("mean", math.nan), stats.get("std", math.nan)
    there = finite > 0 and math.isfinite(mean) and math.isfinite(std)
    return ValueSums.of_moments(finite, mean, std) if there else None


def _with_ends(pool: Pool, ends: ExactFigures, sums: ValueSums) -> Pool:
    """Of the values themselves, in place of those that were rounded to be counted."""
    return replace(
        pool,
        nan=ends.nan,
        posinf=ends.posinf,
        neginf=ends.neginf,
        low=ends.low,
        high=ends.high,
        least=ends.least,
        vanished=pool.zeros - ends.zeros,
        sums=sums,
    )


def _fate(target: Target, pool: Pool, x: Tensor, share: Tensor) -> FateSums:
    if target.kind == "block" or (target.kind == "element" and target.always_scaled):
        amax = 0.0 if math.isnan(pool.amax) else pool.amax
        return fate_of_rows(target, share, amax, pool.massive)
    if x.dtype not in _WIDE:
        return fate_of_counts(target, pool, massive=pool.massive)
    if isinstance(target, Limit):
        return fate_of_limit(target, (part.astype(np.float64) for part in chunks_of(x)))
    values = share.reshape(-1).to(torch.float64).numpy()
    return fate_of_counts(target, pool, values, pool.massive)
