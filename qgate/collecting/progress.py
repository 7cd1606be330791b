"""Progress of a run: the current iteration and micro-batch, and the end of iterations.

An iteration ends with a step of the model's optimizer, with `step()`, or with the next call of the
model after its parameters changed, where no backward pass can come, or where `labels` has another
iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypedDict

import torch.optim
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qgate.collecting.calls import tensors_in
from qgate.collecting.graph import in_backward
from qgate.collecting.guarding import CallingThread, Guard
from qgate.collecting.settings import CollectSettings
from qgate.hooks import ModuleHooks


class Labels(TypedDict, total=False):
    """Labels that changed before a forward pass, and what is wrong with one that may not."""

    iteration: int
    sample: int | None
    quant_type: str
    enabled: bool
    problem: str


class Progress:
    """Counts forward passes and iterations, and calls back at each of them."""

    def __init__(
        self,
        roots: list[nn.Module],
        settings: CollectSettings,
        on_forward: Callable[[], None],
        on_iteration_end: Callable[[int], None],
        labels: Callable[[], Labels] = Labels,
        on_error: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        self.guard, self.thread = Guard(on_error), CallingThread()
        self._roots, self._backward = roots, settings.backward
        self._on_forward, self._on_iteration_end = on_forward, on_iteration_end
        self._labels = labels
        self.is_paused = False
        self.iteration = settings.first_iteration  # the label of the current iteration
        self.samples = -1
        self.passes = 0
        self.had_backward = False
        self.records = 0
        self._pending_end = False
        self._own_optimizer = False
        self._needs_backward = False
        self._versions = 0
        self._hooks, self._on_graph = ModuleHooks(copied=False), ModuleHooks()

    @property
    def micro_batch(self) -> int:
        return max(self.passes - 1, 0)

    @property
    def has_begun(self) -> bool:
        return self.passes > 0 or self.records > 0

    def watch(self) -> None:
        leave = functools.partial(self.guard, self._leave)
        self._hooks.add(self._roots[0], lambda *_: self.enter(), first=True)
        self._hooks.add(self._roots[0], after=leave, always=True)
        step = functools.partial(self.guard, self._on_step)
        self._hooks.keep(register_optimizer_step_post_hook(step))

    def unwatch(self) -> None:
        self._hooks.remove()
        self._on_graph.remove()

    def hidden(self) -> AbstractContextManager[None]:
        return self._hooks.hidden()

    def enter(self) -> None:
        """Note a call of the model."""
        self.guard(self._enter)

    def _enter(self) -> None:
        if in_backward() or not self.thread.enter():
            return
        labels = self._labels()
        if self.passes and ("iteration" in labels or self._is_over()):
            self.end()
        self.iteration = labels.get("iteration", self.iteration)
        self.is_paused = not labels.get("enabled", not self.is_paused)
        if self.is_paused:
            return
        self.passes += 1
        self.samples += 1
        self._versions = self._version()
        self._on_forward()

    def _leave(self, _module: nn.Module, _args: Any, result: Any) -> None:
        """Note the outputs of the model, which decide whether a backward pass can come."""
        if in_backward() or not self.thread.leave() or self.is_paused:
            return
        nodes = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
        self._needs_backward = bool(nodes)

        def on_backward(_gradients: Any) -> None:
            self.had_backward = True

        if nodes:
            self._on_graph.keep(nodes[0].register_prehook(on_backward))

    def end(self) -> None:
        """End the iteration, if one has begun."""
        if not self.has_begun:
            return
        label = self.iteration
        self.iteration += 1
        self.passes = self.records = 0
        self.had_backward = self._pending_end = False
        self._on_graph.remove()
        self._on_iteration_end(label)

    def _is_over(self) -> bool:
        if self._pending_end or self._version() != self._versions:
            return True
        return not (self.had_backward or (self._backward and self._needs_backward))

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.has_begun:
            return
        own = {id(p) for root in self._roots for p in root.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._own_optimizer = True
        elif self._own_optimizer or not self.had_backward:
            return  # the optimizer of another model
        if in_backward():
            self._pending_end = True  # one of many, in the middle of the backward pass
        else:
            self.end()

    def _version(self) -> int:
        """Return a number that changes with every write to a parameter."""
        parameters = (p for root in self._roots for p in root.parameters())
        return sum(p._version for p in parameters if not p.is_inference())
