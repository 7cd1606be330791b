"""Folders of the known collector, read as dumps as they are.

A file's metadata say what it is; its name is the fallback. What cannot be read, or not told apart,
is listed with a reason. Files are loaded weights-only, and plain pickles never.
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

from qgate.archives import load_torch, load_torch_bytes
from qgate.dumps.known_names import KnownName, parse
from qgate.dumps.layout import about
from qgate.dumps.reading import Dump, RankState
from qgate.dumps.records import OPERATIONS, PHASES, Operation, Phase, Record, StoredValues, plain
from qgate.dumps.selecting import check_fields, is_wanted
from qgate.errors import QgateError
from qgate.storage import places
from qgate.storage.folders import Folder, Stamp, files_in, parts_of

_AT_ONCE = 8
_STATS = ("min", "max", "mean", "std")
_AFTER = ("output", "attention_weights", "context", "grad_input", "grad_weight")
_KEYS = {
    "layer_type", "operation", "quant_type", "tensor_name", "layer_idx", "phase", "component",
    "rank", "iteration", "sample_idx",
}  # fmt: skip
BACKWARD_NAMES = {("pre", "input"): "grad_output", ("post", "output"): "grad_input"}
"""What the known collector calls gradients at a linear layer, and what they are."""


class Unreadable(Exception):
    """Why a file is skipped."""


class Damaged(Unreadable):
    """It was one of the collector's, and is not whole."""


@dataclass(frozen=True)
class KnownFile:
    """A file that was read: its record, without a place in the order, and what orders it."""

    name: str
    stamp: Stamp
    named: KnownName | None
    record: Record

    @property
    def place(self) -> tuple[Any, ...]:
        """By time and counter as numbers; a name cannot be sorted, its counter outgrows it."""
        if self.named is None:
            return "~", -1, self.stamp.moment, self.name
        counter = -1 if self.named.counter is None else self.named.counter
        return self.named.timestamp, counter, self.stamp.moment, self.name


def read_known(files: Folder, name: str, data: bytes | None = None) -> KnownFile:
    """One file, or `Unreadable` with the reason; `data` if somebody has read it."""
    named = parse(name)
    stamp = files.stamp(name)
    if stamp is None:
        raise Unreadable("it is not there")
    tensor, content = _content(files, name, stamp, data)
    given = content.get("metadata")
    metadata = given if isinstance(given, Mapping) else {}
    if named is None and not metadata:
        raise Unreadable("it is none of the known collector: no such name, and no metadata")
    return KnownFile(name, stamp, named, _record(name, named, metadata, tensor, content))


def _content(
    files: Folder, name: str, stamp: Stamp, data: bytes | None = None
) -> tuple[Tensor, Mapping[str, Any]]:
    """Mapped where it can be, else read as a whole."""
    if name.endswith(".pkl"):
        raise Unreadable("a plain pickle is never loaded")
    if not name.endswith(".pt"):
        raise Unreadable("it is no .pt file")
    if stamp.size == 0:
        raise Damaged("it is empty")
    if files.path is None and data is None:
        data = files.read(name)
    try:
        if data is not None:
            content = load_torch_bytes(data, repr(name))
        else:
            content = load_torch(_path_of(files) / name)
    except Exception as error:
        if type(error).__name__ == "UnpicklingError" and "Unsupported operand" not in str(error):
            text = "it holds more than tensors, or is no .pt file: it would have to run code"
            raise Unreadable(text) from None
        told = str(error).split("WeightsUnpickler error: ")[-1].strip()
        why = told.splitlines()[0][:100] if told else type(error).__name__
        raise Damaged(f"it is torn or no .pt file ({why})") from None
    if not isinstance(content, Mapping) or not isinstance(content.get("tensor"), Tensor):
        raise Unreadable("it holds no tensor of the known collector")
    return content["tensor"], content


def _path_of(files: Folder) -> Path:
    assert files.path is not None
    return files.path


def _record(
    file: str,
    named: KnownName | None,
    metadata: Mapping[str, Any],
    tensor: Tensor,
    content: Mapping[str, Any],
) -> Record:
    def told(key: str, kind: type, of_name: Any) -> Any:
        """From the metadata if it is there and of its kind, for extras overwrite any key."""
        value = metadata.get(key)
        return value if type(value) is kind else of_name

    operation: Operation = told("operation", str, "")
    if operation not in OPERATIONS:
        if named is None:
            raise Unreadable("its metadata have no operation")
        operation = named.operation
    layer_type = told("layer_type", str, named.layer_type if named else "")
    name = told("tensor_name", str, named.name if named else file.removesuffix(".pt"))
    phase: Phase | None = told("phase", str, None)
    if phase not in PHASES:
        phase = named.phase if named else None
    extra = {key: value for key, value in metadata.items() if key not in _KEYS}
    if phase is None:
        phase, extra["phase"] = "post" if name in _AFTER else "pre", "not told"
    if layer_type == "linear" and operation == "backward":
        known, name = name, BACKWARD_NAMES.get((phase, name), name)
        if known != name:
            extra["known_name"] = known
    if named is not None:
        extra |= {"generation": named.generation, "timestamp": named.timestamp}
        extra |= {} if named.counter is None else {"counter": named.counter}
        extra |= {} if named.group is None else {"group": named.group}
    info = content.get("tensor_info")
    info = info if isinstance(info, Mapping) else {}
    numbers: dict[str, Any] = {key: info.get(key) for key in _STATS}
    if "overflow_info" in info:
        extra["overflow_info"] = info["overflow_info"]
    rank = told("rank", int, (named.rank if named else None) or 0)
    component = named.component if named and named.component else ""
    component = component or ("FA" if layer_type == "attention" else "linear")
    return Record(
        order=0,
        layer_type=layer_type,
        operation=operation,
        phase=phase,
        component=told("component", str, component),
        name=name,
        layer=told("layer_idx", int, named.layer if named else None),
        quant_type=told("quant_type", str, named.quant_type if named else ""),
        rank=max(0, rank),
        iteration=told("iteration", int, named.iteration if named else None),
        sample=told("sample_idx", int, named.sample if named else None),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        stats={key: float(value) for key, value in numbers.items() if _is_finite(value)},
        tensor=StoredValues(file, "tensor", ""),
        extra=plain(extra),
    )


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


class KnownDump(Dump):
    """A folder of the known collector. Its records have no hashes."""

    def __init__(self, files: Folder) -> None:
        super().__init__(files, about(1, {"collector": "known"}))
        found: list[KnownFile] = []
        for name, is_folder in files.names().items():
            if is_folder and any(each.endswith(".pt") for each in files.inside(name).names()):
                self.skipped.append(f"{name}: a folder of its own; name it instead")
        for name, read in self._read_all():
            if isinstance(read, KnownFile):
                found.append(read)
                continue
            self.skipped.append(f"{name}: {read}")
            if isinstance(read, Damaged):
                self.damaged.append(self.skipped[-1])
        self._records = ordered(self._without_copies(found))
        ranks = {record.rank for record in self._records}
        self.about = replace(self.about, world_size=max(ranks, default=0) + 1)

    def _read_all(self) -> Iterator[tuple[str, KnownFile | Unreadable]]:
        """In order; of a store, several at a time."""
        names = files_in(self.files)
        if self.files.parallel_reads == 1:
            yield from ((name, self._read_or_tell(name)) for name in names)
            return
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for start in range(0, len(names), _AT_ONCE):
                some = names[start : start + _AT_ONCE]
                data = pool.map(self._fetched, some)
                yield from ((n, self._read_or_tell(n, d)) for n, d in zip(some, data, strict=True))

    def _fetched(self, name: str) -> bytes | None:
        """Only what is loaded afterwards."""
        return self.files.read(name) if name.endswith(".pt") else None

    def _read_or_tell(self, name: str, data: bytes | None = None) -> KnownFile | Unreadable:
        try:
            return read_known(self.files, name, data)
        except Unreadable as error:
            return error

    @staticmethod
    def is_one(files: Folder) -> bool:
        return any(name.endswith((".pt", ".pkl")) for name in files.names())

    def _without_copies(self, found: list[KnownFile]) -> list[KnownFile]:
        """One of those that are of the same moment, or byte by byte a copy under another name."""
        kept: dict[tuple[Any, ...], KnownFile] = {}
        sizes: dict[int, list[KnownFile]] = {}
        for each in sorted(found, key=lambda file: (file.named is None, file.name)):
            size = each.stamp.size
            identity = each.place[:2], replace(each.record, tensor=None, extra={}, stats={})
            key: tuple[Any, ...] = (str(identity), each.record.extra.get("group"))
            original = kept.get(key) if each.named else None
            if each.named is None:
                key = (each.name,)
                same = (o for o in sizes.get(size, ()) if self._are_equal(o.name, each.name))
                original = next(same, None)
            if original is not None:
                self.skipped.append(f"{each.name}: a duplicate of {original.name}")
                continue
            kept[key] = each
            sizes.setdefault(size, []).append(each)
        return list(kept.values())

    def _are_equal(self, a: str, b: str) -> bool:
        pairs = zip(parts_of(self.files, a), parts_of(self.files, b), strict=True)
        return all(one == other for one, other in pairs)

    @property
    def ranks(self) -> list[int]:
        return sorted({record.rank for record in self._records})

    def has(self, rank: int) -> bool:
        return rank in self.ranks

    def events(self, rank: int) -> list[dict[str, Any]]:  # noqa: ARG002
        return []

    @property
    def began(self) -> float:
        """When its first file was written, in seconds."""
        stamps = [self.files.stamp(name) for name in files_in(self.files)]
        return min((stamp.moment / 1e9 for stamp in stamps if stamp is not None), default=0.0)

    def _expected(self) -> Sequence[int]:
        return ()

    @property
    def folders(self) -> list[int]:
        return self.ranks

    def state(self, rank: int) -> RankState:
        """The known collector does not say when it is done, nor what is missing."""
        count = sum(record.rank == rank for record in self._records)
        return RankState(rank, "not told", count)

    def records_of(self, rank: int) -> list[Record]:
        return [record for record in self._records if record.rank == rank]

    def records(self, **wanted: object) -> Iterator[Record]:
        asked = check_fields(wanted)
        yield from (record for record in self._records if is_wanted(record, asked))

    def tensor(self, record: Record, *, check: bool = True) -> Tensor:
        path, place = self.shard(record), record.tensor
        if path is None or place is None:
            raise QgateError(f"of {record.title} the values were not kept.")
        try:
            stamp = self.files.stamp(place.file)
            if stamp is None:
                raise Unreadable("it is not there any more")
            tensor, _ = _content(self.files, place.file, stamp)
        except (Unreadable, OSError) as error:
            raise QgateError(f"{str(path)!r} cannot be read: {error}.") from None
        dtype = str(tensor.dtype).removeprefix("torch.")
        if check and (tuple(tensor.shape), dtype) != (record.shape, record.dtype):
            raise QgateError(f"{str(path)!r} has been changed: it holds {dtype} {[*tensor.shape]}.")
        return tensor

    def beginning(self, record: Record, elements: int) -> Tensor:
        return self.tensor(record, check=False).reshape(-1)[:elements]

    def counts(self, record: Record, *, check: bool = True) -> dict[str, np.ndarray[Any, Any]]:  # noqa: ARG002
        raise QgateError(f"of {record.title} no counts were kept: {str(self.folder)!r} has none.")

    def shard(self, record: Record) -> places.Place | None:
        place = record.tensor
        if place is None or not place.file or "/" in place.file:
            return None
        return self.files.at(place.file)


def _open(files: Folder) -> Dump | None:
    return KnownDump(files) if KnownDump.is_one(files) else None


Dump.openers.append(_open)


def ordered(found: list[KnownFile]) -> list[Record]:
    """Records with their place in the order of their rank, and how often each came before."""
    orders: Counter[int] = Counter()
    calls: Counter[tuple[object, ...]] = Counter()
    records = []
    for each in sorted(found, key=lambda file: (file.record.rank, *file.place)):
        made = each.record
        where = (
            made.rank, made.iteration, made.sample, made.layer_type, made.layer, made.component,
            made.operation, made.phase, made.name,
        )  # fmt: skip
        records.append(replace(made, order=orders[made.rank], call=calls[where]))
        orders[made.rank] += 1
        calls[where] += 1
    return records
