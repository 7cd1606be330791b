"""Text to run models on: the held-out sample of this package, and windows cut from token ids."""

from __future__ import annotations

import hashlib
import random
import sys
import sysconfig
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qgate.errors import QgateError

if TYPE_CHECKING:
    from torch import Tensor

Part = Literal["evaluation", "calibration"]

# Modules of the Python standard library that the tiny models never see in training.
HELD_OUT: dict[Part, tuple[str, ...]] = {
    "evaluation": ("fractions.py", "calendar.py", "configparser.py"),
    "calibration": ("argparse.py", "statistics.py", "textwrap.py"),
}
_NOT_TRAINED_ON = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    """Training text with what it was made from."""

    text: bytes
    source: str
    files: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text).hexdigest()


def held_out(part: Part) -> bytes:
    """The text of the package that evaluates, or the one that calibrates; they share nothing."""
    return resources.files("qgate.models").joinpath("data", f"{part}.txt").read_bytes()


def standard_library() -> Corpus:
    """The sources of the running Python, without its tests and without the held-out modules."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {name for part in HELD_OUT.values() for name in part}
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not set(path.relative_to(root).parts) & set(_NOT_TRAINED_ON)
        and str(path.relative_to(root)) not in left_out
    ]
    if not files:
        raise QgateError(f"no sources of the standard library under {root}: nothing to train on.")
    text = b"\n".join(path.read_bytes() for path in files)
    version = ".".join(map(str, sys.version_info[:3]))
    return Corpus(text, f"standard library of Python {version}", len(files))


def byte_ids(text: bytes) -> Tensor:
    """One token per byte."""
    import torch

    if not text:
        return torch.empty(0, dtype=torch.long)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows(ids: Tensor, samples: int, seqlen: int, seed: int = 0) -> list[Tensor]:
    """`samples` windows of `seqlen` tokens, (1, seqlen) each, that do not overlap.

    They are the first of one shuffled order per seed, so more samples keep those there were.
    """
    for name, number in (("samples", samples), ("seqlen", seqlen)):
        if number < 1:
            raise QgateError(f"{name} {number} is not allowed; it is a whole number from 1.")
    room = len(ids) // seqlen
    if samples > room:
        raise QgateError(
            f"{samples} samples of {seqlen} tokens are more than the text has: it is {len(ids)} "
            f"tokens long, enough for {room} of that length. Ask for fewer or shorter ones, or "
            "give a longer text."
        )
    order = list(range(room))
    random.Random(seed).shuffle(order)
    return [ids[k * seqlen : (k + 1) * seqlen].unsqueeze(0) for k in order[:samples]]
