"""The history of a project's runs: a file of JSON lines, one per run, and the trends over them.

The file is small, is kept between runs (a cache of CI, a branch), and is written whole or not at
all. Whatever is wrong with it is refused with its line, since what it has cannot be made again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from qgate.errors import QgateError
from qgate.page.runs import representative_error
from qgate.records import validate
from qgate.results.other_tests import is_finished, other_tests_of
from qgate.results.pictures import Count
from qgate.results.schema import Record, line, parse
from qgate.results.summary import ModeSummary, Tally
from qgate.storage.files import lock, naming, replacing

SCHEMA = 1
KIND = "qgate history point"
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ModePoint:
    """One mode of one model in one run: its worst against its limit, and its largest error.

    `margin` is how many times its limit the worst comparison is, None where no number says it;
    `error` the largest relative MSE of `scope`.
    """

    model: str
    mode: str
    gates: Count
    failed: Count
    margin: float | None
    scope: str
    error: float | None


@dataclass(frozen=True)
class Point:
    """One run.

    `identity` and `python` identify it; so do its results where these are equal: jobs of one
    matrix can start in the same second.
    """

    name: str
    started: str
    commit: str | None
    device: str
    command: tuple[str, ...]
    qgate: str
    torch: str | None
    gates: Count
    failed: Count
    comparisons: Count
    models: dict[str, str]
    modes: tuple[ModePoint, ...]
    # Tests that are no gates; and whether the run came to its end. Earlier files say neither.
    other_failed: Count = 0
    finished: bool = True
    # Earlier files do not say it.
    python: str | None = None

    @property
    def red(self) -> bool:
        """Tell if anything failed or the run did not finish."""
        return bool(self.failed or self.other_failed) or not self.finished

    @property
    def identity(self) -> tuple[Any, ...]:
        models = tuple(sorted(self.models.items()))
        versions = self.qgate, self.torch
        return self.started, self.commit, self.device, self.command, models, versions

    def is_same_run(self, other: Point) -> bool:
        """Tell if `other` is this very run, added earlier or later, under any name."""
        if self.identity != other.identity:
            return False
        if self.python is None or other.python is None:
            return True
        if self.python != other.python:
            return False
        if self.finished and other.finished:
            return replace(self, name="") == replace(other, name="")
        return _is_part(self, other) or _is_part(other, self)


def _is_part(part: Point, whole: Point) -> bool:
    """Tell if an unfinished run can have become the other."""
    gates = {(mode.model, mode.mode): mode.gates for mode in whole.modes}
    return (
        not part.finished
        and part.gates <= whole.gates
        and part.comparisons <= whole.comparisons
        and all(mode.gates <= gates.get((mode.model, mode.mode), 0) for mode in part.modes)
    )


def point_of(name: str, header: Record, tally: Tally) -> Point:
    """Reduce a run to its point of a history."""
    counts = tally.counts
    return Point(
        name=name,
        started=str(header["started"]),
        commit=None if header["commit"] is None else str(header["commit"]),
        device=str(header["device"]),
        command=tuple(map(str, header["command"])),
        qgate=str(header["qgate"]),
        torch=None if header["torch"] is None else str(header["torch"]),
        gates=tally.gates,
        failed=tally.failed_gates + len(header.get("broken") or ()),
        comparisons=counts.passed + counts.failed,
        models={model: str(of.get("weights", "")) for model, of in header["models"].items()},
        modes=tuple(
            _mode_point(mode)
            for mode in sorted(tally.modes, key=lambda mode: (mode.model, mode.mode))
        ),
        other_failed=other_tests_of(header)["failed"],
        finished=is_finished(header),
        python=None if header.get("python") is None else str(header["python"]),
    )


def _mode_point(mode: ModeSummary) -> ModePoint:
    times = mode.worst.times if mode.worst else None
    margin = times if times is not None and math.isfinite(times) else None
    error = representative_error(mode.errors)
    return ModePoint(mode.model, mode.mode, mode.gates, mode.failed, margin, *error)


@contextlib.contextmanager
def extend_history(
    path: Path, points: Iterable[Point], timeout_s: float = _TIMEOUT_S
) -> Iterator[list[Point]]:
    """Yield all points of a history with the given ones, each once; write them at the end.

    Writers take turns. A run that is there already takes the place of what was told of it, which
    may have been a part. Whatever goes wrong inside, the file is what it was.
    """
    if not path.parent.is_dir():
        raise QgateError(f"there is no folder {str(path.parent)!r} for the history {path.name!r}.")
    if path.is_dir():
        raise QgateError(f"{str(path)!r} is a folder: name a file for the history.")
    label = f"the history {str(path)!r} is"
    with contextlib.ExitStack() as stack:
        stack.enter_context(naming(path))
        stack.enter_context(lock(path.with_name(f".{path.name}.lock"), timeout_s, label))
        stored = read_points(path)
        merged = _merge_points(stored, points)
        if merged != stored or not path.exists():
            lines = (line({"schema": SCHEMA, "kind": KIND, **asdict(point)}) for point in merged)
            part = stack.enter_context(replacing(path))
            part.write_text("".join(lines), encoding="utf-8", newline="")
        yield sorted(merged, key=lambda point: point.started)


def _merge_points(stored: Sequence[Point], added: Iterable[Point]) -> list[Point]:
    merged = list(stored)
    for point in added:
        if point in merged:
            continue
        matches = [n for n, stored_point in enumerate(merged) if point.is_same_run(stored_point)]
        if not matches:
            merged.append(point)
        elif point.finished or not merged[matches[0]].finished:
            merged[matches[0]] = point
    return merged


def read_points(path: Path) -> list[Point]:
    """Read the points of a history; none where there is no file or an empty one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [_point(text, f"{path}:{n}") for n, text in enumerate(data.splitlines(), start=1)]


def _point(text: bytes, where: str) -> Point:
    advice = "nothing was written; mend the line, or start a new history with another file"
    try:
        raw = parse(text)
    except ValueError as error:
        raise QgateError(f"{where} is damaged: {error}. {advice.capitalize()}.") from None
    if not isinstance(raw, dict) or raw.get("kind") != KIND:
        raise QgateError(f"{where} is no point of a history of qgate: {advice}.")
    if raw.get("schema") != SCHEMA:
        raise QgateError(
            f"{where} has schema {raw.get('schema')!r}, and this qgate knows {SCHEMA}: use the "
            f"qgate that wrote it, {raw.get('qgate', 'a newer one')}."
        )
    try:
        validate(raw, Point)
    except ValueError as error:
        raise QgateError(f"{where} is damaged: {error}. {advice.capitalize()}.") from None
    return msgspec.convert(raw, Point)
