"""List, check and prune stored baselines, and accept new errors.

  qgate baselines list
  qgate baselines verify                       a problem per line; exit status 1 if there is one
  qgate baselines prune --mode '5-*' --model tiny-mamba
  qgate baselines prune --results qgate-out/results.jsonl  remove what a complete run lacks
  qgate baselines accept                       accept the errors that failing gates measured
  qgate baselines accept ci-artifact.zip --mode 2-1
  qgate baselines accept ci-artifact.zip --commit    and commit them; the message lists what moved

Only `pytest suites --update-baselines` records references. prune and accept list what they change
as old -> new, and --dry-run only lists it: review the changes, then commit them.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._console import add_json, print_json, table_text
from qgate.cli._project import option_here, project_folder
from qgate.errors import QgateError, unknown
from qgate.loading import LateModule
from qgate.project.settings import baselines_folder
from qgate.results.kinds import limit_kind_of
from qgate.text import megabytes, one_line
from qgate.text.printing import print_line, print_text

if TYPE_CHECKING:
    from qgate import baselines, results
    from qgate.baselines import store as stores
    from qgate.page import accepted_changes
    from qgate.storage import git
else:
    baselines, results = (LateModule("qgate.baselines"), LateModule("qgate.results"))
    stores = LateModule("qgate.baselines.store")
    accepted_changes = LateModule("qgate.page.accepted_changes")
    baselines = LateModule("qgate.baselines")
    git = LateModule("qgate.storage.git")


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", help="list models and modes, and what they were made with")
    verify = verbs.add_parser("verify", help="check that files are as they were recorded")
    prune = verbs.add_parser("prune", help="remove accepted errors that are no longer needed")
    accept = verbs.add_parser("accept", help="accept the errors that failing gates measured")
    accept.add_argument("folder", nargs="?", type=Path, metavar="PATH",
        help="the output folder of a run, its results.jsonl or candidates, or a zip file of "
        "the folder (default qgate-out)")  # fmt: skip
    accept.add_argument("--accept-plan", action="store_true",
        help="accept changes of the plan, too: which quantizer each site has")  # fmt: skip
    accept.add_argument("--commit", action="store_true",
        help="commit the changed baselines alone, with a table of what moved")  # fmt: skip
    for verb in (listing, verify, prune, accept):
        add = verb.add_argument
        add("--baselines", metavar="DIR",
            help="their folder (default: that of qgate.toml, or baselines)")  # fmt: skip
        add("--model", action="append", metavar="NAME", help="only this model; repeatable")
    add_json(listing, verify, prune, accept)
    prune.add_argument("--results", type=Path, metavar="FILE", help="remove what the modes of this "
        "complete run accepted once and did not measure")  # fmt: skip
    for verb in (prune, accept):
        verb.add_argument(
            "--mode",
            action="append",
            metavar="MODES",
            help="only these modes: names or patterns, separated by commas; repeatable",
        )
        verb.add_argument(
            "--dry-run", action="store_true", help="list the changes, and write nothing"
        )


def run(args: argparse.Namespace) -> int:
    verbs = {
        "list": _list,
        "verify": _verify,
        "prune": _prune,
        "accept": accept_candidates,
    }
    if args.baselines is None:
        args.baselines = option_here("baselines") or project_folder("baselines")
    args.baselines = baselines_folder(args.baselines)
    args.changes, args.refused = [], []
    status = verbs[args.verb](args)
    if args.verb in ("prune", "accept") and args.json:
        print_json({"dry_run": args.dry_run, "changes": args.changes, "refused": args.refused})
    return status


def _stores(args: argparse.Namespace) -> list[baselines.Store]:
    """Return the baselines there are, or those asked for."""
    names = baselines.stored_models(args.baselines)
    if not names:
        raise QgateError(missing_text(args.baselines))
    for name in args.model or []:
        if name not in names:
            raise unknown(f"model with a baseline in {str(args.baselines)!r}", name, names)
    chosen = [name for name in names if not args.model or name in args.model]
    return [baselines.Store(args.baselines, name) for name in chosen]


def _list(args: argparse.Namespace) -> int:
    if args.json:
        print_json([_facts(store) for store in _stores(args)])
        return 0
    print_text("\n\n".join(_described(store) for store in _stores(args)))
    return 0


def _facts(store: baselines.Store) -> dict[str, object]:
    """Return what a baseline holds and was made with, for JSON."""
    manifest = store.manifest()
    if manifest is None:
        raise QgateError(missing_text(store.folder))
    modes: dict[str, dict[str, object]] = {}
    for accepted in _files_of(store):
        entry: dict[str, object] = {
            "entries": len(accepted.values), "device": accepted.device,
            "is_stale": any(accepted.stale(manifest.origin)),
        }  # fmt: skip
        modes[f"{accepted.mode}{accepted.where}"] = entry
    references = {basis: len(tensors) for basis, tensors in manifest.references.items()}
    origin = dataclasses.asdict(manifest.origin)
    return {"folder": store.folder, "origin": origin, "references": references, "modes": modes}


def _files_of(store: baselines.Store) -> Iterator[baselines.Accepted]:
    """Yield the accepted errors of all modes, the first ones of a mode and those beside them."""
    for of_mode in store.all_accepted().values():
        yield from of_mode.values()


def _described(store: baselines.Store) -> str:
    manifest = store.manifest()
    if manifest is None:
        raise QgateError(missing_text(store.folder))
    of, stats = manifest.origin, store.files.stats()
    rows = [
        [
            one_line(f"{accepted.mode}{accepted.where}"),
            len(accepted.values),
            accepted.device,
            megabytes(stats[accepted.file].size),
            "stale" if any(accepted.stale(of)) else "",
        ]
        for accepted in _files_of(store)
    ]
    heads = ["mode", "entries", "device", "size", ""]
    table = table_text(rows, heads) if rows else "no accepted errors"
    written = stats["manifest.json"].modified
    age = f"{written:%Y-%m-%d %H:%M}" if written else "unknown age"
    length = f" of {of.seqlen} tokens" if of.seqlen else ""
    source = (
        f"weights {of.weights[:12]}, inputs {of.inputs[:12]}: {of.samples} samples{length}, "
        f"seed {of.seed}"
    )
    lines = [
        one_line(f"{of.model}  ({store.folder})"),
        f"  {f'numbers of {of.noun}' if of.is_collected else source}",
        f"  recorded on {of.device} with torch {of.torch}, commit {(of.commit or 'unknown')[:12]}; "
        f"file of {age}",
    ]
    if manifest.references:
        bases = ", ".join(sorted(manifest.references))
        tensors = sum(map(len, manifest.references.values()))
        size = sum(stat.size for name, stat in stats.items() if name.startswith("reference-"))
        lines.append(f"  references: {bases}; {tensors} tensors, {megabytes(size)}")
    return "\n".join([*lines, "", *(f"  {line}" for line in table.splitlines())])


def _verify(args: argparse.Namespace) -> int:
    root = args.baselines
    folders = [path for path in stores.folders(root) if not path.name.startswith(".")]
    if args.model:
        asked = {baselines.safe_name(name): name for name in args.model}
        names = [path.name for path in folders]
        for file_name, name in asked.items():
            if file_name not in names:
                raise unknown(f"model in {str(root)!r}", name, names)
        folders = [path for path in folders if path.name in asked]
    if not folders:
        raise QgateError(missing_text(root))
    problems: list[str] = []
    for folder in folders:
        try:
            models = {baselines.safe_name(name): name for name in baselines.stored_models(root)}
        except QgateError:
            models = {}
        name = models.get(folder.name, folder.name)
        if baselines.safe_name(name) == folder.name:
            problems += baselines.verify(baselines.Store(root, name))
        else:
            problems.append(f"{folder}: it has no manifest that can be read")
    if args.json:
        print_json({"passed": not problems, "baselines": len(folders), "problems": problems})
        return 1 if problems else 0
    whole = f"{len(folders)} baselines in {root} are as they were recorded"
    for line in problems or [whole]:
        print_line(line)
    return 1 if problems else 0


# prune -----------------------------------------------------------------------------------------


def _prune(args: argparse.Namespace) -> int:
    # What updates that were cut off have left goes first.
    for store in _stores(args) if not args.dry_run else ():
        for name in store.tidy():
            say(args, f"{store.model}: {name}: the rest of an update that was cut off removed")
    if args.results is not None:
        return _prune_unused(args)
    if not (args.mode or args.model):
        raise QgateError(
            "say what goes: --mode PATTERNS, --model NAME, or --results FILE of a complete run "
            "of `pytest suites`. --dry-run only lists it."
        )
    updates: list[tuple[baselines.Store, baselines.Update]] = []
    held: set[str] = set()
    for store in _stores(args):
        origin = store.origin()
        if origin is None:
            raise QgateError(missing_text(store.folder))
        update = baselines.Update(origin)
        update.everywhere = True
        for mode, of_mode in store.all_accepted().items():
            held.add(mode)
            for accepted in of_mode.values() if is_asked(mode, args.mode) else ():
                for key in accepted.values:
                    update.drop(mode, key)
        if update.modes():
            updates.append((store, update))
    idle = [
        part
        for part in pattern_parts(args.mode)
        if not any(is_asked(mode, [part]) for mode in held)
    ]
    if idle:
        raise QgateError(
            f"--mode {idle[0]!r} is none of the modes with accepted errors: "
            f"{', '.join(sorted(held)) or 'there are none'}. Nothing was removed."
        )
    for store, update in updates:
        for mode in update.modes():
            verb, count = "would go" if args.dry_run else "removed", len(update.drops[mode])
            say(args, f"{store.model}: mode {mode}: {count} accepted errors {verb}")
        commit_changes(args, store, update)
    return 0


def _prune_unused(args: argparse.Namespace) -> int:
    header, records = results.read(args.results)
    if not header.get("complete"):
        raise QgateError(
            f"{str(args.results)!r} is of a run that left something out (-k, --layers, a node, an "
            "error): what it did not measure may be used. Run `pytest suites` whole."
        )
    measured = results.measured_sites(records)
    if records.torn:
        raise QgateError(f"{records.torn} Run `pytest suites` again, whole.")
    removed = 0
    for store in _stores(args):
        origin, titles = store.origin(), measured.get(store.model, {})
        chosen = {mode: keys for mode, keys in titles.items() if is_asked(mode, args.mode)}
        if origin is None or not chosen:
            continue
        update = baselines.Update(origin)
        update.everywhere = True
        for mode, keys in baselines.unused(store, chosen).items():
            for key in keys:
                update.drop(mode, key)
        removed += len(print_changes(args, store, update))
    verb = "would go" if args.dry_run else "removed"
    say(args, f"{removed} accepted errors {verb}" if removed else "nothing is unused")
    return 0


def say(args: argparse.Namespace, text: str) -> None:
    """Print a line, unless the changes are printed as JSON at the end."""
    if not args.json:
        print_line(text)


def missing_text(place: Path, then: str = "") -> str:
    recording = "`pytest suites --update-baselines` records one."
    return f"there is no baseline in {str(place)!r}{then}: {recording}"


def pattern_parts(patterns: Sequence[str] | None) -> list[str]:
    return [part.strip() for entry in patterns or [] for part in entry.split(",")]


def is_asked(mode: str, patterns: Sequence[str] | None) -> bool:
    """Tell if a mode is one of those asked for; without patterns all are."""
    parts = pattern_parts(patterns)
    matches = (fnmatch.fnmatchcase(mode.lower(), part.lower()) for part in parts)
    return any(matches) if parts else True


def commit_changes(
    args: argparse.Namespace, store: baselines.Store, update: baselines.Update
) -> list[baselines.StoredChange]:
    """Commit an update, or only look at it; return what changes."""
    changes = (store.preview if args.dry_run else store.commit)(update)
    args.changes += [{"model": store.model, **dataclasses.asdict(change)} for change in changes]
    return changes


def print_changes(
    args: argparse.Namespace, store: baselines.Store, update: baselines.Update
) -> list[baselines.StoredChange]:
    """Commit an update, or only look at it; print what changes and return it."""
    changes = commit_changes(args, store, update)
    for change in changes:
        say(args, f"{store.model}: {change}")
    for sentence in accepted_changes.kind_file_sentences(store, changes, args.dry_run):
        say(args, sentence)
    return changes


def accept_candidates(args: argparse.Namespace) -> int:
    """Make candidates the accepted errors, and commit them if asked for."""
    folder = _candidate_folder(project_folder("qgate-out") if args.folder is None else args.folder)
    by_model: dict[str, list[baselines.Candidate]] = {}
    for candidate in baselines.read_candidates(folder):
        model = candidate.origin.model
        if is_asked(candidate.mode, args.mode) and (not args.model or model in args.model):
            by_model.setdefault(model, []).append(candidate)
    if not by_model:
        asked = " of the modes and models asked for" if args.mode or args.model else ""
        raise QgateError(f"there are no candidates{asked} in {str(folder)!r}.")
    repository = _clean_repository(args.baselines) if args.commit else None
    changed, refused, moves = 0, [], []
    for model, candidates in by_model.items():
        store = baselines.Store(args.baselines, model)
        changes, reasons = _accepted(args, store, candidates)
        changed += len(changes)
        moves += accepted_changes.accepted_movements(model, changes)
        refused += [f"{model}: {reason}" for reason in reasons]
    args.refused = refused
    for sentence in accepted_changes.mode_sentences(moves):
        say(args, sentence)
    for sentence in refused:
        print_line(f"refused: {sentence}", file=sys.stderr)
    verb = "would change" if args.dry_run else "changed"
    total = sum(map(len, by_model.values()))
    say(args, f"{changed} entries {verb}, {len(refused)} of {total} candidates refused")
    if repository is not None and moves:
        commits = [entry.origin.commit for of_model in by_model.values() for entry in of_model]
        subject, body = accepted_changes.commit_message(moves, commits)
        if args.dry_run:
            say(args, f"would commit: {subject}")
            if not args.json:
                print_text(f"\n{body}", end="")
        else:
            commit = repository.commit(subject, body)
            say(args, f"committed {commit[:12]}: {subject}")
    return 1 if refused else 0


def _clean_repository(folder: Path) -> git.GitRepository:
    """Return the repository of baselines, in which nothing of theirs waits for a commit."""
    repository = git.GitRepository.around(folder)
    if not repository.is_clean():
        raise QgateError(
            f"{str(folder)!r} has changes that are not committed, which the commit would have "
            "too: commit or restore them first."
        )
    return repository


def _candidate_folder(path: Path) -> Path:
    """Return the folder meant by itself, by the one above it, or by the results in that."""
    if path.suffix == ".zip":
        return path
    path = path.parent if path.is_file() else path
    inside = path / "candidates"
    return inside if inside.is_dir() or path.name == "qgate-out" else path


def _accepted(
    args: argparse.Namespace, store: baselines.Store, candidates: list[baselines.Candidate]
) -> tuple[list[baselines.StoredChange], list[str]]:
    """Accept candidates of a model; return what changes, and what is refused."""
    origin = candidates[0].origin
    recorded = store.origin() or (origin if origin.is_collected else None)
    if recorded is None:
        why = missing_text(store.folder, " to accept errors against")
        return [], [f"{entry.source} (mode {entry.mode}): {why}" for entry in candidates]
    accepted, barred = {}, _barred_modes(candidates)
    reasons = [
        f"{entry.source} (mode {entry.mode}): the mode has values that no update can accept: "
        f"{barred[mode]}"
        for entry in candidates
        if (mode := entry.mode.partition("@")[0]) in barred
    ]
    candidates = [entry for entry in candidates if entry.mode.partition("@")[0] not in barred]
    if not candidates:
        return [], reasons
    for entry in () if args.accept_plan else candidates:
        kind = baselines.kind_of(entry.origin.device)
        accepted[entry.mode] = store.accepted_on(entry.mode, kind)
    update, refused = baselines.update_of(recorded, candidates, accepted)
    for commit in dict.fromkeys(entry.origin.commit for entry in candidates):
        say(args, f"{store.model}: measured at commit {(commit or 'unknown')[:12]}")
    changed = print_changes(args, store, update)
    if not changed and not refused:
        modes = ", ".join(sorted({entry.mode for entry in candidates}))
        say(args, f"{store.model}: {modes}: all of it is accepted already")
    return changed, reasons + refused


def _barred_modes(candidates: Sequence[baselines.Candidate]) -> dict[str, str]:
    """Return the modes in which a limit is broken that says what is right, each with the reason."""
    return {
        candidate.mode.partition("@")[0]: f"{key.site} {key.metric}, {reason}"
        for candidate in candidates
        for key, reason in candidate.barred.items()
        if limit_kind_of(reason.partition(":")[0]).bars_mode
    }
