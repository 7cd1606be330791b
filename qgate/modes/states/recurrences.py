"""Recurrences by name: what a state becomes and what is read of it, in numpy and float64.

Each takes the inputs of a scan by port, (tokens, batch, …), and its constants. Channels of heads
stand side by side: head 0 first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from qgate.formats.options import Floats
from qgate.modes.states import definition

Arrays = Mapping[str, Floats]
Step = Callable[..., Floats]


class Recurrence(ABC):
    """A recurrence with the constants of one mixer."""

    next: ClassVar[Step]
    read: ClassVar[Step]

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self.constants = constants

    @abstractmethod
    def steps(self, inputs: Arrays) -> list[Floats]:
        """Return what `next` takes after the states before each token."""

    @abstractmethod
    def decays(self, parts: list[Floats]) -> list[Floats]:
        """Return parts for `next` by which states decay and take nothing new."""

    @abstractmethod
    def takes(self, parts: list[Floats]) -> list[Floats]:
        """Return parts for `next` by which states take what is new and do not decay."""

    @abstractmethod
    def heads(self, inputs: Arrays) -> int:
        """Return the number of heads that the channels belong to."""

    @abstractmethod
    def reads(self, inputs: Arrays) -> list[Floats]:
        """Return what `read` takes after the states of each token."""


class Mamba1(Recurrence):
    next: ClassVar[Step] = staticmethod(definition.next_states)
    read: ClassVar[Step] = staticmethod(definition.outputs)

    def decays(self, parts: list[Floats]) -> list[Floats]:
        return [*parts[:3], 0 * parts[3]]

    def takes(self, parts: list[Floats]) -> list[Floats]:
        return [parts[0], 0 * parts[1], *parts[2:]]

    def heads(self, inputs: Arrays) -> int:
        u = inputs["u"]
        return int(u.shape[2]) if u.ndim == 4 else 1

    def steps(self, inputs: Arrays) -> list[Floats]:
        delta = definition.step_sizes(inputs["dt"], self.constants["dt_bias"])
        return [delta, -np.exp(self.constants["A_log"]), inputs["B"], inputs["u"]]

    def reads(self, inputs: Arrays) -> list[Floats]:
        return [inputs["C"], self.constants["D"], inputs["u"], inputs["z"]]


class Mamba2(Mamba1):
    """Mamba-1 with one step and decay for all channels of a head; groups of heads share B and C."""

    read: ClassVar[Step] = staticmethod(definition.read_and_skip)

    def steps(self, inputs: Arrays) -> list[Floats]:
        least, most = self.constants["limit"]
        delta = definition.step_sizes(inputs["dt"], self.constants["dt_bias"]).clip(least, most)
        u = inputs["u"]
        width, channels = u.shape[3], u.shape[2] * u.shape[3]
        A = np.repeat(self.constants["A"], width)[:, None]
        B = np.repeat(inputs["B"], channels // inputs["B"].shape[2], 2)
        return [np.repeat(delta, width, 2), A, B, u.reshape(*u.shape[:2], channels)]

    def reads(self, inputs: Arrays) -> list[Floats]:
        u, C = inputs["u"], inputs["C"]
        channels = u.shape[2] * u.shape[3]
        D = np.repeat(self.constants["D"], u.shape[3])
        return [np.repeat(C, channels // C.shape[2], 2), D, u.reshape(*u.shape[:2], channels)]


class DeltaRule(Recurrence):
    """The gated delta rule; several heads of values share the keys and queries of one."""

    next: ClassVar[Step] = staticmethod(definition.next_by_delta_rule)
    read: ClassVar[Step] = staticmethod(definition.read)

    def decays(self, parts: list[Floats]) -> list[Floats]:
        return [parts[0], 0 * parts[1], *parts[2:]]

    def takes(self, parts: list[Floats]) -> list[Floats]:
        return [0 * parts[0], *parts[1:]]

    def heads(self, inputs: Arrays) -> int:
        return int(inputs["v"].shape[2])

    def steps(self, inputs: Arrays) -> list[Floats]:
        v, k, g, beta = (inputs[port] for port in ("v", "k", "g", "beta"))
        channels = v.shape[2] * v.shape[3]
        g = g if g.ndim == 4 else g[..., None]
        return [
            np.repeat(g, channels // g.shape[2], 2), np.repeat(beta, v.shape[3], 2),
            np.repeat(definition.unit(k), channels // k.shape[2], 2),
            v.reshape(*v.shape[:2], channels),
        ]  # fmt: skip

    def reads(self, inputs: Arrays) -> list[Floats]:
        q, v = inputs["q"], inputs["v"]
        queries = definition.unit(q) * q.shape[-1] ** -0.5
        return [np.repeat(queries, v.shape[2] * v.shape[3] // q.shape[2], 2)]


RECURRENCES: Mapping[str, type[Recurrence]] = {
    "mamba": Mamba1, "mamba2": Mamba2, "delta": DeltaRule,
}  # fmt: skip
"""Recurrences by the kind of a scan."""
