"""Outputs of layers on disk: one schema, written and read here and nowhere else.

`mode_2-1_layer_0.npy` … hold float32 of shape (tokens, width), all samples one after the other, and
`mode_2-1_stats.json` says what they are of. It appears last: layers without it are no capture. The
reference in a basis other than the plain one is called after it, `mode_fp32-rotated_layer_0.npy`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from qgate.baselines import safe_name
from qgate.errors import QgateError, unknown
from qgate.storage.files import replacing

Array = np.ndarray[Any, Any]

KIND = "layer outputs"
VERSION = 1
REFERENCE = "fp32"
PLAIN = "plain"
_HEADER = 128
_CHUNK = 1 << 17
_STATS = re.compile(r"mode_(.+)_stats\.json")
_LAYER = re.compile(r"layer_(0|[1-9][0-9]*)")
_TEXTS = ("mode", "model", "basis", "weights", "inputs", "device", "torch", "qgate", "created")


def stem_of(mode: str, basis: str) -> str:
    """What the files of a mode are called after."""
    if mode == REFERENCE:
        return REFERENCE if basis == PLAIN else safe_name(f"{REFERENCE}-{basis}")
    if mode.startswith(f"{REFERENCE}-"):
        raise QgateError(f"mode {mode!r} would be taken for a reference on disk: rename it.")
    return safe_name(mode)


def stats_path(folder: Path, stem: str) -> Path:
    return folder / f"mode_{stem}_stats.json"


def layer_path(folder: Path, stem: str, layer: str) -> Path:
    return folder / f"mode_{stem}_{layer}.npy"


@dataclass
class Moments:
    """Mean, spread and ends of values that come in portions; those not finite are counted apart."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    nan: int = 0
    positive_infinity: int = 0
    negative_infinity: int = 0

    def add(self, values: Array) -> None:
        x = np.asarray(values, np.float64).reshape(-1)
        finite = np.isfinite(x)
        if not finite.all():
            self.nan += int(np.isnan(x).sum())
            self.positive_infinity += int(np.isposinf(x).sum())
            self.negative_infinity += int(np.isneginf(x).sum())
            x = x[finite]
        if not x.size:
            return
        low, high = float(x.min()), float(x.max())
        mean = low if low == high else float(x.mean())
        total, step = self.count + x.size, mean - self.mean
        self.squares += float(np.square(x - mean).sum()) + step * step * self.count * x.size / total
        self.mean += step * x.size / total
        self.count, self.low, self.high = total, min(self.low, low), max(self.high, high)

    @property
    def non_finite(self) -> dict[str, int]:
        names = ("nan", "positive_infinity", "negative_infinity")
        return {name: getattr(self, name) for name in names}

    @property
    def reason(self) -> str:
        """Why there are no numbers; the empty text where there are."""
        bad = sum(self.non_finite.values())
        if bad:
            return (
                f"{self.nan} NaN, {self.positive_infinity} +Inf, {self.negative_infinity} -Inf "
                f"among {bad + self.count} values"
            )
        return "" if self.count else "no values"

    def to_dict(self) -> dict[str, float | None]:
        """Population statistics; null, all of them, where a value was not finite."""
        if self.reason:
            return dict.fromkeys(("mean", "std", "min", "max"))
        std = math.sqrt(self.squares / self.count)
        return {"mean": self.mean, "std": std, "min": self.low, "max": self.high}


@dataclass(frozen=True)
class LayerRecord:
    """One layer of a dump; `dtype` is what the model computed, the file is float32."""

    site: str
    file: str
    shape: tuple[int, int]
    tokens: tuple[int, ...]
    dtype: str
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    non_finite: dict[str, int]
    reason: str
    sha256: str


@dataclass(frozen=True)
class DumpOf:
    """What a dump is of and what made it; the first six decide what it can be compared with."""

    mode: str
    model: str
    basis: str
    weights: str
    inputs: str
    calibration: str | None
    samples: int
    seqlen: int
    seed: int
    device: str
    torch: str
    qgate: str
    created: str

    @property
    def stem(self) -> str:
        return stem_of(self.mode, self.basis)

    @property
    def reference(self) -> str | None:
        """The stem of the FP32 reference this can be compared with; None for a reference."""
        return None if self.mode == REFERENCE else stem_of(REFERENCE, self.basis)


@dataclass(frozen=True)
class LayerCapture:
    """One mode on disk; `casts` are the integer casts of the run, by module."""

    of: DumpOf
    layers: dict[str, LayerRecord]
    casts: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_text(self) -> str:
        made = {f"made_{k}" if k == "qgate" else k: v for k, v in asdict(self.of).items()}
        layers = {name: asdict(layer) for name, layer in self.layers.items()}
        head = {"qgate": KIND, "version": VERSION, **made, "reference": self.of.reference}
        record = {**head, "layers": layers, "casts": self.casts}
        return json.dumps(record, indent=1, allow_nan=False) + "\n"


# Writing ---------------------------------------------------------------------------------------


class LayerWriter:
    """One .npy file that grows sample by sample; its header is written at the end."""

    def __init__(self, path: Path, site: str) -> None:
        self.site = site
        self._path = path
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER))
        self._width: int | None = None
        self._dtype = ""
        self._tokens: list[int] = []
        self._moments = Moments()

    def add(self, rows: Array, dtype: str) -> None:
        """The output of one sample, (tokens, width)."""
        width = rows.shape[1]
        if self._width not in (None, width):
            raise QgateError(
                f"{self.site} is {self._width} wide in one sample and {width} in another: such "
                "outputs cannot be put one after the other."
            )
        self._width, self._dtype = width, dtype
        self._tokens.append(len(rows))
        plain = np.ascontiguousarray(rows, dtype="<f4")
        self._moments.add(plain)
        self._file.write(plain.data)

    def finish(self, file: str, samples: int) -> LayerRecord:
        """Close the file; what it holds."""
        if len(self._tokens) != samples or not sum(self._tokens) or not self._width:
            raise QgateError(
                f"{self.site} was passed {len(self._tokens)} times with {sum(self._tokens)} tokens "
                f"in {samples} samples; it takes one output with tokens from each."
            )
        shape = (sum(self._tokens), self._width)
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        length = _HEADER - 10
        head = b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little")
        self._file.seek(0)
        self._file.write(head + text.encode("ascii").ljust(length - 1) + b"\n")
        self.close()
        found = self._moments
        return LayerRecord(
            self.site, file, shape, tuple(self._tokens), self._dtype,
            **found.to_dict(), non_finite=found.non_finite, reason=found.reason,
            sha256=_sha256(self._path),
        )  # fmt: skip

    def close(self) -> None:
        self._file.close()


class LayerCaptureWriter:
    """The files of one mode while it is computed."""

    def __init__(self, layers: dict[str, LayerWriter]) -> None:
        self.layers = layers
        self.casts: dict[str, dict[str, int]] = {}
        self.result: LayerCapture | None = None


@contextlib.contextmanager
def writing(
    folder: Path, of: DumpOf, sites: Mapping[str, str], replaced: Iterable[Path] = ()
) -> Iterator[LayerCaptureWriter]:
    """Files that appear together when all went well, the statistics last; else none does.

    `sites` are by layer name, `replaced` is what goes just before.
    """
    with contextlib.ExitStack() as stack:
        stats = stack.enter_context(replacing(stats_path(folder, of.stem)))
        writers = {}
        for layer, site in sites.items():
            part = stack.enter_context(replacing(layer_path(folder, of.stem, layer)))
            writers[layer] = LayerWriter(part, site)
            stack.callback(writers[layer].close)
        writer = LayerCaptureWriter(writers)
        yield writer
        layers = {
            layer: each.finish(layer_path(folder, of.stem, layer).name, of.samples)
            for layer, each in writers.items()
        }
        writer.result = LayerCapture(of, layers, writer.casts)
        stats.write_text(writer.result.to_text(), encoding="utf-8", newline="\n")
        for path in (stats_path(folder, of.stem), *replaced):
            path.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading ---------------------------------------------------------------------------------------


def captured(folder: Path) -> list[str]:
    """The stems of what was captured into a folder."""
    if not folder.is_dir():
        return []
    found = [_STATS.fullmatch(path.name) for path in sorted(folder.iterdir())]
    return [match[1] for match in found if match]


def find(folder: Path, mode: str) -> list[LayerCapture]:
    """The dumps of a mode: one, or of the reference one per basis."""
    if folder.exists() and not folder.is_dir():
        raise QgateError(
            f"{str(folder)!r} is a file; --output-dir names the folder that `qgate capture` wrote."
        )
    there = captured(folder)
    if not there:
        raise QgateError(
            f"nothing was captured into {str(folder)!r}: `qgate capture --mode {mode} "
            f"--output-dir {folder}` does that."
        )
    key = _key(mode)
    stems = [stem for stem in there if _key(stem) in (key, _key(safe_name(mode)))]
    if key == REFERENCE:
        stems = [stem for stem in there if stem == key or stem.startswith(f"{key}-")]
    if not stems:
        error = unknown("captured mode", mode, there)
        raise QgateError(
            f"{error} `qgate capture --mode {mode} --output-dir {folder}` adds it, if the model "
            "has such a mode."
        )
    return [read_dump(folder, stem) for stem in stems]


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def read_dump(folder: Path, stem: str) -> LayerCapture:
    """What a stats file says, believed field by field."""
    path = stats_path(folder, stem)
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
        if record["qgate"] != KIND:
            raise ValueError(f"it is no record of {KIND}")
        if record["version"] != VERSION:
            raise QgateError(
                f"{str(path)!r} is of version {record['version']!r}, and this qgate reads version "
                f"{VERSION}: capture again."
            )
        record["qgate"] = record.pop("made_qgate")
        of = DumpOf(**{each.name: record[each.name] for each in fields(DumpOf)})
        _check(all(isinstance(getattr(of, name), str) for name in _TEXTS), "a name is no text")
        _check(type(of.samples) is int and of.samples > 0, f"samples is {of.samples!r}")
        named = record.get("reference", of.reference)
        _check(named == of.reference, f"reference is {named!r}, not {of.reference!r}")
        _check(of.stem == stem, f"it is of mode {of.mode!r} in basis {of.basis!r}")
        layers = {name: _layer(name, entry, of) for name, entry in record["layers"].items()}
        _check(bool(layers), "it has no layer: nothing was captured")
        layers = dict(sorted(layers.items(), key=lambda item: layer_index(item[0])))
        casts = {str(name): dict(counts) for name, counts in record["casts"].items()}
        return LayerCapture(of, layers, casts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise QgateError(
            f"{str(path)!r} cannot be used: {why}. Capture mode {stem} again."
        ) from None


def layer_index(name: str) -> int:
    return int(name.rpartition("_")[2])


def _layer(name: str, entry: dict[str, Any], of: DumpOf) -> LayerRecord:
    shape, tokens = tuple(entry["shape"]), tuple(entry["tokens"])
    made = LayerRecord(**{**entry, "shape": shape, "tokens": tokens})
    _check(_LAYER.fullmatch(name) is not None, f"{name!r} is no layer")
    _check(made.file == layer_path(Path(), of.stem, name).name, f"{name} is in {made.file!r}")
    whole = [type(n) is int and n >= 0 for n in (*shape, *tokens)]
    _check(len(shape) == 2 and all(whole), f"{name} has shape {list(shape)}")
    counts = f"{name} has {len(tokens)} samples with {sum(tokens)} tokens"
    _check(
        (len(tokens), sum(tokens)) == (of.samples, shape[0]),
        f"{counts}, not {of.samples} with {shape[0]}",
    )
    return made


def _check(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def open_layer(folder: Path, dump: LayerCapture, layer: str) -> Array:
    """The values of a layer, mapped and not read, after the file proved to be the one recorded."""
    record = dump.layers[layer]
    path = folder / record.file
    again = f"Capture mode {dump.of.mode} again."
    if not path.is_file():
        raise QgateError(f"{str(path)!r} is missing, and its stats file lists it. {again}")
    found = _sha256(path)
    if found != record.sha256:
        raise QgateError(
            f"{str(path)!r} is not the file that was captured: its SHA-256 is {found[:12]}… and "
            f"not {record.sha256[:12]}…. {again}"
        )
    try:
        values = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise QgateError(f"{str(path)!r} cannot be read: {error}. {again}") from None
    if values.dtype != np.dtype("<f4") or values.shape != record.shape:
        raise QgateError(
            f"{str(path)!r} holds {values.dtype} {values.shape}, and its stats file says float32 "
            f"{record.shape}. {again}"
        )
    return np.asarray(values)


def portions(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Equal rows of arrays of one shape, about a MB of float64 at a time."""
    rows = max(1, _CHUNK // max(1, arrays[0].shape[1]))
    for start in range(0, len(arrays[0]), rows):
        yield tuple(array[start : start + rows] for array in arrays)
