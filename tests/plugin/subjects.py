"""What suites measure that is no model: dumps, checkpoints and the logits of two engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints.gated import write_pair
from tests.dumps.gated import write_dump
from tests.engines.gated import logits_pair

Gates = Callable[..., pytest.RunResult]


@dataclass(frozen=True)
class Subject:
    """Suites, what they measure, the options that name it, and the outcomes of an update."""

    suites: tuple[str, ...]
    write: Callable[[Path], object]
    options: tuple[str, ...]
    updated: dict[str, int]

    @property
    def count(self) -> int:
        return sum(self.updated.values())


SUBJECTS = {
    # Two layers and what is in none: one test of the values, and one for each of four formats.
    "dump": Subject(
        ("test_dump_overflow.py", "test_dump_distributions.py"),
        lambda folder: write_dump(folder / "dump"),
        ("--dump", "dump"),
        {"updated": 3 * 5},
    ),
    # Two layers and what is in none, the accounting and the recipe.
    "checkpoint": Subject(
        ("test_checkpoint.py",),
        write_pair,
        ("--checkpoint", "child", "--parent", "parent"),
        {"updated": 3, "passed": 2},
    ),
    "engines": Subject(
        ("test_engines.py",),
        logits_pair,
        ("--engines", "trainer.npz", "rollout.npz", "--engines-name", "mine"),
        {"updated": 1},
    ),
}
