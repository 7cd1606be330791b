"""Checkpoints of activations: their code runs once, so that a site gets a tensor once per call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import checkpoint

_is_real = ContextVar("_is_real", default=False)
_notes: ContextVar[list[bool] | None] = ContextVar("_notes", default=None)


@contextlib.contextmanager
def straight_calls() -> Iterator[None]:
    """Let `torch.utils.checkpoint` keep all tensors, where nobody asked for `real_checkpoints`."""
    if _is_real.get() or not torch.is_grad_enabled():
        yield
        return
    real = {name: getattr(checkpoint, name) for name in _STRAIGHT}
    try:
        for name, straight in _STRAIGHT.items():
            setattr(checkpoint, name, straight)
        yield
    finally:
        for name, function in real.items():
            setattr(checkpoint, name, function)


@contextlib.contextmanager
def real_checkpoints() -> Iterator[None]:
    """Run code behind checkpoints once more on the way back, as programs do."""
    token = _is_real.set(True)
    try:
        yield
    finally:
        _is_real.reset(token)


@contextlib.contextmanager
def noted_checkpoints() -> Iterator[list[bool]]:
    """Yield a list that gets an entry for each call of a checkpoint that is called straight."""
    notes: list[bool] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _note() -> None:
    notes = _notes.get()
    if notes is not None:
        notes.append(True)


def _kept(*_args: Any, **_options: Any) -> Generator[None, None, None]:
    _note()
    yield


class _Called:
    @staticmethod
    def apply(function: Callable[..., Any], _keeps_draws: bool, *args: Any) -> Any:
        _note()
        return function(*args)


_STRAIGHT = {"_checkpoint_without_reentrant_generator": _kept, "CheckpointFunction": _Called}
"""What stands for code of torch: it is entered before and after a function, or calls it."""
