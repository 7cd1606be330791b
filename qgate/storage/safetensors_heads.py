"""The head of a safetensors file: names of tensors, and positions of their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

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


class HeadEntries(Mapping[str, TensorHead]):
    """Entries of a head, which are read when they are asked for: a head may have 200,000."""

    def __init__(self, texts: Mapping[str, Any]) -> None:
        self._texts = texts

    def __getitem__(self, name: str) -> TensorHead:
        import msgspec

        try:
            entry: TensorHead = msgspec.json.decode(self._texts[name])
        except msgspec.DecodeError as error:
            raise NoHeadError(str(error)) from None
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@dataclass(frozen=True)
class Head:
    """Entries by name, with offsets from `start`, the byte at which the data begins."""

    entries: HeadEntries
    metadata: dict[str, str]
    start: int


def read_head(read: Callable[[int, int], bytes], first: int) -> Head:
    """Read the head by `read(start, stop)`, starting with `first` bytes.

    A head that lists too many tensors is a QgateError, which does not name the file.
    """
    import msgspec

    data = read(0, first)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= _LONGEST:
        raise NoHeadError("it has no head")
    start = 8 + length
    if len(data) < start:
        data += read(len(data), start)
    data = data[8:start]
    count = data.count(b'"data_offsets"')
    if count > MOST_NAMES:
        raise QgateError(f"it lists {count} tensors, and {MOST_NAMES} are read; save fewer in it.")
    try:
        texts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(texts.pop("__metadata__", b"{}"))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise NoHeadError("it has no head") from None
    return Head(HeadEntries(texts), metadata, start)


def write_head(entries: Mapping[str, object]) -> bytes:
    """Return the bytes of a head with these entries, without padding."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text
