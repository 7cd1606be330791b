"""Ranges of recurrent states over the calibration samples, that static scales are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.hooks import ModuleHooks
from qgate.models.mamba.network import MambaMixer
from qgate.models.mamba.scanning import selective_scan

if TYPE_CHECKING:
    from qgate.models.model import Model

Ranges = Mapping[str, Tensor]
"""Largest magnitude of each channel, by site."""
_LEAST = 1e-5
_MEASURED: WeakKeyDictionary[Model, tuple[str, Ranges]] = WeakKeyDictionary()


def state_site(at: str, side: str) -> str:
    """Return the name of the place where a mixer's state is stored."""
    return f"{at}.{'conv1d' if side == 'conv' else 'scan'}:stored_state"


def named_mixers(model: Model) -> list[tuple[str, MambaMixer]]:
    """List the mixers of a model, by name."""
    listed = model.module.named_modules()
    mixers = [(name, module) for name, module in listed if isinstance(module, MambaMixer)]
    if not mixers:
        raise QgateError(
            f"{model.name} has no recurrent state that can be quantized: these modes are for "
            "tiny-mamba, and Mamba-1 loaded by mamba:PATH, which reads the folders of transformers "
            "too. Choose another mode."
        )
    return mixers


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

    with ModuleHooks() as hooks:
        for at, mixer in named_mixers(model):

            def convolved(
                _module: nn.Module, args: tuple[Tensor, ...], _kwargs: Any, at: str = at
            ) -> None:
                take(state_site(at, "conv"), args[0])

            def scanned(_module: nn.Module, _args: Any, kwargs: Any, at: str = at) -> None:
                def keep(state: Tensor, _token: int) -> Tensor:
                    take(state_site(at, "ssm"), state)
                    return state

                selective_scan(**kwargs, store=keep)

            hooks.add(mixer.conv1d, convolved)
            hooks.add(mixer.scan, scanned)
        with torch.no_grad():
            for batch in _batches(model):
                model(batch)
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
