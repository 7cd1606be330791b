"""A checkpoint, whatever the files are: tensors by name, and what was declared of them.

Only heads are read; a tensor is read when it is asked for. Nothing in a file is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.checkpoints.grids import QuantizedWeight


@dataclass(frozen=True)
class StoredEntry:
    """One tensor of a file, as its head describes it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class GraphWeight:
    """A quantized weight that a graph describes: its tensors by role, and what decodes these.

    shape  as it is decoded; empty where its packing is not known
    """

    name: str
    packing: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    decode: Callable[[Mapping[str, Tensor]], QuantizedWeight]


@dataclass
class Checkpoint:
    """The tensors of one checkpoint and what its configuration says.

    reader         reads the tensor of an entry
    configuration  the contents of its configuration files, by name
    weights        the quantized weights of a graph; None where names of tensors tell them
    """

    label: str
    entries: dict[str, StoredEntry]
    reader: Callable[[StoredEntry], Tensor]
    configuration: dict[str, object] = field(default_factory=dict)
    weights: tuple[GraphWeight, ...] | None = None

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    @property
    def has_graph(self) -> bool:
        """Return True for a graph, which has constants, and lacks what it does not use."""
        return self.weights is not None

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        return self.reader(self.entries[name])
