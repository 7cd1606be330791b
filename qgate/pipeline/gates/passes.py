"""Passes through a model: what flows at sites, alone or fed by the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.capture import Capture
from qgate.capture.running import pass_through
from qgate.errors import QgateError
from qgate.models import Model, Site
from qgate.models.tapping import tapped
from qgate.modes import Quantized

BUDGET_TOKENS = 128
_BATCH = 8


def short_layer(name: str) -> str:
    """`backbone.layers.3` is `layers.3` for people."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 else name


def linear_weights(model: Model) -> list[Site]:
    return [site for site in model.sites() if site.port == "weight" and site.kind == "linear"]


def _batches(samples: Sequence[Any], together: bool) -> Iterator[Any]:
    """Samples of one length side by side, where a mode is the same alone and in a batch."""
    held: list[Tensor] = []
    for sample in samples:
        if not (together and isinstance(sample, Tensor)):
            yield sample
            continue
        if held and (sample.shape[1:] != held[0].shape[1:] or len(held) == _BATCH):
            yield torch.cat(held)
            held = []
        held.append(sample)
    if held:
        yield torch.cat(held)


def outer_tensors(
    model: Model, samples: Sequence[Any], forced: Capture | None = None, together: bool = True
) -> Capture:
    """Inputs and outputs of the blocks, and the logits; with `forced`, inputs are given."""
    sites = [s for s in model.sites() if s.kind == "block" and s.port in ("input", "output")]
    if not sites:
        raise QgateError(f"{model.name} has no list of blocks: say layers=(…) in its qgate.Model.")
    record = Capture(model.name, model.basis, "")
    record.tensors = {name: [] for name in (*(site.name for site in sites), "logits")}
    place = 0
    with torch.no_grad():
        for batch in _batches(samples, together):

            def keep(_index: int, site: Site, tensor: Tensor) -> None:
                record.tensors[site.name] += _apart(tensor)

            part = None if forced is None else _part(forced, sites, place, _size(batch))
            result = pass_through(model, sites, 0, batch, keep, part)
            record.tensors["logits"] += _apart(result)
            place += _size(batch)
    return record


def _size(batch: Any) -> int:
    return len(batch) if isinstance(batch, Tensor) else 1


def _apart(tensor: Tensor) -> list[Tensor]:
    """The samples of a batch, each as a batch of one."""
    return [row.detach().float().clone() for row in tensor.split(1)]


def _part(forced: Capture, sites: list[Site], place: int, count: int) -> Capture:
    part = Capture(forced.model, forced.basis, "")
    for site in sites:
        if site.port == "input":
            part.tensors[site.name] = [torch.cat(forced[site.name][place : place + count])]
    return part


def shortened(sample: Any) -> Any:
    """The beginning of a sample of token ids; other samples as they are."""
    if isinstance(sample, Tensor) and not sample.is_floating_point() and sample.dim() == 2:
        return sample[:, :BUDGET_TOKENS]
    return sample


def capture_sites(model: Model, sites: Sequence[Site]) -> dict[str, Tensor]:
    """What flows at sites on a short text."""
    return flow(model, set(sites), shortened(model.inputs[0]))


def flow(model: Model, sites: set[Site], sample: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(_index: int, site: Site, tensor: Tensor) -> None:
        found.setdefault(site.name, tensor.detach().clone())

    with torch.no_grad():
        pass_through(model, sites, 0, sample, keep)
    return found


def fed(
    quantized: Quantized, wanted: list[Site], sample: Any, flowing: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What a mode makes of each site when it is given what the reference has there.

    A quantized Mamba mixer is fed as a whole, its parts hang together; elsewhere every linear layer
    and every other site that is quantized on its way in is fed by itself.
    """
    model = quantized.model
    if quantized.mode.choices is not None:
        gates = [s for s in model.sites() if s.port == "input" and s.kind == "block"]
    else:
        own = quantized.plan.quantizers()
        gates = [
            site
            for site in wanted
            if site.port not in ("weight", "output", "state")
            and (site.kind == "linear" or site.name in own)
        ]
    found: dict[str, Tensor] = {}

    def feed(site: Site, tensor: Tensor) -> Tensor:
        return flowing[site.name].to(tensor.dtype) if site.name in flowing else tensor

    def keep(_index: int, site: Site, tensor: Tensor) -> None:
        found.setdefault(site.name, tensor.detach().clone())

    with torch.no_grad(), tapped(model.module, gates, feed, first=True):
        pass_through(model, wanted, 0, sample, keep)
    return found
