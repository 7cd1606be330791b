"""Pairs of numbers: partial sums, extremes and counts of each tile, and how often keys occur.

A key is the leading bits of a difference. All sums are float64 in a fixed order, defined by
`compare_by_torch`: within a tile first elements `_WIDTH` apart, then neighbors. So sums too are
proven bit by bit, and a device without kernels gives the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from qgate.kernels import cases, compiling, proving
from qgate.kernels.launching import flat_bits, launch
from qgate.kernels.shapes import kind_of

TILE = 4096
AT_ONCE = 2**28
_WIDTH = 128
_SLICE = 2**22
_PER_TABLE = 2**16
_TABLES = 8
_LEAST, _OCTAVES = -149, 278
"""Differences of float32 numbers are 0 or from 2**-149 to below 2**129."""
THREADS, UNROLL = 384, 2

SUMS = (
    "sum_a", "sum_r", "rest_a", "rest_r", "m2_a", "m2_r", "co", "squares", "abs_error", "error",
    "abs_reference",
)  # fmt: skip
EXTREMES = ("max_error", "least_a", "most_a", "least_r", "most_r")
COUNTS = (
    "pairs", "flips", "nan_a", "posinf_a", "neginf_a", "nan_r", "posinf_r", "neginf_r",
    "mismatched",
)  # fmt: skip


@dataclass(frozen=True)
class Partials:
    """A row for each of `SUMS`, `EXTREMES` and `COUNTS`, a column for each tile.

    Only pairs that are finite on both sides count in `pairs`, sums, extremes, flips and keys.
    `m2_*`, `co` and `rest_*` are about the means of their tile.
    """

    sums: Tensor
    extremes: Tensor
    counts: Tensor
    keys: Tensor


Compare = Callable[[Tensor, Tensor, int], Partials]


def compare(actual: Tensor, reference: Tensor, shift: int) -> Partials | None:
    """Compare flat tensors of one length, at most `AT_ONCE`; None without a kernel."""
    a, r = actual.dtype, reference.dtype
    if not proving.serves(actual.device) or kind_of(a) is None or kind_of(r) is None:
        return None
    names = (str(dtype).removeprefix("torch.") for dtype in (a, r))
    work = "errors of {} tensors against {} ones".format(*names)
    ways: list[tuple[str, Compare, str]] = [("compare", compare_by_kernel, "torch alone")]
    if fits_shared_memory(actual.device, shift):
        ways.insert(0, ("compare in C", compare_by_warps, "a Triton kernel"))
    for name, kernel, instead in ways:
        way = (name, a, r, shift)
        wrong = partial(_wrong, kernel, actual, reference, shift)
        if proving.prove_once(way, actual.device, work, wrong, instead):
            return kernel(actual, reference, shift)
    return None


def fits_shared_memory(device: torch.device, shift: int) -> bool:
    """Tell whether a block of the device can have a counter for each key that can occur."""
    return compiling.serves(device) and 4 * key_window(shift)[1] <= compiling.shared_memory(device)


def key_window(shift: int) -> tuple[int, int]:
    """Return the first key that is not zero's and how many follow."""
    per_octave = 1 << (52 - shift)
    return (_LEAST + 1023) * per_octave, _OCTAVES * per_octave


def compare_by_warps(actual: Tensor, reference: Tensor, shift: int) -> Partials:
    """Compare by a kernel in CUDA C: a warp takes a tile, a block has a table of all keys."""
    n, device, tiles = len(actual), actual.device, -(-len(actual) // TILE)
    low, room = key_window(shift)
    sums = torch.empty(len(SUMS), tiles, dtype=torch.float64, device=device)
    extremes = torch.empty(len(EXTREMES), tiles, dtype=torch.float64, device=device)
    counts = torch.empty(len(COUNTS), tiles, dtype=torch.int32, device=device)
    keys = torch.zeros(_keys(shift), dtype=torch.int64, device=device)
    kernel = compiling.kernel(
        "comparing.cu", "compare_pairs", device, KIND_A=kind_of(actual.dtype) or 0,
        KIND_R=kind_of(reference.dtype) or 0, TILE=TILE, WIDTH=_WIDTH, THREADS=THREADS,
        UNROLL=UNROLL,
    )  # fmt: skip
    blocks = min(compiling.processors(device), -(-tiles // (THREADS // 32)))
    kernel(
        blocks, THREADS, flat_bits(actual), flat_bits(reference), sums, extremes, counts, keys, n,
        tiles, shift, low, room, shared=4 * room,
    )  # fmt: skip
    return Partials(sums, extremes, counts, keys)


def compare_by_kernel(actual: Tensor, reference: Tensor, shift: int) -> Partials:
    """Compare by a Triton kernel, with tables in the device's memory."""
    programs = importlib.import_module("qgate.kernels.programs.comparing")
    n, device, keys = len(actual), actual.device, _keys(shift)
    tiles, spread = -(-n // TILE), min(max(n // _PER_TABLE, 1), _TABLES)
    sums = torch.empty(len(SUMS), tiles, dtype=torch.float64, device=device)
    extremes = torch.empty(len(EXTREMES), tiles, dtype=torch.float64, device=device)
    counts = torch.zeros(len(COUNTS), tiles, dtype=torch.int32, device=device)
    tables = torch.zeros(spread, keys, dtype=torch.int32, device=device)
    launch(
        programs.compare_pairs, tiles, flat_bits(actual), flat_bits(reference), sums, extremes,
        counts, tables, n, tiles, keys, spread, TILE=TILE, WIDTH=_WIDTH,
        LEVELS=_WIDTH.bit_length() - 1, SHIFT=shift, KIND_A=kind_of(actual.dtype),
        KIND_R=kind_of(reference.dtype), warps=1,
    )  # fmt: skip
    total = tables.sum(0, dtype=torch.int64)
    total[0] = counts[0].sum() - total[1:].sum()
    return Partials(sums, extremes + 0.0, counts, total)


def _keys(shift: int) -> int:
    return 1 << (63 - shift)


def compare_by_torch(actual: Tensor, reference: Tensor, shift: int) -> Partials:
    """Compare by the definition."""
    parts = [
        _slice_by_torch(actual[i : i + _SLICE], reference[i : i + _SLICE], shift)
        for i in range(0, len(actual), _SLICE)
    ]
    return Partials(
        torch.cat([part.sums for part in parts], 1),
        torch.cat([part.extremes for part in parts], 1),
        torch.cat([part.counts for part in parts], 1),
        torch.stack([part.keys for part in parts]).sum(0),
    )


def _slice_by_torch(actual: Tensor, reference: Tensor, shift: int) -> Partials:
    exists = _tiled(torch.ones_like(actual, dtype=torch.bool))
    a, r = _tiled(actual), _tiled(reference)
    kinds_a, kinds_r = _kinds(a), _kinds(r)
    good = exists & (kinds_a == 0) & (kinds_r == 0)
    a, r = (side.masked_fill(~good, 0.0).to(torch.float64) for side in (a, r))
    error = a - r
    size = error.abs()
    pairs = good.sum(1)
    divisor = pairs.clamp(min=1).to(torch.float64)
    plain = _totals(a, r, error * error, size, error, r.abs())
    off_a = (a - (plain[0] / divisor)[:, None]).masked_fill(~good, 0.0)
    off_r = (r - (plain[1] / divisor)[:, None]).masked_fill(~good, 0.0)
    centered = _totals(off_a, off_r, off_a * off_a, off_r * off_r, off_a * off_r)
    inf = float("inf")
    extremes = [
        size.amax(1),
        a.masked_fill(~good, inf).amin(1),
        a.masked_fill(~good, -inf).amax(1),
        r.masked_fill(~good, inf).amin(1),
        r.masked_fill(~good, -inf).amax(1),
    ]
    counts = [
        pairs,
        ((a * r) < 0).sum(1),
        *((kinds_a == kind).sum(1) for kind in (1, 2, 3)),
        *((kinds_r == kind).sum(1) for kind in (1, 2, 3)),
        (kinds_a != kinds_r).sum(1),
    ]
    keys = torch.bincount((size.view(torch.int64) >> shift).view(-1), minlength=_keys(shift))
    keys[0] -= (~good).sum()
    return Partials(
        torch.cat([plain[:2], centered, plain[2:]]),
        torch.stack(extremes) + 0.0,
        torch.stack(counts).to(torch.int32),
        keys,
    )


def _tiled(x: Tensor) -> Tensor:
    """Pad with zeros to whole tiles."""
    return torch.nn.functional.pad(x, (0, -len(x) % TILE)).view(-1, TILE)


def _kinds(x: Tensor) -> Tensor:
    """Return 0 where finite, 1 for NaN, 2 and 3 for the infinities."""
    kinds = x.isnan().to(torch.int8)
    return kinds.masked_fill_(x == float("inf"), 2).masked_fill_(x == -float("inf"), 3)


def _totals(*values: Tensor) -> Tensor:
    """Return a row for each, with the totals of its tiles."""
    x = torch.stack(values).view(len(values), -1, TILE // _WIDTH, _WIDTH)
    total = x[:, :, 0] + 0.0
    for i in range(1, x.shape[2]):
        total += x[:, :, i]
    while total.shape[2] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


def _wrong(kernel: Compare, actual: Tensor, reference: Tensor, shift: int) -> str:
    for i, (a, r) in enumerate(trials(actual.dtype, reference.dtype)):
        there_a, there_r = (cases.move(side, actual.device, i % 3) for side in (a, r))
        actual_partials = kernel(there_a, there_r, shift)
        if problem := first_difference(actual_partials, compare_by_torch(a, r, shift)):
            return problem
    return ""


def first_difference(actual: Partials, expected: Partials) -> str:
    """Describe where two differ in a bit, or return an empty text."""
    for name in (field.name for field in fields(Partials)):
        if problem := proving.first_difference(getattr(actual, name), getattr(expected, name)):
            return f"{name}: {problem}"
    return ""


def trials(actual: torch.dtype, reference: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of every size and kind: neighbors, equals, rounded, constant, short tiles."""
    a, r = cases.numbers(actual), cases.numbers(reference)
    n = min(len(a), len(r)) - 5
    yield a[5 : 5 + n], r[:n]
    usual = cases.bell_curve(torch.float32, count=3 * TILE + 77)
    yield usual.to(actual), (usual * 1.001).to(reference)
    yield usual.to(actual).to(reference).to(actual), usual.to(actual).to(reference)
    level = torch.full((TILE + 1,), 0.1)
    yield level.to(actual), (level * 3).to(reference)
    yield a[-TILE + 1 :], -r[-TILE + 1 :]
    for value in (1.5, -0.0, float("nan"), float("inf"), -float("inf")):
        yield torch.full((1,), value).to(actual), torch.full((1,), -value).to(reference)
