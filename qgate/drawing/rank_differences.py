"""Differences between ranks: the same tensor on each, and which rank stands out."""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from qgate.drawing.peers import Peers
from qgate.results.rows import StoredRows
from qgate.summaries.record import PeerCell, RankRow, Ranks, RankTensor, TensorPortrait

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
_KEY = (
    "rank",
    "module",
    "layer_type",
    "layer",
    "operation",
    "phase",
    "component",
    "name",
    "quant_type",
    "iteration",
    "sample",
    "micro_batch",
    "call",
)
# What is counted up with the members; calls of one sample are matched in their order.
_COUNTED = {"rank": ("rank",), "sample": ("sample", "micro_batch", "call")}
_OF_ITS_RANK = ("title", "order", "rank", "channels", "formats")
_FARTHEST = 64.0
"""In powers of two: as far as a rank that is all zeros is from one that is not."""

FEWEST = 3
LIMIT = 5.0
FLOOR = 0.015
"""Scores of healthy ranks stayed below 4.3 in 1,000 seeds each of normal, Laplace and Student's t
values (4 degrees of freedom), on 3, 4 and 8 ranks, with 6 tensors of 4,096 elements or one of
1,024. One rank of normal values 10 % larger than the others' was found in all of the cases with 4
ranks or 8 and six tensors, and on 3 ranks from 16,384 elements on."""

Group = dict[int, TensorPortrait]
Across = Literal["rank", "sample"]


def jensen_shannon(p: Floats, q: Floats) -> float:
    """The distance of two histograms of the same bins: 0 for equal shares, 1 for none in common."""
    a, b = p / p.sum(), q / q.sum()
    middle = (a + b) / 2
    total = 0.0
    for side in (a, b):
        there = side > 0
        total += float(side[there] @ np.log2(side[there] / middle[there])) / 2
    return math.sqrt(min(max(total, 0.0), 1.0))


def ranks_of(portraits: Sequence[TensorPortrait]) -> Ranks | None:
    """Tensors matched over ranks by place and time. None where there is one rank, or none.

    A rank's `distance` is the median over its tensors but the weights of the distance between its
    binades and those of all other ranks, plus the powers of two between its rms and the median of
    all. Its `score` is how far that is beyond the median of ranks, in their spread or what chance
    alone makes.
    """
    own = _own(portraits)
    if len(own) < 2:
        return None
    tensors: StoredRows[RankTensor] = StoredRows()
    peers = Peers()
    factors, chances = array("d"), array("d")
    far: dict[int, array[float]] = defaultdict(lambda: array("d"))
    equal_weights, unequal = 0, []
    for group in _matched(portraits):
        if len(group) < 2:
            continue
        if not _is_weight(_any(group)["name"]):
            # Weights are to be equal, and so many distances of 0 would hide the others.
            found = _distances(group)
            for rank, distance in found.items():
                far[rank].append(distance)
            chances.append(_chance(group))
            peers.add(group, found, _logs(group), chances[-1])
        elif _equal(group):
            equal_weights += 1
        else:
            unequal.append(_title(group))
        if tensor := _tensor(group):
            tensors.append(tensor)
            factors.append(tensor["factor"])
    distances = {rank: median(far[rank]) for rank in sorted(far)}
    chance = median(chances) / math.sqrt(len(chances)) if chances else 0.0
    scores = _scores(distances, chance) if len(distances) >= FEWEST else {}
    first = max(scores, key=lambda rank: scores[rank], default=None)
    return Ranks(
        rows=[_row(rank, own[rank], distances, scores) for rank in sorted(own)],
        tensors=tensors.ordered(np.argsort(-np.array(factors), kind="stable").tolist()),
        stands_out=first if first is not None and scores[first] > LIMIT else None,
        equal_weights=equal_weights,
        unequal_weights=unequal,
        cells=peers.cells(portraits),
    )


def sample_cells(portraits: Sequence[TensorPortrait]) -> list[PeerCell]:
    """Samples of one rank and iteration against each other, by layer; none of fewer than two."""
    peers = Peers()
    for group in _matched(portraits, "sample"):
        if len(group) > 1 and not _is_weight(_any(group)["name"]):
            peers.add(group, _distances(group), _logs(group), _chance(group))
    return peers.cells(portraits)


def _matched(portraits: Sequence[TensorPortrait], across: Across = "rank") -> Iterator[Group]:
    """By rank or sample; those that nothing tells apart are matched in the order of execution.

    Numbers stand for the tensors, which may be more than fit in memory.
    """
    told = np.fromiter(
        (_told(portrait, across) for portrait in portraits), dtype=_TOLD, count=len(portraits)
    )
    flow = np.lexsort((told["order"], told["member"]))
    flow = flow[told["member"][flow] >= 0]
    if not len(flow):
        return
    told = told[flow]
    kinds = np.unique(told["key"], return_inverse=True)[1].astype(np.int64)
    again = _times(kinds, told["member"])
    groups = kinds * (int(again.max()) + 1) + again
    members = groups.argsort(kind="stable")
    starts = np.flatnonzero(np.diff(groups[members], prepend=-1))
    ends = np.append(starts[1:], len(members))
    for number in members[starts].argsort(kind="stable"):
        found = [portraits[flow[i]] for i in members[starts[number] : ends[number]]]
        yield {cast(int, each[across]): _without_formats(each) for each in found}


_TOLD = np.dtype([("key", [("first", "u8"), ("second", "u8")]), ("member", "i8"), ("order", "i8")])


def _told(portrait: TensorPortrait, across: Across) -> tuple[tuple[int, ...], int, int]:
    """What is the same for all members, the member (-1 where it is not known), and the order."""
    fields: Mapping[str, Any] = portrait
    key = repr([fields.get(name) for name in _KEY if name not in _COUNTED[across]])
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    member = portrait[across]
    return struct.unpack("QQ", digest), -1 if member is None else member, portrait["order"]


def _times(kinds: Numbers, ranks: Numbers) -> Numbers:
    """How often the same kind was on the same rank, or in the same sample, before."""
    alike = np.lexsort((ranks, kinds))
    new = (np.diff(kinds[alike], prepend=-1) != 0) | (np.diff(ranks[alike], prepend=-1) != 0)
    places = np.arange(len(alike))
    found = np.empty_like(kinds)
    found[alike] = places - np.maximum.accumulate(np.where(new, places, 0))
    return found


def _without_formats(portrait: TensorPortrait) -> TensorPortrait:
    kept = {name: portrait[name] for name in portrait if name not in ("channels", "formats")}  # type: ignore[literal-required]
    return cast(TensorPortrait, kept)


def _any(group: Group) -> TensorPortrait:
    return next(iter(group.values()))


def _title(group: Group) -> str:
    rank, each = next(iter(group.items()))
    return each["title"].replace(f", rank {rank}", "")


def _is_weight(name: str) -> bool:
    return "weight" in name and not name.startswith("grad_") and name != "attention_weights"


def _equal(group: Group) -> bool:
    """In shape, dtype and every number of the portrait."""
    told = [{k: v for k, v in each.items() if k not in _OF_ITS_RANK} for each in group.values()]
    return all(each == told[0] for each in told)


def _logs(group: Group) -> dict[int, float]:
    """Powers of two from the median of the ranks' rms."""
    rms = {rank: each["rms"] for rank, each in group.items() if "rms" in each}
    if not rms:
        return {}
    middle = median(rms.values())
    return {rank: _log2_ratio(value, middle) for rank, value in rms.items()}


def _log2_ratio(a: float, b: float) -> float:
    if a == b:
        return 0.0
    if a > 0 and b > 0:
        return max(-_FARTHEST, min(math.log2(a) - math.log2(b), _FARTHEST))
    return -_FARTHEST if a == 0 else _FARTHEST


def _distances(group: Group) -> dict[int, float]:
    """Of each rank that has something to tell it from the others by."""
    shapes, logs = _histograms(group), _logs(group)
    found = {}
    for rank in group:
        parts = []
        if rank in shapes and len(shapes) > 1:
            others = np.sum([shape for other, shape in shapes.items() if other != rank], axis=0)
            parts.append(jensen_shannon(shapes[rank], others))
        if rank in logs and len(logs) > 1:
            parts.append(abs(logs[rank]))
        if parts:
            found[rank] = sum(parts)
    return found


def _histograms(group: Group) -> dict[int, Floats]:
    """Shares of zeros and of each binade, by rank."""
    there = {r: p for r, p in group.items() if p.get("zeros") or "binades" in p}
    binades = [p["binades"] for p in there.values() if "binades" in p]
    first = min((b["first"] for b in binades), default=0)
    last = max((b["first"] + len(b["counts"]) for b in binades), default=0)
    found = {}
    for rank, portrait in there.items():
        counts = np.zeros(1 + last - first)
        counts[0] = portrait.get("zeros", 0)
        if "binades" in portrait:
            start = 1 + portrait["binades"]["first"] - first
            counts[start : start + len(portrait["binades"]["counts"])] = portrait["binades"][
                "counts"
            ]
        found[rank] = counts / counts.sum()
    return found


def _chance(group: Group) -> float:
    """What sampling alone makes of the powers of two between rms of independent values."""
    n = max(min(each["counted"] or each["elements"] for each in group.values()), 1)
    heavy = max(0.0, *(each.get("kurtosis", 0.0) for each in group.values()))
    return math.sqrt((heavy + 2) / (4 * n)) / math.log(2)


def _scores(distances: Mapping[int, float], chance: float) -> dict[int, float]:
    middle = median(distances.values())
    spread = 1.4826 * median(abs(d - middle) for d in distances.values())
    unit = max(spread, FLOOR, chance)
    return {rank: (d - middle) / unit for rank, d in distances.items()}


@dataclass
class _Own:
    """What one rank has by itself."""

    tensors: int = 0
    nonfinite: int = 0
    amax: float | None = None
    rms: array[float] = field(default_factory=lambda: array("d"))
    elements: array[float] = field(default_factory=lambda: array("d"))
    orders: array[int] = field(default_factory=lambda: array("q"))


def _own(portraits: Iterable[TensorPortrait]) -> dict[int, _Own]:
    found: dict[int, _Own] = defaultdict(_Own)
    for each in portraits:
        own = found[each["rank"]]
        own.tensors += 1
        own.nonfinite += each["nan"] + each["posinf"] + each["neginf"]
        if "amax" in each:
            own.amax = max(own.amax or 0.0, each["amax"])
        if "rms" in each:
            own.rms.append(each["rms"])
            own.elements.append(each["elements"])
            own.orders.append(each["order"])
    return found


def _row(
    rank: int, own: _Own, distances: Mapping[int, float], scores: Mapping[int, float]
) -> RankRow:
    row = RankRow(rank=rank, tensors=own.tensors, nonfinite=own.nonfinite)
    if own.amax is not None:
        row["amax"] = own.amax
    if own.rms:
        largest = max(own.rms) or 1.0
        flow = np.argsort(np.array(own.orders), kind="stable")
        parts = ((own.rms[i] / largest) ** 2 * own.elements[i] for i in flow)
        squares = sum(parts) / sum(own.elements)
        row["rms"] = math.sqrt(squares) * largest
    if rank in distances:
        row["distance"] = distances[rank]
    if rank in scores:
        row["score"] = scores[rank]
    return row


def _tensor(group: Group) -> RankTensor | None:
    logs = _logs(group)
    if len(logs) < 2:
        return None
    farthest = max(logs, key=lambda rank: abs(logs[rank]))
    return RankTensor(
        title=_title(group),
        rms={str(rank): group[rank]["rms"] for rank in logs},
        amax={str(rank): group[rank]["amax"] for rank in logs if "amax" in group[rank]},
        factor=2.0 ** abs(logs[farthest]),
        farthest=farthest,
        equal=_equal(group),
    )
