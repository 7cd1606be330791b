"""Sweep the scale of a format over tensors from files, and say which scale to use.

  qgate sweep act.pt                                       E4M3, scales of tensor and blocks
  qgate sweep 'dumps/**/*.safetensors' --elem-format fp4_e2m1 --no-plots
  qgate sweep w.safetensors:layer.0 --granularity block --output-dir sweeps

Reads .pt (weights only), .safetensors, .npy and .npz, also by URL: s3://bucket/w.safetensors:NAME
reads that one tensor. Results go to draw/scaling_analysis/NAME/,
and draw/scaling_analysis/index.html shows them side by side.
After a kill the same command does only the files that were not finished.
Exit status: 0 if every tensor was swept and is free of NaN and Inf, 1 if one was not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate._version import __version__
from qgate.cli._numbers import from_one
from qgate.cli._sweep_work import Lost, SweepWork, SweptTensor, all_made_of, made_of
from qgate.cli._workers import add_workers, workers_from
from qgate.errors import QgateError
from qgate.storage.places import check_writable, local_folder, place_of
from qgate.text import for_terminal, one_line

if TYPE_CHECKING:
    from qgate.engine import Failure, Workers
    from qgate.storage.places import Place
    from qgate.sweeps.findings import SweptFormat
    from qgate.sweeps.requests import FilePart, Request

_WIDE, _THIN = "=" * 80, "-" * 60


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("tensors", nargs="+", metavar="FILE", help="files, FILE:NAME for one tensor, or patterns")
    add("--output-dir", metavar="DIR", help="results go to DIR/NAME; a folder or a URL")
    add(
        "--elem-format", action="append", metavar="F", help="fp8_e4m3 unless given; or several: F,F"
    )
    add("--granularity", choices=("tensor", "block"), help="only this sweep (default: both)")
    add("--num-levels", type=from_one, default=21, metavar="N", help="even steps (default 21)")
    add(
        "--max-scale-exp",
        type=float,
        metavar="X",
        help="first exponent; an offset with --granularity block",
    )
    add(
        "--min-scale-exp",
        type=float,
        metavar="Y",
        help="last exponent; an offset with --granularity block",
    )
    add(
        "--alignment",
        choices=("exact", "documented"),
        default="exact",
        help="ends at which nothing overflows or underflows, or those of the known tool",
    )
    add("--scale-bits", type=int, default=8, metavar="B", help="width of the scale, 2 to 8")
    add("--block", type=from_one, default=32, metavar="N", help="elements per block (default 32)")
    add("--axis", type=int, default=-1, help="axis that blocks run along (default -1)")
    add(
        "--cast",
        "--via",
        choices=("bf16", "fp16"),
        dest="via",
        help="round 32-bit tensors first, which is faster, and make integers floating point",
    )
    add("--no-plots", action="store_true", help="text and data only")
    add("--quiet", action="store_true", help="no analysis on the console; the logs have it")
    add_workers(parser)


@dataclass
class SweepOutcome:
    """What became of one file: lines for the console, and the tensors with a reason if bad."""

    spec: str
    lines: list[str] = field(default_factory=list)
    results: list[tuple[str, str | None]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    entries: list[SweptFormat] = field(default_factory=list)
    lost: bool = False


@dataclass
class SweepTarget:
    """Where results go, and how much is said on the way."""

    root: Place
    quiet: bool
    taken: list[Place] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    from qgate.dumps import expand
    from qgate.sweeps.compute import element_of, mx_of, sweepable
    from qgate.sweeps.page import OTHER_PAGE, PAGE, write_page

    asked = ",".join(args.elem_format or ["fp8_e4m3"]).split(",")
    only_blocks = args.granularity == "block"
    args.elem_format = [sweepable(name, block=only_blocks).name for name in asked]
    for name in args.elem_format:
        mx_of(name) if only_blocks else element_of(name)
    request = _request(args)
    workers = workers_from(args)
    specs = expand(args.tensors)
    work = SweepWork(request, not args.no_plots)
    root = place_of(args.output_dir or Path("draw") / "scaling_analysis")
    check_writable(root)
    target = SweepTarget(root, args.quiet, [root / PAGE, root / OTHER_PAGE])
    say = _Speaker()
    say(f"Processing {len(specs)} tensor file(s)...", _WIDE)
    results: list[tuple[str, str | None]] = []
    answers: list[str] = []
    entries: list[SweptFormat] = []
    with _progress(len(specs)) as step:
        for number, outcome in enumerate(_outcomes(specs, work, target, workers), 1):
            say("", f"[{number}/{len(specs)}] Processing: {one_line(outcome.spec)}", _THIN)
            say(*outcome.lines)
            results += outcome.results
            answers += outcome.answers
            entries += outcome.entries
            step()
    bad = [(name, reason) for name, reason in results if reason]
    say("", _WIDE, "FINAL SUMMARY", _WIDE, f"Total tensors: {len(results)}")
    say(f"Successful: {len(results) - len(bad)}", f"Failed: {len(bad)}", *answers)
    say(*(f"❌ {name}: {reason}" for name, reason in bad))
    try:
        say(f"Page: {write_page(root, entries, results, _asked(request))}")
    except OSError as error:
        say(f"❌ cannot write the page of the results: {error}")
        return 1
    if not bad:
        say("🎉 All tensors were swept successfully!")
    return 1 if bad else 0


def _asked(request: Request) -> str:
    """What was asked for, in the words of the options, as far as it changes the results."""
    told = [f"{request.levels} levels", f"{request.alignment} alignment"]
    told += [f"exponents to {request.max_exp:g}"] if request.max_exp is not None else []
    told += [f"exponents from {request.min_exp:g}"] if request.min_exp is not None else []
    told += [f"blocks of {request.block} along axis {request.axis}"]
    told += [f"scales of {request.scale_bits} bits"]
    told += [f"32-bit tensors and integers rounded to {request.via}"] if request.via else []
    return ", ".join(told)


def _request(args: argparse.Namespace) -> Request:
    from qgate.sweeps.requests import Request

    if not 2 <= args.scale_bits <= 8:
        raise QgateError(f"--scale-bits {args.scale_bits} is not allowed; it is from 2 to 8.")
    for end in ("max", "min"):
        value = getattr(args, f"{end}_scale_exp")
        if value is not None and not abs(value) <= 1000:
            raise QgateError(
                f"--{end}-scale-exp {value:g} is not allowed; it is from -1000 to 1000."
            )
    ends = args.max_scale_exp, args.min_scale_exp
    if None not in ends and ends[0] < ends[1]:
        raise QgateError(
            f"--max-scale-exp {ends[0]:g} is below --min-scale-exp {ends[1]:g}; a sweep runs from "
            "the larger exponent to the smaller one."
        )
    chosen = (args.granularity,) if args.granularity else ("tensor", "block")
    offsets: dict[str, Any] = {}
    if args.granularity == "block":
        for end in ("max", "min"):
            value = getattr(args, f"{end}_scale_exp")
            if value is not None and not float(value).is_integer():
                raise QgateError(f"--{end}-scale-exp {value:g}: a block offset is a whole number.")
            offsets[f"{end}_offset"] = value if value is None else int(value)
    return Request(
        formats=tuple(dict.fromkeys(args.elem_format)),
        levels=args.num_levels,
        max_exp=args.max_scale_exp,
        min_exp=args.min_scale_exp,
        granularity=chosen,
        alignment=args.alignment,
        scale_bits=args.scale_bits,
        block=args.block,
        axis=args.axis,
        via=args.via,
        **offsets,
    )


def _outcomes(
    specs: list[str], work: SweepWork, target: SweepTarget, workers: Workers
) -> Iterator[SweepOutcome]:
    """Files in their order, whoever sweeps them; those that an unfinished run did are taken over.

    The journal goes when every file has been swept, and stays where a process ended, so that the
    same command tries these files again.
    """
    from qgate.engine.journal import Journal

    asked = [__version__, work.plots, dataclasses.asdict(work.request), specs, str(target.root)]
    try:
        target.root.mkdir(parents=True, exist_ok=True)
        opened = Journal(local_folder(target.root), asked)
    except OSError as error:
        raise QgateError(
            f"results cannot be written to {str(target.root)!r}: {error.strerror or error}. Name "
            "another folder with --output-dir."
        ) from None
    with opened as journal:
        keys = {spec: _key(spec) for spec in specs}
        done = {spec for spec in specs if _is_done(journal, keys[spec])}
        made = _made([spec for spec in specs if spec not in done], work, workers)
        lost = False
        for spec in specs:
            if spec in done:
                yield _taken_over(spec, journal.result(keys[spec]), target)
                continue
            before = len(target.taken)
            outcome = _written(spec, next(made), target)
            if outcome.lost:
                lost = True
                yield outcome
                continue
            told = {name: getattr(outcome, name) for name in ("results", "answers", "entries")}
            folders = [str(folder) for folder in target.taken[before:]]
            journal.record(keys[spec], {**told, "folders": folders})
            yield outcome
        if not lost:
            journal.finish()


def _key(spec: str) -> str:
    from qgate.dumps.tensor_files import split_spec
    from qgate.storage.places import identity

    place, key = split_spec(spec)
    return f"{identity(place)} {key or ''}"


def _is_done(journal: Any, key: str) -> bool:
    """Whether a file was swept, passed, and its results are still there."""
    if key not in journal:
        return False
    known = journal.result(key)
    failed = any(reason for _, reason in known["results"]) or "entries" not in known
    return not failed and all(place_of(folder).is_dir() for folder in known["folders"])


def _taken_over(spec: str, known: Any, target: SweepTarget) -> SweepOutcome:
    target.taken += map(place_of, known["folders"])
    results = [(name, reason) for name, reason in known["results"]]
    lines = [f"✅ Swept before, and not again: {name}" for name, _ in results]
    return SweepOutcome(spec, lines, results, list(known["answers"]), list(known["entries"]))


def _made(
    specs: list[str], work: SweepWork, workers: Workers
) -> Iterator[Iterable[SweptTensor | Lost]]:
    """What was made of each file, and what of it was lost with a process."""
    from qgate.engine import outcomes
    from qgate.sweeps.requests import parts_of

    if workers.is_here:
        for spec in specs:
            yield made_of(spec, work)
        return
    asked: deque[list[FilePart]] = deque()

    def parts() -> Iterator[FilePart]:
        for spec in specs:
            asked.append(parts_of(spec))
            yield from asked[-1]

    found = outcomes(all_made_of, parts(), workers, shared=work)
    for _ in specs:
        first = next(found)
        yield _joined(asked.popleft(), itertools.chain([first], found))


def _joined(
    parts: list[FilePart], found: Iterator[list[SweptTensor] | Failure]
) -> Iterator[SweptTensor | Lost]:
    for part, made in zip(parts, found, strict=False):
        if isinstance(made, list):
            yield from made
        else:
            yield Lost(str(part), made.reason)


def _written(spec: str, made: Iterable[SweptTensor | Lost], target: SweepTarget) -> SweepOutcome:
    from qgate.sweeps.texts import answer

    outcome = SweepOutcome(spec)
    for each in made:
        if isinstance(each, Lost):
            outcome.lost = True
            outcome.lines.append(f"❌ Failed: {one_line(each.part)}: {each.reason}")
            outcome.results.append((each.part, each.reason))
            continue
        swept, reason = each.swept, each.swept.failed
        if swept.records:
            try:
                said, entries = _write(each, target)
                outcome.entries += entries
                outcome.lines += [] if target.quiet else said
                outcome.answers += [answer(swept.source, record) for record in swept.records]
            except OSError as error:
                reason = f"cannot write the results: {error}"
        reason = reason or each.undrawn or None
        mark, words = (
            ("❌", f"Failed: {one_line(swept.source)}: {reason}")
            if reason
            else ("✅", f"Successfully processed: {one_line(swept.source)}")
        )
        outcome.lines.append(f"{mark} {words}")
        outcome.results.append((swept.source, reason))
    return outcome


def _write(made: SweptTensor, target: SweepTarget) -> tuple[list[str], list[SweptFormat]]:
    """Files of one tensor; the lines for the console, which are those of the logs, and its rows."""
    from qgate.storage.writing import write_bytes, write_text
    from qgate.sweeps import files as sweep_files
    from qgate.sweeps import texts as sweep_text
    from qgate.sweeps.findings import entry_of
    from qgate.sweeps.folders import folder_for, safe_name
    from qgate.sweeps.record import file_stem

    swept = made.swept
    name = safe_name(swept.name)
    folder = folder_for(target.root, name, swept.source, target.taken)
    target.taken.append(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shown: list[str] = []
    entries: list[SweptFormat] = []
    by_log: dict[str, list[str]] = {}
    for record in swept.records:
        start = _stamp()
        paths = sweep_files.write(folder, record)
        names = sweep_files.picture_names(record) if made.pictures else []
        pictures = {each: made.pictures[each] for each in names if each in made.pictures}
        for picture, data in pictures.items():
            write_bytes(folder / picture, data)
            paths.append(folder / picture)
        entries.append(entry_of(record, folder.name, [path.name for path in paths], pictures))
        lines = sweep_text.lines(record)
        lines += ["Results saved to:", *(f"  {path}" for path in paths), ""]
        stamped = [f"{start} - {line}" for line in lines]
        by_log.setdefault(file_stem(record, f"scaling_test_{name}"), []).extend(stamped)
        shown += lines
    for stem, stamped in by_log.items():
        log = folder / f"{stem}.log"
        write_text(log, "\n".join([*stamped, f"{_stamp()} - end"]) + "\n")
        shown.append(f"Log: {log}")
    return shown, entries


def _stamp() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")


class _Speaker:
    """Prints lines, in ASCII where the terminal knows no more."""

    def __init__(self) -> None:
        from qgate.sweeps import texts as sweep_text

        self._calm = for_terminal
        self._plain = None if sweep_text.can_encode(sys.stdout) else sweep_text.plain

    def __call__(self, *lines: str) -> None:
        shown = list(lines) if self._plain is None else self._plain(list(lines))
        for line in shown:
            print(self._calm(line))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on a terminal; nothing in files and pipes."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="file", file=sys.stderr, leave=False) as bar:
        yield lambda: bar.update(1)
