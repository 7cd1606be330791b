"""Faults in one layer of one rank or sample: distances of tensors against those of their peers."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from qgate.summaries.record import PeerCell, TensorPortrait

Floats = npt.NDArray[np.float64]
FEWEST = 3
FLOOR = 0.015
LIMIT, FEW_TENSORS, TENSOR_LIMIT = 3.0, 8.0, 15.0
"""Of 20 seeds each of a small transformer in training on 2, 3 and 4 ranks that see different data,
no layer of a rank was in the mean more than 3.1 times as far from the others as tensors of its kind
are, and no tensor more than 9.4 times; of 216 runs of random values with 1 or 4 tensors in a layer,
3.0 and 3.4 times. Where a layer of one rank was 1.5 times as large it was 6.6 to 12 times as far,
where one tensor of it was, that one was 17 to 25 times."""


class Peers:
    """Distances by layer and member, where the members are ranks or samples.

    A distance is taken in units of the median of its kind: of tensors with this name and direction
    in modules that differ by their numbers alone, over all layers and members. What chance alone
    makes of a tensor's distance is the least unit.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, ...], int] = {}
        self._whole = {name: array("q") for name in ("kind", "layer", "member", "rank", "order")}
        self._real = {name: array("d") for name in ("distance", "chance", "log")}

    def add(
        self,
        group: Mapping[int, TensorPortrait],
        distances: Mapping[int, float],
        logs: Mapping[int, float],
        chance: float,
    ) -> None:
        """The same tensor on several members, and how far each is from the others."""
        for member, distance in distances.items():
            each = group[member]
            kind = (
                re.sub(r"\d+", "#", each["module"]),
                *(str(each[name]) for name in ("layer_type", "operation", "name", "quant_type")),
            )
            layer = each["layer"]
            numbers = (
                self._kinds.setdefault(kind, len(self._kinds)),
                -1 if layer is None else layer,
                member,
                each["rank"],
                each["order"],
            )
            for column, number in zip(self._whole.values(), numbers, strict=True):
                column.append(number)
            reals = (distance, chance, logs.get(member, 0.0))
            for real, value in zip(self._real.values(), reals, strict=True):
                real.append(value)

    def cells(self, portraits: Iterable[TensorPortrait]) -> list[PeerCell]:
        """Each layer of each member with its ratio; those that stand out name their worst tensor.

        Empty where there are fewer than three tensors of any kind to compare.
        """
        told = {n: np.array(v, dtype=np.int64) for n, v in self._whole.items()}
        real = {n: np.array(v, dtype=np.float64) for n, v in self._real.items()}
        ratios = self._ratios(told["kind"], told["member"], real["distance"], real["chance"])
        known = np.isfinite(ratios)
        found: list[PeerCell] = []
        places: list[int] = []
        pairs = np.stack([told["layer"], told["member"]])[:, known]
        for layer, member in np.unique(pairs, axis=1).T.tolist():
            mine = np.flatnonzero(known & (told["layer"] == layer) & (told["member"] == member))
            far = int(mine[np.argmax(ratios[mine])])
            ratio, most = float(ratios[mine].mean()), float(ratios[far])
            cell = PeerCell(
                layer=None if layer < 0 else layer, member=member, ratio=ratio, most=most,
                tensors=len(mine), stands_out=stands_out(ratio, most, len(mine)),
                log2=float(real["log"][far]),
            )  # fmt: skip
            found.append(cell)
            places.append(far)
        wanted = {
            (int(told["rank"][place]), int(told["order"][place])): cell
            for cell, place in zip(found, places, strict=True)
            if cell["stands_out"]
        }
        for portrait in portraits if wanted else ():
            if (cell_of := wanted.get((portrait["rank"], portrait["order"]))) is not None:
                cell_of["title"] = portrait["title"]
        return found

    @staticmethod
    def _ratios(
        kind: npt.NDArray[np.int64],
        member: npt.NDArray[np.int64],
        distance: Floats,
        chance: Floats,
    ) -> Floats:
        ratios = np.full(len(kind), math.nan)
        two = len(np.unique(member)) == 2
        for each in np.unique(kind):
            mine = np.flatnonzero(kind == each)
            # Of two members each is as far from the other: a pair is one distance.
            if len(mine) >= FEWEST * (1 + two):
                unit = max(float(np.median(distance[mine])), FLOOR)
                ratios[mine] = distance[mine] / np.maximum(unit, chance[mine])
        return ratios


def stands_out(ratio: float, most: float, tensors: int) -> bool:
    """Whether the mean ratio of so many tensors, or the largest of them, is beyond healthy ones."""
    return ratio > LIMIT + FEW_TENSORS / tensors or most > TENSOR_LIMIT
