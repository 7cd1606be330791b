"""The history of a project's runs: a file of JSON lines, one per run, and the trends over them.

The file is small, is kept between runs (a cache of CI, a branch), and is written whole or not at
all. Whatever is wrong with it is refused with its line, since what it has cannot be made again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qgate.errors import QgateError
from qgate.results.others import is_finished, others_of
from qgate.results.schema import Record, line, parse
from qgate.results.summary import Tally
from qgate.storage.files import lock, replacing

SCHEMA = 1
KIND = "qgate history point"
_TIMEOUT_S = 30.0
# The error that stands for a mode, the most telling scope first.
_SCOPES = ("carried", "local", "sweep", "forward", "backward", "task")


@dataclass(frozen=True)
class ModePoint:
    """One mode of one model in one run: its worst against its limit, and its largest error.

    `margin` is how many times its limit the worst comparison is, None where no number says it;
    `error` the largest relative MSE of `scope`.
    """

    model: str
    mode: str
    gates: int
    failed: int
    margin: float | None
    scope: str
    error: float | None


@dataclass(frozen=True)
class Point:
    """One run. `identity` and `python` say which one it is; what it found does where they do not:
    jobs of one matrix can start in the same second."""

    name: str
    started: str
    commit: str | None
    device: str
    command: tuple[str, ...]
    qgate: str
    torch: str | None
    gates: int
    failed: int
    comparisons: int
    models: Mapping[str, str]
    modes: tuple[ModePoint, ...]
    # Tests that are no gates; and whether the run came to its end. Earlier files say neither.
    other_failed: int = 0
    finished: bool = True
    # Earlier files do not say it.
    python: str | None = None

    @property
    def red(self) -> bool:
        """Whether anything failed, or is not known."""
        return bool(self.failed or self.other_failed) or not self.finished

    @property
    def identity(self) -> tuple[Any, ...]:
        models = tuple(sorted(self.models.items()))
        versions = self.qgate, self.torch
        return self.started, self.commit, self.device, self.command, models, versions

    def is_told_again(self, other: Point) -> bool:
        """Whether `other` is this very run, told at the same time or another, by any name."""
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
    """Whether an unfinished run can have become the other."""
    gates = {(each.model, each.mode): each.gates for each in whole.modes}
    return (
        not part.finished
        and part.gates <= whole.gates
        and part.comparisons <= whole.comparisons
        and all(each.gates <= gates.get((each.model, each.mode), 0) for each in part.modes)
    )


def point_of(name: str, header: Record, tally: Tally) -> Point:
    """What a history keeps of a run."""
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
            ModePoint(
                mode.model, mode.mode, mode.gates, mode.failed,
                _finite(mode.worst.times) if mode.worst else None, *_error(mode.errors),
            )
            for mode in sorted(tally.modes, key=lambda each: (each.model, each.mode))
        ),
        other_failed=others_of(header)["failed"],
        finished=is_finished(header),
        python=None if header.get("python") is None else str(header["python"]),
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _error(errors: Mapping[str, float]) -> tuple[str, float | None]:
    scope = next((scope for scope in _SCOPES if scope in errors), "")
    return scope, errors.get(scope)


def add_points(path: Path, points: Iterable[Point], timeout_s: float = _TIMEOUT_S) -> list[Point]:
    """All points of a history with these among them, by time; the file is written with them."""
    with adding(path, points, timeout_s) as together:
        return together


@contextlib.contextmanager
def adding(
    path: Path, points: Iterable[Point], timeout_s: float = _TIMEOUT_S
) -> Iterator[list[Point]]:
    """All points of a history with these among them, each once; the file gets them at the end.

    Writers take turns. A run that is there already takes the place of what was told of it, which
    may have been a part. Whatever goes wrong inside, the file is what it was.
    """
    if not path.parent.is_dir():
        raise QgateError(f"there is no folder {str(path.parent)!r} for the history {path.name!r}.")
    if path.is_dir():
        raise QgateError(f"{str(path)!r} is a folder: name a file for the history.")
    what = f"the history {str(path)!r} is"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_naming(path))
        stack.enter_context(lock(path.with_name(f".{path.name}.lock"), timeout_s, what))
        known = read_points(path)
        together = _together(known, points)
        if together != known or not path.exists():
            _write(stack.enter_context(replacing(path)), together)
        yield sorted(together, key=lambda point: point.started)


def _together(known: Sequence[Point], fresh: Iterable[Point]) -> list[Point]:
    found = list(known)
    for point in fresh:
        if point in found:
            continue
        places = [n for n, each in enumerate(found) if point.is_told_again(each)]
        if not places:
            found.append(point)
        elif point.finished or not found[places[0]].finished:
            found[places[0]] = point
    return found


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the system name the history, not its lock or a neighbor."""
    try:
        yield
    except OSError as error:
        if error.filename is None or f".{path.name}." in Path(error.filename).name:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _write(path: Path, points: Sequence[Point]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        for point in points:
            file.write(line({"schema": SCHEMA, "kind": KIND, **asdict(point)}))


def read_points(path: Path) -> list[Point]:
    """The points of a history as they stand in it; none where there is no file or an empty one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [_point(text, f"{path}:{n}") for n, text in enumerate(data.splitlines(), start=1)]


def _point(text: bytes, where: str) -> Point:
    advice = "nothing was written; mend the line, or start a new history with another file"
    try:
        given = parse(text)
    except ValueError as error:
        raise QgateError(f"{where} is damaged: {error}. {advice.capitalize()}.") from None
    if not isinstance(given, dict) or given.get("kind") != KIND:
        raise QgateError(f"{where} is no point of a history of qgate: {advice}.")
    if given.get("schema") != SCHEMA:
        raise QgateError(
            f"{where} has schema {given.get('schema')!r}, and this qgate knows {SCHEMA}: use the "
            f"qgate that wrote it, {given.get('qgate', 'a newer one')}."
        )
    try:
        return _checked(given)
    except (KeyError, TypeError, ValueError) as error:
        raise QgateError(f"{where} is damaged: {_why(error)}. {advice.capitalize()}.") from None


def _why(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _checked(given: Mapping[str, Any]) -> Point:
    """A point of what a line says; what is of another type is an error."""
    texts = {name: _text(given[name], name) for name in ("name", "started", "device", "qgate")}
    optional = {
        name: None if given[name] is None else _text(given[name], name)
        for name in ("commit", "torch")
    }
    counts = {name: _count(given[name], name) for name in ("gates", "failed", "comparisons")}
    if not isinstance(given["models"], dict) or not isinstance(given["modes"], list):
        raise ValueError("its models or modes are not what they should be")
    return Point(
        name=texts["name"],
        started=texts["started"],
        commit=optional["commit"],
        device=texts["device"],
        command=tuple(_text(each, "command") for each in given["command"]),
        qgate=texts["qgate"],
        torch=optional["torch"],
        gates=counts["gates"],
        failed=counts["failed"],
        comparisons=counts["comparisons"],
        models={str(model): _text(weights, "models") for model, weights in given["models"].items()},
        modes=tuple(
            ModePoint(
                _text(mode["model"], "model"), _text(mode["mode"], "mode"),
                _count(mode["gates"], "gates"), _count(mode["failed"], "failed"),
                _number(mode["margin"], "margin"), _text(mode["scope"], "scope"),
                _number(mode["error"], "error"),
            )
            for mode in given["modes"]
        ),
        other_failed=_count(given.get("other_failed", 0), "other_failed"),
        finished=given.get("finished", True) is True,
        python=None if given.get("python") is None else _text(given["python"], "python"),
    )  # fmt: skip


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its {name} is {value!r}, no text")
    return value


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"its {name} is {value!r}, no count")
    return value


def _number(value: object, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"its {name} is {value!r}, no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"its {name} is too large a number") from None
