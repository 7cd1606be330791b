"""Runs of a trainer and a rollout engine in small: a folder per step, which may drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from tests.engines import runs

FEW, TOKENS, VOCABULARY = 6, 33, 40


def write_steps(
    folder: Path,
    seed: int = 0,
    steps: int = 30,
    noise: Callable[[int], float] = lambda _: 0.02,
) -> Path:
    """Write logits of both engines at each step, which differ by noise of a size."""
    draw = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        batch = float(torch.randn((), generator=draw))
        ids = torch.randint(VOCABULARY, (FEW, TOKENS), generator=draw)
        rollout = 2 * torch.randn(FEW, TOKENS, VOCABULARY, generator=draw)
        difference = torch.randn(rollout.shape, generator=draw)
        trainer = rollout + noise(step) * math.exp(0.1 * batch) * difference
        home = folder / f"step-{step:03d}"
        home.mkdir(parents=True)
        runs.write_npz(home / "rollout.npz", runs.Scored(ids, rollout))
        runs.write_npz(home / "trainer.npz", runs.Scored(ids, trainer))
    return folder
