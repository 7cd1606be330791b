"""Dumps of a training that never ran, for tests of gates: two layers and a head, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.dumps import DumpWriter, Record
from qgate.stats import Counts, counts

Change = Callable[[Record, Tensor], Tensor]
ROWS, WIDTH = 32, 64
# Name, direction, and the standard deviation that its values have.
TENSORS = (
    ("input", "forward", "pre", 1.0),
    ("weight", "forward", "pre", 0.1),
    ("output", "forward", "post", 2.0),
    ("grad_output", "backward", "pre", 1e-2),
)
MODULES = (("layers.0.fc", 0), ("layers.1.fc", 1), ("lm_head", None))


def unchanged(_record: Record, tensor: Tensor) -> Tensor:
    return tensor


def tensors(
    rank: int, ranks: int, seed: int, dtype: torch.dtype, iterations: int = 2
) -> Iterator[tuple[Record, Tensor]]:
    """What one rank sees, with values of its own."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    order = 0
    for iteration in range(iterations):
        for module, layer in MODULES:
            for name, operation, phase, size in TENSORS:
                record = Record(
                    order=order,
                    layer_type="linear",
                    operation=operation,  # type: ignore[arg-type]
                    phase=phase,  # type: ignore[arg-type]
                    component="linear",
                    name=name,
                    module=module,
                    layer=layer,
                    rank=rank,
                    world_size=ranks,
                    iteration=iteration,
                )
                yield record, (torch.randn(ROWS, WIDTH, generator=draw) * size).to(dtype)
                order += 1


def write_dump(
    folder: Path,
    *,
    seed: int = 0,
    ranks: int = 1,
    level: str = "tensors",
    dtype: torch.dtype = torch.bfloat16,
    change: Change = unchanged,
    wanted: Callable[[Record], bool] = lambda _record: True,
    renamed: Mapping[str, str] = MappingProxyType({}),
    close: bool = True,
    **header: Any,
) -> Path:
    """A dump; `change` alters tensors, `wanted` leaves records out."""
    for rank in range(ranks):
        writer = DumpWriter(folder, header={"model": "Toy", **header}, rank=rank, world_size=ranks)
        for record, tensor in tensors(rank, ranks, seed, dtype):
            if not wanted(record):
                continue
            altered = change(record, tensor)
            record = replace(record, module=renamed.get(record.module, record.module))
            if level == "tensors":
                writer.add(record, altered)
            else:
                writer.add(*_counted(record, altered))
        writer.close() if close else writer.flush()
    return folder


def _counted(record: Record, tensor: Tensor) -> tuple[Record, None, dict[str, np.ndarray]]:
    pattern_counts = counts(tensor, via="bf16" if tensor.dtype == torch.float32 else None)
    assert isinstance(pattern_counts, Counts)
    patterns_used = np.flatnonzero(pattern_counts.counts)
    counted_record = replace(
        record,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        nonfinite={
            "nan": pattern_counts.nan,
            "posinf": pattern_counts.posinf,
            "neginf": pattern_counts.neginf,
        },
        extra={"counted_as": pattern_counts.dtype},
    )
    patterns = {
        "patterns": patterns_used.astype(np.uint16),
        "counts": pattern_counts.counts[patterns_used].astype(np.uint32),
    }
    return counted_record, None, patterns


def at(module: str, name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """A change of one site."""

    def changed(record: Record, tensor: Tensor) -> Tensor:
        return change(tensor) if (record.module, record.name) == (module, name) else tensor

    return changed


def with_outliers(tensor: Tensor, factor: float = 16.0) -> Tensor:
    """A channel that grew."""
    scaled = tensor.clone()
    scaled[:, 3] *= factor
    return scaled


def with_nan(tensor: Tensor) -> Tensor:
    damaged = tensor.clone()
    damaged[0, 0] = torch.nan
    return damaged
