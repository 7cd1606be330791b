"""Files of captured layers, written and read here and nowhere else.

`mode_2-1_layer_0.npy` … hold float32 of shape (tokens, width), all samples one after the other, and
`mode_2-1_stats.json` describes them. It appears last: layers without it are no capture. The
reference in a basis other than the plain one has its name: `mode_fp32-rotated_layer_0.npy`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
from torch import Tensor

from qgate.baselines import safe_name
from qgate.dumps import Dump, DumpWriter, Record
from qgate.errors import QgateError, unknown
from qgate.records import Meta, validate
from qgate.storage.files import neighbor, replacing
from qgate.storage.foreign import foreign_path, open_foreign, read_foreign
from qgate.storage.removing import remove_files

Array = np.ndarray[Any, Any]

KIND = "layer outputs"
VERSION = 1
REFERENCE = "fp32"
PLAIN = "plain"
_CHUNK = 1 << 17
_STATS = re.compile(r"mode_(.+)_stats\.json")
_LAYER = re.compile(r"layer_(0|[1-9][0-9]*)")
_NON_FINITE: dict[str, Callable[[Array], Array]] = {
    "nan": np.isnan, "positive_infinity": np.isposinf, "negative_infinity": np.isneginf,
}  # fmt: skip
_Count = Annotated[int, Meta(ge=0)]


def stem_of(mode: str, basis: str) -> str:
    """Return the name of a mode within its file names."""
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
    """Mean, spread and ends of values added in portions; values not finite are only counted."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    non_finite: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_NON_FINITE, 0))

    def add(self, values: Array) -> None:
        x = np.asarray(values, np.float64).reshape(-1)
        finite = np.isfinite(x)
        if not finite.all():
            for name, is_one in _NON_FINITE.items():
                self.non_finite[name] += int(is_one(x).sum())
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
    def reason(self) -> str:
        """The reason why there are no numbers; the empty text where there are."""
        nan, positive, negative = self.non_finite.values()
        if bad := nan + positive + negative:
            kinds = f"{nan} NaN, {positive} +Inf, {negative} -Inf"
            return f"{kinds} among {bad + self.count} values"
        return "" if self.count else "no values"

    def to_dict(self) -> dict[str, float | None]:
        """Return population statistics; null, all of them, where a value was not finite."""
        if self.reason:
            return dict.fromkeys(("mean", "std", "min", "max"))
        std = math.sqrt(self.squares / self.count)
        return {"mean": self.mean, "std": std, "min": self.low, "max": self.high}


@dataclass(frozen=True)
class LayerRecord:
    """One captured layer; `dtype` is that of the model, while the file is float32."""

    site: str
    file: str
    shape: tuple[_Count, _Count]
    tokens: tuple[_Count, ...]
    dtype: str
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    non_finite: dict[str, int]
    reason: str
    sha256: str


@dataclass(frozen=True)
class CaptureSettings:
    """Settings of a capture; the first six decide which others it can be compared with."""

    mode: str
    model: str
    basis: str
    weights: str
    inputs: str
    calibration: str | None
    samples: Annotated[int, Meta(ge=1)]
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
    """One captured mode; `casts` counts the integer casts of the run, by module."""

    of: CaptureSettings
    layers: dict[str, LayerRecord]
    casts: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_text(self) -> str:
        of = {f"made_{k}" if k == "qgate" else k: v for k, v in asdict(self.of).items()}
        layers = {name: asdict(layer) for name, layer in self.layers.items()}
        head = {"qgate": KIND, "version": VERSION, **of, "reference": self.of.reference}
        record = {**head, "layers": layers, "casts": self.casts}
        return json.dumps(record, indent=1, allow_nan=False) + "\n"


class _CapturedLayers(TypedDict):
    """Part of a stats file beside the settings."""

    layers: dict[str, LayerRecord]
    casts: dict[str, dict[str, int]]


# Writing ---------------------------------------------------------------------------------------


class LayerCaptureWriter:
    """Writer of one mode's outputs into a dump, from which the `.npy` files are made at the end."""

    def __init__(self, dump: DumpWriter, sites: Mapping[str, str]) -> None:
        self.casts: dict[str, dict[str, int]] = {}
        self.result: LayerCapture | None = None
        self._dump, self._sites = dump, sites
        self._order = itertools.count()
        self._widths: dict[str, int] = {}

    def add(self, layer: str, rows: Tensor) -> None:
        """Store the output of one sample, (tokens, width)."""
        width = self._widths.setdefault(layer, rows.shape[1])
        if width != rows.shape[1]:
            raise QgateError(
                f"{self._sites[layer]} is {width} wide in one sample and {rows.shape[1]} in "
                "another: such outputs cannot be put one after the other."
            )
        record = Record(
            order=next(self._order),
            layer_type="block",
            operation="forward",
            phase="post",
            component="block",
            name="output",
            module=layer,
        )
        self._dump.add(record, rows)


@contextlib.contextmanager
def writing(
    folder: Path, of: CaptureSettings, sites: Mapping[str, str], replaced: Iterable[Path] = ()
) -> Iterator[LayerCaptureWriter]:
    """Write files that appear together, the statistics last; after an error none of them does.

    `sites` are by layer name; the files `replaced` are removed just before.
    """
    stats = stats_path(folder, of.stem)
    with contextlib.ExitStack() as stack:
        stats_part = stack.enter_context(replacing(stats))
        parts = {
            layer: stack.enter_context(replacing(layer_path(folder, of.stem, layer)))
            for layer in sites
        }
        home = stack.enter_context(neighbor(stats.with_suffix(".dump"), folder=True))
        try:
            with DumpWriter(home) as dump:
                writer = LayerCaptureWriter(dump, sites)
                yield writer
        except QgateError as error:
            raise error.__cause__ if isinstance(error.__cause__, OSError) else error from None
        read = Dump.open(home)
        layers = {
            layer: _exported(read, layer, site, parts[layer], of) for layer, site in sites.items()
        }
        writer.result = LayerCapture(of, layers, writer.casts)
        stats_part.write_text(writer.result.to_text(), encoding="utf-8", newline="\n")
        for path in (stats, *replaced):
            remove_files(path.parent, path.name)


def _exported(dump: Dump, layer: str, site: str, path: Path, of: CaptureSettings) -> LayerRecord:
    """Write the outputs of a layer into one file, sample after sample."""
    records = list(dump.records(module=layer))
    tokens = [record.shape[0] for record in records]
    shape = (sum(tokens), records[0].shape[1] if records else 0)
    if len(tokens) != of.samples or not all(shape):
        raise QgateError(
            f"{site} was passed {len(tokens)} times with {sum(tokens)} tokens in {of.samples} "
            "samples; it takes one output with tokens from each."
        )
    moments = Moments()
    head = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head)
        for record in records:
            rows = np.ascontiguousarray(dump.tensor(record, check=False).float(), dtype="<f4")
            moments.add(rows)
            file.write(rows.data)
    return LayerRecord(
        site, layer_path(path.parent, of.stem, layer).name, shape, tuple(tokens), records[-1].dtype,
        **moments.to_dict(), non_finite=moments.non_finite, reason=moments.reason,
        sha256=_sha256(path),
    )  # fmt: skip


def _sha256(path: Path) -> str:
    with open_foreign(path, "captures", None) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading ---------------------------------------------------------------------------------------


def captured(folder: Path) -> list[str]:
    """List the stems of the modes captured into a folder."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [match[1] for name in names if (match := _STATS.fullmatch(name))]


def find(folder: Path, mode: str) -> list[LayerCapture]:
    """Find the captures of a mode: one, or for the reference one per basis."""
    if folder.exists() and not folder.is_dir():
        raise QgateError(
            f"{str(folder)!r} is a file; --output-dir names the folder that `qgate layers capture` "
            "wrote."
        )
    all_stems = captured(folder)
    if not all_stems:
        raise QgateError(
            f"nothing was captured into {str(folder)!r}: `qgate layers capture --mode {mode} "
            f"--output-dir {folder}` does that."
        )
    key = _key(mode)
    stems = [stem for stem in all_stems if _key(stem) in (key, _key(safe_name(mode)))]
    if key == REFERENCE:
        stems = [stem for stem in all_stems if stem == key or stem.startswith(f"{key}-")]
    if not stems:
        error = unknown("captured mode", mode, all_stems)
        raise QgateError(
            f"{error} `qgate layers capture --mode {mode} --output-dir {folder}` adds it, if "
            "the model has such a mode."
        )
    return [read_dump(folder, stem) for stem in stems]


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def read_dump(folder: Path, stem: str) -> LayerCapture:
    """Read a stats file, checked field by field."""
    path = stats_path(folder, stem)
    try:
        record = json.loads(read_foreign(path, "captures"), parse_constant=_refused)
        if record["qgate"] != KIND:
            raise ValueError(f"it is no record of {KIND}")
        if record["version"] != VERSION:
            raise QgateError(
                f"{str(path)!r} is of version {record['version']!r}, and this qgate reads version "
                f"{VERSION}: capture again."
            )
        record["qgate"] = record.pop("made_qgate")
        validate(record, CaptureSettings)
        validate(record, _CapturedLayers)
        of = CaptureSettings(**{own.name: record[own.name] for own in fields(CaptureSettings)})
        named = record.get("reference", of.reference)
        _check(named == of.reference, f"reference is {named!r}, not {of.reference!r}")
        _check(of.stem == stem, f"it is of mode {of.mode!r} in basis {of.basis!r}")
        layers = {name: _layer(name, entry, of) for name, entry in record["layers"].items()}
        _check(bool(layers), "it has no layer: nothing was captured")
        layers = dict(sorted(layers.items(), key=lambda item: int(item[0].rpartition("_")[2])))
        return LayerCapture(of, layers, record["casts"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise QgateError(
            f"{str(path)!r} cannot be used: {why}. Capture mode {stem} again."
        ) from None


def _layer(name: str, entry: dict[str, Any], of: CaptureSettings) -> LayerRecord:
    shape, tokens = tuple(entry["shape"]), tuple(entry["tokens"])
    record = LayerRecord(**{**entry, "shape": shape, "tokens": tokens})
    _check(_LAYER.fullmatch(name) is not None, f"{name!r} is no layer")
    _check(record.file == layer_path(Path(), of.stem, name).name, f"{name} is in {record.file!r}")
    counts = f"{name} has {len(tokens)} samples with {sum(tokens)} tokens"
    same = (len(tokens), sum(tokens)) == (of.samples, shape[0])
    _check(same, f"{counts}, not {of.samples} with {shape[0]}")
    return record


def _check(is_good: bool, problem: str) -> None:
    if not is_good:
        raise ValueError(problem)


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def open_layer(folder: Path, dump: LayerCapture, layer: str) -> Array:
    """Map the values of a layer, after its hash proved that the file is the one captured."""
    record = dump.layers[layer]
    path = folder / record.file
    remedy = f"Capture mode {dump.of.mode} again."
    if not path.is_file():
        raise QgateError(f"{str(path)!r} is missing, and its stats file lists it. {remedy}")
    sha256 = _sha256(path)
    if sha256 != record.sha256:
        raise QgateError(
            f"{str(path)!r} is not the file that was captured: its SHA-256 is {sha256[:12]}… and "
            f"not {record.sha256[:12]}…. {remedy}"
        )
    try:
        own = foreign_path(path, "captures")
        values = np.load(own, mmap_mode="c", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise QgateError(f"{str(path)!r} cannot be read: {error}. {remedy}") from None
    if values.dtype != np.dtype("<f4") or values.shape != record.shape:
        raise QgateError(
            f"{str(path)!r} holds {values.dtype} {values.shape}, and its stats file says float32 "
            f"{record.shape}. {remedy}"
        )
    return np.asarray(values)


def portions(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield the same rows of arrays of one shape, about a MB of float64 at a time."""
    rows = max(1, _CHUNK // max(1, arrays[0].shape[1]))
    for start in range(0, len(arrays[0]), rows):
        yield tuple(array[start : start + rows] for array in arrays)
