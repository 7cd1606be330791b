"""The comparison of a checkpoint for the screen: findings first, then totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tabulate import tabulate

from qgate.checkpoints.findings import OutlierWeight, find_outliers
from qgate.checkpoints.recipe_texts import bits_per_weight, recipe_file_lines
from qgate.checkpoints.record import CheckpointRecord, WeightRecord, worst_first
from qgate.text import counted, one_line
from qgate.text.wording import brief, decibels, megabytes, percent

SHOWN = 40
FORMAT_HEADINGS = ("format", "packing", "tensors", "parameters", "bits each", "size")


def result_lines(record: CheckpointRecord, limit: int = SHOWN) -> Iterator[str]:
    """Say what was found, what there is, and which weights have the most error."""
    yield from _findings(record, limit)
    yield from _recipe(record)
    yield from _formats(record)
    yield from _worst(record)
    yield from map(outlier_text, find_outliers(record)[:limit])
    if record.notes:
        yield ""
        yield from map(one_line, record.notes)
    yield from _written_recipe(record)


def headline(record: CheckpointRecord) -> tuple[str, str]:
    """Return the verdict in a few words, and the worst finding or what agrees."""
    if record.findings:
        first = record.findings[0]
        cause = f"{one_line(first.subject)}: {one_line(first.cause)}"
        return counted(len(record.findings), "finding"), cause
    quantized = sum(weight.outcome == "quantized" for weight in record.weights)
    beside = f" and its parent {one_line(record.parent)!r}" if record.parent else ""
    return (
        f"{one_line(record.child)} is as declared",
        f"{quantized} quantized and {len(record.weights) - quantized} other tensors agree with the "
        f"recipe{beside}",
    )


def first_line(record: CheckpointRecord) -> str:
    """Return the verdict in one line."""
    verdict, cause = headline(record)
    more = len(record.findings) - 1
    if more < 0:
        return f"{verdict}: {cause}"
    return f"{cause}; {counted(more, 'more finding')}" if more else cause


def _findings(record: CheckpointRecord, limit: int) -> Iterator[str]:
    yield first_line(record)
    for finding in record.findings[1:limit]:
        yield f"{one_line(finding.subject)}: {one_line(finding.cause)}"
    if len(record.findings) > limit:
        yield f"… and {len(record.findings) - limit} more; --json has all"


def outlier_text(outlier: OutlierWeight) -> str:
    """Say that a weight has more error than others of its format."""
    return f"{one_line(outlier.weight.name)} stands out: {distance_text(outlier)}"


def distance_text(outlier: OutlierWeight) -> str:
    """Say how far the error of a weight is above the usual one of its format."""
    return (
        f"its error is {decibels(outlier.error_db - outlier.usual_db)} above that of the median "
        f"weight in {outlier.weight.format}"
    )


def _recipe(record: CheckpointRecord) -> Iterator[str]:
    if record.method:
        yield ""
        yield f"recipe of {one_line(record.method)}"
        yield from (f"  {one_line(line)}" for line in record.recipe)


def _formats(record: CheckpointRecord) -> Iterator[str]:
    yield ""
    yield tabulate(format_rows(record), FORMAT_HEADINGS, tablefmt="simple")
    yield totals(record)


def totals(record: CheckpointRecord) -> str:
    """Write how many parameters there are, and the bits that each takes."""
    count = sum(weight.count for weight in record.weights)
    return f"{count:,} parameters, {bits_per_weight(record.weights):.2f} bits per parameter"


def format_rows(record: CheckpointRecord) -> list[list[str | int]]:
    """List each format with the share of parameters that have it."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    tensors: Counter[tuple[str, str]] = Counter()
    for weight in record.weights:
        key = weight.format, weight.packing
        counts[key] += weight.count
        sizes[key] += weight.size
        tensors[key] += 1
    total = sum(counts.values()) or 1
    return [
        [
            *key,
            tensors[key],
            percent(count / total),
            f"{8 * sizes[key] / count:.2f}" if count else "",
            megabytes(sizes[key]),
        ]
        for key, count in counts.most_common()
    ]


def _written_recipe(record: CheckpointRecord) -> Iterator[str]:
    """Write out what the checkpoint is, as a file that --recipe takes."""
    if record.written_recipe:
        yield ""
        yield "# What this checkpoint is; as a .yaml file, --recipe takes it"
        yield from recipe_file_lines(record.written_recipe)


def _worst(record: CheckpointRecord, count: int = 10) -> Iterator[str]:
    """List the quantized weights with the most error over an ideal quantizer."""
    measured = worst_first(record.weights)
    if not measured:
        return
    yield ""
    rows = [_row(over, weight) for weight, over in measured[:count]]
    headings = ["weight", "parent by", "over ideal", "relative error", "at the ends", "method"]
    if not any(row[-1] for row in rows):
        rows, headings = [row[:-1] for row in rows], headings[:-1]
    yield tabulate(rows, headings, tablefmt="simple")
    if len(measured) > count:
        yield f"{len(measured) - count} more quantized weights have less error over ideal"


def _row(over: float, weight: WeightRecord) -> list[str]:
    assert weight.figures is not None
    return [
        one_line(weight.name),
        weight.matched,
        decibels(over, 2),
        brief(weight.figures.error or 0.0),
        percent(weight.figures.at_ends_share),
        weight.method,
    ]
