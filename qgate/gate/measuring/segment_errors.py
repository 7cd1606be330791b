"""The worst rows of a site in each pass, and which samples of a batch they are of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qgate.gate.measuring.segment_probes import PROBES
from qgate.text import listed


@dataclass
class Worst:
    """The row of a site, a token or what else the last axis belongs to, with the largest error."""

    error: float = -1.0
    actual: Tensor | None = None
    expected: Tensor | None = None
    inputs: Tensor | None = None
    row: int = 0
    sample: str = ""
    of_numbers: Tensor | None = None
    padded: Tensor | None = None
    """Of each sample of a batch the largest error, and whether it has padding."""

    def place(self) -> str:
        """Say which row of which sample it is."""
        return f"worst at token {self.row} of {self.rows}, {self.sample}"

    def some_of_batch(self, limit: float) -> str:
        """Name the samples of a batch that are wrong beside right ones; empty if all are."""
        if self.of_numbers is None:
            return ""
        wrong = ~(self.of_numbers <= limit)
        if bool(wrong.all()):
            return ""
        if self.padded is not None and torch.equal(wrong, self.padded):
            return "in the rows with padding alone, which is not masked: "
        numbers = listed([*map(str, wrong.nonzero().flatten().tolist())], 5)
        return f"in number {numbers} of {len(wrong)} of a batch, and right in the others: "

    @property
    def rows(self) -> int:
        return 0 if self.expected is None else self.expected.numel() // self.expected.shape[-1]


@dataclass
class SiteError:
    """Errors of one site over all passes."""

    squared_error: float = 0.0
    energy: float = 0.0
    passes: dict[str, Worst] = field(default_factory=dict)
    nonfinite: int = 0
    longest: int = 1
    unit: float = 0.0
    channels: int = 0

    @property
    def worst(self) -> Worst:
        return max(self.passes.values(), key=lambda worst: worst.error, default=Worst())

    def clearest(self, limit: float) -> Worst:
        """Return the largest sample that is beyond a limit: a pattern shows best there.

        Among massive values the others are hidden.
        """
        wrong = {name: worst for name, worst in self.passes.items() if not worst.error <= limit}
        beyond = [worst for name, worst in wrong.items() if name != PROBES[5] or len(wrong) == 1]
        return max(beyond, key=lambda worst: (worst.rows, worst.error), default=self.worst)

    def agreeing(self, limit: float) -> list[str]:
        """List the passes that keep a limit."""
        return [name for name, worst in self.passes.items() if worst.error <= limit]

    @property
    def relative_mse(self) -> float:
        return self.squared_error / self.energy if self.energy else 0.0


def errors_by_number(ratios: Tensor, real: Tensor | None) -> Tensor | None:
    """Return the largest error of each row of a batch with padding, whose real tokens follow."""
    if real is None or ratios.numel() != int(real.sum()):
        return None
    numbers = real.to(ratios.device).nonzero()[:, 0]
    largest = ratios.new_zeros(len(real))
    return largest.scatter_reduce(0, numbers, ratios.reshape(-1), "amax")
