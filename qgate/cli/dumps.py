"""Draw, list, check, compare, merge and convert dumps of tensors.

  qgate dumps draw DIR --output-dir draw     overflow, distributions, formats: pictures on a page
  qgate dumps ls DIR --where 'layer=3,name=grad_*'
  qgate dumps info DIR
  qgate dumps verify DIR                     a problem per line; exit status 1 if there is one
  qgate dumps compare A B --relative-mse 1e-4
  qgate dumps merge A B --output OUT         ranks of several folders into one
  qgate dumps export DIR --output FOLDER     flat .pt files as megatron-tensor-saver writes them
  qgate dumps watch DIR --expect 100 --timeout 600

DIR is a dump that `qgate collect` wrote, or a folder of megatron-tensor-saver, as a path or URL
(s3://bucket/run). OUT and FOLDER may be URLs, too. `qgate help dumps VERB` says more of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qgate.cli import _draw
from qgate.cli._console import add_json, print_json, table_text
from qgate.cli._dump_selection import add_selection, selected_fields
from qgate.cli._progress import progress
from qgate.cli._verbs import add_verbs
from qgate.cli._workers import add_limit, add_workers, from_one, from_zero, workers_from
from qgate.errors import QgateError
from qgate.text import listed, one_line
from qgate.text.printing import print_line, print_text

if TYPE_CHECKING:
    from qgate.comparing.dump_differences import DumpComparison, PairErrors
    from qgate.dumps import Dump, Record
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


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = add_verbs(parser, {"draw": _draw})
    listing = verbs.add_parser("ls", help="list the tensors, one per row")
    info = verbs.add_parser("info", help="show totals, sizes and what is missing")
    verify = verbs.add_parser("verify", help="check that all tensors are as they were written")
    compare = verbs.add_parser(
        "compare", help="find the first and the worst difference between two dumps"
    )
    merge = verbs.add_parser("merge", help="merge the ranks of several folders into one dump")
    export = verbs.add_parser(
        "export", help="write .pt files in the layout of megatron-tensor-saver"
    )
    watch = verbs.add_parser(
        "watch", help="wait until a running collection has written its tensors"
    )
    for verb in (listing, info, verify, export, watch):
        verb.add_argument("folder", metavar="DIR", help="the dump, by path or URL")
    for verb in (listing, compare, export):
        add_selection(verb)
    add_json(listing, info, verify, compare, merge, export)
    add_limit(listing, 50, "rows")
    add_limit(compare, 20, "rows")
    compare.add_argument("actual", metavar="A", help="the dump to judge")
    compare.add_argument("reference", metavar="B", help="the dump to compare it with")
    compare.add_argument(
        "--relative-mse",
        type=from_zero,
        metavar="LIMIT",
        help="fail if the relative MSE of a tensor is above this",
    )
    compare.add_argument(
        "--allow-unpaired", action="store_true", help="pass if tensors are in one dump only"
    )
    merge.add_argument("folders", nargs="+", metavar="DIR", help="dumps, by path or URL")
    for verb in (verify, compare, merge):
        add_workers(verb)
    for verb in (merge, export):
        verb.add_argument(
            "--output", required=True, metavar="FOLDER", help="folder or URL to write"
        )
    watch.add_argument(
        "--expect", type=from_one, required=True, metavar="N", help="tensors to wait for"
    )
    watch.add_argument(
        "--timeout",
        type=from_zero,
        default=600.0,
        metavar="S",
        help="give up after this many seconds (default 600)",
    )


def run(args: argparse.Namespace) -> int:
    verbs = {
        "draw": _draw.run,
        "ls": _list,
        "info": _info,
        "verify": _verify,
        "compare": _compare,
        "merge": _merge,
        "export": _export,
        "watch": _watch,
    }
    return verbs[args.verb](args)


def _selected(dump: Dump, args: argparse.Namespace) -> Iterator[Record]:
    """Select records; a selection that none matches is an error that names what exists."""
    from qgate.dumps import RecordSelection

    selection = RecordSelection(selected_fields(args))
    yield from filter(selection.count, dump.records())
    selection.check(repr(str(dump.folder)))


def _say_notes(notes: list[str]) -> None:
    if notes:
        print_text("\n".join(note_lines(notes)))


# ls, info, verify ------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from qgate.dumps import Dump

    dump = Dump.open(args.folder)
    records = _selected(dump, args)
    if args.json:
        print_json([record.to_dict() for record in records])
        return 0
    first = list(itertools.islice(records, args.limit))
    print_text("\n".join(record_table(first, sum(1 for _ in records))))
    _say_notes(dump.notes())
    return 0


def _info(args: argparse.Namespace) -> int:
    from qgate.dumps import Dump, totals

    sums = totals(Dump.open(args.folder))
    if args.json:
        print_json(sums)
    else:
        print_text("\n".join(total_lines(sums)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from qgate.dumps import Dump
    from qgate.dumps.verifying import Verification

    verification = Verification(Dump.open(args.folder).folder, workers_from(args))
    problems: list[str] = []
    with progress("records") as step:
        for problem in verification.problems(step):
            if not args.json:
                print_line(problem, flush=True)
            problems.append(problem)
    if not verification.records and not problems:
        raise QgateError(f"{str(args.folder)!r} has no records: nothing was verified.")
    if args.json:
        print_json(
            {
                "passed": not problems,
                "problems": problems,
                "records": verification.records,
                "proved": verification.hashed,
                "notes": verification.notes(),
            }
        )
        return 1 if problems else 0
    if not problems:
        proved = [f"{number} {kind}" for kind, number in verification.hashed.items() if number]
        values = f"{' and '.join(proved)} are what was written"
        if not proved:
            values = "their files can be read, and have no hashes to prove them by"
        print_line(f"{verification.records} records in {args.folder}: {values}")
    _say_notes(verification.notes())
    return 1 if problems else 0


# compare ---------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> int:
    from qgate.comparing.dump_causes import fault_of_pair
    from qgate.comparing.dump_comparison import compare_dumps
    from qgate.comparing.pairing import rule_of
    from qgate.dumps import Dump
    from qgate.engine import Workers

    dumps = Dump.open(args.actual), Dump.open(args.reference)
    rule = rule_of(*(_selected(dump, args) for dump in dumps))
    workers = workers_from(args)
    comparison = compare_dumps(
        *dumps,
        rule=rule,
        workers=None if workers == Workers() else workers,
        **selected_fields(args),
    )
    reasons = comparison.reasons(args.relative_mse, unpaired=args.allow_unpaired)
    first = comparison.first
    fault = fault_of_pair(*dumps, first) if first is not None and first.kind == "differs" else ""
    if args.json:
        print_json(
            {
                "passed": not reasons,
                "reasons": reasons,
                "first": first and {**first.to_dict(), "fault": fault},
                "pairs": (pair.to_dict() for pair in comparison.pairs),
                "only_actual": (record.to_dict() for record in comparison.only_actual),
                "only_reference": (record.to_dict() for record in comparison.only_reference),
                "notes": iter(comparison.notes),
            }
        )
        return 1 if reasons else 0
    if reasons:
        print_line(f"failed: {'; '.join(reasons)}")
    elif args.relative_mse is not None:
        print_line(f"passed: every relative_mse is at most {args.relative_mse:g}")
    names = str(args.actual), str(args.reference)
    print_text("\n".join(comparison_lines(comparison, names, args.limit, fault)))
    return 1 if reasons else 0


# merge, export ---------------------------------------------------------------------------------


def _merge(args: argparse.Namespace) -> int:
    from qgate.dumps import merge_dumps

    with progress("ranks") as step:
        merged = merge_dumps(args.folders, args.output, workers_from(args), step)
    if args.json:
        print_json({"output": args.output, **dataclasses.asdict(merged)})
        return 0
    same = f", {merged.same} of them in several folders" if merged.same else ""
    print_line(f"{args.output}: {merged.records} records of {merged.ranks} ranks{same}")
    notes = [f"missing: {text}" for text in merged.missing]
    if merged.missing_count > len(notes):
        notes.append(f"missing: {merged.missing_count - len(notes)} more")
    _say_notes(notes)
    return 0


def _export(args: argparse.Namespace) -> int:
    from qgate.dumps import Dump, export_dump

    dump = Dump.open(args.folder)
    deque(_selected(dump, args), maxlen=0)  # refuses before anything is written
    done = export_dump(dump, args.output, _selected(dump, args))
    if args.json:
        print_json({"output": args.output, **dataclasses.asdict(done)})
        return 0 if done.files else 1
    print_line(f"{args.output}: {done.files} files")
    _say_notes([f"no values were kept of {title}" for title in done.without_values])
    if not done.files:
        print_line("nothing was written: no record has values", file=sys.stderr)
    return 0 if done.files else 1


# watch -----------------------------------------------------------------------------------------


def _watch(args: argparse.Namespace) -> int:
    from qgate.dumps import Follower

    follower = Follower(args.folder)
    end = time.monotonic() + args.timeout
    arrivals: Counter[str] = Counter()
    while True:
        # More records than expected may come at once; those are not counted.
        for record in itertools.islice(follower.poll(), args.expect - arrivals.total()):
            print_line(f"{arrivals.total() + 1}/{args.expect} {record.title}", flush=True)
            arrivals[f"{record.layer_type} {record.operation}"] += 1
        count = arrivals.total()
        if count >= args.expect or follower.ended or time.monotonic() >= end:
            break
        time.sleep(min(follower.pause_s, max(0.0, end - time.monotonic())))
    kinds = ", ".join(f"{number} {kind}" for kind, number in arrivals.items()) or "nothing"
    if count >= args.expect:
        print_line(f"{count} records are there: {kinds}")
        return 0
    reason = "the collection has ended" if follower.ended else f"{args.timeout:g} s are over"
    print_line(f"{reason}: {count} of {args.expect} records came: {kinds}")
    _say_notes(follower.unreadable)
    return 1


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
