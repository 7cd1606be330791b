"""Which tensor of the parent each weight of the child was made from.

By name first, then by rules for prefixes and for fused weights, last by content: a few elements at
fixed positions tell weights of one shape apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.checkpoints.grids import QuantizedWeight
from qgate.checkpoints.stacked_experts import stacked_parts
from qgate.errors import QgateError

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
    names, child = list(parent), list(child)
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
            parts = _parts_of(strip_prefix(name), bare) or stacked_parts(strip_prefix(name), bare)
            if parts:
                matches[name] = ParentMatch(parts, "fused")
    used = {name for match in matches.values() for name in match.names}
    wrapped = {name: _wrapped(name, bare) for name in child if name not in matches}
    counts = Counter(wrapped.values())
    for name, other in wrapped.items():
        if other and other not in used and counts[other] == 1:
            matches[name] = ParentMatch((other,), "prefix")
    return matches


def _wrapped(name: str, bare: Mapping[str, str]) -> str:
    """Return the parent's name that stands after the wrappers in a name, or ""."""
    parts = name.split(".")
    tails = (".".join(parts[start:]) for start in range(1, len(parts) - 1))
    return next((bare[tail] for tail in tails if tail in bare), "")


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
    read_child: Callable[[str], Tensor | QuantizedWeight],
    read_parent: Callable[[str], Tensor],
    least: float = ALIKE,
) -> dict[str, ParentMatch]:
    """Match weights of one shape, or of a transposed one, by sampled elements.

    Each parent has one child while there are others; a tied weight may be in a child twice.
    """
    candidates = _Candidates(parent, read_parent)
    pairs: list[tuple[float, str, ParentMatch]] = []
    for name in child:
        try:
            values = read_child(name)
            elements = values if isinstance(values, Tensor) else values.elements
        except QgateError:  # is a finding when the weight is judged
            continue
        shape = tuple(elements.shape)
        matches, samples = candidates.of(shape)
        if matches:
            cosines = samples @ _normal(sampled(values, shape))
            likely = (cosines >= least).nonzero().reshape(-1).tolist()
            pairs += [(float(cosines[number]), name, matches[number]) for number in likely]
    pairs.sort(key=lambda pair: -pair[0])
    best: dict[str, ParentMatch] = {}
    used: set[str] = set()
    for may_share in (False, True):
        for _, name, match in pairs:
            if name not in best and (may_share or match.names[0] not in used):
                best[name] = match
                used.add(match.names[0])
    return best


class _Candidates:
    """Samples of parents by the shape of a child; each parent is read once."""

    def __init__(
        self, parent: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> None:
        self._parent, self._read = parent, read
        self._by_shape: dict[tuple[int, ...], tuple[list[ParentMatch], Tensor]] = {}

    def of(self, shape: tuple[int, ...]) -> tuple[list[ParentMatch], Tensor]:
        """Return the parents that have a shape, and a row of samples of each."""
        if shape not in self._by_shape:
            matches, samples = [], []
            for name, its in self._parent.items():
                orders = _orders(shape, its)
                values = self._read(name) if orders else None
                for transposed in orders:
                    assert values is not None
                    matches.append(ParentMatch((name,), "content", transposed))
                    samples.append(_normal(sampled(values.T if transposed else values, shape)))
            self._by_shape[shape] = matches, torch.stack(samples) if samples else torch.empty(0, 0)
        return self._by_shape[shape]


def _orders(shape: tuple[int, ...], other: tuple[int, ...]) -> list[bool]:
    """List the orders in which a tensor has a shape: as it is (False), transposed (True)."""
    may_be_transposed = len(shape) == len(other) == 2 and shape == other[::-1]
    may_be_flat = len(other) != 2 or len(shape) != 2
    same = shape == other or (may_be_flat and math.prod(shape) == math.prod(other))
    return [False] * same + [True] * may_be_transposed


def sampled(x: Tensor | QuantizedWeight, shape: tuple[int, ...] = ()) -> Tensor:
    """Return values at fixed positions of a tensor that is looked at in a shape."""
    shape = shape or tuple(x.shape)
    count = math.prod(shape)
    positions = torch.linspace(0, count - 1, min(count, SAMPLES), dtype=torch.float64).long()
    if isinstance(x, QuantizedWeight):
        return x.values_at(positions // shape[1], positions % shape[1])
    if x.dim() == 2 and tuple(x.shape) == shape:
        return x[positions // shape[1], positions % shape[1]].float()
    return x.reshape(-1)[positions].float()


def _normal(sample: Tensor) -> Tensor:
    """Return a sample of length 1, with one element more that only samples of zeros have."""
    sample = torch.nn.functional.pad(sample.nan_to_num(0, 0, 0), (0, 1))
    norm = float(sample.norm())
    if norm:
        return sample.div_(norm)
    sample[-1] = 1
    return sample


def cosine(x: Tensor, y: Tensor) -> float:
    """Return the cosine of two samples; that of zeros with zeros is 1."""
    return float(_normal(x) @ _normal(y))
