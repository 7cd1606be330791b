"""Open a checkpoint: its tensors by name over all shards, and its configuration.

Only heads are read; a tensor is read when it is asked for. Nothing in a file is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, TypedDict

from safetensors import SafetensorError

from qgate.errors import QgateError, first_line
from qgate.records.validating import Meta, validate
from qgate.storage.access import folder_of
from qgate.storage.folders import Folder, files_in
from qgate.storage.locations import user_location
from qgate.storage.safetensors_heads import Head, NoHeadError, read_head
from qgate.storage.tensor_reading import TensorFile, open_tensors
from qgate.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

FIRST = 1 << 16
POINTER = b"version https://git-lfs"
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
CONFIGURATIONS = ("config.json", "hf_quant_config.json", "quantize_config.json")


Length = Annotated[int, Meta(ge=0)]


class HeadEntry(TypedDict):
    """A tensor as the head of a safetensors file describes it."""

    dtype: str
    shape: list[Length]
    data_offsets: Annotated[list[Length], Meta(min_length=2, max_length=2)]


@dataclass(frozen=True)
class StoredEntry:
    """One tensor of a file, as its head describes it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass
class Checkpoint:
    """The tensors of one checkpoint and what its configuration says."""

    label: str
    folder: Folder
    entries: dict[str, StoredEntry]
    configuration: dict[str, object] = field(default_factory=dict)
    _open: tuple[str, TensorFile] | None = field(default=None, repr=False)

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor; the file that was read last stays open."""
        entry = self.entries[name]
        try:
            if self._open is None or self._open[0] != entry.file:
                self._open = (entry.file, open_tensors(self.folder, entry.file, FIRST))
            return self._open[1].get_tensor(name)
        except (SafetensorError, ValueError, OSError, RuntimeError) as error:
            raise QgateError(
                f"{str(self.folder.at(entry.file))!r}: tensor {name!r} cannot be read: "
                f"{first_line(error)}."
            ) from None


def open_checkpoint(spec: str) -> Checkpoint:
    """Open a folder of safetensors shards, or one such file, at a path or URL."""
    location = user_location(spec)
    if str(spec).endswith(".safetensors"):
        folder, names = folder_of(location.parent), [location.name]
        if folder.stamp(location.name) is None:
            raise QgateError(f"there is no file {spec!r}.")
    else:
        folder = folder_of(location)
        if folder.kind() != "folder":
            what = "a file that is not .safetensors" if folder.kind() == "file" else "not there"
            raise QgateError(
                f"{spec!r} is {what}; give a folder with .safetensors files, or one such file."
            )
        names = [name for name in files_in(folder) if name.endswith(".safetensors")]
        if not names:
            raise QgateError(f"{spec!r} has no .safetensors file.")
        _check_shards(spec, names)
    entries: dict[str, StoredEntry] = {}
    for name in names:
        for entry in _entries(folder, name):
            if entry.name in entries:
                raise QgateError(
                    f"{spec!r}: {entry.name!r} is in {entries[entry.name].file!r} and in {name!r}: "
                    "shards of two exports lie in one folder. Remove those of one."
                )
            entries[entry.name] = entry
    configuration = {
        name: _configuration(folder, name)
        for name in CONFIGURATIONS
        if folder.stamp(name) is not None
    }
    return Checkpoint(spec, folder, entries, configuration)


def _check_shards(spec: str, names: list[str]) -> None:
    """Refuse folders in which a shard is missing, or shards of two exports lie."""
    counts: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := SHARD.fullmatch(name):
            key = match["stem"], int(match["count"])
            counts.setdefault(key, set()).add(int(match["number"]))
    if len(counts) > 1:
        listed = " and ".join(f"{stem!r} in {count} parts" for stem, count in sorted(counts))
        raise QgateError(
            f"{spec!r} holds shards of two exports: {listed}. Remove those of one, or name a file."
        )
    for (stem, count), numbers in counts.items():
        missing = sorted(set(range(1, count + 1)) - numbers)
        if missing:
            first = f"{stem}-{missing[0]:05}-of-{count:05}.safetensors"
            raise QgateError(
                f"{spec!r} lacks {len(missing)} of {count} shards, first {first!r}. Download it "
                "again."
            )


def _entries(folder: Folder, name: str) -> Iterator[StoredEntry]:
    """Read the head of one shard, and check that the file is as long as it says."""
    path = str(folder.at(name))
    stamp = folder.stamp(name)
    head = _head(folder, name, path)
    end = head.start
    for key, entry in head.entries.items():
        try:
            validate(entry, HeadEntry)
        except ValueError as error:
            raise QgateError(
                f"{path!r} is damaged: its head describes {one_line(key)!r} wrongly ({error})."
            ) from None
        first, last = entry["data_offsets"]
        end = max(end, head.start + last)
        yield StoredEntry(key, name, entry["dtype"], tuple(entry["shape"]), last - first)
    if stamp is not None and stamp.size < end:
        raise QgateError(
            f"{path!r} is cut off: it has {stamp.size:,} of {end:,} bytes. Download it again."
        )


def _head(folder: Folder, name: str, path: str) -> Head:
    try:
        return read_head(lambda start, stop: folder.read(name, start, stop), FIRST)
    except PermissionError:
        raise QgateError(f"{path!r} cannot be read: permission denied.") from None
    except (NoHeadError, ValueError, AttributeError, RecursionError):
        if folder.read(name, 0, len(POINTER)) == POINTER:
            raise QgateError(
                f"{path!r} is a pointer of Git LFS, not the tensors; run `git lfs pull`."
            ) from None
        raise QgateError(f"{path!r} is damaged or no .safetensors file.") from None


def _configuration(folder: Folder, name: str) -> object:
    try:
        return json.loads(folder.read(name))
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{str(folder.at(name))!r} is no JSON: {first_line(error)}.") from None
