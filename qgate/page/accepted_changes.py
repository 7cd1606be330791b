"""An update of accepted errors as text: what moved in each mode, and a commit message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qgate.baselines import Key, Store, StoredChange, Update
from qgate.page.terminal import table
from qgate.results.kinds import barred_modes
from qgate.results.movements import Movement, movement
from qgate.text import counted, figures_apart, listed, one_line, shortened

_ROWS = 20
_LONGEST_SUBJECT, _LONGEST_SITE = 65, 48
_HEADS = ("what moved", "mode", "metric", "before", "now", "change")
# Outcomes in the order of a summary, and how it names them.
_WORDS = {
    "worse": "worse", "moved": "moved", "better": "better", "equal": "within 2 %",
    "new": "new", "removed": "removed",
}  # fmt: skip


def accepted_movements(model: str, changes: Iterable[StoredChange]) -> list[Movement]:
    """Return the entries of accepted files among changes as movements, the largest first."""
    moves = [_movement(model, change, change.key) for change in changes if change.key is not None]
    return sorted(moves, key=lambda move: move.order)


def _movement(model: str, change: StoredChange, key: Key) -> Movement:
    old, new = (value if isinstance(value, float) else None for value in (change.old, change.new))
    outcome, text, size = movement(key.metric, old, new)
    if change.old is None or change.new is None:
        outcome, text, size = ("new" if change.old is None else "removed"), "", 0.0
    where = (key.site, key.scope, key.metric)
    mode = f"{change.mode} on {change.kind}" if change.kind else change.mode
    return Movement(model, mode, change.mode, *where, old, new, outcome, text, size)


def mode_sentences(moves: Sequence[Movement]) -> list[str]:
    """Write a sentence per mode: how many entries moved which way, and how far the worst did."""
    by_mode: dict[tuple[str, str], list[Movement]] = {}
    for move in moves:
        by_mode.setdefault((move.model, move.mode), []).append(move)
    return [
        one_line(f"{model} {mode}: {'; '.join(_parts(of_mode))}")
        for (model, mode), of_mode in sorted(by_mode.items())
    ]


def leave_out_barred(update: Update, rows: Iterable[Mapping[str, Any]], model: str) -> list[str]:
    """Take the modes out of an update that gave what no update accepts; say which and why."""
    return [
        f"nothing of mode {mode} is written: no update can accept what {site} gives. Fix it, or "
        "allow it by a limit with a reason"
        for mode, site in barred_modes(rows, model).items()
        if update.leave_out(mode)
    ]


def kind_file_sentences(store: Store, changes: Iterable[StoredChange], dry_run: bool) -> list[str]:
    """Say which values an update keeps for a kind of device beside those of the first one."""
    by_file: dict[str, list[StoredChange]] = {}
    for change in changes:
        if change.kind:
            by_file.setdefault(change.file, []).append(change)
    sentences = []
    for file, of_file in by_file.items():
        entries = [change for change in of_file if change.key is not None]
        if not entries:
            continue
        mode = entries[0].mode
        counts = {
            "added": sum(change.old is None for change in entries),
            "changed": sum(None not in (change.old, change.new) for change in entries),
            "removed": sum(change.new is None for change in entries),
        }
        verb = "would be " if dry_run else ""
        parts = [f"{counted(n, 'value')} {verb}{done}" for done, n in counts.items() if n]
        devices = (change.new for change in of_file if change.entry == "device" and change.new)
        text = f"{store.model} {mode}: {', '.join(parts)}"
        text += f" for {next(devices, of_file[0].kind)} in {file}"
        if (first := store.accepted(mode)) is not None:
            text += f", beside those of {first.device} in {first.file}"
        sentences.append(one_line(text))
    return sentences


def _parts(moves: Sequence[Movement]) -> list[str]:
    parts = []
    for outcome, word in _WORDS.items():
        chosen = [move for move in moves if move.outcome == outcome]
        if not chosen:
            continue
        first, text = chosen[0], f"{len(chosen):,} {word}"
        if first.change and outcome != "equal":
            text += f", up to {first.change} ({first.site} {first.metric})"
        parts.append(text)
    return parts


def commit_message(moves: Sequence[Movement], commits: Iterable[str | None]) -> tuple[str, str]:
    """Return subject and body of the commit that accepts these changes."""
    models, modes = (
        [*dict.fromkeys(one_line(name) for name in names)]
        for names in zip(*((move.model, move.mode) for move in moves), strict=True)
    )
    subject = f"Accept errors of {listed(models, 1)} in {listed(modes, 2)}"
    if len(subject) > _LONGEST_SUBJECT:
        subject = f"Accept errors of {counted(len(modes), 'mode')}"
    rows = [
        [
            shortened(f"{move.site} ({move.scope})", _LONGEST_SITE),
            one_line(f"{move.model} {move.mode}"),
            one_line(move.metric),
            *figures_apart(move.old, move.new),
            move.change or move.outcome,
        ]
        for move in moves[:_ROWS]
    ]
    more = [f"+{len(moves) - _ROWS} more"] * (len(moves) > _ROWS)
    measured = [f"Measured at commit {commit[:12]}." for commit in dict.fromkeys(commits) if commit]
    lines = [*mode_sentences(moves), "", *table(_HEADS, rows, numbers=(3, 4, 5)), *more]
    return subject, "\n".join([*lines, *([""] if measured else []), *measured]) + "\n"
