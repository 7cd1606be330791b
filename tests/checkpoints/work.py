"""What tests of checkpoints do: read a weight by spans, and compare in other processes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qgate.checkpoints.comparison import CheckpointPair
from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.grouping import find_weights
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.packings import decode
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import WeightRecord
from qgate.checkpoints.rows import WeightRows
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.checkpoints.weights import Judgement


def decoded(folder: Path) -> Tensor:
    """Return the values of the only quantized weight of a checkpoint."""
    checkpoint = open_checkpoint(str(folder))
    (weight,) = [weight for weight in find_weights(checkpoint) if weight.packing]
    return decode(checkpoint, weight).values()


def check_spans(checkpoint: Checkpoint, stored: StoredWeight) -> int:
    """Compare a weight that is read by spans with the whole one, and return how many they are."""
    whole, weight = decode(checkpoint, stored), WeightRows(checkpoint, stored)
    assert (weight.shape, weight.tile, weight.element) == (whole.shape, whole.tile, whole.element)
    assert weight.has_zero_points == whole.has_zero_points
    parts = [weight.rows(*span) for span in weight.spans()]
    assert {(part.element, part.has_zero_points) for part in parts} == {
        (whole.element, whole.has_zero_points)
    }
    for read in (QuantizedWeight.values, QuantizedWeight.float_elements):
        rows = torch.cat([read(part) for part in parts])
        assert torch.allclose(rows, read(whole), rtol=0, atol=0, equal_nan=True)
    return len(parts)


@dataclass
class DeadlyPair:
    """A checkpoint whose weights end the process that judges them."""

    spec: str
    driver: int = field(default_factory=os.getpid)
    parent: None = None
    recipe: Recipe = field(default_factory=Recipe)
    matches: dict[str, ParentMatch] = field(default_factory=dict)

    @property
    def child(self) -> Checkpoint:
        return open_checkpoint(self.spec)

    @property
    def weights(self) -> list[StoredWeight]:
        return find_weights(self.child)

    def judge(self, weight: StoredWeight) -> Judgement:
        if os.getpid() != self.driver:
            os.kill(os.getpid(), signal.SIGKILL)
        return WeightRecord(weight.name, "", "", 0, 0), []


def names_judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the names of the weights that are judged from now on."""
    names: list[str] = []
    original = CheckpointPair.judge

    def judge(pair: CheckpointPair, weight: StoredWeight) -> Judgement:
        names.append(weight.name)
        return original(pair, weight)

    monkeypatch.setattr(CheckpointPair, "judge", judge)
    return names
