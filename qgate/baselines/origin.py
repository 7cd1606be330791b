"""What a baseline was made with: changed weights are not a loss of accuracy, and are said."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from qgate.errors import QgateError

DEVICES = ("cpu", "cuda")
_DEVICE = re.compile(rf"({'|'.join(DEVICES)})(-[A-Za-z0-9_.+]+)*")
COLLECTED = "collected"
"""In the place of hashes: numbers of a dump are of a run elsewhere, and no weights or samples of
qgate's have to fit them."""


class Key(NamedTuple):
    """What an accepted error is the error of."""

    suite: str
    site: str
    scope: str
    metric: str

    def __str__(self) -> str:
        return " ".join(self)


DEVICE_FORM = f"{' or '.join(DEVICES)}, and what is known of its arithmetic, as in cpu-avx2"


def is_device(text: object) -> bool:
    return isinstance(text, str) and _DEVICE.fullmatch(text) is not None


def kind_of(device: str) -> str:
    """cpu or cuda, without its arithmetic."""
    return device.partition("-")[0]


@dataclass(frozen=True)
class Origin:
    """What a run measured, on what, and with what; hashes are texts that are equal or not."""

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
        for name, least in (("samples", 1), ("seqlen", 1), ("seed", 0)):
            good = type(getattr(self, name)) is int and getattr(self, name) >= least
            self._check(name, good, f"a whole number from {least}")
        self._check("device", is_device(self.device), DEVICE_FORM)

    @classmethod
    def of_dump(cls, name: str, torch: str, commit: str | None) -> Origin:
        """Of what was collected in a run, under the name that its accepted record is kept."""
        return cls(name, COLLECTED, COLLECTED, None, 1, 1, 0, "cpu", torch, commit)

    @property
    def is_collected(self) -> bool:
        """Whether it is of a dump, and not of a model: then there are no references."""
        return self.weights == COLLECTED

    def _check(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise QgateError(f"{name} {getattr(self, name)!r} is not allowed; it is {wanted}.")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


# Which numbers the references depend on, in the order they are worth saying.
REFERENCE_FIELDS = ("model", "weights", "samples", "seqlen", "inputs")
_SENTENCES: dict[str, Callable[[str, str], str]] = {
    "model": lambda old, new: f"the baseline is of model {old!r}, not of {new!r}",
    "weights": lambda old, new: f"the baseline was made with other weights {_both(old, new)}",
    "samples": lambda old, new: (
        f"the baseline was made with {old} samples, and there are {new} now (--samples {old})"
    ),
    "seqlen": lambda old, new: (
        f"the baseline was made with sequences of {old} tokens, and they "
        f"have {new} now (--seqlen {old})"
    ),
    "inputs": lambda old, new: f"the baseline was made with other inputs {_both(old, new)}",
    "calibration": lambda old, new: (
        f"the baseline was made with another calibration {_both(old, new)}"
    ),
    "device": lambda old, new: f"the baseline was made on {old}, and this run is on {new}",
}


def differences(
    recorded: Origin, now: Origin, fields: tuple[str, ...] = tuple(_SENTENCES)
) -> list[str]:
    """Why numbers of now cannot be held against the recorded ones, one sentence per cause."""
    return [
        _SENTENCES[name](_shown(recorded, name), _shown(now, name))
        for name in fields
        if _shown(recorded, name) != _shown(now, name)
    ]


def notes(recorded: Origin, now: Origin) -> list[str]:
    """What differs and should not matter, good to know when a number moves all the same."""
    found = []
    if recorded.torch != now.torch:
        found.append(f"the baseline was made with torch {recorded.torch}, this run has {now.torch}")
    if recorded.seed != now.seed:
        found.append(f"the baseline was made with seed {recorded.seed}, this run has {now.seed}")
    return found


def _shown(origin: Origin, name: str) -> str:
    """Another arithmetic of the same kind of device has its own tolerance, and is no other one."""
    value = kind_of(origin.device) if name == "device" else getattr(origin, name)
    return "none" if value is None else str(value)


def _both(old: str, new: str) -> str:
    """Two hashes by their beginnings, longer ones where these are the same."""
    short = 12 if old[:12] != new[:12] else max(len(old), len(new))
    return f"({_begin(old, short)} then, {_begin(new, short)} now)"


def _begin(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"
