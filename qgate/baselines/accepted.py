"""Accepted errors of a mode as text, for pull requests: one changed value is one changed line.

Columns have fixed widths that longer names overflow, so that no line depends on another one. Each
line ends in a digest of itself and of the header, without the device: lines that git merges from
two branches stay valid, and a line that was edited, or is of another file, is an error. Figures of
samples, none of which is held by itself, share a line.

A file belongs to a kind of device. The first one of a mode is `accepted/int8.txt`; each further
kind has a file beside it, `accepted/int8@cuda.txt`, whose header and digests have the kind too.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qgate.baselines._reading import check_version
from qgate.baselines.names import quoted, safe_name, unquoted
from qgate.baselines.origin import KIND, Key, Origin, hashes_text, is_device, kind_of
from qgate.errors import QgateError
from qgate.metrics import METRICS, sample_number, sample_part

VERSION = 3
FOLDER = "accepted"
REMEDY = (
    "Restore the file from version control, or delete it and record it again with "
    "--update-baselines."
)
EDITED_REMEDY = (
    "Accepted errors are not edited by hand. Restore the file from version control, or write it "
    "anew with `{}`."
)
_TITLE = "# qgate accepted errors, version "
# What lines belong to. A device is not part of it: branches may accept errors on several.
_IDENTITY = ("model", "mode", "weights", "inputs", "calibration")
_ADVICE = "# written by --update-baselines and by qgate baselines accept; not to be edited"
_WIDTHS = (20, 44, 9, 32, 24)
_COLUMNS = ("suite", "site", "scope", "metric", "value")
_BESIDE = re.compile(rf".+@({KIND})\.txt")
_VERSION = re.compile(r"[0-9]{1,9}", re.ASCII)
_DIGITS = re.compile(r"(\d+)", re.ASCII)

_PART = "samples"
Line = tuple[Key, float | str | tuple[float, ...]]


@dataclass(frozen=True)
class Accepted:
    """Accepted errors of a mode, and the model and device they were measured with.

    Without a calibration they do not depend on one. Values from two arithmetics of one kind of
    device are of `cpu-mixed`. `kind` is that of a file beside the first one of its mode, and empty
    for the first. `edited` are entries of the file whose lines do not have their digest; they have
    no value.
    """

    model: str
    mode: str
    weights: str
    inputs: str
    calibration: str | None
    device: str
    values: dict[Key, float | str] = field(default_factory=dict)
    edited: frozenset[Key] = frozenset()
    kind: str = ""

    def stale(self, origin: Origin) -> list[str]:
        """Say why these are not the accepted errors of a baseline, one sentence per cause."""
        pairs = {
            "weights": (self.weights, origin.weights),
            "inputs": (self.inputs, origin.inputs),
            "calibration": (self.calibration, self.calibration and origin.calibration),
        }
        return [
            f"the accepted errors of mode {self.mode}{self.where} were measured with other {name} "
            f"than those of the baseline {hashes_text(old or 'none', new or 'none')}"
            for name, (old, new) in pairs.items()
            if old != new
        ]

    @property
    def where(self) -> str:
        """Return ` on cuda` for those beside the first ones."""
        return f" on {self.kind}" if self.kind else ""

    @property
    def file(self) -> str:
        """Return their file, under the folder of the model."""
        return accepted_file(self.mode, self.kind)

    def to_bytes(self) -> bytes:
        """Write the file, in an order that depends on nothing but the keys."""
        identity = self.identity()
        header = [f"# {name:<12} {_field(getattr(self, name))}" for name in self._names]
        header.append(_device_line(identity, self.device))
        title = f"# {_aligned(_COLUMNS)} digest"
        entries = [_entry(*line) for line in sorted(self.lines(), key=lambda line: order(line[0]))]
        lines = [f"{entry} {_digest(identity, entry)}" for entry in entries]
        text = "\n".join([f"{_TITLE}{VERSION}", *header, _ADVICE, title, *lines, ""])
        return text.encode("utf-8")

    def lines(self) -> list[Line]:
        """Return what the file has a line for, in no order."""
        return list(folded(self.values))

    def identity(self) -> bytes:
        """Return the key of all digests: what the lines were measured with."""
        words = "\n".join(_field(getattr(self, name)) for name in self._names)
        return hashlib.sha256(words.encode("utf-8")).digest()

    @property
    def _names(self) -> tuple[str, ...]:
        return (*_IDENTITY, "kind") if self.kind else _IDENTITY


def accepted_file(mode: str, kind: str = "") -> str:
    """Return the first file of a mode, or that of a kind of device beside it."""
    return f"{FOLDER}/{safe_name(mode)}{f'@{kind}' if kind else ''}.txt"


def kind_in(file: str) -> str:
    """Return the kind of device in the name of a file; empty for the first file of a mode."""
    match = _BESIDE.fullmatch(file)
    return match[1] if match else ""


def order(key: Key) -> tuple[object, ...]:
    """Sort by suite, site, scope, metric; `layers.2` before `layers.10`."""
    return (*(_natural(part) for part in key), tuple(key))


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    """Sort numbers by their digits, as one in a name can be longer than Python reads."""
    parts = _DIGITS.split(text)
    parts[1::2] = [digits.lstrip("0") for digits in parts[1::2]]
    return tuple((len(p) if i % 2 else 0, p) for i, p in enumerate(parts))


def _field(value: str | None) -> str:
    return "%none" if value is None else quoted(value)


def _aligned(words: Iterable[str]) -> str:
    return " ".join(f"{word:<{width}}" for word, width in zip(words, _WIDTHS, strict=True))


def _entry(key: Key, value: float | str | tuple[float, ...]) -> str:
    """Write an entry without its digest; a text as value has an equals sign before it."""
    word = f"={quoted(value)}" if isinstance(value, str) else repr(value)
    if isinstance(value, tuple):
        word = ",".join(map(repr, value))
    return _aligned([*(quoted(part) for part in key), word])


def _device_line(identity: bytes, device: str) -> str:
    word = _field(device)
    return f"# {'device':<12} {word} {_digest(identity, f'device {word}')}"


def _digest(identity: bytes, text: str) -> str:
    """Return eight hexadecimal digits: against edits by mistake, not against a forger."""
    return hashlib.blake2b(text.encode("utf-8"), key=identity, digest_size=4).hexdigest()


def read_accepted(data: bytes, file: str, *, refresh: str = "", replaced: bool = False) -> Accepted:
    """Read the accepted errors of a file; the first thing wrong with it is the error.

    `refresh` is the command that measures them again. Where they are about to be `replaced`, lines
    that were edited are no error, but listed as `edited`.
    """
    accepted, problems, edits = _inspect(data, file)
    if accepted is None or problems:
        raise QgateError(f"{problems[0]}. {REMEDY}")
    if edits and not replaced:
        command = refresh or f"pytest suites --mode {accepted.mode} --update-baselines"
        raise QgateError(f"{edits[0]}. {EDITED_REMEDY.format(command)}")
    return accepted


def inspect_accepted(data: bytes, file: str) -> tuple[Accepted | None, list[str]]:
    """Read what can be read of a file, and list everything that is wrong with it, by line."""
    accepted, problems, edits = _inspect(data, file)
    return accepted, problems + edits


def _inspect(data: bytes, file: str) -> tuple[Accepted | None, list[str], list[str]]:
    """Read a file; list what is wrong with it, and apart from that what was edited in it."""
    try:
        lines = data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(10) + 1
        return None, [f"{file}:{number}: it is no UTF-8 text"], []
    problems: list[str] = []
    version = lines[0].removeprefix(_TITLE)
    if version == lines[0] or not _VERSION.fullmatch(version):
        return None, [f"{file}:1: it is no list of accepted errors of qgate"], []
    check_version(file, int(version), VERSION, REMEDY)
    accepted = _read_header(lines, file, problems)
    if accepted is None:
        return None, problems, []
    device_line = 2 + len(accepted._names)
    if lines[-1]:
        problems.append(f"{file}:{len(lines)}: the last line has no end, it may be cut off")
    identity = accepted.identity()
    line_of: dict[Key, int] = {}
    edits: dict[Key, str] = {}
    for number, line in list(enumerate(lines, 1))[device_line + 2 : -1]:
        try:
            entries, why = _read_line(line, identity)
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
            continue
        for key, value in entries:
            if key in line_of:
                first = line_of[key]
                problems.append(f"{file}:{number}: {key} is there twice, first in line {first}")
            line_of.setdefault(key, number)
            if why:
                edits[key] = f"{file}:{number}: {key} was edited, or is of another file: {why}"
            else:
                accepted.values.setdefault(key, value)
    if not line_of and not problems:
        problems.append(f"{file}: it has no accepted error")
    notes = list(edits.values())
    if len(edits) == len(line_of) > 1:
        count = len({*line_of.values()})
        notes = [
            f"{next(iter(edits.values()))}. So do all {count} lines: they were recorded for "
            f"another header ({', '.join(accepted._names)})"
        ]
    elif lines[device_line - 1] != _device_line(identity, accepted.device):
        # Which limits hold depends on it, so nothing is compared under it.
        notes = [f"{file}:{device_line}: device {accepted.device} was edited", *notes]
        edits |= dict.fromkeys(accepted.values, "")
        accepted.values.clear()
    return replace(accepted, edited=frozenset(edits)), problems, notes


def _read_header(lines: list[str], file: str, problems: list[str]) -> Accepted | None:
    try:
        values = dict(_header_values(lines))
    except ValueError as error:
        problems.append(f"{file}:{error.args[0]}: {error.args[1]}")
        return None
    for name, value in values.items():
        if not value and (name != "calibration" or value is not None):
            problems.append(f"{file}:{2 + list(values).index(name)}: {name} is empty")
    device, kind = values["device"] or "", values.get("kind")
    if not is_device(device):
        problems.append(f"{file}:{1 + len(values)}: there is no device {device!r}")
    elif kind is not None and kind_of(device) != kind:
        problems.append(f"{file}:{1 + len(values)}: device {device} is not of kind {kind}")
    if problems:
        return None
    return Accepted(**values)  # type: ignore[arg-type]


def _header_values(lines: list[str]) -> Iterator[tuple[str, str | None]]:
    kind_line = 1 + len(_IDENTITY)
    has_kind = len(lines) > kind_line and lines[kind_line].startswith("# kind ")
    names = (*_IDENTITY, *(["kind"] if has_kind else []), "device")
    for number, name in enumerate(names, 2):
        words = lines[number - 1].split(" ") if number <= len(lines) else []
        words = [word for word in words if word]
        count = 4 if name == "device" else 3
        if len(words) != count or words[:2] != ["#", name]:
            raise ValueError(number, f"the header has no {name} here")
        try:
            yield name, None if words[2] == "%none" else unquoted(words[2])
        except ValueError as error:
            raise ValueError(number, str(error)) from None
    for number in (len(names) + 2, len(names) + 3):
        if number > len(lines) or not lines[number - 1].startswith("#"):
            raise ValueError(number, "the header has to go on here")


def _read_line(line: str, identity: bytes) -> tuple[Sequence[tuple[Key, float | str]], str]:
    """Read the entries of a line and say why its digest is not its own, or raise a ValueError."""
    words = [word for word in line.split(" ") if word]
    if len(words) != len(_COLUMNS) + 1:
        raise ValueError(f"{line[:60]!r} is not {', '.join(_COLUMNS)} and digest")
    key = Key(*(unquoted(word) for word in words[:4]))
    entries: Sequence[tuple[Key, float | str]]
    if is_folded(key):
        entries = unfolded(key, [float(_read_value(key, word)) for word in words[4].split(",")])
    else:
        entries = [(key, _read_value(key, words[4]))]
    entry, _, digest = line.rpartition(" ")
    if digest == (now := _digest(identity, entry)):
        return entries, ""
    return entries, f"its digest is {words[5][:16]}, and that of what it says is {now}"


def _read_value(key: Key, word: str) -> float | str:
    if word.startswith("=") and METRICS.find(key.metric).textual:
        return unquoted(word[1:])
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is no number") from None
    if not math.isfinite(value):
        raise ValueError(f"{key} is {word}, which is never accepted")
    return value


def folded(values: Mapping[Key, float | str]) -> Iterator[Line]:
    """Yield the lines of entries: samples that are counted from 0 without a gap share one."""
    of_samples: dict[Key, dict[int, float]] = {}
    for key, value in values.items():
        metric, _, part = key.metric.partition("@")
        number = sample_number(part)
        if number is not None and not isinstance(value, str):
            of_samples.setdefault(key._replace(metric=f"{metric}@{_PART}"), {})[number] = value
    whole = {
        key: tuple(figures[number] for number in range(len(figures)))
        for key, figures in of_samples.items()
        if len(figures) > 1 and figures.keys() == {*range(len(figures))}
    }
    together = {entry for key, figures in whole.items() for entry, _ in unfolded(key, figures)}
    yield from ((key, value) for key, value in values.items() if key not in together)
    yield from whole.items()


def is_folded(key: Key) -> bool:
    """Tell if a line has the figures of all samples of a metric."""
    return key.metric.endswith(f"@{_PART}")


def unfolded(key: Key, figures: Sequence[float]) -> list[tuple[Key, float]]:
    """Return the entries of such a line, one for each sample."""
    metric = key.metric.removesuffix(_PART)
    return [
        (key._replace(metric=f"{metric}{sample_part(number)}"), figure)
        for number, figure in enumerate(figures)
    ]
