"""Largest inputs of layers on the calibration samples, from which static scales are made."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.hooks.tapping import tap_sites
from qgate.models.model import Model
from qgate.models.sites import Site
from qgate.text import listed

_Reaches = dict[str, float]
_MEASURED: WeakKeyDictionary[Model, tuple[str, _Reaches]] = WeakKeyDictionary()


def calibrated_reaches(model: Model, sites: Sequence[Site]) -> _Reaches:
    """Return the largest magnitude at each site over the calibration samples, by name.

    A site that they never reach, such as that of an expert without a token, is an error.
    """
    if not sites:
        return {}
    weights, measured = _MEASURED.get(model, ("", {}))
    if weights != model.weights_hash() or {site.name for site in sites} - measured.keys():
        measured = _measure(model, sites)
        _MEASURED[model] = (model.weights_hash(), measured)
    if unreached := [site.module for site in sites if not measured[site.name]]:
        raise QgateError(
            f"calibration reached {listed(unreached, 4)} with no token: their input scales would "
            f"be 0 or NaN. {model.name} was calibrated on {len(model.calibration_samples())} "
            "samples: give more or longer ones (calib_samples, calib_seqlen), or take a mode "
            "whose scales are those of each token, such as experts-fp8."
        )
    return {site.name: measured[site.name] for site in sites}


def _measure(model: Model, sites: Sequence[Site]) -> _Reaches:
    largest = dict.fromkeys((site.name for site in sites), 0.0)

    def take(site: Site, tensor: Tensor) -> None:
        largest[site.name] = max(largest[site.name], float(tensor.detach().abs().amax()))

    with torch.no_grad(), tap_sites(model.module, sites, take):
        for sample in model.calibration_samples():
            model.outputs(sample)
    return largest
