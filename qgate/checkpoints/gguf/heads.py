"""Heads of GGUF files: what is said of the model, and where each tensor lies.

Everything is checked against the length of the file before it is believed, so that no number in a
head can make memory or time grow. Contents of arrays are passed over, but for the vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qgate.errors import QgateError
from qgate.text import one_line

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
WINDOW = 1 << 20
MOST_DIMENSIONS = 4
DEEPEST = 4
TEXT, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
"""How a value of each type is unpacked."""
LEAST_FIELD, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
"""Bytes that an entry has at least."""
MOST_FIELDS, MOST_TENSORS, LONGEST_TEXT = 1 << 16, 1 << 18, 1 << 16
"""Far more than models have; longer values are passed over."""
VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template")
MOST_TOKENS, LONGEST_TEMPLATE = 1 << 20, 1 << 20
"""Limits of the vocabulary; more is passed over."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as a head describes it: the rows come first in the shape, as in torch."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufHead:
    """The values that a head states, its tensors, and the byte at which data begins."""

    fields: dict[str, object]
    tensors: list[GgufTensor]
    start: int


class DamagedHeadError(ValueError):
    """A head that states what cannot be."""


class _HeadBytes:
    """Reads a head from the front; a window of the file is kept, not all of it."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self.size = read, size
        self.position = 0
        self._start, self._window = 0, b""

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise DamagedHeadError(f"its head ends after {self.size:,} bytes")
        first = self.position - self._start
        if first < 0 or first + count > len(self._window):
            self._start = self.position
            self._window = self._read(self._start, self._start + max(count, WINDOW))
            first = 0
        self.position += count
        part = self._window[first : first + count]
        if len(part) < count:
            raise DamagedHeadError(f"its head ends after {self._start + len(self._window):,} bytes")
        return part

    def skip(self, count: int) -> None:
        if count > self.left:
            raise DamagedHeadError(f"its head ends after {self.size:,} bytes")
        self.position += count

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def count(self, least: int, noun: str, most: int | None = None) -> int:
        """Read a number of entries that take at least so many bytes each."""
        count = self.number("<Q")
        if count * least > self.left or (most is not None and count > most):
            raise DamagedHeadError(f"its head states {count:,} {noun}")
        return count

    def new_name(self, names: set[str], verb: str) -> str:
        """Read a name that is not among those so far, and add it to them."""
        name = self.text()
        if name in names:
            raise DamagedHeadError(f"its head {verb} {one_line(name)!r} twice")
        names.add(name)
        return name

    def text(self) -> str:
        length = self.number("<Q")
        if length > LONGEST_TEXT:
            raise DamagedHeadError(f"its head states a name of {length:,} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise DamagedHeadError("its head holds a text that is not UTF-8") from None


def read_gguf_head(read: Callable[[int, int], bytes], size: int, path: str) -> GgufHead:
    """Read the head of a file of `size` bytes by `read(start, stop)`; the path is to be shown."""
    data = _HeadBytes(read, size)
    try:
        _check_kind(data, path)
        tensor_count = data.count(LEAST_TENSOR, "tensors", MOST_TENSORS)
        field_count = data.count(LEAST_FIELD, "fields", MOST_FIELDS)
        fields = dict(_fields(data, field_count))
        tensors = list(_tensors(data, tensor_count))
        step = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise DamagedHeadError(f"its alignment is {step!r}")
    except (DamagedHeadError, struct.error) as error:
        raise QgateError(f"{path!r} is damaged: {error}. Download it again.") from None
    return GgufHead(fields, tensors, -(-data.position // step) * step)


def _check_kind(data: _HeadBytes, path: str) -> None:
    """Refuse files that are no GGUF, or of a version that nobody writes."""
    if data.size < len(MAGIC) + 4 or data.take(len(MAGIC)) != MAGIC:
        data.position = 0
        if data.take(min(19, data.size)).startswith(b"version https://git"):
            raise QgateError(
                f"{path!r} is a pointer of Git LFS, not the tensors; run `git lfs pull`."
            )
        raise QgateError(f"{path!r} is damaged or no .gguf file.")
    version = data.number("<I")
    if version and not version & 0xFFFF:
        raise QgateError(f"{path!r} is big-endian; little-endian GGUF files can be read.")
    if version not in VERSIONS:
        raise QgateError(f"{path!r} is GGUF version {version}; versions 2 and 3 can be read.")


def _fields(data: _HeadBytes, count: int) -> Iterator[tuple[str, object]]:
    names: set[str] = set()
    for _ in range(count):
        name = data.new_name(names, "states")
        value = _value(data, data.number("<I"), 0, is_kept=name in VOCABULARY)
        if value is not None:
            yield name, value


def _value(data: _HeadBytes, kind: int, depth: int, *, is_kept: bool = False) -> object:
    """Read a single value, or texts to keep; pass over others, and return None."""
    if kind == TEXT:
        length = data.number("<Q")
        if length > (LONGEST_TEMPLATE if is_kept else LONGEST_TEXT):
            data.skip(length)
            return None
        return data.take(length).decode(errors="replace")
    if kind != ARRAY:
        if kind not in SCALARS:
            raise DamagedHeadError(f"its head has a value of type {kind}")
        return data.number(SCALARS[kind])
    if depth == DEEPEST:
        raise DamagedHeadError(f"its head has arrays in arrays, {DEEPEST} deep")
    inner = data.number("<I")
    if inner in SCALARS:
        width = struct.calcsize(SCALARS[inner])
        data.skip(data.count(width, "numbers") * width)
        return None
    count = data.count(8 if inner == TEXT else 12, "values of an array")
    if is_kept and inner == TEXT and count <= MOST_TOKENS:
        return [data.take(data.number("<Q")).decode(errors="replace") for _ in range(count)]
    for _ in range(count):
        if inner == TEXT:
            data.skip(data.number("<Q"))
        else:
            _value(data, inner, depth + 1)
    return None


def _tensors(data: _HeadBytes, count: int) -> Iterator[GgufTensor]:
    names: set[str] = set()
    for _ in range(count):
        name = data.new_name(names, "describes")
        dimensions = data.number("<I")
        if dimensions > MOST_DIMENSIONS:
            raise DamagedHeadError(f"{one_line(name)!r} has {dimensions:,} dimensions")
        lengths = [data.number("<Q") for _ in range(dimensions)]
        kind, offset = data.number("<I"), data.number("<Q")
        yield GgufTensor(name, kind, tuple(reversed(lengths)), offset)
