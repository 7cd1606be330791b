"""Origin of a baseline: model, weights, samples and device, and how it differs from a run's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from qgate.errors import QgateError

KIND = "[a-z][a-z0-9_]*"
"""A kind of device as torch names it: cpu, cuda, xpu, npu."""
_DEVICE = re.compile(rf"{KIND}(-[A-Za-z0-9_.+]+)*")
COLLECTED = "collected"
"""Stands in the place of hashes: numbers of a dump are of a run elsewhere, and no weights or
samples of qgate's have to fit them."""
MODEL, DUMP = "model", "dump"
_BARE = ("checkpoint", "engines")
"""Kinds that begin the inputs of their origins without a colon, as they were first stored."""


class Key(NamedTuple):
    """Name of an accepted error."""

    suite: str
    site: str
    scope: str
    metric: str

    def __str__(self) -> str:
        return " ".join(self)


def is_device(text: object) -> bool:
    return isinstance(text, str) and _DEVICE.fullmatch(text) is not None


def kind_of(device: str) -> str:
    """Return the kind of a device, such as cpu or cuda, without the arithmetic."""
    return device.partition("-")[0]


@dataclass(frozen=True)
class Origin:
    """Model, weights, samples and software of a run; hashes are texts that are equal or not.

    `seqlen` is 0 for samples without token ids, which no length cuts.
    """

    model: str
    weights: str
    inputs: str
    calibration: str | None
    samples: int
    seqlen: int
    seed: int
    device: str
    torch: str
    commit: str | None

    def __post_init__(self) -> None:
        for name in ("model", "weights", "inputs", "torch"):
            self._check(name, _is_text(getattr(self, name)), "a text that is not empty")
        for name in ("calibration", "commit"):
            value = getattr(self, name)
            self._check(name, value is None or _is_text(value), "a text that is not empty, or none")
        for name, least in (("samples", 1), ("seqlen", 0), ("seed", 0)):
            good = type(getattr(self, name)) is int and getattr(self, name) >= least
            self._check(name, good, f"a whole number from {least}")
        form = "a kind such as cpu or cuda, and what is known of its arithmetic, as in cpu-avx2"
        self._check("device", is_device(self.device), form)

    @classmethod
    def of_subject(
        cls, kind: str, name: str, torch: str, commit: str | None, about: str = ""
    ) -> Origin:
        """Return the origin of figures of a kind of subject, under the name of their record.

        `about` identifies its samples: figures of other ones are not compared.
        """
        inputs = COLLECTED if kind == DUMP else kind if kind in _BARE else f"{kind}:"
        return cls(
            name, COLLECTED, f"{inputs} {about}".strip(), None, 1, 1, 0, "cpu", torch, commit
        )

    @property
    def is_collected(self) -> bool:
        """Tell if it is of no model: then there are no references."""
        return self.weights == COLLECTED

    @property
    def kind(self) -> str:
        """Return what it is of: a model, or the kind of a subject."""
        if not self.is_collected:
            return MODEL
        first = self.inputs.partition(" ")[0]
        return first.removesuffix(":") if first in _BARE or first.endswith(":") else DUMP

    @property
    def noun(self) -> str:
        """Return its kind as a sentence has it."""
        return "two engines" if self.kind == "engines" else f"a {self.kind}"

    def _check(self, name: str, good: bool, form: str) -> None:
        if not good:
            raise QgateError(f"{name} {getattr(self, name)!r} is not allowed; it is {form}.")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


# Fields that the references depend on, the most important first.
REFERENCE_FIELDS = ("model", "weights", "samples", "seqlen", "inputs")
_SENTENCES: dict[str, Callable[[str, str], str]] = {
    "model": lambda old, new: f"the baseline is of model {old!r}, not of {new!r}",
    "weights": lambda old, new: f"the baseline was made with other weights {hashes_text(old, new)}",
    "samples": lambda old, new: (
        f"the baseline was made with {old} samples, and there are {new} now (--samples {old})"
    ),
    "seqlen": lambda old, new: (
        f"the baseline was made with sequences of {old} tokens, and they "
        f"have {new} now (--seqlen {old})"
    ),
    "inputs": lambda old, new: f"the baseline was made with other inputs {hashes_text(old, new)}",
    "calibration": lambda old, new: (
        f"the baseline was made with another calibration {hashes_text(old, new)}"
    ),
    "device": lambda old, new: f"the baseline was made on {old}, and this run is on {new}",
}


def differences(
    recorded: Origin, now: Origin, fields: tuple[str, ...] = tuple(_SENTENCES)
) -> list[str]:
    """Say why numbers of now cannot be compared with recorded ones, one sentence per cause."""
    pairs = [(name, _text(recorded, name), _text(now, name)) for name in fields]
    # A length counts where both have tokens.
    lengths_count = recorded.seqlen and now.seqlen
    return [
        _SENTENCES[name](old, new)
        for name, old, new in pairs
        if old != new and (name != "seqlen" or lengths_count)
    ]


def _text(origin: Origin, name: str) -> str:
    """Write a field; arithmetics of one kind of device have a tolerance, and do not differ here."""
    value = kind_of(origin.device) if name == "device" else getattr(origin, name)
    return "none" if value is None else str(value)


def hashes_text(old: str, new: str) -> str:
    """Write two hashes by their beginnings, or whole where these are the same."""
    short = 12 if old[:12] != new[:12] else max(len(old), len(new))
    old, new = (text if len(text) <= short else f"{text[:short]}…" for text in (old, new))
    return f"({old} then, {new} now)"
