"""Safetensors files that grow tensor by tensor, and hold nothing of a tensor but its own bytes.

A file has room for its header reserved in front, is written under a temporary name, and gets its
own when it is whole: memory does not grow with it, and what is there under that name is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from qgate.dumps.layout import unfinished_name
from qgate.errors import QgateError

Array = np.ndarray[Any, Any]

CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
HEADER = 1 << 15
"""Bytes that the head of a file takes at least, with its length."""
ALIGNED = 8
RAW = "raw."
"""Before a key in a file's metadata: of what dtype and shape the bytes under it are."""


@dataclass(frozen=True)
class Block:
    """The bytes of one tensor, and how to read them."""

    data: memoryview
    dtype: str
    shape: tuple[int, ...]

    def update(self, digest: Any) -> None:
        digest.update(self.data)

    @property
    def digest(self) -> str:
        """128 bits of XXH3, which reads as fast as memory: it proves that nothing went wrong, and
        no more than an index beside the file could prove."""
        return xxhash.xxh3_128(self.data).hexdigest()

    def hashed(self, like: str) -> str:
        """The hash of the kind that `like` is."""
        hashing = _hashing(like)
        hashing.update(self.data)
        return str(hashing.hexdigest())

    def entry(self, start: int) -> tuple[dict[str, Any], str | None]:
        """Its place in a header, and what the metadata say where safetensors lacks the dtype."""
        offsets = [start, start + len(self.data)]
        code = CODES.get(self.dtype)
        if code is not None:
            return {"dtype": code, "shape": list(self.shape), "data_offsets": offsets}, None
        raw = {"dtype": "U8", "shape": [len(self.data)], "data_offsets": offsets}
        return raw, json.dumps([self.dtype, list(self.shape)])


def block_of(tensor: Tensor) -> Block:
    """The values of a tensor as they lie in memory, in order; a view does not bring its storage."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else str(tensor.device.type)
        raise QgateError(
            f"a dump takes dense tensors with values, not {tensor.layout} on {kind}: give it "
            "`tensor.to_dense()`, or what the tensor holds."
        )
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    with torch.no_grad():
        held = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = held.reshape(-1).view(torch.uint8)
    return Block(flat.numpy().data, dtype, shape)


def block_of_array(array: Array) -> Block:
    """As `block_of`, of numbers in numpy."""
    if array.dtype.kind not in "fiub" or array.dtype.name not in CODES:
        raise QgateError(f"a dump takes arrays of numbers, not of {array.dtype}.")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return Block(little.reshape(-1).view(np.uint8).data, array.dtype.name, array.shape)


def _hashing(like: str) -> Any:
    """What makes hashes as long as this one; those of dumps of version 1 are SHA-256."""
    return hashlib.sha256() if len(like) == 64 else xxhash.xxh3_128()


def digest_of(blocks: Mapping[str, Block], like: str = "") -> str:
    """One hash of several arrays with their names, dtypes and shapes, as `like` is one."""
    digest = _hashing(like)
    for name in sorted(blocks):
        block = blocks[name]
        digest.update(json.dumps([name, block.dtype, list(block.shape)]).encode())
        block.update(digest)
    return str(digest.hexdigest())


class ShardWriter:
    """One file under a temporary name; `finish` gives it its own, and hands it on where it is not
    to stay."""

    def __init__(
        self,
        path: Path,
        first: Mapping[str, Block],
        hand_on: Callable[[Path], None] | None = None,
    ) -> None:
        self.path = path
        self._hand_on = hand_on
        self._part = path.with_name(unfinished_name(path.name))
        self._entries: dict[str, Any] = {}
        self._raw: dict[str, str] = {}
        self._header = max(HEADER, -(-2 * self._length(first) // HEADER) * HEADER) - 8
        self._told = 64
        self.size = 0
        self._handle = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.lseek(self._handle, 8 + self._header, os.SEEK_SET)

    @staticmethod
    def _length(blocks: Mapping[str, Block]) -> int:
        """Bytes that blocks take in a header, at most."""
        return sum(400 + 2 * len(key) + 44 * len(block.shape) for key, block in blocks.items())

    def fits(self, blocks: Mapping[str, Block]) -> bool:
        return self._told + self._length(blocks) <= self._header

    def add(self, blocks: Mapping[str, Block]) -> None:
        for key, block in blocks.items():
            rest = -self.size % ALIGNED
            if rest:
                self._put(f"pad.{key}", Block(memoryview(bytes(rest)), "uint8", (rest,)))
            self._put(key, block)
        self._told += self._length(blocks)

    def _put(self, key: str, block: Block) -> None:
        entry, raw = block.entry(self.size)
        write_all(self._handle, block.data)
        self.size += len(block.data)
        self._entries[key] = entry
        if raw is not None:
            self._raw[RAW + key] = raw

    def finish(self) -> None:
        """Complete the header; from here on the file is there."""
        entries = {"__metadata__": self._raw, **self._entries} if self._raw else self._entries
        text = json.dumps(entries, separators=(",", ":")).encode().ljust(self._header)
        os.lseek(self._handle, 0, os.SEEK_SET)
        write_all(self._handle, memoryview(self._header.to_bytes(8, "little") + text))
        handle, self._handle = self._handle, -1
        os.close(handle)
        self._part.replace(self.path)
        if self._hand_on is not None:
            self._hand_on(self.path)

    def discard(self) -> None:
        """Nothing of it is left; the disk has its room back."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = -1
        for path in (self._part, self.path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def write_all(handle: int, data: memoryview) -> None:
    """All of it: a system writes at most 2 GB at once, and less where it likes."""
    while data:
        data = data[os.write(handle, data) :]
