"""Rows of token ids from files; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.errors import QgateError, first_line
from qgate.models.samples.text_files import check_file
from qgate.storage.archives import flatten, load_torch
from qgate.storage.foreign import foreign_size
from qgate.storage.tensor_reading import open_safetensors, read_npy


def read_token_rows(path: Path) -> tuple[list[Tensor], int]:
    """Read the rows of a file, and count the ids that were cut off as padding.

    A row ends where only negative ids follow; a negative id before that is an error.
    """
    check_file(path)
    rows: list[Tensor] = []
    cut = count = 0
    most = max(1 << 20, 16 * path.stat().st_size)
    for name, tensor in _tensors(path):
        count += tensor.numel()
        if count > most:
            raise QgateError(f"{str(path)!r} repeats its ids to more than {most}; save each once.")
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise QgateError(
                f"{name} is of {str(tensor.dtype).removeprefix('torch.')}, but token ids are "
                "whole numbers."
            )
        if tensor.dim() not in (1, 2):
            raise QgateError(
                f"{name} has the shape {tuple(tensor.shape)}; token ids are one row (tokens) or "
                "several (rows, tokens)."
            )
        for row in tensor.to(torch.int64).reshape(tensor.shape[:-1].numel(), tensor.shape[-1]):
            real = (row >= 0).nonzero()
            ids = row[: int(real[-1]) + 1] if len(real) else row[:0]
            if bool((ids < 0).any()):
                position = int((ids < 0).nonzero()[0])
                raise QgateError(
                    f"{name} has the id {int(ids[position])} at position {position} of row "
                    f"{len(rows)}; ids are from 0, and negative ones are padding at the end of a "
                    "row only."
                )
            cut += len(row) - len(ids)
            rows.append(ids)
    if not any(len(row) for row in rows):
        raise QgateError(f"{str(path)!r} has no token ids: {len(rows)} rows, all empty.")
    return rows, cut


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    kind = path.suffix.lower()
    readers = {
        ".npy": _numpy,
        ".pt": _torch,
        ".pth": _torch,
        ".safetensors": _safetensors,
    }
    if kind not in readers:
        raise QgateError(f"{str(path)!r}: token ids are read from {', '.join(readers)} files.")
    try:
        if foreign_size(path, "token ids") == 0:
            raise QgateError(f"{str(path)!r} is an empty file.")
        loaded = readers[kind](path)
    except QgateError:
        raise
    except Exception as error:
        objects = any(word in str(error) for word in ("allow_pickle", "Python objects"))
        if type(error).__name__ == "UnpicklingError" or objects:
            raise QgateError(
                f"{str(path)!r} holds more than numbers, or is damaged, and would have to run code "
                "to be read; that is refused. Save the ids alone."
            ) from None
        raise QgateError(
            f"{str(path)!r} cannot be read; it is damaged or no {kind} file ({first_line(error)})."
        ) from None
    yield from _flat(str(path), loaded)


def _flat(name: str, loaded: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a list or table; rows may have different lengths."""
    if isinstance(loaded, Tensor):
        yield repr(name), loaded
    elif isinstance(loaded, Mapping | list | tuple):
        items = loaded.items() if isinstance(loaded, Mapping) else enumerate(loaded)
        if isinstance(loaded, list) and loaded and all(type(k) is int for k in loaded):
            yield repr(name), torch.tensor(loaded)
            return
        for key, value in items:
            yield from _flat(f"{name}:{key}", value)
    else:
        raise QgateError(f"{name!r} is {type(loaded).__name__}, not token ids.")


def _numpy(path: Path) -> Tensor:
    array = read_npy(path)
    if array.dtype.kind not in "iu":
        raise QgateError(f"{str(path)!r} is of {array.dtype}, but token ids are whole numbers.")
    return torch.from_numpy(array.astype(np.int64))


def _torch(path: Path) -> Any:
    loaded = load_torch(path, dense=True)
    list(flatten(loaded, repr(str(path))))
    return loaded


def _safetensors(path: Path) -> Any:
    with open_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}
