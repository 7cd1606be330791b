"""Runs in training mode, which compute what they compute in evaluation, with the same gradients.

Code that asks whether a module trains runs in no other gate. Dropout and norms over a batch stay as
in evaluation: they are others by design.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qgate.gate.measuring.segment_rows import pattern
from qgate.gate.measuring.segment_views import TakenTensors
from qgate.gate.measuring.segments import Segments, Worst
from qgate.models import Model
from qgate.models.refusals import LENGTH_REFUSALS

_OTHERS_BY_DESIGN = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
_OTHERWISE = "is not in training mode what it is in evaluation"
_NOISE = 64.0
"""Roundings of float32 by which a row may be off."""
_TINY = 1e-30


@contextmanager
def training_mode(root: nn.Module) -> Iterator[None]:
    """Switch modules to training for a while, but for dropout and norms over a batch."""
    switched = [
        module
        for module in root.modules()
        if not module.training and not isinstance(module, _OTHERS_BY_DESIGN)
    ]
    try:
        for module in switched:
            module.training = True
        yield
    finally:
        for module in switched:
            module.training = False


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
