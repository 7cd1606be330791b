"""Gradients at one call of a module, read from the autograd graph without changing it.

Nothing is put between the tensors of the model: hooks on the nodes that the call made hand over the
gradient of its output, and what the call alone adds to the gradients of its inputs and weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

Edge = tuple[Node, int]
Arrived = Callable[[str, Tensor], None]

_MOST_NODES = 2000


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: what runs forward now is recomputed."""
    return torch._C._current_graph_task_id() != -1


def executing_node() -> int:
    """The node of the backward pass that runs now, as a number that lasts as long as it does."""
    return id(torch._C._current_autograd_node())


def edges_of(tensors: Mapping[str, Tensor]) -> dict[str, Edge]:
    """Where gradients of tensors go; of several names of one tensor the first stands for all."""
    found: dict[str, Edge] = {}
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            edge = get_gradient_edge(tensor)
            found[name] = (edge.node, edge.output_nr)
    names: dict[Edge, str] = {}
    for name, place in found.items():
        names.setdefault(place, name)
    return {name: place for place, name in names.items()}


def watch_gradients(
    output: Tensor, edges: Mapping[str, Edge], arrived: Arrived
) -> tuple[list[Any], set[str]]:
    """Call `arrived(name, gradient)` for the output (`""`) and each edge when backward comes.

    Returns the handles, and the names that will arrive. A name whose edge the call's part of the
    graph does not reach is not among them.
    """
    node = output.grad_fn
    if node is None:
        return [], set()
    goals = {edge: name for name, edge in edges.items()}
    if (node, output.output_nr) in goals:
        return [], set()
    handles = [_at_output(node, output, goals, arrived)]
    found = _arrivals(node, goals)
    sums = {name: _Sum(name, len(places), arrived) for name, places in found.items()}
    by_node: dict[Node, list[tuple[int, _Sum]]] = {}
    for name, places in found.items():
        for origin, position in places:
            by_node.setdefault(origin, []).append((position, sums[name]))
    for origin, wanted in by_node.items():
        handles.append(origin.register_hook(_hand_over(wanted)))
    return handles, {"", *found}


def _at_output(node: Node, output: Tensor, goals: Mapping[Edge, str], arrived: Arrived) -> Any:
    place, base = output.output_nr, output._base if output._is_view() else None
    shape = output.shape
    if base is not None and base.numel() == output.numel() and output.is_contiguous():
        # What is written into a view later makes autograd go around the view's own node.
        inner = base.grad_fn
        below = [edge[0] for edge in node.next_functions]
        if inner is not None and below == [inner] and (inner, base.output_nr) not in goals:
            node, place = inner, base.output_nr

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[place]
        if gradient is not None:
            arrived("", gradient.reshape(shape))

    return node.register_prehook(hook)


def _arrivals(start: Node, goals: Mapping[Edge, str]) -> dict[str, list[Edge]]:
    """For each goal the nodes that lead to it, with the position of their gradient."""
    stops = {edge[0] for edge in goals}
    found: dict[str, list[Edge]] = {}
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        for position, edge in enumerate(node.next_functions):
            following = edge[0]
            if following is None:
                continue
            name = goals.get((following, edge[1]))
            if name is not None:
                found.setdefault(name, []).append((node, position))
            elif following not in seen and following not in stops:
                seen.add(following)
                waiting.append(following)
        if len(seen) > _MOST_NODES:
            return {}
    return found


class _Sum:
    """The parts of one gradient, added when the last of them has come."""

    def __init__(self, name: str, parts: int, arrived: Arrived) -> None:
        self.name, self.parts, self._arrived = name, parts, arrived
        self._come = 0
        self._total: Tensor | None = None

    def add(self, part: Tensor | None) -> None:
        self._come += 1
        if part is not None:
            self._total = part if self._total is None else self._total + part
        if self._come == self.parts:
            total, self._total, self._come = self._total, None, 0
            if total is not None:
                self._arrived(self.name, total)


def _hand_over(wanted: list[tuple[int, _Sum]]) -> Callable[..., None]:
    def hook(given: tuple[Tensor | None, ...], _outputs: Any) -> None:
        for position, total in wanted:
            total.add(given[position])

    return hook


def inside_module_call(names: Mapping[int, str]) -> str | None:
    """The name of the innermost module whose method is running, from the frames of this thread.

    No hook is needed on modules that are not collected, and an exception leaves nothing behind.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back  # type: ignore[assignment]
    return None
