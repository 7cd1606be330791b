"""Dumps as people read them: records, totals and differences as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from qgate.text import one_line

if TYPE_CHECKING:
    from qgate.comparing.dump_differences import DumpComparison, PairErrors
    from qgate.dumps import Record

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
    from tabulate import tabulate

    rows = [[one_line(cell) for cell in _row(record)] for record in records]
    lines = tabulate(rows, headers=_HEADS, disable_numparse=True).splitlines()
    return [*lines, f"… and {more} more: --limit shows them"] if more else lines


def _row(record: Record) -> list[object]:
    def told(value: object) -> object:
        return "" if value is None else value

    kept = [word for word in ("tensor", "counts") if getattr(record, word) is not None]
    bad = sum(record.nonfinite.values())
    return [
        record.rank,
        record.order,
        told(record.iteration),
        record.layer_type,
        told(record.layer),
        f"{record.operation} {record.phase}",
        record.name,
        record.call,
        record.quant_type,
        "×".join(map(str, record.shape)),
        record.dtype,
        record.module,
        "+".join(kept or ["statistics"]) + (f", {bad} not finite" if bad else ""),
    ]


def total_lines(told: dict[str, Any]) -> list[str]:
    from tabulate import tabulate

    made = f"written by qgate {told['qgate']}, {told['created']}; " if told["created"] else ""
    lines = [
        f"{told['folder']}: {told['records']} records",
        f"  {made}{told['world_size']} ranks",
        f"  {told['with_values']} with values, {told['with_counts']} with counts, "
        f"{told['with_nonfinite']} with values that are not finite",
        f"  {size(told['bytes'])} of tensors; {size(told['stored_bytes'])} of values are stored",
    ]
    states: dict[str, list[int]] = {}
    for rank, state in told["states"].items():
        states.setdefault(state, []).append(rank)
    lines += [f"  {state}: ranks {_some(ranks)}" for state, ranks in states.items()]
    header = dict(told["header"])
    session = header.pop("session", None)
    header |= session if isinstance(session, dict) else {}
    lines += [f"  {name}: {one_line(value)[:100]}" for name, value in header.items()]
    rows = [
        [name if first else "", one_line(key), each["records"], size(each["bytes"])]
        for name, group in told["by"].items()
        for first, (key, each) in _marked(group.items())
    ]
    if rows:
        table = tabulate(rows, headers=["by", "", "records", "size"], disable_numparse=True)
        lines += ["", *table.splitlines()]
    return [*lines, *([""] if told["notes"] else []), *note_lines(told["notes"])]


def _marked(items: Iterable[Any]) -> Iterable[tuple[bool, Any]]:
    return ((not place, item) for place, item in enumerate(items))


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return f"{shown} and {len(numbers) - 16} more" if len(numbers) > 16 else shown


def note_lines(notes: Sequence[str], most: int = 20) -> list[str]:
    lines = [f"note: {one_line(note)}" for note in notes[:most]]
    return [*lines, f"note: and {len(notes) - most} more"] if len(notes) > most else lines


def comparison_lines(found: DumpComparison, names: tuple[str, str], most: int) -> list[str]:
    """What differs first, then the worst, then what had no counterpart."""
    from tabulate import tabulate

    kinds = [("equal", "equal"), ("differs", "differ"), ("unfit", "cannot be compared")]
    told = [f"{len(found.of_kind(kind))} {words}" for kind, words in kinds]  # type: ignore[arg-type]
    summaries = len(found.of_kind("summary"))
    told += [f"{summaries} without values"] if summaries else []
    lines = [f"{len(found.pairs)} pairs: {', '.join(told)}"]
    lines += _first_lines(found)
    worst = found.worst_first()
    if worst:
        rows = [_pair_row(each) for each in worst[:most]]
        heads = ["tensor", "relative mse", "correlation", "max abs", "", ""]
        lines += ["", *tabulate(rows, headers=heads, disable_numparse=True).splitlines()]
        lines += [f"… and {len(worst) - most} more: --limit shows them"] * (len(worst) > most)
    for name, alone in zip(names, (found.only_actual, found.only_reference), strict=True):
        if alone:
            lines += ["", f"{len(alone)} only in {name}:"]
            lines += [f"  {one_line(_titled(record))}" for record in alone[:most]]
            lines += [f"  … and {len(alone) - most} more"] * (len(alone) > most)
    return [*lines, *note_lines(found.notes)]


def _first_lines(found: DumpComparison) -> list[str]:
    first = found.first
    if first is None:
        return []
    lines = [f"first difference: {_difference(first)}"]
    earliest = found.different[0]
    if first.origin == "local" != earliest.origin:
        lines.append(f"  (before it in the order of execution: {_difference(earliest)})")
    return lines


def _difference(each: PairErrors) -> str:
    what = each.why or f"relative MSE {each.relative_mse:.3g}, max abs {each.max_abs:.3g}"
    origin = _ORIGINS.get(each.origin, "")
    return one_line(f"{_titled(each)}: {what}" + (f"; {origin}" if origin else ""))


def _titled(record: Record | PairErrors) -> str:
    return f"{record.title}, order {record.order}"


def _pair_row(each: PairErrors) -> list[str]:
    numbers = (f"{each.relative_mse:.3g}", _correlation(each.correlation), f"{each.max_abs:.3g}")
    bad = f"{each.nonfinite} not finite" if each.nonfinite else ""
    said = each.why or bad
    return [one_line(each.title), *numbers, each.origin, said]


def _correlation(value: float) -> str:
    """As far from 1 as it is."""
    return f"1 - {1 - value:.3g}" if 0.99 < value < 1 else f"{value:.6g}"
