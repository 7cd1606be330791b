"""Records, dumps and files of megatron-tensor-saver, made for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgate.dumps import DumpWriter, Record
from qgate.dumps.tensor_saver_names import TensorFileName

STAMP = "20250908_092156"


def record(order: int = 0, **told: Any) -> Record:
    defaults: dict[str, Any] = {
        "layer_type": "linear",
        "operation": "forward",
        "phase": "pre",
        "component": "linear",
        "name": "input",
        "layer": 0,
        "iteration": 0,
    }
    return Record(order=order, **{**defaults, **told})


def write(
    folder: Path, tensors: Sequence[Tensor], *, rank: int = 0, start: int = 0, **settings: Any
) -> list[Record]:
    """A dump of one rank, a record per tensor in its own module."""
    fields = settings.pop("told", {})
    with DumpWriter(folder, rank=rank, **settings) as writer:
        world = writer.world_size
        return [
            writer.add(
                record(start + i, rank=rank, world_size=world, module=f"m{i}", **fields), tensor
            )
            for i, tensor in enumerate(tensors)
        ]


def known(
    folder: Path,
    tensor: Tensor,
    *,
    zipped: bool = True,
    metadata: dict[str, Any] | None = None,
    timestamp: str = STAMP,
    **parts: Any,
) -> Path:
    """A file as megatron-tensor-saver leaves it; the metadata repeat the name unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    base: dict[str, Any] = {
        "layer_type": "linear",
        "operation": "forward",
        "quant_type": "mxfp8",
        "name": "input",
        "layer": 0,
    }
    name = TensorFileName(timestamp=timestamp, **{**base, **parts})
    name_fields = {
        "layer_type": name.layer_type,
        "operation": name.operation,
        "quant_type": name.quant_type,
        "tensor_name": name.name,
        "layer_idx": name.layer,
        "phase": name.phase,
        "component": name.component,
        "save_time": "2025-09-08 09:21:56",
        "rank": name.rank,
        "iteration": name.iteration,
        "sample_idx": name.sample,
    }
    content = {
        "tensor": tensor,
        "tensor_info": {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "min": float(tensor.float().min()),
            "std": float("nan"),
            "overflow_info": {"upper_overflow_count": 0},
        },
        "metadata": {k: v for k, v in name_fields.items() if v is not None}
        if metadata is None
        else metadata,
    }
    path = folder / name.file_name()
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


GENERATIONS: dict[int, dict[str, Any]] = {
    1: {"counter": 4},
    2: {"counter": 4, "phase": "pre", "component": "linear"},
    3: {
        "counter": 4,
        "iteration": 1,
        "phase": "pre",
        "component": "linear",
        "rank": 2,
        "sample": 3,
        "group": 1,
    },
    4: {"counter": 4, "iteration": 1, "phase": "pre", "component": "linear", "rank": 2},
    5: {"iteration": 1, "phase": "pre", "component": "linear", "rank": 2},
}
