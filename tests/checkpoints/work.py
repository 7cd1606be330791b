"""Pairs of checkpoints that other processes get, and that may be deadly."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

import pytest

from qgate.checkpoints.comparison import CheckpointPair
from qgate.checkpoints.opening import open_checkpoint
from qgate.checkpoints.packings import find_weights
from qgate.checkpoints.pairing import ParentMatch
from qgate.checkpoints.recipes import Recipe
from qgate.checkpoints.record import WeightRecord
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.weight_parts import StoredWeight
from qgate.checkpoints.weights import Judgement


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
