"""Experts that one checkpoint stacks in a tensor of three axes and the other one lists."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from qgate.checkpoints.stored import Checkpoint, StoredEntry

STACKED = re.compile(r"^(.*\bexperts\.)([A-Za-z_]\w*?)(\.weight)?$")
LISTED = re.compile(r"\bexperts\.\d+\.(\w+)\.")
HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}
"""The parts whose rows stand one after the other in a stacked weight."""


def list_experts(parent: Checkpoint, child: Iterable[str]) -> Checkpoint:
    """Return the parent with an entry for each expert, if the child lists experts.

    A stacked tensor (experts x outputs x inputs) holds them one after the other, so that each is a
    range of it. Tensors that can only be read whole stay as they are.
    """
    modules = {match[1] for name in child if (match := LISTED.search(name))}
    if not modules:
        return parent
    entries: dict[str, StoredEntry] = {}
    for name, entry in parent.entries.items():
        listed = _experts_of(entry, modules) if parent.has_spans(name) else ()
        entries |= {part.name: part for part in listed or (entry,)}
    return replace(parent, entries=entries)


def _experts_of(entry: StoredEntry, modules: set[str]) -> tuple[StoredEntry, ...]:
    stacked = STACKED.match(entry.name)
    if stacked is None or len(entry.shape) != 3 or not math.prod(entry.shape):
        return ()
    experts, rows, columns = entry.shape
    own = stacked[2]
    names = next((n for n in ((own,), HALVES.get(own, ())) if n and modules.issuperset(n)), ())
    if not names or rows % len(names):
        return ()
    assert entry.offset is not None
    size = entry.size // experts // len(names)
    return tuple(
        StoredEntry(
            f"{stacked[1]}{expert}.{name}.weight",
            entry.file,
            entry.dtype,
            (rows // len(names), columns),
            size,
            entry.offset + size * (expert * len(names) + number),
        )
        for expert in range(experts)
        for number, name in enumerate(names)
    )


def stacked_parts(name: str, bare: Mapping[str, str]) -> tuple[str, ...]:
    """Return the parent's listed experts, in order, of which the child stacks one module."""
    stacked = STACKED.match(name)
    if stacked is None:
        return ()
    choices = ((stacked[2],), HALVES.get(stacked[2], ()))
    listed = (tuple(_in_order(stacked[1], parts, bare)) for parts in choices if parts)
    return next((parts for parts in listed if parts), ())


def _in_order(prefix: str, parts: tuple[str, ...], bare: Mapping[str, str]) -> Iterator[str]:
    expert = 0
    while all(f"{prefix}{expert}.{part}.weight" in bare for part in parts):
        yield from (bare[f"{prefix}{expert}.{part}.weight"] for part in parts)
        expert += 1
