"""Which call of which place a tensor belongs to: iteration, micro-batch, sample, count of calls.

A backward pass asks for the labels of the forward call it belongs to. Where activations are not
kept but computed again, that call was made without a graph, and the one made again stands for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class CollectedPlace:
    """A place that is collected: what all its records have in common."""

    module: str
    layer_type: str
    component: str
    layer: int | None = None


@dataclass(eq=False)
class ModuleCall:
    """One forward call; `watched` once its gradients are waited for."""

    spot: CollectedPlace
    iteration: int
    micro_batch: int
    sample: int | None
    index: int
    watched: bool = False


@dataclass(eq=False)
class Again:
    """A call made again in a backward pass; which one it stands for is known when that is over."""

    calls: Calls
    spot: CollectedPlace
    group: list[Again]
    call: ModuleCall | None = None

    def resolved(self) -> ModuleCall | None:
        if self.call is None:
            self.calls.resolve(self.spot, self.group)
        return self.call


@dataclass
class Calls:
    """The calls of one iteration."""

    made: dict[CollectedPlace, list[ModuleCall]] = field(default_factory=dict)
    _groups: dict[tuple[CollectedPlace, int], list[Again]] = field(default_factory=dict)

    def begin(
        self, spot: CollectedPlace, iteration: int, micro_batch: int, sample: int | None
    ) -> ModuleCall:
        made = self.made.setdefault(spot, [])
        made.append(ModuleCall(spot, iteration, micro_batch, sample, len(made)))
        return made[-1]

    def again(self, spot: CollectedPlace, node: int) -> Again | None:
        """A call made again by a node of the backward pass.

        None if all calls have a graph already: what is computed then only refills it.
        """
        if all(call.watched for call in self.made.get(spot, [])):
            return None
        group = self._groups.setdefault((spot, node), [])
        if group and group[0].call is not None:
            group = self._groups[spot, node] = []
        group.append(Again(self, spot, group))
        return group[-1]

    def resolve(self, spot: CollectedPlace, group: list[Again]) -> None:
        """Stretches are made again from the last to the first, each in its own order.

        Micro-batches come back in the order in which they went.
        """
        left = [call for call in self.made.get(spot, []) if not call.watched]
        if left:
            first = min(call.micro_batch for call in left)
            left = [call for call in left if call.micro_batch == first]
        for again, call in zip(reversed(group), reversed(left), strict=False):
            again.call, call.watched = call, True


def without_gradient(calls: Calls) -> list[CollectedPlace]:
    """Places all of whose calls ran without a graph."""
    return [spot for spot, made in calls.made.items() if not any(call.watched for call in made)]


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors in tuples, lists, dictionaries and records of any depth."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = list(result.values())
    elif dataclasses.is_dataclass(result):
        result = [getattr(result, field.name, None) for field in dataclasses.fields(result)]
    if isinstance(result, list | tuple):
        return [tensor for each in result for tensor in tensors_in(each)]
    return []
