"""Differences between ranks: the same tensor on each, which rank stands out, and in which layer."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, cast

import numpy as np

from qgate.results.rows import StoredRows
from qgate.stats.summary import Floats, Ints
from qgate.summaries.record import PeerCell, RankRow, Ranks, RankTensor, TensorSummary

Group = dict[int, TensorSummary]
Across = Literal["rank", "sample"]

_RUN = ("sample", "micro_batch", "call")
_KEY = (
    "rank", "module", "layer_type", "layer", "operation", "phase", "component", "name",
    "quant_type", "iteration", *_RUN,
)  # fmt: skip
# Members differ in these fields; calls of one sample are matched in their order.
_MEMBER_FIELDS: dict[Across, tuple[str, ...]] = {"rank": ("rank",), "sample": _RUN}
_LARGE_FIELDS = ("channels", "formats")
_RANK_FIELDS = ("title", "order", "rank", *_LARGE_FIELDS)
_MATCHED = np.dtype(
    [("key", [("first", "u8"), ("second", "u8")]), ("member", "i8"), ("order", "i8")]
)
_FARTHEST = 64.0
"""The distance, in powers of two, of a rank that is all zeros from one that is not."""

FEWEST = 3
LIMIT = 5.0
FLOOR = 0.015
"""Scores of healthy ranks stayed below 4.3 in 1,000 seeds each of normal, Laplace and Student's t
values (4 degrees of freedom), on 3, 4 and 8 ranks, with 6 tensors of 4,096 elements or one of
1,024. A rank whose normal values were 10 % larger stood out in all cases with 4 or 8 ranks and six
tensors, and on 3 ranks from 16,384 elements on."""
CELL_LIMIT, FEW_TENSORS, TENSOR_LIMIT = 3.0, 8.0, 15.0
"""A small transformer was trained with 20 seeds each on 2, 3 and 4 ranks that see different data. A
layer of a rank was in the mean at most 3.1 times as far from the others as tensors of its kind are,
and a tensor at most 9.4 times; in 216 runs of random values with 1 or 4 tensors in a layer it was
3.0 and 3.4 times. A layer that was 1.5 times as large on one rank was 6.6 to 12 times as far, and a
single tensor that was 1.5 times as large 17 to 25 times."""


def ranks_of(summaries: Sequence[TensorSummary]) -> Ranks | None:
    """Compare tensors matched over ranks by module and time; None where there are not two ranks.

    The distance of a tensor is that of its binades from those of all other ranks, plus the powers
    of two between its rms and the median of all. A rank's `distance` is the median over its tensors
    without the weights. Its `score` is how far that is beyond the median of ranks, in units of
    their spread, or of chance alone if that is larger.
    """
    rows = _rank_rows(summaries)
    if len(rows) < 2:
        return None
    tensors: StoredRows[RankTensor] = StoredRows()
    peers = Peers()
    factors, chances = array("d"), array("d")
    distances_of: dict[int, array[float]] = defaultdict(lambda: array("d"))
    equal_weights, unequal = 0, []
    for group in _matched(summaries):
        if len(group) < 2:
            continue
        equal = _equal(group)
        if not _is_weight(group):
            # Weights should be equal, and so many distances of 0 would hide all others.
            group_distances = _distances(group)
            chances.append(peers.add(group, group_distances))
            for rank, distance in group_distances.items():
                distances_of[rank].append(distance)
        elif equal:
            equal_weights += 1
        else:
            unequal.append(_title(group))
        if len(logs := _logs(group)) > 1:
            farthest = max(logs, key=lambda rank: abs(logs[rank]))
            factors.append(2.0 ** abs(logs[farthest]))
            tensor = RankTensor(
                title=_title(group),
                rms={str(rank): group[rank]["rms"] for rank in logs},
                amax={str(rank): group[rank]["amax"] for rank in logs if "amax" in group[rank]},
                factor=factors[-1], farthest=farthest, equal=equal,
            )  # fmt: skip
            tensors.append(tensor)
    distances = {rank: median(distances_of[rank]) for rank in sorted(distances_of)}
    chance = median(chances) / math.sqrt(len(chances)) if chances else 0.0
    scores = _scores(distances, chance) if len(distances) >= FEWEST else {}
    for rank, row in rows.items():
        row.update({"distance": distances[rank]} if rank in distances else {})
        row.update({"score": scores[rank]} if rank in scores else {})
    first = max(scores, key=lambda rank: scores[rank], default=None)
    return Ranks(
        rows=[rows[rank] for rank in sorted(rows)],
        tensors=tensors.ordered(np.argsort(-np.array(factors), kind="stable").tolist()),
        stands_out=first if first is not None and scores[first] > LIMIT else None,
        equal_weights=equal_weights,
        unequal_weights=unequal,
        cells=peers.cells(summaries),
    )


def sample_cells(summaries: Sequence[TensorSummary]) -> list[PeerCell]:
    """Compare samples of one rank and iteration by layer; nothing of fewer than two."""
    peers = Peers()
    for group in _matched(summaries, "sample"):
        if len(group) > 1 and not _is_weight(group):
            peers.add(group, _distances(group))
    return peers.cells(summaries)


# Matching tensors of several members ------------------------------------------------------------


def _matched(summaries: Sequence[TensorSummary], across: Across = "rank") -> Iterator[Group]:
    """Match tensors over ranks or samples, those of equal fields in the order of execution.

    Numbers stand for the tensors, which may be more than fit in memory.
    """
    numbers = (_match_numbers(summary, across) for summary in summaries)
    table = np.fromiter(numbers, dtype=_MATCHED, count=len(summaries))
    flow = np.lexsort((table["order"], table["member"]))
    flow = flow[table["member"][flow] >= 0]
    if not len(flow):
        return
    table = table[flow]
    kinds = np.unique(table["key"], return_inverse=True)[1].astype(np.int64)
    times = _times(kinds, table["member"])
    groups = kinds * (int(times.max()) + 1) + times
    members = groups.argsort(kind="stable")
    starts = np.flatnonzero(np.diff(groups[members], prepend=-1))
    ends = np.append(starts[1:], len(members))
    for number in members[starts].argsort(kind="stable"):
        group = [summaries[index] for index in flow[members[starts[number] : ends[number]]]]
        yield {cast(int, summary[across]): _without_formats(summary) for summary in group}


def _match_numbers(summary: TensorSummary, across: Across) -> tuple[tuple[int, ...], int, int]:
    """Return a digest of the fields that members share, the member (-1 for none), and the order."""
    fields: Mapping[str, object] = summary
    key = repr([fields.get(name) for name in _KEY if name not in _MEMBER_FIELDS[across]])
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    member = summary[across]
    return struct.unpack("QQ", digest), -1 if member is None else member, summary["order"]


def _times(kinds: Ints, ranks: Ints) -> Ints:
    """Count how often each kind came before on the same rank, or in the same sample."""
    order = np.lexsort((ranks, kinds))
    new = (np.diff(kinds[order], prepend=-1) != 0) | (np.diff(ranks[order], prepend=-1) != 0)
    numbers = np.arange(len(order))
    times = np.empty_like(kinds)
    times[order] = numbers - np.maximum.accumulate(np.where(new, numbers, 0))
    return times


def _without_formats(summary: TensorSummary) -> TensorSummary:
    fields = {name: value for name, value in summary.items() if name not in _LARGE_FIELDS}
    return cast(TensorSummary, fields)


def _title(group: Group) -> str:
    rank, summary = next(iter(group.items()))
    return summary["title"].replace(f", rank {rank}", "")


def _is_weight(group: Group) -> bool:
    name = next(iter(group.values()))["name"]
    return "weight" in name and not name.startswith("grad_") and name != "attention_weights"


def _equal(group: Group) -> bool:
    """Compare shape, dtype and every number of the summaries."""
    first, *peers = (
        {name: value for name, value in summary.items() if name not in _RANK_FIELDS}
        for summary in group.values()
    )
    return all(peer == first for peer in peers)


# How far ranks are apart -------------------------------------------------------------------------


def jensen_shannon(p: Floats, q: Floats) -> float:
    """Return the distance of two histograms of the same bins, from 0 for equal to 1."""
    a, b = p / p.sum(), q / q.sum()
    middle = (a + b) / 2
    total = 0.0
    for side in (a, b):
        used = side > 0
        total += float(side[used] @ np.log2(side[used] / middle[used])) / 2
    return math.sqrt(min(max(total, 0.0), 1.0))


def _logs(group: Group) -> dict[int, float]:
    """Return the powers of two from the median rms to each rank's."""
    rms = {rank: summary["rms"] for rank, summary in group.items() if "rms" in summary}
    middle = median(rms.values()) if rms else 0.0
    return {rank: _log2_ratio(value, middle) for rank, value in rms.items()}


def _log2_ratio(a: float, b: float) -> float:
    if a == b:
        return 0.0
    if a > 0 and b > 0:
        return max(-_FARTHEST, min(math.log2(a) - math.log2(b), _FARTHEST))
    return -_FARTHEST if a == 0 else _FARTHEST


def _distances(group: Group) -> dict[int, float]:
    """Measure how far each rank is from all others, by its binades and its rms."""
    shapes, logs = _histograms(group), _logs(group)
    distances = {}
    for rank in group:
        parts = []
        if rank in shapes and len(shapes) > 1:
            peers = np.sum([shape for peer, shape in shapes.items() if peer != rank], axis=0)
            parts.append(jensen_shannon(shapes[rank], peers))
        if rank in logs and len(logs) > 1:
            parts.append(abs(logs[rank]))
        if parts:
            distances[rank] = sum(parts)
    return distances


def _histograms(group: Group) -> dict[int, Floats]:
    """Return the shares of zeros and of each binade, by rank."""
    binades = [p["binades"] for p in group.values() if "binades" in p]
    first = min((b["first"] for b in binades), default=0)
    last = max((b["first"] + len(b["counts"]) for b in binades), default=0)
    shares = {}
    for rank, summary in group.items():
        if summary.get("zeros") or "binades" in summary:
            counts = np.zeros(1 + last - first)
            counts[0] = summary.get("zeros", 0)
            if "binades" in summary:
                own = summary["binades"]
                start = 1 + own["first"] - first
                counts[start : start + len(own["counts"])] = own["counts"]
            shares[rank] = counts / counts.sum()
    return shares


def _chance(group: Group) -> float:
    """Estimate the powers of two between the rms of samples of the same distribution."""
    n = max(min(p["counted"] or p["elements"] for p in group.values()), 1)
    heavy = max(0.0, *(p.get("kurtosis", 0.0) for p in group.values()))
    return math.sqrt((heavy + 2) / (4 * n)) / math.log(2)


def _scores(distances: Mapping[int, float], chance: float) -> dict[int, float]:
    middle = median(distances.values())
    spread = 1.4826 * median(abs(d - middle) for d in distances.values())
    unit = max(spread, FLOOR, chance)
    return {rank: (d - middle) / unit for rank, d in distances.items()}


def _rank_rows(summaries: Iterable[TensorSummary]) -> dict[int, RankRow]:
    """Summarize each rank by itself."""
    rows: dict[int, RankRow] = {}
    sizes: dict[int, array[float]] = defaultdict(lambda: array("d"))
    for summary in summaries:
        rank = summary["rank"]
        row = rows.setdefault(rank, RankRow(rank=rank, tensors=0, nonfinite=0))
        row["tensors"] += 1
        row["nonfinite"] += summary["nan"] + summary["posinf"] + summary["neginf"]
        if "amax" in summary:
            row["amax"] = max(row.get("amax", 0.0), summary["amax"])
        if "rms" in summary:
            sizes[rank].extend((summary["order"], summary["rms"], summary["elements"]))
    for rank, numbers in sizes.items():
        order, rms, elements = np.array(numbers).reshape(-1, 3).T
        flow = np.argsort(order, kind="stable")
        largest = float(rms.max()) or 1.0
        squares = sum(((rms / largest) ** 2 * elements)[flow].tolist()) / sum(elements.tolist())
        rows[rank]["rms"] = math.sqrt(squares) * largest
    return rows


# Layers of ranks and samples ---------------------------------------------------------------------


class Peers:
    """Distances by layer and member, where the members are ranks or samples.

    The unit of a distance is the median of its kind: of tensors with this name and direction in
    modules that differ by their numbers alone, over all layers and members; at least the distance
    that chance alone makes.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, ...], int] = {}
        self._rows = array("d")

    def add(self, group: Group, distances: Mapping[int, float]) -> float:
        """Add the same tensor on several members; return the distance that chance alone makes."""
        chance, logs = _chance(group), _logs(group)
        for member, distance in distances.items():
            own = group[member]
            names = (own["layer_type"], own["operation"], own["name"], own["quant_type"])
            kind = re.sub(r"\d+", "#", own["module"]), *map(str, names)
            number = self._kinds.setdefault(kind, len(self._kinds))
            layer = -1 if own["layer"] is None else own["layer"]
            key = number, layer, member, own["rank"], own["order"]
            self._rows.extend((*key, distance, chance, logs.get(member, 0.0)))
        return chance

    def cells(self, summaries: Iterable[TensorSummary]) -> list[PeerCell]:
        """Return each layer of each member with its ratio; those that stand out name their worst
        tensor. There are none with fewer than three tensors of each kind."""
        table = np.array(self._rows).reshape(-1, 8).T
        kind, layers, members, ranks, orders, distances, chances, logs = table
        ratios = np.full(len(kind), math.nan)
        two = len(np.unique(members)) == 2
        for one in np.unique(kind):
            mine = np.flatnonzero(kind == one)
            # Two members are equally far from each other: a pair is one distance.
            if len(mine) >= FEWEST * (1 + two):
                unit = max(float(np.median(distances[mine])), FLOOR)
                ratios[mine] = distances[mine] / np.maximum(unit, chances[mine])
        finite = np.isfinite(ratios)
        cells: list[PeerCell] = []
        untitled: dict[tuple[int, int], PeerCell] = {}
        for layer, member in np.unique(table[1:3, finite], axis=1).T.astype(int).tolist():
            mine = np.flatnonzero(finite & (layers == layer) & (members == member))
            far = int(mine[np.argmax(ratios[mine])])
            ratio, most = float(ratios[mine].mean()), float(ratios[far])
            cell = PeerCell(
                layer=None if layer < 0 else layer, member=member, ratio=ratio, most=most,
                tensors=len(mine), stands_out=stands_out(ratio, most, len(mine)),
                log2=float(logs[far]),
            )  # fmt: skip
            cells.append(cell)
            if cell["stands_out"]:
                untitled[int(ranks[far]), int(orders[far])] = cell
        for summary in summaries if untitled else ():
            if cell_of := untitled.get((summary["rank"], summary["order"])):
                cell_of["title"] = summary["title"]
        return cells


def stands_out(ratio: float, most: float, tensors: int) -> bool:
    """Tell if the mean ratio of so many tensors, or the largest, is beyond healthy ones."""
    return ratio > CELL_LIMIT + FEW_TENSORS / tensors or most > TENSOR_LIMIT
