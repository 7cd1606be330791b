"""Words for what is wrong with one weight, and weights whose error stands out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from qgate.checkpoints.recipes import DeclaredFormat, Recipe
from qgate.checkpoints.record import (
    CheckpointFinding,
    CheckpointRecord,
    WeightFigures,
    WeightRecord,
)
from qgate.text.wording import decibels

LIMIT_DB = 1.0
"""Error over the ideal quantizer's that conventions of right exporters stay under.

Scales of amax/7 against amax/7.5 of INT4 differ by 0.6 dB, the rules of MX by less than 0.9 dB.
"""
BETTER_DB = -3.0
"""Error so far below the ideal one that the weight was not quantized as it says."""
LEAST_DB = 0.3
"""Distance that right exporters' weights of one format stay under."""
SPREADS = 6.0
"""How many median distances from the median stand out."""
NOT_NEAREST = "codes are not the nearest"
UNEXPLAINED = re.compile(f"{NOT_NEAREST}|scales are off|scales are [^ ]+ times the ideal")
"""How causes begin that say where the error is, and not what was done wrong."""
EQUAL_CODES = "all codes are equal"
_FEWEST = 4


def scale_causes(figures: WeightFigures) -> Iterator[str]:
    """Name what is wrong with scales and values whatever the parent is."""
    if figures.zero_share == 1.0 and not figures.scales.not_finite:
        yield "all values are zero"
        return
    scales = figures.scales
    count = f"{scales.count:,} scale{'s' * (scales.count != 1)}"
    if scales.not_finite:
        yield f"{scales.not_finite:,} of {count} are NaN or infinite"
    if scales.negative:
        yield f"{scales.negative:,} of {count} are negative"
    if scales.zero:
        yield f"{scales.zero:,} of {count} are zero"
    if scales.all_equal and scales.count > 4 and not _is_octave(scales.largest or 0.0):
        value = scales.largest or 0.0
        yield f"all {count} are equal, {value:.4g}: they were not made from the weight"
    if figures.not_finite and not scales.not_finite:
        yield f"{figures.not_finite:,} of {figures.count:,} values are NaN or infinite"
    if figures.zero_blocks and figures.zero_share < 1:
        blocks = f"{figures.zero_blocks:,} block{'s' * (figures.zero_blocks != 1)}"
        yield f"{blocks} were never written: all their values are zero, and not the parent's"


def _is_octave(scale: float) -> bool:
    """Return True for a power of two, which scales in E8M0 often are all; 1 is nothing's scale."""
    return scale > 0 and math.frexp(scale)[0] == 0.5 and scale != 1.0


def error_cause(figures: WeightFigures, explained: str) -> str:
    """Say in words that a weight has more error than its format, and why; empty if it has not."""
    over = figures.over_ideal_db
    if over is None:
        return ""
    if over < BETTER_DB:
        return (
            f"{decibels(-over)} less error than the format can have: it was not made from this "
            "parent by this format"
        )
    if not over > LIMIT_DB:
        return ""
    size = f"{decibels(over)} worse than ideal"
    if explained:
        return f"{explained}: {size}"
    if figures.over_codes_db is not None and figures.over_codes_db > LIMIT_DB:
        return f"{NOT_NEAREST} to the parent at the stored scales: {size}"
    ratio = figures.scales.log2_ratio
    if ratio is not None and abs(ratio) > 0.05:
        return f"scales are {2**ratio:.3g} times the ideal ones at the median: {size}"
    row = f", row {figures.worst_row[0]} most" if figures.worst_row else ""
    return f"scales are off{row}: {size}"


def makes_unlike(figures: WeightFigures, causes: Sequence[str]) -> bool:
    """Return True if a weight is unlike its parent for a fault that is known."""
    scales = figures.scales
    is_lost = figures.zero_share == 1.0 or scales.zero + scales.negative > scales.count / 2
    is_lost = is_lost or any(EQUAL_CODES in cause for cause in causes)
    is_undone = any(
        cause.endswith(" worse than ideal") and not UNEXPLAINED.match(cause) for cause in causes
    )
    return is_lost or is_undone or bool(figures.not_finite or scales.not_finite)


def declared_causes(
    recipe: Recipe, record: WeightRecord, stored: DeclaredFormat | None, columns: int = 0
) -> Iterator[CheckpointFinding]:
    """Compare how a weight is stored with what the recipe declares for its module.

    columns   those of the weight: a group that holds all of them is a row
    """
    module = record.name.removesuffix(".weight")
    if not recipe.method:
        return
    declared = recipe.format_of(module)
    if stored is not None and recipe.ignores(module):
        yield CheckpointFinding(record.name, f"it is {stored}, and the recipe ignores it")
    elif stored is not None and declared is not None and not same_format(stored, declared, columns):
        yield CheckpointFinding(record.name, f"it is {stored}, and the recipe declares {declared}")
    elif stored is not None and declared is None and _names_modules(recipe):
        yield CheckpointFinding(record.name, f"it is {stored}, and the recipe does not name it")


def _names_modules(recipe: Recipe) -> bool:
    """Tell if all targets of compressed-tensors are patterns of modules, and none is a class."""
    targets = [target for group in recipe.groups for target in group.targets]
    is_named = bool(targets) and all(re.search(r"^re:|[.*]", target) for target in targets)
    return recipe.method == "compressed-tensors" and is_named


def same_format(stored: DeclaredFormat, declared: DeclaredFormat, columns: int = 0) -> bool:
    """Compare formats; signed integers with zero points and unsigned ones are one format."""
    if declared.tile[0] == 1 and declared.tile[1] == columns:
        declared = replace(declared, tile=(declared.tile[0], None))
    return (
        stored.element.removeprefix("u") == declared.element.removeprefix("u")
        and stored.tile == declared.tile
        and (stored.has_zero_points or not declared.has_zero_points)
    )


# Weights that stand out ---------------------------------------------------------------------------


class OutlierWeight(NamedTuple):
    """A weight, its relative error in dB, that of its format's median weight, and the limit.

    limit_db  how far above the usual error one does not stand out
    """

    weight: WeightRecord
    error_db: float
    usual_db: float
    limit_db: float


def find_outliers(record: CheckpointRecord) -> list[OutlierWeight]:
    """Return weights with much more error than others of one format and method, the worst first.

    Those that have a finding are left out.
    """
    subjects = {finding.subject for finding in record.findings}
    alike: dict[tuple[str, str], list[tuple[WeightRecord, float]]] = {}
    for weight in record.weights:
        error = None if weight.figures is None else weight.figures.error
        if error is not None and error > 0:
            entry = weight, 10 * math.log10(error)
            alike.setdefault((weight.format, weight.method), []).append(entry)
    outliers = []
    for entries in alike.values():
        if len(entries) < _FEWEST:
            continue
        usual = median(error for _, error in entries)
        spread = median(abs(error - usual) for _, error in entries)
        limit = max(LEAST_DB, SPREADS * spread)
        outliers += [
            OutlierWeight(weight, error, usual, limit)
            for weight, error in entries
            if error > usual + limit and weight.name not in subjects
        ]
    return sorted(outliers, key=lambda outlier: outlier.usual_db - outlier.error_db)
