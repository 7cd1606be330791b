"""Look at stored baselines, check them, remove and accept errors.

  qgate baselines list
  qgate baselines verify                       a problem per line; exit status 1 if there is one
  qgate baselines prune --mode '5-*' --model tiny-mamba
  qgate baselines prune --results qgate-out/results.jsonl      what a complete run did not measure
  qgate baselines accept                       what failing gates left in qgate-out/candidates
  qgate baselines accept ci-artifact.zip --mode 2-1
  qgate baselines unlock --baselines s3://bucket/baselines --model tiny-mamba

References are recorded by `pytest suites --update-baselines` only. What prune and accept change is
listed, old -> new, and --dry-run only lists it: look at it, then commit it. Baselines in a bucket
are locked by an object while they are updated; unlock removes that of a process that was killed.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.errors import QgateError, unknown
from qgate.storage.places import place_of

if TYPE_CHECKING:
    from qgate.baselines import Candidate, Store, Update

_RECORD = "`pytest suites --update-baselines` records one."


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", help="models and modes, and what they were made with")
    verify = verbs.add_parser("verify", help="whether the files are what was recorded")
    prune = verbs.add_parser("prune", help="remove accepted errors")
    accept = verbs.add_parser("accept", help="make candidates the accepted errors")
    accept.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("qgate-out"),
        metavar="PATH",
        help="candidates, the folder or results.jsonl beside them, or a zip file of that folder "
        "(default qgate-out)",
    )
    unlock = verbs.add_parser("unlock", help="remove the lock of an update that was killed")
    for verb in (listing, verify, prune, accept, unlock):
        verb.add_argument(
            "--baselines", default="baselines", metavar="DIR", help="a folder or a URL"
        )
        verb.add_argument("--model", action="append", metavar="NAME", help="only this; repeatable")
    prune.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="remove what the modes of this complete run accepted once and did not measure",
    )
    for verb in (prune, accept):
        verb.add_argument("--mode", action="append", metavar="MODES", help="only these; patterns")
        verb.add_argument("--dry-run", action="store_true", help="say what would change")


def run(args: argparse.Namespace) -> int:
    verbs = {"list": _list, "verify": _verify, "prune": _prune, "accept": _accept}
    verbs["unlock"] = _unlock
    args.baselines = place_of(args.baselines)
    return verbs[args.verb](args)


def _stores(args: argparse.Namespace) -> list[Store]:
    """The baselines there are, or those asked for."""
    from qgate.baselines import Store, stored_models

    there = stored_models(args.baselines)
    if not there:
        raise QgateError(f"there is no baseline in {str(args.baselines)!r}: {_RECORD}")
    for name in args.model or []:
        if name not in there:
            raise unknown(f"model with a baseline in {str(args.baselines)!r}", name, there)
    return [Store(args.baselines, name) for name in there if not args.model or name in args.model]


def _parts(patterns: Sequence[str] | None) -> list[str]:
    return [part.strip() for each in patterns or [] for part in each.split(",")]


def _asked(mode: str, patterns: Sequence[str] | None) -> bool:
    return any(fnmatch.fnmatchcase(mode.lower(), part.lower()) for part in _parts(patterns))


# list ------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    print("\n\n".join(_described(store) for store in _stores(args)))
    return 0


def _described(store: Store) -> str:
    from tabulate import tabulate

    from qgate.baselines import accepted_file

    manifest = store.manifest()
    if manifest is None:
        raise QgateError(f"there is no baseline in {str(store.folder)!r}: {_RECORD}")
    of = manifest.origin
    tensors = sum(len(found) for found in manifest.references.values())
    stats = store.files.stats()
    size = sum(of.size for name, of in stats.items() if name.startswith("reference-"))
    written = stats["manifest.json"].modified
    rows = []
    for mode, accepted in store.accepted_of(store.modes()).items():
        stale = "; ".join(accepted.stale(of))
        bytes_ = _size(stats[accepted_file(mode)].size)
        rows.append([mode, len(accepted.values), accepted.device, bytes_, stale and "stale"])
    lines = [
        f"{of.model}  ({store.folder})",
        "  numbers of a dump"
        if of.is_collected
        else f"  weights {of.weights[:12]}, inputs {of.inputs[:12]}: {of.samples} samples of "
        f"{of.seqlen} tokens, seed {of.seed}",
        f"  recorded on {of.device} with torch {of.torch}, commit {(of.commit or 'unknown')[:12]}; "
        f"file of {f'{written:%Y-%m-%d %H:%M}' if written else 'unknown age'}",
    ]
    if manifest.references:
        bases = ", ".join(sorted(manifest.references))
        lines.append(f"  references: {bases}; {tensors} tensors, {_size(size)}")
    heads = ["mode", "entries", "device", "size", ""]
    table = tabulate(rows, headers=heads, disable_numparse=True) if rows else "no accepted errors"
    return "\n".join([*lines, "", *(f"  {line}" for line in table.splitlines())])


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


# verify ----------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    from qgate.baselines import Store, safe_name, stored_models, verify
    from qgate.baselines.places import folders as folders_in

    root = args.baselines
    folders = [path for path in folders_in(root) if not path.name.startswith(".")]
    if args.model:
        named = {safe_name(name): name for name in args.model}
        there = [path.name for path in folders]
        for file_name, name in named.items():
            if file_name not in there:
                raise unknown(f"model in {str(root)!r}", name, there)
        folders = [path for path in folders if path.name in named]
    if not folders:
        raise QgateError(f"there is no baseline in {str(root)!r}: {_RECORD}")
    problems: list[str] = []
    for folder in folders:
        try:
            names = {safe_name(name): name for name in stored_models(root)}
        except QgateError:
            names = {}
        name = names.get(folder.name, folder.name)
        if safe_name(name) == folder.name:
            problems += verify(Store(root, name))
        else:
            problems.append(f"{folder}: it has no manifest that can be read")
    print("\n".join(problems) or f"{len(folders)} baselines in {root} are as they were recorded")
    return 1 if problems else 0


# prune -----------------------------------------------------------------------------------------


def _prune(args: argparse.Namespace) -> int:
    from qgate.baselines import Update

    if not args.dry_run:
        _tidy(args)
    if args.results is not None:
        return _prune_unused(args)
    if not (args.mode or args.model):
        raise QgateError(
            "say what goes: --mode PATTERNS, --model NAME, or --results FILE of a complete run "
            "of `pytest suites`. --dry-run only lists it."
        )
    found: list[tuple[Store, Update]] = []
    held: set[str] = set()
    for store in _stores(args):
        origin = store.origin()
        if origin is None:
            raise QgateError(f"there is no baseline in {str(store.folder)!r}: {_RECORD}")
        update = Update(origin)
        for mode, accepted in store.accepted_of(store.modes()).items():
            held.add(mode)
            named = _asked(mode, args.mode) if args.mode else True
            for key in accepted.values if named else ():
                update.drop(mode, key)
        if update.modes():
            found.append((store, update))
    idle = [part for part in _parts(args.mode) if not any(_asked(mode, [part]) for mode in held)]
    if idle:
        raise QgateError(
            f"--mode {idle[0]!r} is none of the modes with accepted errors: "
            f"{', '.join(sorted(held)) or 'there are none'}. Nothing was removed."
        )
    for store, update in found:
        for mode in update.modes():
            what = "would go" if args.dry_run else "removed"
            count = len(update.drops[mode])
            print(f"{store.model}: mode {mode}: {count} accepted errors {what}")
        if not args.dry_run:
            store.commit(update)
    return 0


def _tidy(args: argparse.Namespace) -> None:
    """Remove what updates that were cut off have left."""
    for store in _stores(args):
        for name in store.tidy():
            print(f"{store.model}: {name}: the rest of an update that was cut off removed")


def _prune_unused(args: argparse.Namespace) -> int:
    from qgate.baselines import Update, unused
    from qgate.results import measured_places, read

    header, records = read(args.results)
    if not header.get("complete"):
        raise QgateError(
            f"{str(args.results)!r} is of a run that left something out (-k, --layers, a node, an "
            "error): what it did not measure may be used. Run `pytest suites` whole."
        )
    measured = measured_places(records)
    if records.torn:
        raise QgateError(f"{records.torn} Run `pytest suites` again, whole.")
    removed = 0
    for store in _stores(args):
        origin = store.origin()
        titles = measured.get(store.model, {})
        wanted = {k: v for k, v in titles.items() if not args.mode or _asked(k, args.mode)}
        if origin is None or not wanted:
            continue
        update = Update(origin)
        for mode, keys in unused(store, wanted).items():
            for key in keys:
                update.drop(mode, key)
        for change in (store.preview if args.dry_run else store.commit)(update):
            print(f"{store.model}: {change}")
            removed += 1
    verb = "would go" if args.dry_run else "removed"
    print(f"{removed} accepted errors {verb}" if removed else "nothing is unused")
    return 0


# unlock ----------------------------------------------------------------------------------------


def _unlock(args: argparse.Namespace) -> int:
    from qgate.baselines import Store

    if not args.model:
        raise QgateError("say whose lock goes: --model NAME.")
    for name in args.model:
        holder = Store(args.baselines, name).files.unlock()
        print(f"{name}: the lock of {holder} removed" if holder else f"{name}: nobody has a lock")
    return 0


# accept ----------------------------------------------------------------------------------------


def _accept(args: argparse.Namespace) -> int:
    from qgate.baselines import Store, read_candidates

    folder = _candidate_folder(args.folder)
    candidates = [
        each
        for each in read_candidates(folder)
        if (not args.mode or _asked(each.mode, args.mode))
        and (not args.model or each.origin.model in args.model)
    ]
    if not candidates:
        asked = " of the modes and models asked for" if args.mode or args.model else ""
        raise QgateError(f"there are no candidates{asked} in {str(folder)!r}.")
    by_model: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_model.setdefault(candidate.origin.model, []).append(candidate)
    refused: list[str] = []
    changed = 0
    for model, found in by_model.items():
        count, said = _accepted(Store(args.baselines, model), found, args.dry_run)
        changed += count
        refused += [f"{model}: {sentence}" for sentence in said]
    for sentence in refused:
        print(f"refused: {sentence}", file=sys.stderr)
    verb = "would change" if args.dry_run else "changed"
    print(f"{changed} entries {verb}, {len(refused)} of {len(candidates)} candidates refused")
    return 1 if refused else 0


def _candidate_folder(path: Path) -> Path:
    """The candidates meant by their folder, by the one above it, or by the results in that."""
    if path.suffix == ".zip":
        return path
    if path.is_file():
        path = path.parent
    inside = path / "candidates"
    return inside if inside.is_dir() or path == Path("qgate-out") else path


def _accepted(store: Store, candidates: list[Candidate], dry: bool) -> tuple[int, list[str]]:
    """How many entries change, and what is refused."""
    from qgate.baselines import update_of

    recorded = store.origin()
    if recorded is None and candidates[0].origin.is_collected:
        recorded = candidates[0].origin
    if recorded is None:
        why = f"there is no baseline in {str(store.folder)!r} to accept errors against: {_RECORD}"
        return 0, [f"{each.source} (mode {each.mode}): {why}" for each in candidates]
    update, refused = update_of(recorded, candidates)
    for commit in dict.fromkeys(each.origin.commit for each in candidates):
        print(f"{store.model}: measured at commit {(commit or 'unknown')[:12]}")
    lines = [str(change) for change in (store.preview if dry else store.commit)(update)]
    for line in lines:
        print(f"{store.model}: {line}")
    same = Counter(each.mode for each in candidates)
    if not lines and not refused:
        print(f"{store.model}: {', '.join(sorted(same))}: all of it is accepted already")
    return len(lines), refused
