"""Reading shards: mapped and not copied, from inside the folder of their rank, proved by hash."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from qgate.dumps.layout import SHARD
from qgate.dumps.records import Place, Record
from qgate.dumps.shards import RAW, block_of, block_of_array, digest_of
from qgate.errors import QgateError

Array = np.ndarray[Any, Any]
_OPEN_AT_ONCE = 8
_REMEDY = "`qgate dumps verify` lists all that is damaged"


class ShardReader:
    """The shards of one rank; some of them stay open."""

    def __init__(self, root: Path, home: Path) -> None:
        self._root, self._home = root, home
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Any] = OrderedDict()

    def path(self, place: Place) -> Path:
        """Where a shard is; a name that leads out of the dump is refused."""
        path = self._home / place.file
        if not SHARD.fullmatch(place.file):
            raise QgateError(
                f"an index in {str(self._home)!r} names the file {place.file[:80]!r}, which is "
                "none of a dump: it is refused."
            )
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise QgateError(f"{str(path)!r} leads out of the dump: it is refused.")
        if not path.is_file():
            raise QgateError(f"{str(path)!r} is missing, and the index names it; {_REMEDY}.")
        return path

    def tensor(self, record: Record, *, check: bool) -> Tensor:
        place = record.tensor
        if place is None:
            raise QgateError(f"of {record.title} only a summary was kept, not the values.")
        path, file = self._file(place)
        try:
            found = _shaped(
                file.get_tensor(place.key), (file.metadata() or {}).get(RAW + place.key)
            )
        except Exception as error:
            raise _damaged(path, record, error) from None
        shape, dtype = tuple(found.shape), str(found.dtype).removeprefix("torch.")
        if (shape, dtype) != (record.shape, record.dtype):
            raise QgateError(
                f"{str(path)!r} holds {dtype} {list(shape)} for {record.title}, and the index says "
                f"{record.dtype} {list(record.shape)}; {_REMEDY}."
            )
        if check and block_of(found).digest != place.digest:
            raise _changed(path, record)
        return found

    def counts(self, record: Record, *, check: bool) -> dict[str, Array]:
        place = record.counts
        if place is None:
            raise QgateError(f"of {record.title} no counts were kept.")
        path, file = self._file(place)
        prefix = f"{place.key}."
        try:
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
            found = {key.removeprefix(prefix): file.get_tensor(key).numpy() for key in names}
        except Exception as error:
            raise _damaged(path, record, error) from None
        blocks = {name: block_of_array(array) for name, array in found.items()}
        if not found or (check and digest_of(blocks) != place.digest):
            raise _changed(path, record)
        return found

    def _file(self, place: Place) -> tuple[Path, Any]:
        path = self.path(place)
        with self._lock:
            if place.file not in self._open:
                try:
                    self._open[place.file] = safe_open(path, framework="pt")
                except Exception as error:
                    raise QgateError(
                        f"{str(path)!r} is truncated or damaged ({error}); {_REMEDY}."
                    ) from None
            self._open.move_to_end(place.file)
            while len(self._open) > _OPEN_AT_ONCE:
                self._open.popitem(last=False)
            return path, self._open[place.file]


def _shaped(found: Tensor, raw: str | None) -> Tensor:
    """Bytes of a dtype that safetensors does not have, as that dtype again."""
    if raw is None:
        return found
    name, shape = json.loads(raw)
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found.view(dtype).reshape(shape)


def _damaged(path: Path, record: Record, error: Exception) -> QgateError:
    why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return QgateError(f"{str(path)!r}: {record.title} cannot be read ({why}); {_REMEDY}.")


def _changed(path: Path, record: Record) -> QgateError:
    return QgateError(
        f"{str(path)!r}: the values of {record.title} are not those that were written; {_REMEDY}."
    )
