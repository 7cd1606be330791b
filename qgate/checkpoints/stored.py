"""A checkpoint, whatever the files are: tensors by name, and what was declared of them.

Only heads are read; a tensor is read when it is asked for. Nothing in a file is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qgate.storage.folders import Stamp

if TYPE_CHECKING:
    from torch import Tensor

    from qgate.checkpoints.grids import QuantizedWeight
    from qgate.storage.folders import Folder


Stamps = dict[str, Stamp]
"""The stamps of files by name."""
REMOTE_AHEAD = 32 << 20
"""Bytes of a store to read with one request."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One tensor of a file, as its head describes it.

    offset  the byte of the file at which it begins; None where it can only be read whole
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    offset: int | None = None


@dataclass(frozen=True)
class GraphWeight:
    """A quantized weight that a graph describes: its tensors by role, and what decodes these.

    shape    as it is decoded; empty where its packing is not known
    rows     of the weight, where it can be decoded some rows at a time
    by_rows, by_columns  roles of the tensors whose rows, or columns, belong to rows of the weight
    """

    name: str
    packing: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    decode: Callable[[Mapping[str, Tensor]], QuantizedWeight]
    rows: int = 0
    by_rows: tuple[str, ...] = ()
    by_columns: tuple[str, ...] = ()


@dataclass(eq=False)
class Checkpoint:
    """The tensors of one checkpoint and what its configuration says; it equals itself alone.

    reader         reads the tensor of an entry
    configuration  the contents of its configuration files, by name
    span_reader    reads elements of an entry from one number to another; without it, the tensor is
                   read whole
    stamps         the stamps that its files had when they were opened
    weights        the quantized weights of a graph; None where names of tensors tell them
    ahead          bytes worth reading at a time, more where each request takes time
    folder         the folder that holds all its files; None where it was given as one file
    layout         a LayoutFile that describes its weights; None where names tell
    samples        samples of tensors that were compared with others, by what they are of
    """

    label: str
    entries: dict[str, StoredEntry]
    reader: Callable[[StoredEntry], Tensor]
    configuration: dict[str, object] = field(default_factory=dict)
    span_reader: Callable[[StoredEntry, int, int], Tensor] | None = None
    stamps: Stamps = field(default_factory=dict)
    weights: tuple[GraphWeight, ...] | None = None
    ahead: int = 2 << 20
    folder: Folder | None = None
    layout: object = None
    samples: dict[tuple[str, int, int], Tensor] = field(default_factory=dict, repr=False)
    _last: tuple[str, Tensor] | None = field(default=None, init=False, repr=False)

    @property
    def model_settings(self) -> Mapping[str, object]:
        """Return what config.json states; nothing without one."""
        settings = self.configuration.get("config.json")
        return settings if isinstance(settings, dict) else {}

    @property
    def has_graph(self) -> bool:
        """Return True for a graph, which has constants, and lacks what it does not use."""
        return self.weights is not None

    @property
    def is_gguf(self) -> bool:
        """Return True for GGUF, whose types of blocks are its recipe."""
        return any(entry.file.endswith(".gguf") for entry in self.entries.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        return self.reader(self.entries[name])

    def has_spans(self, name: str) -> bool:
        """Return True for a tensor of which some elements can be read alone."""
        return self.span_reader is not None and self.entries[name].offset is not None

    def read_span(self, name: str, first: int, last: int) -> Tensor:
        """Read the elements of a tensor from one number to another, as one row."""
        if self.span_reader is not None and self.has_spans(name):
            return self.span_reader(self.entries[name], first, last)
        if self._last is None or self._last[0] != name:
            self._last = name, self.read(name).reshape(-1)
        return self._last[1][first:last]
