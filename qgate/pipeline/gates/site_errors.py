"""What one comparison at a site leaves behind: plain numbers, with and without massive elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.results.pictures import Picture
from qgate.stats import ErrorStats, errors, massive_beyond

# A thousandth of the mean amplitude. The quietest channels of the tiny models have 1e-3 of the mean
# energy, beside outliers of 1000 times the amplitude 1e-6; float32 noise is 1e-13 of the mean.
_QUIET = 1e-6
PART_METRICS = ("relative_mse", "correlation")
Pairs = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SiteErrors:
    """The errors at one site in one scope, as plain numbers.

    ideal            relative MSE of an ideal quantizer there, None where nothing is quantized
    worst_channel    the largest ratio of a channel's squared error to its own energy
    without_massive  values over all but the massive elements of the reference: those of the whole
                     where there are none, None where it was not asked
    pictures         what is needed to draw it, where somebody wants that
    """

    site: str
    layer: str
    scope: str
    order: int
    values: dict[str, float]
    nonfinite: int
    nonfinite_reference: int
    ideal: float | None = None
    quantizer: str = ""
    worst_channel: float | None = None
    without_massive: dict[str, float] | None = None
    pictures: tuple[Picture, ...] = ()


def compare(pairs: Pairs, channels: bool = False) -> ErrorStats:
    """The errors of all pairs together; `channels` are indices of the last axis."""
    if not pairs:
        raise QgateError("nothing was compared: there is no pair of tensors.")
    for a, r in pairs:
        if a.shape != r.shape:
            raise QgateError(
                f"a tensor of shape {tuple(a.shape)} cannot be compared with {tuple(r.shape)}."
            )
    if not channels:
        return errors((a.float() for a, _ in pairs), (r.float() for _, r in pairs))
    actual, reference = (_rows([pair[side] for pair in pairs]) for side in (0, 1))
    return errors(actual, reference, channel_axis=-1)


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Samples may differ in length, channels do not."""
    if len(tensors) == 1:
        return tensors[0].float()
    return torch.cat([each.float().reshape(-1, each.shape[-1]) for each in tensors])


def massive_from(reference: Sequence[Tensor]) -> float:
    """The magnitude above which elements of a site are massive, over all samples."""
    return massive_beyond(each.float() for each in reference)


def without_massive(found: ErrorStats, pairs: Pairs, beyond: float) -> dict[str, float]:
    """The metrics over the elements whose reference is not above a magnitude.

    NaN in a reference is not left out: what is not finite is for the gate to see.
    """
    if beyond < float("inf"):
        kept = [(a[~massive], r[~massive]) for a, r in pairs for massive in [r.abs() > beyond]]
        found = compare(kept)
    metrics = found.metrics()
    return {name: metrics[name] for name in PART_METRICS}


def worst_channel(found: ErrorStats) -> float | None:
    """Return the largest ratio of a channel's squared error to its own energy.

    A channel below `_QUIET` of the mean energy is measured against that floor: it is silent, and
    its own energy would make float noise look like a fault.
    """
    channels = found.channels
    if channels is None:
        return None
    energy = channels.sum_square_reference
    floor = _QUIET * float(energy.mean())
    return float((channels.sum_square_error / energy.clip(min=floor)).max()) if floor else None
