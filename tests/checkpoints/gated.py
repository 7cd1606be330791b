"""A quantized checkpoint and its parent made by hand, for tests of gates: no library is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qgate.checkpoints.gate import CheckpointGates, CheckpointSubject
from qgate.gate import Policy
from qgate.gate.sessions import Outcome
from tests.checkpoints.exports import SCHEMES, configuration, parent_tensors, write
from tests.checkpoints.faults import UP

SUITE = "checkpoint"
Tensors = dict[str, Tensor]
Plant = Callable[[Tensors, dict[str, Any]], None]


def write_pair(folder: Path) -> None:
    """Write `parent`, and `child` with INT8 weights per row."""
    parent = parent_tensors()
    write(folder / "parent", parent, {})
    tensors: Tensors = {}
    for name, weight in parent.items():
        if "_proj" not in name:
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    write(folder / "child", tensors, configuration(SCHEMES["int8"]))


def planted(source: Path, target: Path, plant: Plant) -> Path:
    """Copy a checkpoint with a change."""
    tensors = load_file(source / "model.safetensors")
    declared = json.loads((source / "config.json").read_text(encoding="utf-8"))
    plant(tensors, declared)
    return write(target, tensors, declared)


def double_scales(tensors: Tensors, _configuration: dict[str, Any]) -> None:
    tensors[f"{UP}.weight_scale"] *= 2


def grow_scales(factor: float, name: str = UP) -> Plant:
    """Quantize a weight again, with scales larger than they should be."""

    def plant(tensors: Tensors, _configuration: dict[str, Any]) -> None:
        weight = parent_tensors()[f"{name}.weight"].float()
        scale = weight.abs().amax(1, keepdim=True) / 127 * factor
        tensors[f"{name}.weight"] = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}.weight_scale"] = scale

    return plant


def gates_of(
    child: Path, parent: Path | None, baselines: Path, limits: Any = None, **how: Any
) -> CheckpointGates:
    subject = CheckpointSubject(str(child), None if parent is None else str(parent), "mine")
    return CheckpointGates(subject, baselines, Policy.from_table(limits or {}), **how)


def outcomes(gates: CheckpointGates) -> list[Outcome]:
    """Run all gates of a checkpoint."""
    gates.check_baseline()
    layers = [gates.weights(SUITE, layer) for layer in gates.layers(SUITE)]
    return [*layers, gates.accounting(SUITE), gates.recipe(SUITE)]


def failures(gates: CheckpointGates) -> list[str]:
    """Return the texts of the gates that fail."""
    return [outcome.text for outcome in outcomes(gates) if outcome.text]


def accept(child: Path, parent: Path | None, baselines: Path) -> list[str]:
    """Accept what a checkpoint has, and return what no update accepts."""
    gates = gates_of(child, parent, baselines, updating="failed", accept_plan=True)
    texts = failures(gates)
    gates.commit()
    return texts
