"""Look at dumps of tensors, check, compare, merge and convert them.

  qgate dumps ls DIR --layer 3 --name 'grad_*'
  qgate dumps info DIR
  qgate dumps verify DIR                     a problem per line; exit status 1 if there is one
  qgate dumps compare A B --relative-mse 1e-4
  qgate dumps merge A B --output OUT         ranks of several folders into one
  qgate dumps export DIR --output FOLDER     flat .pt files as the known collector writes them
  qgate dumps watch DIR --expect 100 --timeout 600

DIR is what `qgate.collect` wrote, or a folder of the known collector as it is: a path, or a URL as
in s3://bucket/run. OUT and FOLDER may be URLs too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from qgate.cli._dump_selection import add_selection, wanted_of
from qgate.cli._numbers import from_one
from qgate.cli._progress import progress
from qgate.cli._workers import add_workers, workers_from
from qgate.errors import QgateError
from qgate.text import for_terminal, one_line

if TYPE_CHECKING:
    from qgate.dumps import Dump, Record


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("ls", help="the records, one per row")
    info = verbs.add_parser("info", help="totals, sizes, what is missing")
    verify = verbs.add_parser("verify", help="whether all tensors are what was written")
    compare = verbs.add_parser("compare", help="what differs first between two dumps, how much")
    merge = verbs.add_parser("merge", help="put ranks of several folders into one")
    export = verbs.add_parser("export", help="write .pt files as the known collector does")
    watch = verbs.add_parser("watch", help="follow a collection until its records are there")
    for verb in (listing, info, verify, export, watch):
        verb.add_argument("folder", metavar="DIR")
    for verb in (listing, compare, export):
        add_selection(verb)
    for verb in (listing, info, compare):
        verb.add_argument("--json", action="store_true", help="as JSON")
    listing.add_argument("--limit", type=from_one, default=50, metavar="N", help="rows (50)")
    compare.add_argument("actual", metavar="A")
    compare.add_argument("reference", metavar="B")
    compare.add_argument("--limit", type=from_one, default=20, metavar="N", help="rows (20)")
    compare.add_argument("--relative-mse", type=_limit, metavar="LIMIT", help="fail above it")
    compare.add_argument(
        "--allow-unpaired", action="store_true", help="pass if tensors are in one dump only"
    )
    merge.add_argument("folders", nargs="+", metavar="DIR")
    for verb in (verify, compare, merge):
        add_workers(verb)
    for verb in (merge, export):
        verb.add_argument("--output", required=True, metavar="FOLDER")
    watch.add_argument("--expect", type=from_one, required=True, metavar="N", help="records")
    watch.add_argument("--timeout", type=_limit, default=600.0, metavar="S", help="(default 600)")


def _limit(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


def run(args: argparse.Namespace) -> int:
    verbs = {
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
    """The records asked for, one by one; none at all is an error that says what there is."""
    from qgate.dumps import Seen, check_fields, is_wanted

    wanted = check_fields(wanted_of(args))
    seen, none = Seen(wanted), True
    for record in dump.records():
        seen.add(record)
        if is_wanted(record, wanted):
            none = False
            yield record
    seen.check()
    if wanted and none:
        asked = ", ".join(f"{name} {value}" for name, value in wanted_of(args).items())
        raise QgateError(f"no record of {str(dump.folder)!r} has all of {asked}.")


def _check_selection(dump: Dump, args: argparse.Namespace) -> None:
    deque(_selected(dump, args), maxlen=0)


def _say(text: str, **how: Any) -> None:
    """Names are of other people's files."""
    print(for_terminal(text), **how)


def _print_json(told: object) -> None:
    """JSON has no NaN and no infinities: they are texts."""
    from qgate.dumps.records import plain

    print(json.dumps(plain(told), indent=1, allow_nan=False))


def _print_long_json(told: Mapping[str, object]) -> None:
    """The same text part by part: of each iterator, one value after the other."""
    from qgate.dumps.records import plain

    encode = json.JSONEncoder(indent=1, allow_nan=False).encode

    def indented(value: object, depth: int) -> str:
        return encode(plain(value)).replace("\n", "\n" + depth * " ")

    end = "{"
    for name, value in told.items():
        print(f"{end}\n {encode(name)}: ", end="")
        end = ","
        if isinstance(value, Iterator):
            begin = "["
            for each in value:
                print(f"{begin}\n  {indented(each, 2)}", end="")
                begin = ","
            print("[]" if begin == "[" else "\n ]", end="")
        else:
            print(indented(value, 1), end="")
    print("\n}")


# ls, info, verify ------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from qgate.cli._dump_texts import note_lines, record_table
    from qgate.dumps import Dump

    dump = Dump.open(args.folder)
    found = _selected(dump, args)
    if args.json:
        _print_json([record.to_dict() for record in found])
        return 0
    shown = list(itertools.islice(found, args.limit))
    _say("\n".join(record_table(shown, sum(1 for _ in found))))
    _say("\n".join(note_lines(dump.notes())), end="\n" if dump.notes() else "")
    return 0


def _info(args: argparse.Namespace) -> int:
    from qgate.cli._dump_texts import total_lines
    from qgate.dumps import Dump, totals

    told = totals(Dump.open(args.folder))
    if args.json:
        _print_json(told)
    else:
        _say("\n".join(total_lines(told)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from qgate.cli._dump_texts import note_lines
    from qgate.dumps import Dump
    from qgate.dumps.worker_verifying import Proof

    proof = Proof(Dump.open(args.folder).folder, workers_from(args))
    found = 0
    with progress("records") as step:
        for problem in proof.problems(step):
            _say(one_line(problem), flush=True)
            found += 1
    if not proof.records and not found:
        raise QgateError(f"{str(args.folder)!r} has no records: nothing was verified.")
    if not found:
        proved = [f"{number} {what}" for what, number in proof.hashed.items() if number]
        values = f"{' and '.join(proved)} are what was written"
        if not proved:
            values = "their files can be read, and have no hashes to prove them by"
        _say(f"{proof.records} records in {args.folder}: {values}")
    notes = proof.notes()
    _say("\n".join(note_lines(notes)), end="\n" if notes else "")
    return 1 if found else 0


# compare ---------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> int:
    from qgate.cli._dump_texts import comparison_lines
    from qgate.comparing.dump_comparison import compare_dumps
    from qgate.comparing.pairing import rule_of
    from qgate.dumps import Dump
    from qgate.engine import Workers

    dumps = Dump.open(args.actual), Dump.open(args.reference)
    rule = rule_of(*(_selected(dump, args) for dump in dumps))
    workers = workers_from(args)
    elsewhere = None if workers == Workers() else workers
    found = compare_dumps(*dumps, rule=rule, workers=elsewhere, **wanted_of(args))
    reasons = found.reasons(args.relative_mse, unpaired=args.allow_unpaired)
    if args.json:
        _print_long_json(
            {
                "passed": not reasons,
                "reasons": reasons,
                "first": found.first and found.first.to_dict(),
                "pairs": (each.to_dict() for each in found.pairs),
                "only_actual": (record.to_dict() for record in found.only_actual),
                "only_reference": (record.to_dict() for record in found.only_reference),
                "notes": iter(found.notes),
            }
        )
        return 1 if reasons else 0
    if reasons:
        _say(f"failed: {one_line('; '.join(reasons))}")
    elif args.relative_mse is not None:
        _say(f"passed: every relative_mse is at most {args.relative_mse:g}")
    names = str(args.actual), str(args.reference)
    _say("\n".join(comparison_lines(found, names, args.limit)))
    return 1 if reasons else 0


# merge, export ---------------------------------------------------------------------------------


def _merge(args: argparse.Namespace) -> int:
    from qgate.cli._dump_texts import note_lines
    from qgate.dumps.worker_merging import merge_on

    with progress("ranks") as step:
        merged = merge_on(workers_from(args), args.folders, args.output, step)
    same = f", {merged.same} of them in several folders" if merged.same else ""
    _say(f"{args.output}: {merged.records} records of {merged.ranks} ranks{same}")
    notes = [f"missing: {text}" for text in merged.missing]
    if merged.missing_count > len(notes):
        notes.append(f"missing: {merged.missing_count - len(notes)} more")
    _say("\n".join(note_lines(notes)), end="\n" if notes else "")
    return 0


def _export(args: argparse.Namespace) -> int:
    from qgate.cli._dump_texts import note_lines
    from qgate.dumps import Dump, export_dump

    dump = Dump.open(args.folder)
    _check_selection(dump, args)
    done = export_dump(dump, args.output, _selected(dump, args))
    _say(f"{args.output}: {done.files} files")
    notes = [f"no values were kept of {title}" for title in done.without_values]
    _say("\n".join(note_lines(notes)), end="\n" if notes else "")
    if not done.files:
        _say("nothing was written: no record has values", file=sys.stderr)
    return 0 if done.files else 1


# watch -----------------------------------------------------------------------------------------


def _watch(args: argparse.Namespace) -> int:
    from qgate.cli._dump_texts import note_lines
    from qgate.dumps import Follower

    follower = Follower(args.folder)
    end = time.monotonic() + args.timeout
    came: dict[str, int] = {}
    while True:
        # More than was expected may come at once: it is counted no further.
        for record in itertools.islice(follower.poll(), args.expect - sum(came.values())):
            _say(f"{sum(came.values()) + 1}/{args.expect} {one_line(record.title)}", flush=True)
            kind = f"{record.layer_type} {record.operation}"
            came[kind] = came.get(kind, 0) + 1
        count = sum(came.values())
        if count >= args.expect or follower.ended or time.monotonic() >= end:
            break
        time.sleep(min(follower.pause_s, max(0.0, end - time.monotonic())))
    what = ", ".join(f"{number} {kind}" for kind, number in came.items()) or "nothing"
    if count >= args.expect:
        _say(f"{count} records are there: {what}")
        return 0
    why = "the collection has ended" if follower.ended else f"{args.timeout:g} s are over"
    _say(f"{why}: {count} of {args.expect} records came: {what}")
    notes = follower.unreadable
    _say("\n".join(note_lines(notes)), end="\n" if notes else "")
    return 1
