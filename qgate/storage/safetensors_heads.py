"""The head of a safetensors file: names of tensors, and positions of their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypedDict

from qgate.errors import QgateError
from qgate.records import Meta
from qgate.storage.foreign import MOST_NAMES

_LONGEST = 100 << 20
Length = Annotated[int, Meta(ge=0)]


class NoHeadError(ValueError):
    """A file has no safetensors head."""


class TensorHead(TypedDict):
    """One tensor of a file: the name of its dtype, and where its bytes begin and end."""

    dtype: str
    shape: list[Length]
    data_offsets: Annotated[list[Length], Meta(min_length=2, max_length=2)]


@dataclass(frozen=True)
class Head:
    """Entries by name, with offsets from `start`, the byte at which the data begins."""

    entries: dict[str, TensorHead]
    metadata: dict[str, str]
    start: int


def read_head(read: Callable[[int, int], bytes], first: int) -> Head:
    """Read the head by `read(start, stop)`, starting with `first` bytes.

    A head that lists too many tensors is a QgateError, which does not name the file.
    """
    data = read(0, first)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= _LONGEST:
        raise NoHeadError("it has no head")
    start = 8 + length
    if len(data) < start:
        data += read(len(data), start)
    count = data.count(b'"data_offsets"', 8, start)
    if count > MOST_NAMES:
        raise QgateError(f"it lists {count} tensors, and {MOST_NAMES} are read; save fewer in it.")
    entries = json.loads(data[8:start])
    if not isinstance(entries, dict):
        raise NoHeadError("it has no head")
    return Head(entries, entries.pop("__metadata__", {}), start)


def write_head(entries: Mapping[str, object]) -> bytes:
    """Return the bytes of a head with these entries, without padding."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text
