"""Weight files of a checkpoint folder: all names and shapes first, then tensors one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qgate.errors import QgateError
from qgate.storage.archives import load_torch
from qgate.storage.foreign import foreign_path, open_foreign, read_foreign

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CheckpointShard:
    """A file of weights: the shapes in it, by the names of our network, and its reader."""

    path: Path
    shapes: dict[str, Shape]
    read: Callable[[str], Tensor]

    def float32(self, name: str) -> Tensor:
        """Return a copy of a tensor, so that the file can be closed."""
        try:
            tensor = self.read(name)
        except Exception as error:
            raise _unreadable(self.path, error) from None
        if tensor.dtype not in _FLOATS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
            raise QgateError(
                f"tensor {name!r} in {str(self.path)!r} is {tensor.dtype}; {allowed} can be "
                "loaded. Give the folder of the weights before quantization."
            )
        return tensor.to(torch.float32, copy=True)


def open_shards(folder: Path) -> list[CheckpointShard]:
    """Open the weight files of a folder: one, or all files of an index."""
    for file in WEIGHTS:
        if (folder / file).is_file():
            return [_open(folder / file)]
        index = folder / f"{file}.index.json"
        if index.is_file():
            return [_open(path) for path in _indexed(index)]
    raise QgateError(
        f"{str(folder)!r} has no weights; it needs one of {', '.join(WEIGHTS)}, or the shards of "
        "one and its .index.json. Copy them next to config.json."
    )


def _indexed(index: Path) -> list[Path]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise QgateError(f"{str(index)!r} names no shards: it has no weight_map. Copy it again.")
    files = sorted({str(file) for file in named.values()})
    for file in files:
        if Path(file).name != file or not (index.parent / file).is_file():
            raise QgateError(
                f"{str(index)!r} names the shard {file!r}, which is not in the folder. Copy it "
                f"there; in all it names {', '.join(files[:3])}{', …' * (len(files) > 3)}."
            )
    return [index.parent / file for file in files]


def _open(path: Path) -> CheckpointShard:
    try:
        with open_foreign(path, "checkpoints", None) as file:
            if file.read(23) == b"version https://git-lfs":
                raise QgateError(
                    f"{str(path)!r} is a Git LFS pointer, not the weights; get them: git lfs pull."
                )
        return _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    except (QgateError, PermissionError):
        raise
    except Exception as error:
        raise _unreadable(path, error) from None


def _safetensors(path: Path) -> CheckpointShard:
    file: Any = safe_open(foreign_path(path, "checkpoints"), framework="pt", device="cpu")
    stored = {_ours(name): name for name in file.keys()}  # noqa: SIM118
    shapes = {ours: tuple(file.get_slice(name).get_shape()) for ours, name in stored.items()}
    return CheckpointShard(path, shapes, lambda name: file.get_tensor(stored[name]))


def _pickled(path: Path) -> CheckpointShard:
    loaded = load_torch(path, dense=True)
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise QgateError(
            f"{str(path)!r} does not hold tensors by name; save the model's state_dict() alone."
        )
    tensors = {_ours(str(name)): tensor for name, tensor in loaded.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return CheckpointShard(path, shapes, tensors.pop)


def _ours(name: str) -> str:
    """Add the s of embeddings, which state-spaces and early conversions omit."""
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def _unreadable(path: Path, error: Exception) -> QgateError:
    if type(error).__name__ == "UnpicklingError":
        return QgateError(
            f"{str(path)!r} holds more than tensors, or is no .bin file, and would have to run "
            "code to be read; that is refused. Save the weights as model.safetensors."
        )
    text = str(error).strip().partition("\n")[0].rstrip(".")[:160]
    detail = f" ({text})" if len(text) > 8 else ""
    return QgateError(
        f"{str(path)!r} cannot be read; it is damaged or cut short{detail}. Copy it again."
    )


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON file that holds an object."""
    try:
        raw = json.loads(read_foreign(path, "checkpoints"))
    except FileNotFoundError:
        raise QgateError(f"there is no {str(path)!r}; a checkpoint folder has one.") from None
    except (ValueError, RecursionError) as error:
        raise QgateError(
            f"{str(path)!r} is not JSON: {error}. Copy it again from where the checkpoint is from."
        ) from None
    if not isinstance(raw, dict):
        raise QgateError(
            f"{str(path)!r} holds a {type(raw).__name__}, not a JSON object. Copy it again."
        )
    return raw
