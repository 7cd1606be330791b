"""Accept candidates, and what the verbs of `qgate baselines` say and change."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qgate.cli._project import project_folder
from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.results.limit_kinds import limit_kind_of
from qgate.text.printing import print_line, print_text

if TYPE_CHECKING:
    from qgate import baselines
    from qgate.page import accepted_changes
    from qgate.storage import git
else:
    accepted_changes = LateModule("qgate.page.accepted_changes")
    baselines = LateModule("qgate.baselines")
    git = LateModule("qgate.storage.git")


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
