"""A checkpoint, whatever the files are: tensors by name, and what was declared of them.

Only heads are read; a tensor is read when it is asked for. Nothing in a file is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StoredEntry:
    """One tensor of a file, as its head describes it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass
class Checkpoint:
    """The tensors of one checkpoint and what its configuration says.

    reader         reads the tensor of an entry
    configuration  the contents of its configuration files, by name
    samples        samples of tensors, by name and order of rows, that were compared with others
    """

    label: str
    entries: dict[str, StoredEntry]
    reader: Callable[[StoredEntry], Tensor]
    configuration: dict[str, object] = field(default_factory=dict)
    samples: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        return self.reader(self.entries[name])
