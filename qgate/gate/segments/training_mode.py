"""Runs in training mode, which compute what they compute in evaluation, with the same gradients.

Code that asks whether a module trains runs in no other gate. Dropout and norms over a batch stay as
in evaluation: they are others by design. What stands behind checkpoints runs again on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qgate.capture.running import loss_of
from qgate.devices import exact_math
from qgate.errors import first_line
from qgate.gate.segments.rows import pattern
from qgate.gate.segments.segments import Segments, Worst
from qgate.gate.segments.views import TakenTensors
from qgate.hooks.recomputing import real_checkpoints
from qgate.models import Model
from qgate.models.refusals import LENGTH_REFUSALS

_OTHERS_BY_DESIGN = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
_OTHERWISE = "is not in training mode what it is in evaluation"
_AGAIN = "behind torch.utils.checkpoint, which runs code again on the way back,"
_NOISE = 64.0
"""Roundings of float32 by which a row may be off."""
_TINY = 1e-30


@contextmanager
def training_mode(root: nn.Module) -> Iterator[None]:
    """Switch modules to training for a while, but for dropout and norms over a batch.

    Buffers get back what they held: spectral norms learn theirs in training.
    """
    switched = [
        module
        for module in root.modules()
        if not module.training and not isinstance(module, _OTHERS_BY_DESIGN)
    ]
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()] if switched else []
    try:
        for module in switched:
            module.training = True
        yield
    finally:
        for module in switched:
            module.training = False
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def trains_as_it_runs(base: Model, sample: Any) -> bool:
    """Tell if a reference gives the same bits in training mode: it draws no numbers there."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = base.outputs(sample)
        try:
            with training_mode(base.module):
                trained = base.outputs(sample)
        except LENGTH_REFUSALS:
            return False
    return outputs.keys() == trained.keys() and all(
        torch.equal(outputs[name], trained[name]) for name in outputs
    )


def evaluated(segments: Segments, sample: Any) -> Mapping[str, Sequence[Tensor]]:
    """Return the tensors at the sites of a run in evaluation, with autograd as in training."""
    recorder = TakenTensors(copies=True)
    with torch.enable_grad(), recorder.watch(segments.model.module, segments.view.ports):
        segments.model.outputs(sample)
    return segments.view.read(recorder.tensors).actual


def training_fault(
    right: Mapping[str, Sequence[Tensor]], trained: Mapping[str, Sequence[Tensor]]
) -> tuple[str, str] | None:
    """Return the first site at which a run in training mode has other values, and what they are.

    Memory that is laid out otherwise may move last bits. What follows from these is no fault, and
    is not looked at.
    """
    for site, tensors in right.items():
        trained_tensors = trained.get(site, ())
        if [other.shape for other in trained_tensors] != [tensor.shape for tensor in tensors]:
            return site, f"{_OTHERWISE}: it is called otherwise"
        for actual, expected in zip(trained_tensors, tensors, strict=True):
            if torch.equal(actual, expected):
                continue
            if not expected.is_floating_point() or not expected.dim():
                return site, f"{_OTHERWISE}: {actual.flatten()[0]} for {expected.flatten()[0]}"
            a, r = actual.float(), expected.float()
            distance = torch.linalg.vector_norm(a - r, dim=-1)
            size = torch.linalg.vector_norm(r, dim=-1).clamp_min(_TINY)
            room = torch.finfo(actual.dtype).eps * (_NOISE if actual.dtype == torch.float32 else 1)
            if bool((distance <= room * size).all()):
                return None
            return site, f"{_OTHERWISE}: {pattern(Worst(actual=a, expected=r), _TINY)}"
    return None


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that take a gradient, by name."""
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def recomputing_fault(model: Model, sample: Any) -> tuple[str, str] | None:
    """Return a parameter that gets another gradient where code behind checkpoints runs again.

    Nothing is said of a model that does not repeat its own gradients.
    """
    expected = _gradients(model, sample)
    repeated = _gradients(model, sample)
    if any(not torch.equal(expected[name], repeated[name]) for name in expected):
        return None
    try:
        with real_checkpoints():
            recomputed = _gradients(model, sample)
    except RuntimeError as error:  # torch compares shapes and numbers of tensors
        return next(iter(expected)), f"{_AGAIN} has no gradient: {first_line(error)}"
    for name, gradient in expected.items():
        if name not in recomputed:
            return name, f"{_AGAIN} has no gradient"
        a, r = recomputed[name].float(), gradient.float()
        room = torch.finfo(gradient.dtype).eps * (_NOISE if gradient.dtype == torch.float32 else 1)
        if not torch.linalg.vector_norm(a - r) <= room * torch.linalg.vector_norm(r):
            actual, expected_rows = (t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in (a, r))
            words = pattern(Worst(actual=actual, expected=expected_rows), _TINY).replace(
                "token", "row"
            )
            return name, f"{_AGAIN} has another gradient: {words}"
    return None


def _gradients(model: Model, sample: Any) -> dict[str, Tensor]:
    """Return the gradients of a loss by the site of a parameter; what they were before stays."""
    trained = trained_parameters(model.module)
    before = [parameter.grad for parameter in trained.values()]
    try:
        for parameter in trained.values():
            parameter.grad = None
        with torch.enable_grad(), exact_math():
            loss_of(model.outputs(sample), sample).backward()
        return {
            ":".join(name.rpartition(".")[::2]): parameter.grad.clone()
            for name, parameter in trained.items()
            if parameter.grad is not None
        }
    finally:
        for parameter, gradient in zip(trained.values(), before, strict=True):
            parameter.grad = gradient
