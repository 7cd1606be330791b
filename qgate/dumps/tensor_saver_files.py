"""Read folders of megatron-tensor-saver as dumps, without converting them.

A file's metadata describe its tensor; its name is the fallback, and enough: under a name of the
saver a file may also hold a tensor alone, or a dictionary or list of tensors. Files that cannot be
read, and duplicates, are listed with a reason. Files are loaded weights-only, plain pickles never.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from qgate.dumps.layout import DumpManifest
from qgate.dumps.reading import Dump, RankState
from qgate.dumps.record import (
    OPERATIONS,
    PHASES,
    Operation,
    Phase,
    Record,
    StoredValues,
)
from qgate.dumps.tensor_saver_names import TensorFileName, parse
from qgate.errors import QgateError
from qgate.interruptions import raise_interruption
from qgate.records.plain_data import plain
from qgate.storage import locations
from qgate.storage.archives import flatten
from qgate.storage.folders import Folder, Stamp, files_in, read_parts
from qgate.storage.tensor_reading import read_torch, torch_source

_FETCHED_FILES = 8
_STATS = ("min", "max", "mean", "std")
_OUTPUT_NAMES = ("output", "attention_weights", "context", "grad_input", "grad_weight")
_SAVED = "tensor"  # its key in a file of the saver
_KEYS = {
    "layer_type", "operation", "quant_type", "tensor_name", "layer_idx", "phase", "component",
    "rank", "iteration", "sample_idx",
}  # fmt: skip
BACKWARD_NAMES = {("pre", "input"): "grad_output", ("post", "output"): "grad_input"}
"""Names of gradients at a linear layer in megatron-tensor-saver, and in qgate."""


class UnreadableFileError(Exception):
    """The reason why a file is skipped."""


class DamagedFileError(UnreadableFileError):
    """The reason why a file of megatron-tensor-saver is not whole."""


@dataclass(frozen=True)
class SavedTensor:
    """A file that was read: its record, still without an order, and its sort keys."""

    file: str
    stamp: Stamp
    named: TensorFileName | None
    record: Record

    @property
    def moment(self) -> tuple[Any, ...]:
        """Return the sort key: the counter as a number, since it can outgrow its digits."""
        if self.named is None:
            return "~", -1, self.stamp.moment, self.file
        counter = -1 if self.named.counter is None else self.named.counter
        return self.named.timestamp, counter, self.stamp.moment, self.file


def read_saved(files: Folder, name: str, source: Path | bytes | None = None) -> list[SavedTensor]:
    """Read the tensors of a file, or raise an UnreadableFileError; `source` is its content."""
    stamp = files.stamp(name)
    if stamp is None:
        raise UnreadableFileError("it is not there")
    content = _content(files, name, stamp, source)
    named, metadata = parse(name), _mapping(_mapping(content).get("metadata"))
    tensors = _tensors_in(content, name)
    if not tensors:
        raise UnreadableFileError("it holds no tensor")
    if named is None and not (metadata and _SAVED in tensors):
        raise UnreadableFileError(
            "it is none of megatron-tensor-saver: no such name, and no metadata"
        )
    info = _mapping(_mapping(content).get("tensor_info"))
    saved = []
    for key, tensor in tensors.items():
        record = _record(name, named, metadata, info, tensor)
        own_name = record.name if len(tensors) == 1 else f"{record.name}.{key}"
        record = replace(record, name=own_name, tensor=StoredValues(name, key, ""))
        saved.append(SavedTensor(name, stamp, named, record))
    return saved


def _tensors_in(content: Any, name: str) -> dict[str, Tensor]:
    """Return the tensors of a loaded file by their keys: the saver's, or all that there are."""
    saved = _mapping(content).get(_SAVED)
    if isinstance(saved, Tensor):
        return {_SAVED: saved}
    entries = flatten(content, repr(name))
    return {key: value for key, value in entries if isinstance(value, Tensor)}


def _content(files: Folder, name: str, stamp: Stamp, source: Path | bytes | None = None) -> Any:
    """Load a file, mapped where possible, else as a whole."""
    if name.endswith(".pkl"):
        raise UnreadableFileError("a plain pickle is never loaded")
    if not name.endswith(".pt"):
        raise UnreadableFileError("it is no .pt file")
    if stamp.size == 0:
        raise DamagedFileError("it is empty")
    source = torch_source(files, name) if source is None else source
    try:
        return read_torch(source, repr(name))
    except Exception as error:
        raise_interruption()
        if type(error).__name__ == "UnpicklingError" and "Unsupported operand" not in str(error):
            raise UnreadableFileError(
                "it holds more than tensors, or is no .pt file: it would have to run code"
            ) from None
        text = str(error).split("WeightsUnpickler error: ")[-1].strip()
        why = text.splitlines()[0][:100] if text else type(error).__name__
        raise DamagedFileError(f"it is torn or no .pt file ({why})") from None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _record(
    file: str,
    named: TensorFileName | None,
    metadata: Mapping[str, Any],
    info: Mapping[str, Any],
    tensor: Tensor,
) -> Record:
    def field(key: str, kind: type, name_part: str, default: Any = None) -> Any:
        """Return metadata of the right type, for extras overwrite any key; else from the name."""
        value = metadata.get(key)
        if type(value) is kind:
            return value
        value = getattr(named, name_part, None)
        return default if value is None else value

    operation: Operation = field("operation", str, "")
    if operation not in OPERATIONS:
        if named is None:
            raise UnreadableFileError("its metadata have no operation")
        operation = named.operation
    layer_type = field("layer_type", str, "layer_type", "")
    name = field("tensor_name", str, "name", file.removesuffix(".pt"))
    phase: Phase | None = field("phase", str, "")
    if phase not in PHASES:
        phase = named.phase if named else None
    extra = {key: value for key, value in metadata.items() if key not in _KEYS}
    if phase is None:
        phase, extra["phase"] = "post" if name in _OUTPUT_NAMES else "pre", "not told"
    if layer_type == "linear" and operation == "backward" and (phase, name) in BACKWARD_NAMES:
        extra["known_name"], name = name, BACKWARD_NAMES[phase, name]
    if named is not None:
        extra |= {"generation": named.generation, "timestamp": named.timestamp}
        extra |= {} if named.counter is None else {"counter": named.counter}
        extra |= {} if named.group is None else {"group": named.group}
    if "overflow_info" in info:
        extra["overflow_info"] = info["overflow_info"]
    component = "FA" if layer_type == "attention" else "linear"
    return Record(
        order=0,
        layer_type=layer_type,
        operation=operation,
        phase=phase,
        component=field("component", str, "component", component),
        name=name,
        layer=field("layer_idx", int, "layer"),
        quant_type=field("quant_type", str, "quant_type", ""),
        rank=max(0, field("rank", int, "rank", 0)),
        iteration=field("iteration", int, "iteration"),
        sample=field("sample_idx", int, "sample"),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        stats={
            key: float(info[key])
            for key in _STATS
            if type(info.get(key)) in (int, float) and math.isfinite(info[key])
        },
        extra=plain(extra),
    )


class TensorSaverDump(Dump):
    """A folder of megatron-tensor-saver as a dump; its records have no hashes."""

    is_foreign = True

    def __init__(self, files: Folder) -> None:
        super().__init__(files, DumpManifest(1, {"collector": "known"}))
        saved: list[SavedTensor] = []
        for name, is_folder in files.names().items():
            if is_folder and any(file.endswith(".pt") for file in files.inside(name).names()):
                self.skipped.append(f"{name}: a folder of its own; name it instead")
        for name, tensors in self._read_all():
            if isinstance(tensors, list):
                saved += tensors
                continue
            self.skipped.append(f"{name}: {tensors}")
            if isinstance(tensors, DamagedFileError):
                self.damaged.append(self.skipped[-1])
        self._records = ordered(self._without_copies(saved))
        self.manifest = replace(self.manifest, world_size=max(self._records, default=0) + 1)

    def _read_all(self) -> Iterator[tuple[str, list[SavedTensor] | UnreadableFileError]]:
        """Read the files in name order, fetching several of a store at once."""

        def fetch(name: str) -> Path | bytes | None:
            return torch_source(self.files, name) if name.endswith(".pt") else None

        names = files_in(self.files)
        with ThreadPoolExecutor(min(_FETCHED_FILES, self.files.parallel_reads)) as pool:
            for start in range(0, len(names), _FETCHED_FILES):
                some = names[start : start + _FETCHED_FILES]
                for name, source in zip(some, pool.map(fetch, some), strict=True):
                    try:
                        yield name, read_saved(self.files, name, source)
                    except UnreadableFileError as error:
                        yield name, error

    @staticmethod
    def is_one(files: Folder) -> bool:
        return any(name.endswith((".pt", ".pkl")) for name in files.names())

    def _without_copies(self, saved: list[SavedTensor]) -> list[SavedTensor]:
        """Drop files of the same moment, and byte-by-byte copies under other names."""
        originals: dict[tuple[Any, ...], SavedTensor] = {}
        sizes: dict[int, list[SavedTensor]] = {}
        for tensor in sorted(saved, key=lambda tensor: (tensor.named is None, tensor.file)):
            same_size = sizes.setdefault(tensor.stamp.size, [])
            identity = tensor.moment[:2], replace(tensor.record, tensor=None, extra={}, stats={})
            key: tuple[Any, ...] = (str(identity), tensor.record.extra.get("group"))
            original = originals.get(key) if tensor.named else None
            if tensor.named is None:
                key = (tensor.file,)
                copies = (o for o in same_size if self._are_equal(o.file, tensor.file))
                original = next(copies, None)
            if original is not None:
                self.skipped.append(f"{tensor.file}: a duplicate of {original.file}")
                continue
            originals[key] = tensor
            same_size.append(tensor)
        return list(originals.values())

    def _are_equal(self, a: str, b: str) -> bool:
        pairs = zip(read_parts(self.files, a), read_parts(self.files, b), strict=True)
        return all(one == other for one, other in pairs)

    @property
    def began(self) -> float:
        """Return the time in seconds at which its first file was written."""
        stamps = [self.files.stamp(name) for name in files_in(self.files)]
        return min((stamp.moment / 1e9 for stamp in stamps if stamp is not None), default=0.0)

    @property
    def folders(self) -> list[int]:
        return list(self._records)

    def has(self, rank: int) -> bool:
        return rank in self._records

    def events(self, rank: int) -> list[dict[str, object]]:  # noqa: ARG002
        return []

    def _read_ahead(self, ranks: list[int]) -> None:
        """Do nothing: everything has been read."""

    def _expected(self) -> Sequence[int]:
        return ()

    def state(self, rank: int) -> RankState:
        """Return a state without more than the number of records, as the files tell no more."""
        return RankState(rank, "not told", len(self.records_of(rank)))

    def records_of(self, rank: int) -> list[Record]:
        return self._records.get(rank, [])

    def tensor(self, record: Record, *, check: bool = True) -> Tensor:
        path, stored = self.shard(record), record.tensor
        if path is None or stored is None:
            raise QgateError(f"of {record.title} the values were not kept.")
        try:
            stamp = self.files.stamp(stored.file)
            if stamp is None:
                raise UnreadableFileError("it is not there any more")
            content = _content(self.files, stored.file, stamp)
            tensor = _tensors_in(content, stored.file).get(stored.key)
        except (UnreadableFileError, OSError) as error:
            raise QgateError(f"{str(path)!r} cannot be read: {error}.") from None
        if tensor is None:
            raise QgateError(f"{str(path)!r} has been changed: it has no tensor {stored.key!r}.")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if check and (tuple(tensor.shape), dtype) != (record.shape, record.dtype):
            raise QgateError(f"{str(path)!r} has been changed: it holds {dtype} {[*tensor.shape]}.")
        return tensor

    def beginning(self, record: Record, elements: int) -> Tensor:
        return self.tensor(record, check=False).reshape(-1)[:elements]

    def counts(self, record: Record, *, check: bool = True) -> dict[str, np.ndarray[Any, Any]]:  # noqa: ARG002
        raise QgateError(f"of {record.title} no counts were kept: {str(self.folder)!r} has none.")

    def shard(self, record: Record) -> locations.Location | None:
        stored = record.tensor
        if stored is None or not stored.file or "/" in stored.file:
            return None
        return self.files.at(stored.file)


def opened(files: Folder) -> Dump | None:
    """Open a folder of the collector; None where it is none."""
    return TensorSaverDump(files) if TensorSaverDump.is_one(files) else None


def ordered(saved: list[SavedTensor]) -> dict[int, list[Record]]:
    """Return records by rank, with their order and the number of earlier calls."""
    calls: Counter[tuple[object, ...]] = Counter()
    ranks: dict[int, list[Record]] = {}
    for tensor in sorted(saved, key=lambda tensor: (tensor.record.rank, *tensor.moment)):
        record = tensor.record
        site = (
            record.rank, record.iteration, record.sample, record.layer_type, record.layer,
            record.component, record.operation, record.phase, record.name,
        )  # fmt: skip
        records = ranks.setdefault(record.rank, [])
        records.append(replace(record, order=len(records), call=calls[site]))
        calls[site] += 1
    return ranks
