"""Write records, totals and differences of dumps as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qgate.cli._console import table_text
from qgate.text import listed, one_line

if TYPE_CHECKING:
    from qgate.comparing.dump_differences import DumpComparison, PairErrors
    from qgate.dumps import Record
    from qgate.dumps.record import DumpTotals

_HEADS = (
    "rank", "order", "iter", "layer type", "L", "operation", "name", "call", "quant", "shape",
    "dtype", "module", "kept",
)  # fmt: skip
_ORIGINS = {
    "local": "local: what went in is equal",
    "carried": "carried: what went in differs too",
    "enters": "it comes in from outside of what was collected",
    "unknown": "what went in was not collected",
}


def size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def record_table(records: Sequence[Record], more: int) -> list[str]:
    rows = [[one_line(cell) for cell in _row(record)] for record in records]
    lines = table_text(rows, _HEADS).splitlines()
    return [*lines, f"… and {more} more: --limit shows them"] if more else lines


def _row(record: Record) -> list[object]:
    stored = [word for word in ("tensor", "counts") if getattr(record, word) is not None]
    bad = sum(record.nonfinite.values())
    return [
        record.rank,
        record.order,
        "" if record.iteration is None else record.iteration,
        record.layer_type,
        "" if record.layer is None else record.layer,
        f"{record.operation} {record.phase}",
        record.name,
        record.call,
        record.quant_type,
        "×".join(map(str, record.shape)),
        record.dtype,
        record.module,
        "+".join(stored or ["statistics"]) + (f", {bad} not finite" if bad else ""),
    ]


def total_lines(totals: DumpTotals) -> list[str]:
    created = totals["created"]
    writer = f"written by qgate {totals['qgate']}, {created}; " if created else ""
    stored = size(totals["stored_bytes"])
    lines = [
        f"{totals['folder']}: {totals['records']} records",
        f"  {writer}{totals['world_size']} ranks",
        f"  {totals['with_values']} with values, {totals['with_counts']} with counts, "
        f"{totals['with_nonfinite']} with values that are not finite",
        f"  {size(totals['bytes'])} of tensors; {stored} of values are stored",
    ]
    states: dict[str, list[int | str]] = {}
    for rank, state in totals["states"].items():
        states.setdefault(state, []).append(rank)
    lines += [
        f"  {state}: ranks {listed([*map(str, ranks)], 16)}" for state, ranks in states.items()
    ]
    header = dict(totals["header"])
    session = header.pop("session", None)
    header |= session if isinstance(session, dict) else {}
    lines += [f"  {name}: {one_line(value)[:100]}" for name, value in header.items()]
    rows = [
        ["" if row else name, one_line(key), sums["records"], size(sums["bytes"])]
        for name, group in totals["by"].items()
        for row, (key, sums) in enumerate(group.items())
    ]
    if rows:
        lines += ["", *table_text(rows, ["by", "", "records", "size"]).splitlines()]
    return [*lines, *([""] if totals["notes"] else []), *note_lines(totals["notes"])]


def note_lines(notes: Sequence[str]) -> list[str]:
    most = 20
    lines = [f"note: {one_line(note)}" for note in notes[:most]]
    return [*lines, f"note: and {len(notes) - most} more"] if len(notes) > most else lines


def comparison_lines(
    comparison: DumpComparison, names: tuple[str, str], most: int, fault: str = ""
) -> list[str]:
    """Write the first difference, then the worst ones, then records without a counterpart.

    fault  what is wrong with the first one that differs, in words
    """
    kinds = [("equal", "equal"), ("differs", "differ"), ("unfit", "cannot be compared")]
    counts = [f"{len(comparison.of_kind(kind))} {words}" for kind, words in kinds]  # type: ignore[arg-type]
    summaries = len(comparison.of_kind("summary"))
    counts += [f"{summaries} without values"] if summaries else []
    lines = [f"{len(comparison.pairs)} pairs: {', '.join(counts)}"]
    lines += _first_lines(comparison, fault)
    worst = comparison.worst_first()
    if worst:
        rows = [_pair_row(pair) for pair in worst[:most]]
        heads = ["tensor", "relative mse", "correlation", "max abs", "", ""]
        lines += ["", *table_text(rows, heads).splitlines()]
        lines += [f"… and {len(worst) - most} more: --limit shows them"] * (len(worst) > most)
    sides = comparison.only_actual, comparison.only_reference
    for name, unpaired in zip(names, sides, strict=True):
        if unpaired:
            lines += ["", f"{len(unpaired)} only in {name}:"]
            lines += [f"  {one_line(_titled(record))}" for record in unpaired[:most]]
            lines += [f"  … and {len(unpaired) - most} more"] * (len(unpaired) > most)
    return [*lines, *note_lines(comparison.notes)]


def _first_lines(comparison: DumpComparison, fault: str) -> list[str]:
    first = comparison.first
    if first is None:
        return []
    lines = [f"first difference: {_difference(first)}"]
    lines += [f"  it {one_line(fault)}"] if fault else []
    earliest = comparison.different[0]
    if first.origin == "local" != earliest.origin:
        lines.append(f"  (before it in the order of execution: {_difference(earliest)})")
    return lines


def _difference(pair: PairErrors) -> str:
    size_text = pair.why or f"relative MSE {pair.relative_mse:.3g}, max abs {pair.max_abs:.3g}"
    origin = _ORIGINS.get(pair.origin, "")
    return one_line(f"{_titled(pair)}: {size_text}" + (f"; {origin}" if origin else ""))


def _titled(record: Record | PairErrors) -> str:
    return f"{record.title}, order {record.order}"


def _pair_row(pair: PairErrors) -> list[str]:
    numbers = (f"{pair.relative_mse:.3g}", _correlation(pair.correlation), f"{pair.max_abs:.3g}")
    bad = f"{pair.nonfinite} not finite" if pair.nonfinite else ""
    return [one_line(pair.title), *numbers, pair.origin, pair.why or bad]


def _correlation(value: float) -> str:
    """Write a correlation near 1 as its distance from 1."""
    return f"1 - {1 - value:.3g}" if 0.99 < value < 1 else f"{value:.6g}"
