"""Folders of the known collector, read as dumps as they are.

A file's metadata say what it is; its name is the fallback. What cannot be read, or not told apart,
is listed with a reason. Files are loaded weights-only, and plain pickles never.
"""

from __future__ import annotations

import filecmp
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from qgate.dumps.known_names import KnownName, parse
from qgate.dumps.layout import about
from qgate.dumps.reading import Dump, RankState
from qgate.dumps.records import OPERATIONS, PHASES, Operation, Phase, Place, Record, plain
from qgate.dumps.selecting import check_fields, is_wanted
from qgate.dumps.tensor_files import load_torch
from qgate.errors import QgateError

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

    path: Path
    named: KnownName | None
    record: Record

    @property
    def place(self) -> tuple[Any, ...]:
        """By time and counter as numbers; a name cannot be sorted, its counter outgrows it."""
        if self.named is None:
            return "~", -1, self.path.stat().st_mtime_ns, self.path.name
        counter = -1 if self.named.counter is None else self.named.counter
        return self.named.timestamp, counter, self.path.stat().st_mtime_ns, self.path.name


def read_known(path: Path) -> KnownFile:
    """One file, or `Unreadable` with the reason."""
    named = parse(path.name)
    tensor, content = _content(path)
    given = content.get("metadata")
    metadata = given if isinstance(given, Mapping) else {}
    if named is None and not metadata:
        raise Unreadable("it is none of the known collector: no such name, and no metadata")
    return KnownFile(path, named, _record(path, named, metadata, tensor, content))


def _content(path: Path) -> tuple[Tensor, Mapping[str, Any]]:
    if path.suffix == ".pkl":
        raise Unreadable("a plain pickle is never loaded")
    if path.suffix != ".pt":
        raise Unreadable("it is no .pt file")
    if path.stat().st_size == 0:
        raise Damaged("it is empty")
    try:
        content = load_torch(path)
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


def _record(
    path: Path,
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
    name = told("tensor_name", str, named.name if named else path.stem)
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
        tensor=Place(path.name, "tensor", ""),
        extra=plain(extra),
    )


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


class KnownDump(Dump):
    """A folder of the known collector. Its records have no hashes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, about(1, {"collector": "known"}))
        found: list[KnownFile] = []
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                if any(path.glob("*.pt")):
                    self.skipped.append(f"{path.name}: a folder of its own; name it instead")
                continue
            try:
                found.append(read_known(path))
            except Unreadable as error:
                self.skipped.append(f"{path.name}: {error}")
                if isinstance(error, Damaged):
                    self.damaged.append(self.skipped[-1])
        self._records = ordered(self._without_copies(found))
        ranks = {record.rank for record in self._records}
        self.about = replace(self.about, world_size=max(ranks, default=0) + 1)

    @staticmethod
    def is_one(folder: Path) -> bool:
        return any(path.suffix in (".pt", ".pkl") for path in folder.iterdir())

    def _without_copies(self, found: list[KnownFile]) -> list[KnownFile]:
        """One of those that are of the same moment, or byte by byte a copy under another name."""
        kept: dict[tuple[Any, ...], KnownFile] = {}
        sizes: dict[int, list[KnownFile]] = {}
        for each in sorted(found, key=lambda file: (file.named is None, file.path.name)):
            size = each.path.stat().st_size
            identity = each.place[:2], replace(each.record, tensor=None, extra={}, stats={})
            key: tuple[Any, ...] = (str(identity), each.record.extra.get("group"))
            original = kept.get(key) if each.named else None
            if each.named is None:
                key = (each.path.name,)
                same = (o for o in sizes.get(size, ()) if filecmp.cmp(o.path, each.path, False))
                original = next(same, None)
            if original is not None:
                self.skipped.append(f"{each.path.name}: a duplicate of {original.path.name}")
                continue
            kept[key] = each
            sizes.setdefault(size, []).append(each)
        return list(kept.values())

    @property
    def ranks(self) -> list[int]:
        return sorted({record.rank for record in self._records})

    @property
    def absent_ranks(self) -> list[int]:
        return []

    def state(self, rank: int) -> RankState:
        """The known collector does not say when it is done, nor what is missing."""
        count = sum(record.rank == rank for record in self._records)
        return RankState(rank, "not told", count)

    def records(self, **wanted: object) -> Iterator[Record]:
        asked = check_fields(wanted)
        yield from (record for record in self._records if is_wanted(record, asked))

    def tensor(self, record: Record, *, check: bool = True) -> Tensor:
        path = self.shard(record)
        if path is None:
            raise QgateError(f"of {record.title} the values were not kept.")
        try:
            tensor, _ = _content(path)
        except (Unreadable, OSError) as error:
            raise QgateError(f"{str(path)!r} cannot be read: {error}.") from None
        dtype = str(tensor.dtype).removeprefix("torch.")
        if check and (tuple(tensor.shape), dtype) != (record.shape, record.dtype):
            raise QgateError(f"{str(path)!r} has been changed: it holds {dtype} {[*tensor.shape]}.")
        return tensor

    def counts(self, record: Record, *, check: bool = True) -> dict[str, np.ndarray[Any, Any]]:  # noqa: ARG002
        raise QgateError(f"of {record.title} no counts were kept: {str(self.folder)!r} has none.")

    def shard(self, record: Record) -> Path | None:
        place = record.tensor
        if place is None or Path(place.file).name != place.file:
            return None
        return self.folder / place.file


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
