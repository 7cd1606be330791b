"""What one worker does of `qgate sweep`: a file swept and drawn, as plain data to be written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qgate.sweeps.requests import FilePart, Request, Swept


@dataclass(frozen=True)
class SweepWork:
    """What all files have in common."""

    request: Request
    plots: bool


@dataclass(frozen=True)
class SweptTensor:
    """A tensor swept, its pictures by name of the file, and why some could not be drawn."""

    swept: Swept
    pictures: dict[str, bytes] = field(default_factory=dict)
    undrawn: str = ""


@dataclass(frozen=True)
class Lost:
    """A part of a file whose process ended."""

    part: str
    reason: str


def made_of(part: str | FilePart, work: SweepWork) -> Iterator[SweptTensor]:
    """Tensor by tensor, so that one process holds no more than one."""
    from qgate.sweeps.requests import FilePart, sweep_part

    for swept in sweep_part(FilePart(part) if isinstance(part, str) else part, work.request):
        for record in swept.records:
            record["tensor"]["source"] = swept.source
        pictures, undrawn = _drawn(swept) if work.plots else ({}, "")
        yield SweptTensor(swept, pictures, undrawn)


def all_made_of(part: FilePart, work: SweepWork) -> list[SweptTensor]:
    """The same for a worker, which sends all of a part at once."""
    return list(made_of(part, work))


def _drawn(swept: Swept) -> tuple[dict[str, bytes], str]:
    """Pictures as bytes: where they are written is not for a worker to know."""
    from qgate.sweeps import files as sweep_files

    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as made:
        for record in swept.records:
            try:
                sweep_files.draw(Path(made), record)
            except Exception as error:
                return found, f"cannot draw the results: {error}"
            for name in sweep_files.picture_names(record):
                found[name] = (Path(made) / name).read_bytes()
    return found, ""
