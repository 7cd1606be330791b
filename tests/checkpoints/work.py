"""Pairs of checkpoints that other processes get, and that may be deadly."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

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
