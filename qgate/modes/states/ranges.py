"""Ranges of recurrent states over the calibration samples, that static scales are made from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.hooks import ModuleHooks
from qgate.modes.states.mixers import StateInputs, StateMixer, named_mixers, network_of, watch

if TYPE_CHECKING:
    from qgate.models.model import Model

Ranges = Mapping[str, Tensor]
"""Largest magnitude of each channel, by site."""
_LEAST = 1e-5
_MEASURED: WeakKeyDictionary[Model, tuple[str, Ranges]] = WeakKeyDictionary()


def state_ranges(model: Model) -> Ranges:
    """Run the FP32 model and return the largest states of every channel."""
    weights, measured = _MEASURED.get(model, ("", {}))
    if weights != model.weights_hash():
        measured = _measure(model)
        _MEASURED[model] = (model.weights_hash(), measured)
    return measured


def _measure(model: Model) -> Ranges:
    largest: dict[str, Tensor] = {}

    def take(site: str, values: Tensor) -> None:
        most = values.detach().abs().amax((0, 1))
        largest[site] = most.maximum(largest.get(site, most)).clamp_min(_LEAST)

    network = network_of(model)
    running = model.with_module(network)

    def measure(mixer: StateMixer, side: str, inputs: StateInputs) -> None:
        if side == "conv":
            take(mixer.site(side), inputs.tokens["input"])
            return

        def keep(state: Tensor, _token: int) -> Tensor:
            take(mixer.site(side), state)
            return state

        scan = copy.copy(mixer.part(side))
        scan.store = keep
        inputs.to(scan.forward)

    with ModuleHooks() as hooks, torch.no_grad():
        watch(hooks, named_mixers(model, network), measure)
        for batch in _batches(model):
            running(batch)
    for site, values in largest.items():
        if not values.isfinite().all():
            raise QgateError(f"{site} cannot be calibrated: its range is {float(values.amax())}.")
    return largest


def _batches(model: Model) -> list[Tensor]:
    """Join calibration samples of one length."""
    by_length: dict[int, list[Tensor]] = {}
    for sample in model.calibration_samples():
        by_length.setdefault(sample.shape[1], []).append(sample)
    return [torch.cat(samples) for samples in by_length.values()]
