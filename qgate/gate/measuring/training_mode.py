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
from qgate.gate.measuring.segments import Segments, TakenTensors, Worst
from qgate.models import Model
from qgate.models.refusals import LENGTH_REFUSALS

_OTHERS_BY_DESIGN = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
_LEAST = 1e-30


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
    """Return the first site at which a run in training mode has other bits, and what they are."""
    for site, tensors in right.items():
        others = trained.get(site, ())
        for actual, expected in zip(others, tensors, strict=False):
            if actual.shape == expected.shape and torch.equal(actual, expected):
                continue
            words = "other shapes"
            if actual.shape == expected.shape and expected.dim():
                worst = Worst(actual=actual.float(), expected=expected.float())
                words = pattern(worst, _LEAST)
            return site, f"is not in training mode what it is in evaluation: {words}"
        if len(others) != len(tensors):
            return site, "is not in training mode what it is in evaluation: it is called otherwise"
    return None
