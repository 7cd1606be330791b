"""Places of stale weights: a rank, an expert, a layer, or some rows of one weight."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qgate.engines.sync_record import StaleGroup, WeightFinding
from qgate.text import counted, listed

if TYPE_CHECKING:
    from qgate.engines.probes import ProbeShard

Shard = tuple[str, int]
"""The name of a weight, and a rank."""
RELATIONS = ("stale", "another", "differs", "near")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.([0-9]+)\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.([0-9]+)\.")
_LISTED = 4


def group_findings(findings: Iterable[WeightFinding], shards: Sequence[Shard]) -> list[StaleGroup]:
    """Say where the findings of each kind are, those that an earlier step explains first."""
    groups: dict[tuple[str, int | None], list[Shard]] = defaultdict(list)
    for finding in findings:
        groups[finding.relation, finding.step].append((finding.name, finding.rank))
    ordered = sorted(groups, key=lambda key: (RELATIONS.index(key[0]), -len(groups[key])))
    everything = set(shards)
    return [
        StaleGroup(relation, step, *_place(set(groups[relation, step]), everything))
        for relation, step in ordered
    ]


def _place(stale: set[Shard], shards: set[Shard]) -> tuple[str, int, int]:
    """Return where shards are, how many weights they are of, and how many there are there."""
    names, ranks = {name for name, _ in stale}, {rank for _, rank in stale}
    everywhere = {rank for _, rank in shards}
    layers = {_number(_LAYER, name) for name in names}
    if ranks < everywhere and len(layers) > 1:
        in_place = {name for name, rank in shards if rank in ranks}
        if 2 * len(names) > len(in_place):
            return f"on {_numbered('rank', ranks)}", len(names), len(in_place)
    of_names = {rank for name, rank in shards if name in names}
    on_ranks = f" on {_numbered('rank', ranks)}" if ranks < of_names else ""
    if len(names) == 1:
        return f"in {next(iter(names))}{on_ranks}", 1, 1
    if None not in layers and len(layers) <= _LISTED:
        experts = {_number(_EXPERT, name) for name in names}
        in_layers = {name for name, _ in shards if _number(_LAYER, name) in layers}
        where = _numbered("layer", {layer for layer in layers if layer is not None})
        if None not in experts and len(experts) <= _LISTED:
            in_place = {name for name in in_layers if _number(_EXPERT, name) in experts}
            words = _numbered("expert", {expert for expert in experts if expert is not None})
            return f"in {words} of {where}{on_ranks}", len(names), len(in_place)
        return f"in {where}{on_ranks}", len(names), len(in_layers)
    whole = {name for name, _ in shards}
    if 2 * len(names) > len(whole):
        return f"in the whole model{on_ranks}", len(names), len(whole)
    return f"in {min(names)} and others{on_ranks}", len(names), len(whole)


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.search(name)
    return int(match[1]) if match else None


def _numbered(noun: str, numbers: set[int]) -> str:
    texts = [str(number) for number in sorted(numbers)]
    return f"{noun}{'s' * (len(texts) > 1)} {listed(texts, _LISTED)}"


def row_spans(rows: Sequence[int], shard: ProbeShard) -> str:
    """Write rows of the whole weight: as a span where no other sampled row lies between them."""
    if not rows:
        return ""
    first, last = rows[0], rows[-1]
    sampled = [row for row in shard.rows.tolist() if first <= row <= last]
    if len(rows) > 1 and set(sampled) <= set(rows):
        return f"rows {first:,} to {last:,}"
    if len(rows) == 1:
        return f"row {first:,}"
    return f"{counted(len(rows), 'row')} ({listed([f'{row:,}' for row in rows], _LISTED)})"
