"""Gradients at one call of a module, read from the autograd graph without changing it.

The graph stays as it is: hooks on the nodes of the call hand over the gradient of its output, and
the part that this call adds to the gradients of its inputs and weight.
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
    """Tell whether a backward pass runs in this thread, so that forward calls are repetitions."""
    return torch._C._current_graph_task_id() != -1


def executing_node() -> int:
    """Return a number for the current node of the backward pass, valid as long as the node."""
    return id(torch._C._current_autograd_node())


def edges_of(tensors: Mapping[str, Tensor]) -> dict[str, Edge]:
    """Return the gradient edges of tensors; of several names of one tensor the first counts."""
    names: dict[Edge, str] = {}
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            edge = get_gradient_edge(tensor)
            names.setdefault((edge.node, edge.output_nr), name)
    return {name: edge for edge, name in names.items()}


def watch_gradients(
    output: Tensor, edges: Mapping[str, Edge], arrived: Arrived
) -> tuple[list[Any], set[str]]:
    """Call `arrived(name, gradient)` for the output (`""`) and each edge during backward.

    Returns the handles, and the names that will arrive: those whose edges the call's part of the
    graph reaches.
    """
    node = output.grad_fn
    if node is None:
        return [], set()
    goals = {edge: name for name, edge in edges.items()}
    if (node, output.output_nr) in goals:
        return [], set()
    arrivals = _arrivals(node, goals)
    handles = [_at_output(node, output, goals, arrived)]
    by_node: dict[Node, list[tuple[int, _Sum]]] = {}
    for name, origins in arrivals.items():
        total = _Sum(name, len(origins), arrived)
        for origin, position in origins:
            by_node.setdefault(origin, []).append((position, total))
    for origin, sums in by_node.items():

        def hand_over(
            gradients: tuple[Tensor | None, ...], _outputs: Any, sums: list[tuple[int, _Sum]] = sums
        ) -> None:
            for position, total in sums:
                total.add(gradients[position])

        handles.append(origin.register_hook(hand_over))
    return handles, {"", *arrivals}


def _at_output(node: Node, output: Tensor, goals: Mapping[Edge, str], arrived: Arrived) -> Any:
    index, base = output.output_nr, output._base if output._is_view() else None
    shape = output.shape
    if base is not None and base.numel() == output.numel() and output.is_contiguous():
        # A later write into a view makes autograd go around the view's own node.
        inner = base.grad_fn
        below = [edge[0] for edge in node.next_functions]
        if inner is not None and below == [inner] and (inner, base.output_nr) not in goals:
            node, index = inner, base.output_nr

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[index]
        if gradient is not None:
            arrived("", gradient.reshape(shape))

    return node.register_prehook(hook)


def _arrivals(start: Node, goals: Mapping[Edge, str]) -> dict[str, list[Edge]]:
    """Return for each goal the nodes before it, with the positions of their gradients."""
    stops = {edge[0] for edge in goals}
    arrivals: dict[str, list[Edge]] = {}
    visited, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        for position, edge in enumerate(node.next_functions):
            following = edge[0]
            if following is None:
                continue
            name = goals.get((following, edge[1]))
            if name is not None:
                arrivals.setdefault(name, []).append((node, position))
            elif following not in visited and following not in stops:
                visited.add(following)
                waiting.append(following)
        if len(visited) > _MOST_NODES:
            return {}
    return arrivals


class _Sum:
    """A sum of the parts of one gradient, handed over after the last part."""

    def __init__(self, name: str, parts: int, arrived: Arrived) -> None:
        self.name, self.parts, self._arrived = name, parts, arrived
        self._count = 0
        self._total: Tensor | None = None

    def add(self, part: Tensor | None) -> None:
        self._count += 1
        if part is not None:
            self._total = part if self._total is None else self._total + part
        if self._count == self.parts:
            total, self._total, self._count = self._total, None, 0
            if total is not None:
                self._arrived(self.name, total)


def inside_module_call(names: Mapping[int, str]) -> str | None:
    """Return the innermost module whose method is running, by name, from this thread's frames.

    No hook is needed on modules that are not collected, and an exception leaves nothing behind.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back  # type: ignore[assignment]
    return None
