"""Findings of the plots of errors, one line each, computed from the data that is drawn.

A finding is stated where it is plain, with its number; where nothing stands out, that is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from qgate.charts.svg import brief, power
from qgate.results.pictures import ErrorBins, ErrorPicture
from qgate.text import rounded_percent

# Errors are one-sided from this share on one side, of so many elements at least.
ONE_SIDED, FEW = 0.75, 30
# A tail is worth a title when more than this share is beyond the drawn bins.
BEYOND = 0.01
# Channels stand out when half of the error is in an eighth of them, or nearly all in one.
CROWDED, ALONE = 8, 0.9
# Shares of error and energy differ where their running sums are this far apart.
APART = 0.3
# Actual ends elsewhere than the reference when their largest values differ by this factor.
ENDS_APART = 1.5
WRONG_SIGN, NEAR = 0.01, 0.9


def sides(bins: ErrorBins) -> tuple[int, int]:
    """Count errors below and above zero, without the bins that touch zero from both sides.

    Exact elements fall into the bin right of zero where there are two in the middle, so neither of
    these two counts, unless there is nothing else.
    """
    counts, middle = bins["counts"], len(bins["counts"]) // 2
    odd = len(counts) % 2
    below = bins["below"] + sum(counts[: middle - (not odd)])
    above = bins["above"] + sum(counts[middle + 1 :])
    if not odd and below + above == 0:
        return sum(counts[:middle]), sum(counts[middle:])
    return below, above


def histogram_finding(picture: ErrorPicture) -> str:
    bins = picture["bins"]
    beyond = bins["below"] + bins["above"]
    total = sum(bins["counts"]) + beyond
    lost = picture["sampled"] - total
    if lost > 0:
        return f"{lost:,} of {picture['sampled']:,} elements cannot be compared: not finite"
    if not total:
        return "No errors: nothing was compared"
    if not bins["edge"] and not beyond:
        return f"No error: all {total:,} elements are exact"
    below, above = sides(bins)
    signed = below + above
    if total < FEW:
        elements = "1 element" if total == 1 else f"{total} elements"
        return f"Only {elements}: {below} errors below zero, {above} above"
    share = max(below, above) / signed if signed else 0.0
    side = "below" if below > above else "above"
    if signed >= FEW and signed >= 0.05 * total and share >= ONE_SIDED:
        return f"Errors are one-sided: {rounded_percent(share)} {side} zero"
    if beyond > BEYOND * total:
        return f"{rounded_percent(beyond / total)} of errors are beyond ±{brief(bins['edge'])}"
    if signed < FEW or signed < 0.05 * total:
        bins_inside = 1 if len(bins["counts"]) % 2 else 2
        width = brief(bins_inside * bins["edge"] / len(bins["counts"]))
        return f"{rounded_percent(1 - signed / total)} of errors are within ±{width} of zero"
    return f"Errors are on both sides: {rounded_percent(share)} {side} zero"


def density_finding(picture: ErrorPicture) -> str:
    """Find wrong signs, ends that differ, or the share of values near the diagonal."""
    density = picture["density"]
    size, edge = density["size"], density["edge"]
    columns, rows, counts = (density["cells"][at::3] for at in range(3))
    total = sum(counts)
    if not total:
        return "Actual and reference: nothing was compared"
    if not picture["rms"]:
        same = set(rows) == set(columns) and len(set(rows)) == 1
        return "Actual and reference are zero" if same else "The reference is zero, actual is not"
    if len(set(rows)) == 1 and len(set(columns)) > 1:
        if abs(2 * rows[0] + 1 - size) <= 1:
            return "Actual is zero, or near it, everywhere"
        return f"Actual is constant, near {brief(_middle(rows[0], size, edge))} rms everywhere"
    opposite = sum(
        count
        for column, row, count in zip(columns, rows, counts, strict=True)
        if (2 * column - size + 1) * (2 * row - size + 1) < 0
        and min(abs(2 * column - size + 1), abs(2 * row - size + 1)) > 2
    )
    if opposite >= WRONG_SIGN * total:
        return f"{rounded_percent(opposite / total)} of values have the wrong sign"
    reference, actual = (_reach(cells, size, edge) for cells in (columns, rows))
    if reference >= ENDS_APART * actual and _cells_apart(columns, rows, size) >= 2:
        return f"Actual ends at {brief(actual)} rms, the reference at {brief(reference)}"
    if actual >= ENDS_APART * reference and _cells_apart(rows, columns, size) >= 2:
        return f"Actual reaches {brief(actual)} rms, the reference only {brief(reference)}"
    near = sum(
        count
        for column, row, count in zip(columns, rows, counts, strict=True)
        if abs(column - row) <= 1
    )
    if near >= NEAR * total:
        return f"Actual follows the reference: {rounded_percent(near / total)} near the diagonal"
    return f"Actual strays: only {rounded_percent(near / total)} near the diagonal"


def _middle(cell: int, size: int, edge: float) -> float:
    """Return the value in the middle of a cell; zero for the middle cell of an odd number."""
    return float(f"{math.sinh(edge * (2 * cell + 1 - size) / size):.2g}")


def _reach(cells: Sequence[int], size: int, edge: float) -> float:
    farthest = max(max(cell + 1, size - cell) for cell in cells)
    return float(f"{math.sinh(edge * (2 * farthest - size) / size):.2g}")


def _cells_apart(far: Sequence[int], near: Sequence[int], size: int) -> int:
    ends = [max(max(cell + 1, size - cell) for cell in cells) for cells in (far, near)]
    return ends[0] - ends[1]


def channels_finding(picture: ErrorPicture) -> str:
    channels = picture.get("channels") or []
    count = picture.get("channel_count") or len(channels)
    running = list(accumulate(channel["share"] for channel in channels))
    if not running or running[-1] <= 0:
        return f"No error in any of {count:,} channels"
    if count < 2:
        return "All error is in the only channel"
    if running[0] >= ALONE:
        return f"{rounded_percent(running[0])} of the error is in 1 of {count:,} channels"
    half = next((at for at, share in enumerate(running, 1) if share >= 0.5), None)
    if half is not None and half * CROWDED <= count:
        return f"Half of the error is in {half} of {count:,} channels"
    first = channels[0]["share"]
    return (
        f"No channel stands out: the worst of {count:,} holds {rounded_percent(first)} of the error"
    )


def magnitude_finding(picture: ErrorPicture) -> str:
    octaves = picture["octaves"]
    error, energy, low = octaves["error"], octaves["energy"], octaves["low"]
    if not any(error):
        return "No error at any magnitude"
    if not any(energy):
        return "The reference is zero: all error is at zero"
    running = [list(accumulate(row)) for row in (error, energy)]
    gaps = [e - r for e, r in zip(*running, strict=True)]
    small, large = max(gaps), min(gaps)
    if max(small, -large) < APART:
        return "Error spreads over magnitudes as the energy does"
    if small >= -large:
        at = gaps.index(small)
        error_share, energy_share = running[0][at], running[1][at]
        where, side = _threshold(low + at + 1), "below"
    else:
        at = gaps.index(large)
        error_share, energy_share = running[0][-1] - running[0][at], running[1][-1] - running[1][at]
        where, side = _threshold(low + at + 1), "above"
    size = "small" if side == "below" else "large"
    return (
        f"Error sits in {size} values: {rounded_percent(error_share)} of it {side} {where} rms, "
        f"where {rounded_percent(energy_share)} of the energy is"
    )


def _threshold(octave: int) -> str:
    value = 2.0**octave
    return brief(value) if -4 <= octave <= 13 else power(2, octave)
