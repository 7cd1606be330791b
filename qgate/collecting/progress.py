"""Where a run is: which iteration, which micro-batch, and when an iteration is over.

An iteration ends with a step of the model's optimizer, with `step()`, or when the model is called
again: after a change of its parameters, or where no backward pass is to come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qgate.collecting.calls import tensors_in
from qgate.collecting.graph import in_backward


class Progress:
    """Counts; calls `ended(label)` when an iteration is over, `began()` with each forward pass."""

    def __init__(
        self,
        roots: list[nn.Module],
        *,
        first: int,
        backward: bool,
        began: Callable[[], None],
        ended: Callable[[int], None],
    ) -> None:
        self._roots, self._first, self._backward = roots, first, backward
        self._began, self._ended = began, ended
        self.done = 0
        self.samples = -1
        self.passes = 0
        self.backward_seen = False
        self.records = 0
        self._pending_end = False
        self._own_optimizer = False
        self._needs_backward = False
        self._versions = 0
        self._handles: list[Any] = []
        self._nodes: list[Any] = []

    @property
    def iteration(self) -> int:
        """The label of the iteration that is under way."""
        return self._first + self.done

    @property
    def micro_batch(self) -> int:
        return max(self.passes - 1, 0)

    @property
    def begun(self) -> bool:
        return self.passes > 0 or self.records > 0

    def watch(self) -> None:
        root = self._roots[0]
        self._handles = [
            root.register_forward_pre_hook(lambda *_: self.enter(), prepend=True),
            root.register_forward_hook(lambda _module, _args, result: self.leave(result)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer)),
        ]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        for handle in self._nodes:
            handle.remove()
        self._nodes = []

    def enter(self) -> None:
        """The model is called."""
        if torch.compiler.is_compiling() or in_backward():
            return
        if self.passes and self._is_over():
            self.end()
        self.passes += 1
        self.samples += 1
        self._versions = self._version()
        self._began()

    def leave(self, result: Any) -> None:
        """The model returns: whether a backward pass can come is seen from what it returns."""
        if torch.compiler.is_compiling() or in_backward():
            return
        tensor = next((t for t in tensors_in(result) if t.grad_fn is not None), None)
        self._needs_backward = tensor is not None
        if tensor is not None and tensor.grad_fn is not None:

            def seen(_gradients: Any) -> None:
                self.backward_seen = True

            self._nodes.append(tensor.grad_fn.register_prehook(seen))

    def end(self) -> None:
        """The iteration is over."""
        if not self.begun:
            return
        label = self.iteration
        self.done += 1
        self.passes = self.records = 0
        self.backward_seen = self._pending_end = False
        self._forget_nodes()
        self._ended(label)

    def _is_over(self) -> bool:
        if self._pending_end or self._version() != self._versions:
            return True
        return not (self.backward_seen or (self._backward and self._needs_backward))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if torch.compiler.is_compiling() or not self.begun:
            return
        own = {id(p) for root in self._roots for p in root.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._own_optimizer = True
        elif self._own_optimizer or not self.backward_seen:
            return  # the optimizer of another model
        if in_backward():
            self._pending_end = True  # one of many, in the middle of the backward pass
        else:
            self.end()

    def _version(self) -> int:
        """Changes whenever a parameter is written to."""
        every = (p for root in self._roots for p in root.parameters())
        return sum(p._version for p in every if not p.is_inference())
