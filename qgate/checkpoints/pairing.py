"""Which tensor of the parent each weight of the child was made from.

By name first, then by rules for prefixes and for fused weights, last by content: a few elements at
fixed positions tell weights of one shape apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PREFIXES = ("model.", "language_model.", "transformer.", "module.", "base_model.", "bert.")
FUSIONS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("query", "key", "value"),
}
"""A fused weight, and the parts whose rows stand one after the other in it."""
SAMPLES = 4096
ALIKE = 0.8
"""Least cosine of sampled elements of a weight and its parent; other weights have about 0."""


@dataclass(frozen=True)
class ParentMatch:
    """The parent's tensors of one weight, and how they were found.

    how      "name", "prefix", "fused", "content" or "llama.cpp"
    transposed   the parent's rows are the child's columns
    heads    heads whose rows stand in the order of llama.cpp's rope in the child; negative: parent
    """

    names: tuple[str, ...]
    how: str
    transposed: bool = False
    heads: int = 0


def match_by_name(child: Iterable[str], parent: Iterable[str]) -> dict[str, ParentMatch]:
    """Match equal names, names but for a prefix, and fused names with their parts."""
    names = list(parent)
    exact = set(names)
    bare: dict[str, str] = {}
    for name in names:
        bare.setdefault(strip_prefix(name), name)
    matches = {}
    for name in child:
        if name in exact:
            matches[name] = ParentMatch((name,), "name")
        elif strip_prefix(name) in bare:
            matches[name] = ParentMatch((bare[strip_prefix(name)],), "prefix")
        else:
            parts = _parts_of(strip_prefix(name), bare)
            if parts:
                matches[name] = ParentMatch(parts, "fused")
    return matches


def strip_prefix(name: str) -> str:
    """Leave out what wrappers put before a name."""
    stripped = name
    while True:
        prefix = next((p for p in PREFIXES if stripped.startswith(p)), None)
        if prefix is None:
            return stripped
        stripped = stripped[len(prefix) :]


def _parts_of(name: str, bare: Mapping[str, str]) -> tuple[str, ...]:
    for fused, parts in FUSIONS.items():
        if f"{fused}." in name or name.endswith(fused):
            listed = [name.replace(fused, part) for part in parts]
            if all(part in bare for part in listed):
                return tuple(bare[part] for part in listed)
    return ()


def match_by_content(
    child: Iterable[str],
    parent: Mapping[str, tuple[int, ...]],
    read_child: Callable[[str], Tensor],
    read_parent: Callable[[str], Tensor],
) -> dict[str, ParentMatch]:
    """Match weights of one shape, or of a transposed one, by sampled elements."""
    matches: dict[str, ParentMatch] = {}

    @functools.cache
    def parent_sample(name: str, transposed: bool) -> Tensor:
        values = read_parent(name)
        return sampled(values.T if transposed else values)

    for name in child:
        values = read_child(name)
        shape, sample = tuple(values.shape), sampled(values)
        best: tuple[float, ParentMatch] | None = None
        for other, its in parent.items():
            for transposed in _orders(shape, its):
                likeness = cosine(sample, parent_sample(other, transposed))
                if best is None or likeness > best[0]:
                    best = likeness, ParentMatch((other,), "content", transposed)
        if best is not None and best[0] >= ALIKE:
            matches[name] = best[1]
    return matches


def _orders(shape: tuple[int, ...], other: tuple[int, ...]) -> list[bool]:
    """List the orders in which a tensor has a shape: as it is (False), transposed (True)."""
    may_be_transposed = len(shape) == 2 and shape == other[::-1]
    return [False] * (shape == other) + [True] * may_be_transposed


def sampled(x: Tensor) -> Tensor:
    row = x.reshape(-1)
    if row.numel() <= SAMPLES:
        return row.float()
    positions = torch.linspace(0, row.numel() - 1, SAMPLES, dtype=torch.float64).long()
    return row[positions].float()


def cosine(x: Tensor, y: Tensor) -> float:
    x, y = x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)
    norms = float(x.norm() * y.norm())
    return float(x @ y) / norms if norms else 0.0
