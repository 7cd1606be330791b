"""The manifest: what the references are of, and what each of their tensors has to be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from qgate.baselines._reading import Fields, read_json
from qgate.baselines.origin import DEVICE_FORM, Origin, is_device
from qgate.baselines.rows import BaselineRows, ReferenceTensor, row_count
from qgate.errors import QgateError

VERSION = 1
NAME = "manifest.json"
REMEDY = (
    "Restore the file from version control, or delete its folder and record the baseline again "
    "with --update-baselines."
)
_BASIS = re.compile(r"[a-z0-9_]+")
_DTYPE = "float32"


@dataclass(frozen=True)
class TensorRecord:
    """What the manifest says of a tensor: `shape` is the live one's, whole or not."""

    shape: tuple[int, ...]
    sha256: str
    rows: BaselineRows | None


@dataclass(frozen=True)
class Manifest:
    """The origin of all references, and per basis their tensors by site, in forward order."""

    origin: Origin
    references: dict[str, dict[str, TensorRecord]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """One line per tensor: a changed tensor is a changed line."""
        head = {"qgate": "baseline", "version": VERSION, **asdict(self.origin)}
        lines = [f" {_json(name)}: {_json(value)}," for name, value in head.items()]
        bases = []
        for basis, tensors in sorted(self.references.items()):
            entries = [f"   {_json(_entry(site, record))}" for site, record in tensors.items()]
            listed = ",\n".join(entries)
            file = _json(reference_file(basis))
            bases.append(f'  {_json(basis)}: {{"file": {file}, "tensors": [\n{listed}\n  ]}}')
        body = ",\n".join(bases)
        text = "\n".join(["{", *lines, f' "references": {{\n{body}\n }}', "}", ""])
        return text.encode("utf-8")


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _entry(site: str, record: TensorRecord) -> dict[str, object]:
    rows = None if record.rows is None else asdict(record.rows)
    shape = list(record.shape)
    return {"site": site, "shape": shape, "dtype": _DTYPE, "sha256": record.sha256, "rows": rows}


def reference_file(basis: str) -> str:
    """The file of a basis; its name goes into a file name, so it is a plain one."""
    if not _BASIS.fullmatch(basis):
        raise QgateError(f"basis {basis!r} is not allowed; it is of the letters a-z, 0-9 and _.")
    return f"reference-{basis}.safetensors"


def read_manifest(data: bytes, file: str) -> Manifest:
    """A manifest as `to_bytes` makes it."""
    read = read_json(data, file, REMEDY)
    read.check_header("baseline", VERSION)
    read.only("qgate", "version", "references", *(each.name for each in fields(Origin)))
    bases = read.fields("references")
    origin = read_origin(read)
    if bool(bases.names()) == origin.is_collected:
        empty = "is not empty, and a dump has none" if origin.is_collected else "is empty"
        raise read.wrong(f"references {empty}")
    references = {}
    for basis in bases.names():
        entry = bases.fields(basis)
        entry.only("file", "tensors")
        if not _BASIS.fullmatch(basis) or entry.text("file") != reference_file(basis):
            raise entry.wrong(f"{entry.place}.file is not the file of this basis")
        references[basis] = _tensors(entry)
    return Manifest(origin, references)


def read_origin(read: Fields) -> Origin:
    """An origin out of the fields of a file that has others too."""
    device = read.text("device")
    if not is_device(device):
        raise read.wrong(f"device is {device!r}, not {DEVICE_FORM}")
    return Origin(
        model=read.text("model"),
        weights=read.text("weights"),
        inputs=read.text("inputs"),
        calibration=read.text_or_none("calibration"),
        samples=read.whole("samples", 1),
        seqlen=read.whole("seqlen", 1),
        seed=read.whole("seed", 0),
        device=device,
        torch=read.text("torch"),
        commit=read.text_or_none("commit"),
    )


def _tensors(entry: Fields) -> dict[str, TensorRecord]:
    found: dict[str, TensorRecord] = {}
    for each in entry.many("tensors"):
        each.only("site", "shape", "dtype", "sha256", "rows")
        site, shape = each.text("site"), each.shape("shape")
        if site in found:
            raise each.wrong(f"{each.place}: site {site!r} is there twice")
        if each.text("dtype") != _DTYPE:
            raise each.wrong(f"{each.place}.dtype is {each.text('dtype')!r}, not {_DTYPE!r}")
        rows = _rows(each.fields_or_none("rows"), shape)
        found[site] = TensorRecord(shape, each.text("sha256"), rows)
    if not found:
        raise entry.wrong(f"{entry.place}.tensors is empty")
    return found


def _rows(read: Fields | None, shape: tuple[int, ...]) -> BaselineRows | None:
    if read is None:
        return None
    read.only("seed", "count", "of")
    rows = BaselineRows(read.whole("seed", 0), read.whole("count", 1), read.whole("of", 1))
    if rows.count > rows.of or rows.of != row_count(shape):
        raise read.wrong(
            f"{read.place} draws {rows.count} of {rows.of} rows, but shape {list(shape)} has "
            f"{row_count(shape)}"
        )
    return rows


def records_of(tensors: Mapping[str, ReferenceTensor]) -> dict[str, TensorRecord]:
    """What the manifest is to say of these tensors."""
    return {site: TensorRecord(t.shape, t.sha256(), t.rows) for site, t in tensors.items()}


def reference_bytes(tensors: Mapping[str, ReferenceTensor]) -> bytes:
    """The file of these tensors."""
    return save({site: np.array(t.values, order="C") for site, t in tensors.items()})


def read_reference(
    data: bytes, records: Mapping[str, TensorRecord], file: str
) -> dict[str, ReferenceTensor]:
    """The tensors of a file, each the one the manifest knows, or an error."""
    remedy = REMEDY.replace("the file", "it")
    try:
        arrays: dict[str, np.ndarray[Any, Any]] = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise QgateError(f"{file}: it is damaged ({error}). {remedy}") from None
    for site in (*records, *arrays):
        if site not in arrays or site not in records:
            where = "the manifest but not in the file" if site in records else "it but not in the"
            where += "" if site in records else " manifest"
            raise QgateError(f"{file}: the tensor of {site!r} is in {where}. {remedy}")
    found = {}
    for site, record in records.items():
        tensor = ReferenceTensor(arrays[site], record.shape, record.rows)
        if arrays[site].dtype != np.float32 or arrays[site].shape != tensor.kept_shape:
            raise QgateError(
                f"{file}: the tensor of {site!r} is of {arrays[site].dtype} and shape "
                f"{arrays[site].shape}, and the manifest says {_DTYPE} and {tensor.kept_shape}. "
                f"{remedy}"
            )
        if tensor.sha256() != record.sha256:
            raise QgateError(
                f"{file}: the tensor of {site!r} is not the one in the manifest, its SHA-256 is "
                f"{tensor.sha256()[:12]}… and not {record.sha256[:12]}…. {remedy}"
            )
        found[site] = tensor
    return found
