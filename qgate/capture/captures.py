"""The record of one run: tensors by site, one per sample and pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from qgate.errors import unknown


@dataclass
class Capture:
    """Site -> the tensors that flowed there, sample after sample; samples may differ in length.

    `gradients` holds the gradient of the loss with respect to the same tensors, if asked for: of an
    input as far as it comes through its module, of a weight added up over the samples.
    """

    model: str
    basis: str
    inputs: str
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)

    def __getitem__(self, site: str) -> list[Tensor]:
        if site not in self.tensors:
            raise unknown("captured site", site, self.tensors)
        return self.tensors[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def nbytes(self) -> int:
        """Bytes of all tensors kept."""
        kept = [*self.tensors.values(), *self.gradients.values()]
        return sum(t.numel() * t.element_size() for ts in kept for t in ts)
