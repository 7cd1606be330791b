"""The manifest: origin, shape and hash of every reference tensor."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from qgate.baselines._reading import naming, read_json, read_origin
from qgate.baselines.origin import Origin
from qgate.baselines.rows import BaselineRows, ReferenceTensor, row_count
from qgate.errors import QgateError
from qgate.records import Meta

VERSION = 2
NAME = "manifest.json"
REMEDY = (
    "Restore the file from version control, or delete its folder and record the baseline again "
    "with --update-baselines."
)
_BASIS = re.compile(r"[a-z0-9_]+")
_DTYPE = "float32"


class RowsRecord(TypedDict):
    seed: Annotated[int, Meta(ge=0)]
    count: Annotated[int, Meta(ge=1)]
    of: Annotated[int, Meta(ge=1)]


class TensorEntry(TypedDict):
    site: Annotated[str, Meta(min_length=1)]
    shape: list[Annotated[int, Meta(ge=0)]]
    dtype: Literal["float32"]
    sha256: str
    rows: RowsRecord | None


class BasisEntry(TypedDict):
    file: str
    tensors: list[TensorEntry]


class ManifestRecord(TypedDict):
    """A manifest as its file has it, beside the fields of its origin."""

    qgate: str
    version: int
    references: dict[str, BasisEntry]
    digest: str


@dataclass(frozen=True)
class TensorRecord:
    """Entry of a tensor in the manifest; `shape` is the live one's, even if a part is stored."""

    shape: tuple[int, ...]
    sha256: str
    rows: BaselineRows | None


@dataclass(frozen=True)
class Manifest:
    """Origin of all references, and per basis their tensors by site, in forward order."""

    origin: Origin
    references: dict[str, dict[str, TensorRecord]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Write one line per tensor: a changed tensor is a changed line."""
        head = {"qgate": "baseline", "version": VERSION, **asdict(self.origin)}
        lines = [f" {_json(name)}: {_json(value)}," for name, value in head.items()]
        bases = []
        for basis, tensors in sorted(self.references.items()):
            entries = [f"   {_json(_entry(site, record))}" for site, record in tensors.items()]
            tensor_lines = ",\n".join(entries)
            file = _json(reference_file(basis))
            bases.append(f'  {_json(basis)}: {{"file": {file}, "tensors": [\n{tensor_lines}\n  ]}}')
        body = ",\n".join(bases)
        text = "\n".join(["{", *lines, f' "references": {{\n{body}\n }},', ""])
        return f'{text} "digest": {_json(_digest(text))}\n}}\n'.encode()


def edits_of(data: bytes, file: str) -> list[str]:
    """Say that a readable manifest is not what was written."""
    text, _, tail = data.decode("utf-8").replace("\r\n", "\n").rpartition(' "digest": ')
    if tail == f"{_json(_digest(text))}\n}}\n":
        return []
    return [f"{file}: it was edited, as its digest does not match. {REMEDY}"]


def _digest(text: str) -> str:
    """Return sixteen hexadecimal digits: against edits by mistake, not against a forger."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _entry(site: str, record: TensorRecord) -> dict[str, object]:
    rows = None if record.rows is None else asdict(record.rows)
    shape = list(record.shape)
    return {"site": site, "shape": shape, "dtype": _DTYPE, "sha256": record.sha256, "rows": rows}


def reference_file(basis: str) -> str:
    """Return the file of a basis; its name goes into a file name, so it is a plain one."""
    if not _BASIS.fullmatch(basis):
        raise QgateError(f"basis {basis!r} is not allowed; use the letters a-z, 0-9 and _ only.")
    return f"reference-{basis}.safetensors"


def read_manifest(data: bytes, file: str) -> Manifest:
    """Read a manifest as `to_bytes` makes it."""
    record = read_json(data, file, REMEDY, "baseline", VERSION, ManifestRecord)
    with naming(file, REMEDY):
        origin = read_origin(record)
        bases = record["references"]
        if bool(bases) == origin.is_collected:
            empty = (
                "has entries, and the baseline of a dump has none"
                if origin.is_collected
                else "is empty"
            )
            raise ValueError(f"references {empty}")
        references = {basis: _tensors(basis, entry) for basis, entry in bases.items()}
    return Manifest(origin, references)


def _tensors(basis: str, entry: BasisEntry) -> dict[str, TensorRecord]:
    if not _BASIS.fullmatch(basis) or entry["file"] != reference_file(basis):
        raise ValueError(f"references.{basis}.file is not the file of this basis")
    if not entry["tensors"]:
        raise ValueError(f"references.{basis}.tensors is empty")
    tensors: dict[str, TensorRecord] = {}
    for number, tensor in enumerate(entry["tensors"]):
        at, site = f"references.{basis}.tensors[{number}]", tensor["site"]
        shape = tuple(tensor["shape"])
        if site in tensors:
            raise ValueError(f"{at}: site {site!r} is there twice")
        rows = None if tensor["rows"] is None else BaselineRows(**tensor["rows"])
        if rows and (rows.count > rows.of or rows.of != row_count(shape)):
            raise ValueError(
                f"{at}.rows draws {rows.count} of {rows.of} rows, but shape {list(shape)} has "
                f"{row_count(shape)}"
            )
        tensors[site] = TensorRecord(shape, tensor["sha256"], rows)
    return tensors


def records_of(tensors: Mapping[str, ReferenceTensor]) -> dict[str, TensorRecord]:
    """Make the manifest's entries of tensors."""
    return {site: TensorRecord(t.shape, t.sha256(), t.rows) for site, t in tensors.items()}


def reference_bytes(tensors: Mapping[str, ReferenceTensor]) -> bytes:
    """Write the file of tensors."""
    return save({site: np.array(t.values, order="C") for site, t in tensors.items()})


def read_reference(
    data: bytes, records: Mapping[str, TensorRecord], file: str
) -> dict[str, ReferenceTensor]:
    """Read the tensors of a file, each the one the manifest knows, or an error."""
    if data.startswith(b"version https://git-lfs"):
        raise QgateError(
            f"{file}: it is a pointer of git LFS, and not the tensors: run `git lfs pull`."
        )
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
    tensors = {}
    for site, record in records.items():
        tensor = ReferenceTensor(arrays[site], record.shape, record.rows)
        if arrays[site].dtype != np.float32 or arrays[site].shape != tensor.stored_shape:
            raise QgateError(
                f"{file}: the tensor of {site!r} is of {arrays[site].dtype} and shape "
                f"{arrays[site].shape}, and the manifest says {_DTYPE} and {tensor.stored_shape}. "
                f"{remedy}"
            )
        if tensor.sha256() != record.sha256:
            raise QgateError(
                f"{file}: the tensor of {site!r} is not the one in the manifest, its SHA-256 is "
                f"{tensor.sha256()[:12]}… and not {record.sha256[:12]}…. {remedy}"
            )
        tensors[site] = tensor
    return tensors
