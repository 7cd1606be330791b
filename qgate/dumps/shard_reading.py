"""Reading shards from inside the folder of their rank, proved by hash.

Files of this machine are mapped and not copied; of others the bytes of a tensor are read.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from qgate.dumps.layout import SHARD
from qgate.dumps.ranged_shards import RangedShard
from qgate.dumps.records import Record, StoredValues
from qgate.dumps.shards import RAW, block_of, block_of_array, digest_of
from qgate.errors import QgateError
from qgate.storage import places
from qgate.storage.folders import Folder

Array = np.ndarray[Any, Any]
_OPEN_AT_ONCE, _HEADS = 8, 16
_REMEDY = "`qgate dumps verify` lists all that is damaged"


class ShardReader:
    """The shards of one rank; some of them stay open."""

    def __init__(self, files: Folder, home: Folder) -> None:
        self._files, self._home = files, home
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._most = _HEADS if home.path is None else _OPEN_AT_ONCE

    def path(self, place: StoredValues) -> places.Place:
        """Where a shard is; a name that leads out of the dump is refused."""
        path = self._home.at(place.file)
        if not SHARD.fullmatch(place.file):
            raise QgateError(
                f"an index in {str(self._home.place)!r} names the file {place.file[:80]!r}, which "
                "is none of a dump: it is refused."
            )
        root, here = self._files.path, self._home.path
        if root is not None and here is not None:
            if not (here / place.file).resolve().is_relative_to(root.resolve()):
                raise QgateError(f"{str(path)!r} leads out of the dump: it is refused.")
            is_there = (here / place.file).is_file()
        else:
            is_there = self._home.stamp(place.file) is not None
        if not is_there:
            raise QgateError(f"{str(path)!r} is missing, and the index names it; {_REMEDY}.")
        return path

    def tensor(self, record: Record, *, check: bool) -> Tensor:
        place = _place_of(record)
        path, file = self._file(place)
        try:
            found = _shaped(
                file.get_tensor(place.key), (file.metadata() or {}).get(RAW + place.key)
            )
        except QgateError:  # of a store that cannot be reached
            raise
        except Exception as error:
            raise _damaged(path, record, error) from None
        shape, dtype = tuple(found.shape), str(found.dtype).removeprefix("torch.")
        if (shape, dtype) != (record.shape, record.dtype):
            raise QgateError(
                f"{str(path)!r} holds {dtype} {list(shape)} for {record.title}, and the index says "
                f"{record.dtype} {list(record.shape)}; {_REMEDY}."
            )
        if check and block_of(found).hashed(place.digest) != place.digest:
            raise _changed(path, record)
        return found

    def beginning(self, record: Record, elements: int) -> Tensor:
        """The first elements, flat; of a file that is not here no more is read."""
        place = _place_of(record)
        path, file = self._file(place)
        if not isinstance(file, RangedShard):
            return self.tensor(record, check=False).reshape(-1)[:elements]
        dtype = getattr(torch, record.dtype, None)
        try:
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{record.dtype} is no dtype")
            found = file.beginning(place.key, elements * dtype.itemsize)
            return found if found.dtype == dtype else found.view(dtype)
        except QgateError:  # of a store that cannot be reached
            raise
        except Exception as error:
            raise _damaged(path, record, error) from None

    def counts(self, record: Record, *, check: bool) -> dict[str, Array]:
        place = record.counts
        if place is None:
            raise QgateError(f"of {record.title} no counts were kept.")
        path, file = self._file(place)
        prefix = f"{place.key}."
        try:
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
            found = {key.removeprefix(prefix): file.get_tensor(key).numpy() for key in names}
        except QgateError:  # of a store that cannot be reached
            raise
        except Exception as error:
            raise _damaged(path, record, error) from None
        blocks = {name: block_of_array(array) for name, array in found.items()}
        if not found or (check and digest_of(blocks, place.digest) != place.digest):
            raise _changed(path, record)
        return found

    def _file(self, place: StoredValues) -> tuple[places.Place, Any]:
        path = self.path(place)
        with self._lock:
            if place.file not in self._open:
                try:
                    self._open[place.file] = _opened(self._home, place.file)
                except QgateError:  # of a store that cannot be reached
                    raise
                except Exception as error:
                    raise QgateError(
                        f"{str(path)!r} is truncated or damaged ({error}); {_REMEDY}."
                    ) from None
            self._open.move_to_end(place.file)
            while len(self._open) > self._most:
                self._open.popitem(last=False)
            return path, self._open[place.file]


def _opened(home: Folder, name: str) -> Any:
    if home.path is None:
        return RangedShard(home, name)
    return safe_open(home.path / name, framework="pt")


def _place_of(record: Record) -> StoredValues:
    if record.tensor is None:
        raise QgateError(f"of {record.title} only a summary was kept, not the values.")
    return record.tensor


def _shaped(found: Tensor, raw: str | None) -> Tensor:
    """Bytes of a dtype that safetensors does not have, as that dtype again."""
    if raw is None:
        return found
    name, shape = json.loads(raw)
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found.view(dtype).reshape(shape)


def _damaged(path: places.Place, record: Record, error: Exception) -> QgateError:
    why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return QgateError(f"{str(path)!r}: {record.title} cannot be read ({why}); {_REMEDY}.")


def _changed(path: places.Place, record: Record) -> QgateError:
    return QgateError(
        f"{str(path)!r}: the values of {record.title} are not those that were written; {_REMEDY}."
    )
