"""What a mutant is: a literal that says what it is called, where it is seen, and what the gate must say.

`source` is a regular expression for the whole name of the site where the error enters, and `says`
one that is searched in the text. The first line of the run matches `first`, or else `source`.
`survives` says why the gate does not see it; the test fails as soon as it does. For the suites of
formats, `mode` is the name of a format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.campaigns.mutants.bed import (
    ACTIVATIONS,
    CHECKPOINT,
    DUMP,
    ENGINES,
    FORMATS,
    RELATIONS,
    Bed,
)

LLAMA, MAMBA = "tiny-llama", "tiny-mamba"
_QUICK = (ACTIVATIONS, CHECKPOINT, DUMP, ENGINES, FORMATS)
Sow = Callable[[Bed], None]


@dataclass(frozen=True)
class Mutant:
    """`unrecorded` ones are there when the baseline is recorded, as a defect of day one is."""

    name: str
    model: str
    mode: str
    sow: Sow
    source: str = ""
    says: str = ""
    suite: str = "layer_outputs"
    first: str = ""
    survives: str = ""
    unrecorded: bool = False

    @property
    def subject(self) -> str:
        """Return what the gate is about: models are one kind, whose mutants take seconds."""
        return self.model if self.model in _QUICK else "model"


def llama(name: str, mode: str, sow: Sow, source: str = "", **more: Any) -> Mutant:
    return Mutant(name, LLAMA, mode, sow, source, **more)


def mamba(name: str, mode: str, sow: Sow, source: str = "", **more: Any) -> Mutant:
    return Mutant(name, MAMBA, mode, sow, source, **more)


def of_dump(
    name: str, mode: str, sow: Sow, source: str = "", says: str = "", **more: Any
) -> Mutant:
    """Of a format, or of the values alone."""
    suite = "dump_distributions" if mode == "values" else "dump_overflow"
    return Mutant(name, DUMP, mode, sow, source, says, suite, **more)


def of_activations(name: str, sow: Sow, source: str = "", says: str = "", **more: Any) -> Mutant:
    """Of a model's activations, in no mode."""
    return Mutant(name, ACTIVATIONS, "", sow, source, says, "activations", **more)


def of_checkpoint(name: str, mode: str, sow: Sow, source: str = "", says: str = "") -> Mutant:
    """Of a checkpoint: of its weights, its accounting or its recipe."""
    return Mutant(name, CHECKPOINT, mode, sow, source, says, CHECKPOINT)


def of_engines(name: str, mode: str, sow: Sow, says: str) -> Mutant:
    """Of two engines: of their tokens, their weights or their sites."""
    return Mutant(name, ENGINES, mode, sow, says=says, suite=ENGINES)


def of_relations(name: str, sow: Sow, source: str, says: str, mode: str = "int8") -> Mutant:
    """Of a mode that is compared with itself."""
    return Mutant(name, RELATIONS, mode, sow, source, says, RELATIONS)


def of_formats(name: str, mode: str, sow: Sow, says: str) -> Mutant:
    """Of the fast code of a format; `says` is the test that has to see it."""
    return Mutant(name, FORMATS, mode, sow, says=says, suite="formats")
