"""An exhibit about checkpoints: a right and a faulty exporter, judged by `qgate checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Generator, Tensor

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.packings import decode
from qgate.checkpoints.recipes import read_recipe
from qgate.kernel_checks.record import CheckFailure
from tests.checkpoints.exports import write
from tests.museum.exhibit import Exhibit, Function

Tensors = dict[str, Tensor]
Stored = tuple[Tensors, dict[str, Any]]
"""Tensors and the content of config.json."""


@dataclass(frozen=True)
class CheckpointExhibit(Exhibit):
    """One published defect of an exporter, or of a checkpoint.

    arguments  a seeded generator → the parent's tensors by name
    right      the exporter after the fix: the parent's tensors → what it stores
    faulty     the exporter as it was reported
    like       tensors by name, dequantized → the values that the network multiplies with
    """

    def check(self, kernel: Function, seed: int = 0) -> Any:
        """Compare an export with its parent as a user of qgate would."""
        (parent,) = self.draw(seed)
        with TemporaryDirectory() as folder:
            paths = Path(folder, "child"), Path(folder, "parent")
            write(paths[0], *kernel(dict(parent)))
            write(paths[1], parent, {})
            record = compare(*map(str, paths))
        if record.findings:
            lines = [f"{finding.subject}: {finding.cause}" for finding in record.findings]
            raise CheckFailure(lines[0], lines[1:], record)  # type: ignore[arg-type]
        return record

    def reference(self, arguments: tuple[Any, ...]) -> Tensor:
        (parent,) = arguments
        return self.like({name: x.float() for name, x in parent.items()}).float()

    def result(self, kernel: Function, arguments: tuple[Any, ...]) -> Tensor:
        """Return what an engine reads from an export."""
        (parent,) = arguments
        with TemporaryDirectory() as folder:
            path = write(Path(folder), *kernel(dict(parent)))
            checkpoint = open_checkpoint(str(path))
            recipe = read_recipe(str(path), checkpoint.configuration)
            tensors = {name: torch.zeros(x.shape) for name, x in parent.items()}
            for weight in find_weights(checkpoint):
                stored = next(iter(weight.parts.values()))
                values = (
                    checkpoint.read(stored.name)
                    if weight.packing is None or weight.missing  # codes are taken for values
                    else decode(checkpoint, weight, recipe).values()
                )
                tensors[weight.name] = values.float().reshape(parent[weight.name].shape)
        return self.like(tensors).float()


def draw_tensors(generator: Generator, **shapes: tuple[int, ...]) -> Tensors:
    """Draw weights by name, `mlp__up_proj` for `model.layers.0.mlp.up_proj.weight`."""
    return {
        f"model.layers.0.{name.replace('__', '.')}.weight": (
            torch.randn(shape, generator=generator) * 0.1
        ).bfloat16()
        for name, shape in shapes.items()
    }


def store_int8(tensors: Tensors, name: str) -> None:
    """Replace a weight by codes of eight bits and the scales of its rows."""
    weight = tensors[name].float()
    scales = (weight.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-5)
    tensors[name] = (weight / scales).round().to(torch.int8)
    tensors[f"{name}_scale"] = scales


def int8_recipe(ignore: list[str]) -> dict[str, Any]:
    declared = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": declared}}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore,
        }
    }  # fmt: skip


def joined(tensors: Tensors) -> Tensor:
    """Stand all matrices of one width below each other."""
    matrices = [x.reshape(-1, x.shape[-1]) for x in tensors.values() if x.dim() > 1]
    return torch.cat([x for x in matrices if x.shape[1] == matrices[0].shape[1]])
