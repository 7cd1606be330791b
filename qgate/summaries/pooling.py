"""Pools and channels of tensors, from their values or from the counts or statistics of a dump."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.errors import QgateError, unknown
from qgate.stats import Counts, counts, serial
from qgate.stats.bits import BY_NAME, CHUNK, COUNTABLE, slabs
from qgate.stats.moments import PowerPass, PowerSums, is_tame
from qgate.summaries.outcomes import (
    OutcomeSums,
    Target,
    WideDtype,
    outcome_of_counts,
    outcome_of_dtype,
    outcome_of_rows,
    target_of,
)
from qgate.summaries.pool import Pool, of_counts
from qgate.summaries.record import Channels
from qgate.summaries.row_samples import OCTAVES, RowSample, all_rows, by_kind, drawn, octaves_of

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.bfloat16, torch.float16)
_CHUNK = 2**16
_RUNS = 16
_UNIT = 64
"""Blocks of every format fit into runs of this many elements."""
_CHANNEL_CHUNK = 2**17
_CURVE_POINTS = 65
_LARGEST_CHANNELS = 5
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The least magnitude, as an integer, that is not finite.
_INFINITY = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}


def pool_of(tensor: Tensor, formats: Sequence[str] = (), rows: int = 2**16, seed: int = 0) -> Pool:
    """Pool one tensor, read part by part.

    16-bit and 8-bit values are counted exactly, the latter as bfloat16, which holds them all. Wider
    ones are counted after rounding to bfloat16; their ends, moments, zeros and non-finite values
    are exact. Signal and noise are estimated from a seeded sample of about `rows` elements where
    the tensor is wider than 16 bits or the format has scales of its own; of those formats all
    figures are.
    """
    targets = {t.name: t for t in map(target_of, formats)}
    narrow = tensor.dtype.itemsize == 1 and tensor.is_floating_point()
    if tensor.dtype not in (*_WIDE, *_NARROW) and not narrow:
        raise QgateError(f"a summary needs floating point numbers, not {tensor.dtype}.")
    if rows < 1:
        raise QgateError(f"rows {rows} is not allowed; a share has at least 1 element.")
    x = tensor.detach().cpu().resolve_neg().contiguous()
    wide = x.dtype in _WIDE
    with serial():
        if narrow and x.dtype not in COUNTABLE:
            empty = torch.empty(0, dtype=torch.bfloat16)
            parts = (part.to(torch.bfloat16) for part in slabs(x, CHUNK))
            counted = counts(itertools.chain([empty], parts))
        else:
            counted = counts(x, via="bf16" if wide else None)
        assert isinstance(counted, Counts)
        pool = of_counts(counted)
        if wide:
            pool = _with_exact_figures(pool, x)
        sample = _sample_rows(x, rows, seed)
        sample = sample.to(torch.bfloat16) if narrow else sample
        outcomes: dict[str, OutcomeSums] = {}
        for name, target in targets.items():
            if wide and isinstance(target, WideDtype):
                values = (part.astype(np.float64) for part in _chunks(x))
                outcomes[name] = outcome_of_dtype(target, values)
            else:
                outcomes[name] = outcome_of(target, pool, sample, pool.massive, wide=wide)
    return replace(pool, outcomes=outcomes)


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
    """Pool one tensor of which a dump has counts, of all elements or a share, in its own `dtype` or
    rounded. Formats with scales of their own are left out, because counts have no rows."""
    if BY_NAME.get(counted_as) not in COUNTABLE:
        raise unknown("dtype of counts", counted_as, [str(d)[6:] for d in COUNTABLE])
    pool = of_counts(Counts.of_patterns(counted_as, patterns, counts))
    pool = _with_known(replace(pool, elements=elements, source="counts"), stats, nonfinite)
    if dtype.removeprefix("torch.") in ("float32", "float64"):
        pool = replace(pool, moments=_known_moments(stats, pool.counts.finite))
    targets = [t for t in map(target_of, formats) if t.kind != "block" and not t.always_scaled]
    none = all_rows(torch.empty(0, 1))
    outcomes = {t.name: outcome_of(t, pool, none, pool.massive, wide=False) for t in targets}
    return replace(pool, outcomes=outcomes)


def pool_of_statistics(
    stats: Mapping[str, float], nonfinite: Mapping[str, int], elements: int
) -> Pool:
    """Pool one tensor of which a dump has ends and moments and no counts."""
    pool = _with_known(Pool(1, elements, "statistics", Counts("")), stats, nonfinite)
    finite = elements - sum(nonfinite.values())
    return replace(pool, moments=_known_moments(stats, finite))


def outcome_of(
    target: Target, pool: Pool, rows: RowSample, massive: float, *, wide: bool
) -> OutcomeSums:
    """Measure a format on pooled values, with the sums of the rest below `massive`.

    `rows` stand for the tensor's: formats with scales of their own are measured on them, and
    so are the errors of `wide` values.
    """
    if target.kind == "block" or (target.kind == "element" and target.always_scaled):
        return outcome_of_rows(target, rows, (pool.low, pool.high), massive)
    exact = not wide or target.kind == "dtype"
    own = (pool.posinf, pool.neginf, pool.vanished)
    return outcome_of_counts(target, pool.counts, own, None if exact else rows, massive)


def _with_known(pool: Pool, stats: Mapping[str, float], nonfinite: Mapping[str, int]) -> Pool:
    """Replace figures of the counts by the exact figures of a record."""
    low, high = (float(stats.get(end, math.nan)) for end in ("min", "max"))
    return replace(
        pool,
        nan=int(nonfinite.get("nan", 0)),
        posinf=int(nonfinite.get("posinf", 0)),
        neginf=int(nonfinite.get("neginf", 0)),
        low=low if math.isfinite(low) else pool.low,
        high=high if math.isfinite(high) else pool.high,
    )


def _known_moments(stats: Mapping[str, float], finite: int) -> PowerSums | None:
    mean, std = stats.get("mean", math.nan), stats.get("std", math.nan)
    has_moments = finite > 0 and math.isfinite(mean) and math.isfinite(std)
    return PowerSums.of_figures(finite, mean, std) if has_moments else None


def _chunks(x: Tensor) -> Iterator[npt.NDArray[np.floating]]:
    """Yield a contiguous tensor of 32 or 64 bits as flat parts that stay in the cache; views."""
    flat = x.view(-1).numpy()
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]


def _with_exact_figures(pool: Pool, x: Tensor) -> Pool:
    """Take figures of the values themselves in place of those that were rounded to be counted."""
    low, high, zeros, kinds, moments = math.nan, math.nan, 0, [0, 0, 0], PowerPass(order=2)
    integer, real = np.dtype(f"u{x.itemsize}"), np.dtype(f"f{x.itemsize}")
    magnitude = np.array(2 ** (8 * x.itemsize - 1) - 1, dtype=integer)
    one = np.array(1, dtype=integer)
    least = int(magnitude)
    for chunk in _chunks(x):
        part = chunk
        smallest, largest = float(part.min()), float(part.max())
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            hits = (np.isnan(part), part == np.inf, part == -np.inf)
            kinds = [n + int(hit.sum()) for n, hit in zip(kinds, hits, strict=True)]
            part = part[np.isfinite(part)]
            if not part.size:
                continue
            smallest, largest = float(part.min()), float(part.max())
        # Plus zero, so that of two zeros there is one.
        low, high = float(np.fmin(low, smallest + 0.0)), float(np.fmax(high, largest + 0.0))
        bits = part.view(integer) & magnitude
        zeros += bits.size - int(np.count_nonzero(bits))
        # Zero minus one is the largest integer, so the least is that of the others.
        least = min(least, int((bits - one).min()))
        moments.take(torch.from_numpy(part))
    amax = max(abs(low), abs(high))
    if not (math.isnan(amax) or is_tame(amax)):
        moments = PowerPass(amax, order=2)
        for chunk in _chunks(x):
            moments.take(torch.from_numpy(chunk[np.isfinite(chunk)]))
    return replace(
        pool,
        nan=kinds[0],
        posinf=kinds[1],
        neginf=kinds[2],
        low=low,
        high=high,
        least=float(np.array([least + 1], integer).view(real)[0])
        if least < magnitude
        else math.nan,
        vanished=pool.zeros - zeros,
        moments=moments.moments(),
    )


def _sample_rows(x: Tensor, most: int, seed: int) -> RowSample:
    """Draw about `most` elements of a tensor: all of it, or whole rows of its last dimension, or
    runs of whole blocks where one row is longer. Rows of every power of two are among them."""
    length = x.shape[-1] if x.dim() else 1
    if not x.numel():
        return all_rows(x.reshape(0, 1))
    table = x.reshape(-1, length)
    if x.numel() <= most:
        return all_rows(table)
    run = length if length <= most else max(most // _RUNS // _UNIT * _UNIT, min(_UNIT, length))
    per_row = length // run
    sizes = np.concatenate(
        [
            channel_amax(part[:, : per_row * run].unflatten(1, (per_row, run)).flatten(0, 1).T)
            for part in table.split(max(_CHUNK // length, 1))
        ]
    )
    octaves = octaves_of(sizes)
    order = np.random.default_rng([seed, *x.shape]).permutation(len(sizes))
    chosen = drawn(order, octaves, max(most // run, 1))
    places = [divmod(int(place), per_row) for place in chosen]
    rows = torch.stack([table[row, i * run : (i + 1) * run] for row, i in places])
    return by_kind(rows, octaves[chosen], np.bincount(octaves, minlength=OCTAVES))


# Channels ----------------------------------------------------------------------------------------


def channel_amax(x: Tensor) -> npt.NDArray[np.float64]:
    """Return the largest finite magnitude of each channel, the last dimension; 0 without any."""
    length = x.shape[-1] if x.dim() else 1
    table = x.detach().reshape(-1, length) if x.numel() else x.new_empty(0, length)
    if table.dtype not in _INFINITY:
        table = table.to(torch.bfloat16)
    kind = np.dtype(f"u{table.itemsize}")
    # As integers, magnitudes are in order, and no format or NaN is in the way.
    mask = np.array(2 ** (8 * table.itemsize - 1) - 1, dtype=kind)
    infinity = np.array(_INFINITY[table.dtype], dtype=kind)
    bits = table.view(_SIGNED[table.itemsize]).numpy().view(kind)
    largest = np.zeros(length, dtype=kind)
    step, width = max(_CHANNEL_CHUNK // max(length, 1), 1), max(min(length, _CHANNEL_CHUNK), 1)
    for row in range(0, len(bits), step):
        for column in range(0, length, width):
            columns = slice(column, column + width)
            part = bits[row : row + step, columns] & mask
            part_amax = part.max(axis=0)
            if (part_amax >= infinity).any():
                part[part >= infinity] = 0
                part_amax = part.max(axis=0)
            np.maximum(largest[columns], part_amax, out=largest[columns])
    signed = largest.view(np.uint8 if table.itemsize == 1 else f"i{table.itemsize}")
    return np.asarray(torch.from_numpy(signed).view(table.dtype).to(torch.float64).numpy())


def channels_of(x: Tensor) -> Channels:
    """Summarize a tensor's channels; without channels all figures are zero or empty."""
    sizes = channel_amax(x)
    if not sizes.size:
        return Channels(count=0, median=0.0, largest=[], curve=[])
    order = np.argsort(-sizes, kind="stable")
    places = np.linspace(0, sizes.size - 1, min(_CURVE_POINTS, sizes.size)).round().astype(np.int64)
    return Channels(
        count=sizes.size,
        median=float(np.median(sizes)),
        largest=[(int(i), float(sizes[i])) for i in order[:_LARGEST_CHANNELS]],
        curve=sizes[order[places]].tolist(),
    )
