"""Compare two engines that scored the same tokens, such as a trainer and a rollout engine.

  qgate engines A B                          per-token differences, KL, flips, and where they begin
  qgate engines A B --max-kl 1e-3 --same-weights --weights CKPT_A CKPT_B
  qgate engines A B --output-dir DIR         also as a page, with all tokens
  qgate engines A B --keep-reference FILE    also keep B's logits, in about 1 % of their bytes
  qgate engines --steps DIR                  all steps of a run: from which step on they drift apart
  qgate engines TRAINER PROBE                the weights that an engine holds after a sync

A and B are dumps of `qgate.collect` with the embedding and the head among their sites; .npz,
.safetensors or .pt files of token ids with logits or log-probabilities; or JSON lines of vLLM,
SGLang or servers with OpenAI's API. B is the engine that drew the tokens.
PROBE is a folder that qgate.probe wrote in an engine, and TRAINER one of a trainer, a checkpoint,
or a folder of several of them with the step in their names.
DIR holds a folder per step with its number in the name, such as step-12, and in it files or dumps
that are called trainer and rollout, such as trainer.npz.
Exit status: 0 if both were compared; 1 if a limit is exceeded, the engines drift apart, or weights
are stale; 2 if files cannot be read or hold other tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from qgate.cli._progress import progress
from qgate.cli._workers import add_limit
from qgate.engines.findings import EngineLimits
from qgate.errors import QgateError
from qgate.records.plain_data import json_text
from qgate.settings import add_options, typed_values
from qgate.storage.locations import location_of
from qgate.text.printing import print_json, print_line, print_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from qgate.storage.locations import Location


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("actual", metavar="A", nargs="?", help="the engine to judge")
    add("reference", metavar="B", nargs="?", help="the engine that drew the tokens")
    add("--steps", metavar="DIR", help="compare the engines at every step in this folder")
    add("--weights", nargs=2, metavar=("CKPT_A", "CKPT_B"),
        help="the checkpoints that they loaded, to compare their weights")  # fmt: skip
    add_options(parser, EngineLimits)
    add(
        "--logits",
        default="",
        metavar="MODULE",
        help="module of the dumps whose output are the logits",
    )
    add("--output-dir", metavar="DIR",
        help="write a page, engines.json and tokens.csv there; a folder or a URL")  # fmt: skip
    add("--keep-reference", metavar="FILE",
        help="write B's logits to this file, which can stand for B in later comparisons; ends in "
        ".safetensors")  # fmt: skip
    add("--json", action="store_true", help="print all figures as JSON")
    add_limit(parser, 10, "tokens, weights and steps")


def run(args: argparse.Namespace) -> int:
    from qgate.engines import files
    from qgate.engines.comparison import compare_tokens
    from qgate.engines.kept_logits import keep_logits
    from qgate.engines.profile import token_rows
    from qgate.engines.sync import is_sync
    from qgate.engines.texts import result_lines
    from qgate.storage.output import check_folder

    folder = None if args.output_dir is None else location_of(args.output_dir)
    if folder is not None:
        check_folder(folder)

    limits = EngineLimits(**typed_values(args, EngineLimits))
    if args.steps is not None:
        return _run_steps(args, folder, limits)
    if args.reference is None:
        raise QgateError("name two engines, as in qgate engines A B, or a folder by --steps DIR.")
    if is_sync(args.reference):
        return _run_sync(args, folder, limits)
    weights = None if args.weights is None else (args.weights[0], args.weights[1])
    with progress("samples") as report:
        comparison = compare_tokens(
            args.actual, args.reference, head=args.logits, weights=weights, limits=limits,
            progress=report, most_drawn=files.DRAWN if folder else 0,
        )  # fmt: skip
    record = comparison.record
    if args.keep_reference is not None:
        keep_logits(args.keep_reference, [reference for _, reference in comparison.samples])
    _print_record(args, record, lambda: result_lines(record, args.limit))
    if folder is not None:
        page = files.write_files(folder, record, token_rows(comparison.samples, comparison.values))
        _name_page(args, page)
    return int(bool(record.beyond))


def _print_record(
    args: argparse.Namespace, record: DataclassInstance, lines: Callable[[], Iterable[str]]
) -> None:
    """Print a record as JSON, or its lines."""
    if args.json:
        print_json(json_text(record), end="")
    else:
        print_text("\n".join(lines()))


def _name_page(args: argparse.Namespace, page: object) -> None:
    """Say where the page is, beside JSON on the error output."""
    print_line(f"page: {page}", file=sys.stderr if args.json else sys.stdout)


def _run_sync(args: argparse.Namespace, folder: Location | None, limits: EngineLimits) -> int:
    """Compare the weights that an engine holds with those of its trainer."""
    from qgate.engines import files
    from qgate.engines.sync import compare_sync
    from qgate.engines.sync_texts import result_lines

    _refuse(args, "a folder of qgate.probe is compared as a whole and", "--weights",
            "--keep-reference", "--logits")  # fmt: skip
    with progress("weights") as report:
        record = compare_sync(args.actual, args.reference, limits=limits, progress=report)
    _print_record(args, record, lambda: result_lines(record, args.limit))
    if folder is not None:
        _name_page(args, files.write_sync(folder, record))
    return int(record.failed)


def _refuse(args: argparse.Namespace, why: str, *options: str) -> None:
    """Refuse options that say nothing about what is compared."""
    values = {"A": args.actual, "--weights": args.weights, "--logits": args.logits}
    values |= {"--keep-reference": args.keep_reference, "--same-weights": args.same_weights}
    if chosen := [name for name in options if values[name]]:
        raise QgateError(f"{why} takes no {chosen[0]}: leave it out.")


def _run_steps(args: argparse.Namespace, folder: Location | None, limits: EngineLimits) -> int:
    """Compare two engines at every step of a run."""
    from qgate.engines import files
    from qgate.engines.series import compare_steps
    from qgate.engines.series_texts import result_lines

    _refuse(args, "--steps compares what is in its folder and", "A", "--weights",
            "--keep-reference", "--same-weights")  # fmt: skip
    with progress("steps") as report:
        series = compare_steps(args.steps, head=args.logits, limits=limits, progress=report)
    _print_record(args, series, lambda: result_lines(series, args.limit))
    if folder is not None:
        _name_page(args, files.write_series(folder, series))
    return int(series.failed)
