"""Torch files of a checkpoint, read weights-only: plain tensors, and weights of torchao."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from qgate.checkpoints.stored import Checkpoint, StoredEntry
from qgate.checkpoints.tensor_types import DTYPES
from qgate.checkpoints.torchao_weights import CONFIGURATION, TorchaoEntry
from qgate.checkpoints.wrong_files import (
    NO_WEIGHTS,
    SHARDS_OF_TWO,
    by_name,
    check_not_pointer,
    check_shards,
    reading,
)
from qgate.errors import QgateError, first_line
from qgate.storage.archives import flatten, load_torch
from qgate.storage.described_classes import DescribedTensor
from qgate.storage.folders import Folder
from qgate.storage.tensor_reading import torch_source
from qgate.text import one_line

LIBRARY = "torchao"
"""The library whose classes of tensors are read by name."""
HOLDERS = ("state_dict", "model_state_dict", "model", "module")
"""Names under which trainers store the weights beside their own state."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def open_torch(label: str, folder: Folder, names: list[str]) -> Checkpoint:
    """Open torch files of one folder as one checkpoint; those of this machine are mapped."""
    names = [name for name in names if name not in NO_WEIGHTS] or names
    if len(names) > 1:
        check_shards(label, names)
    described: dict[str, TorchaoEntry] = {}
    tensors: dict[str, Tensor] = {}

    def listed() -> Iterator[StoredEntry]:
        for file in names:
            for name, tensor in _tensors(folder, file, described):
                entry = _entry(name, file, tensor, str(folder.at(file)))
                tensors.setdefault(name, tensor)
                yield entry

    entries = by_name(label, listed(), SHARDS_OF_TWO)
    configuration: dict[str, object] = {CONFIGURATION: described} if described else {}
    return Checkpoint(label, entries, lambda entry: tensors[entry.name].contiguous(), configuration)


def _tensors(
    folder: Folder, file: str, described: dict[str, TorchaoEntry]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file by name; those of a described weight as its parts."""
    path = str(folder.at(file))
    for name, value in _state(_loaded(folder, file, path), path).items():
        if isinstance(value, DescribedTensor):
            parts = dict(value.parts())
            entry = TorchaoEntry(type(value).__name__, _attributes(value), tuple(parts))
            described[name] = entry
            yield from ((entry.part_names(name)[part], x) for part, x in parts.items())
        elif isinstance(value, Tensor):
            yield name, value


def _loaded(folder: Folder, file: str, path: str) -> object:
    check_not_pointer(folder, file)
    with reading(path):
        source = torch_source(folder, file)
        try:
            return load_torch(source, repr(path), dense=True, library=LIBRARY)
        except (QgateError, OSError):
            raise
        except Exception as error:
            raise QgateError(
                f"{path!r} cannot be read as tensors by name: {first_line(error)}. Save the "
                "model's state_dict() alone, by torch.save or as .safetensors."
            ) from None


def _state(loaded: object, path: str) -> Mapping[str, object]:
    """Return the tensors by name, which may stand beside the state of a trainer."""
    inner = loaded
    if isinstance(loaded, Mapping):
        holders = [loaded[key] for key in HOLDERS if isinstance(loaded.get(key), Mapping)]
        inner = holders[0] if holders else loaded
    named = dict(inner) if isinstance(inner, Mapping) else {}
    if not any(isinstance(x, Tensor) for x in named.values()):
        modules = {name: parts for name, parts in named.items() if isinstance(parts, Mapping)}
        named = {
            f"{module}.{name}": tensor
            for module, parts in modules.items()
            for name, tensor in _of_module(parts, path)
        }
    if not any(isinstance(x, Tensor) for x in named.values()):
        raise QgateError(
            f"{path!r} holds no tensors by name: save the model's state_dict() by torch.save."
        )
    return {str(name): value for name, value in named.items()}


def _of_module(parts: Mapping[str, object], path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one module, as HQQ keeps them; its numbers become tensors, too."""
    for name, value in flatten(parts, repr(path)):
        numbers = list(value) if isinstance(value, tuple) else [value]
        if isinstance(value, Tensor):
            yield name.removeprefix("meta."), value
        elif numbers and all(type(number) is int for number in numbers):
            yield name.removeprefix("meta."), torch.tensor(numbers)


def _entry(name: str, file: str, tensor: Tensor, path: str) -> StoredEntry:
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise QgateError(
            f"{path!r}: tensor {one_line(name)!r} is {tensor.dtype}, and {', '.join(DTYPES)} can "
            "be read."
        )
    size = tensor.numel() * tensor.element_size()
    return StoredEntry(name, file, dtype, tuple(tensor.shape), size)


def _attributes(weight: DescribedTensor) -> dict[str, object]:
    """Return what is stored beside the tensors of a weight, as heads of safetensors state it."""
    return {name: _stated(value) for name, value in vars(weight).items()}


def _stated(value: object) -> object:
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": str(value).removeprefix("torch.")}
    return list(value) if isinstance(value, tuple) else value
