"""Passes through a model: the tensors at its sites, alone or fed by the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qgate.capture import Capture
from qgate.capture.running import pass_through
from qgate.errors import QgateError
from qgate.hooks.tapping import tap_sites
from qgate.models import Model, Site
from qgate.modes import Quantized

BUDGET_TOKENS = 128
Watch = Callable[[Any, str], AbstractContextManager[dict[str, Tensor]]]
_BATCH = 8


def short_layer(name: str) -> str:
    """Return `layers.3` for `backbone.layers.3`."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 else name


def linear_weights(model: Model) -> list[Site]:
    return [site for site in model.sites() if site.port == "weight" and site.kind == "linear"]


def _batches(samples: Sequence[Any], together: bool) -> Iterator[Any]:
    """Put samples of one length side by side, where a mode is the same alone and in a batch."""
    batch: list[Tensor] = []
    for sample in samples:
        if not (together and isinstance(sample, Tensor)):
            yield sample
            continue
        if batch and (sample.shape[1:] != batch[0].shape[1:] or len(batch) == _BATCH):
            yield torch.cat(batch)
            batch = []
        batch.append(sample)
    if batch:
        yield torch.cat(batch)


def outer_tensors(
    model: Model,
    samples: Sequence[Any],
    forced: Capture | None = None,
    together: bool = True,
    watch: Watch | None = None,
) -> Capture:
    """Capture inputs and outputs of the blocks and of the model; `forced` gives the inputs.

    `watch(batch, name)` is entered around each pass, and gets the outputs of the model.
    """
    sites = [s for s in model.sites() if s.kind == "block" and s.port in ("input", "output")]
    if not sites:
        raise QgateError(f"{model.name} has no list of blocks: say layers=(…) in its qgate.Model.")
    record = Capture(model.name, model.basis, "")
    record.tensors = {site.name: [] for site in sites}
    start = 0
    with torch.no_grad():
        for batch in _batches(samples, together):

            def keep(_index: int, site: Site, tensor: Tensor) -> None:
                record.tensors[site.name] += _split(tensor)

            end = start + (len(batch) if isinstance(batch, Tensor) else 1)
            part = None if forced is None else _inputs(forced, sites, start, end)
            with watch(batch, _named(start, end)) if watch else nullcontext({}) as watched:
                outputs = pass_through(model, sites, 0, batch, keep, part)
                watched |= outputs
            for name, tensor in outputs.items():
                record.tensors.setdefault(name, []).extend(_split(tensor))
            start = end
    return record


def _named(start: int, end: int) -> str:
    return f"sample {start}" if end == start + 1 else f"samples {start} to {end - 1}"


def _split(tensor: Tensor) -> list[Tensor]:
    """Return the samples of a batch, each as a batch of one; a number stands for all of them."""
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    return [row.detach().float().clone() for row in tensor.split(1)]


def _inputs(forced: Capture, sites: list[Site], start: int, end: int) -> Capture:
    part = Capture(forced.model, forced.basis, "")
    for site in sites:
        if site.port == "input":
            part.tensors[site.name] = [torch.cat(forced[site.name][start:end])]
    return part


def shortened(sample: Any) -> Any:
    """Return the beginning of a sample of token ids; other samples as they are."""
    if isinstance(sample, Tensor) and not sample.is_floating_point() and sample.dim() == 2:
        return sample[:, :BUDGET_TOKENS]
    return sample


def capture_sites(model: Model, sites: Sequence[Site]) -> dict[str, Tensor]:
    """Capture the tensors at sites on a short text."""
    return flow(model, set(sites), shortened(model.inputs[0]))


def flow(model: Model, sites: Iterable[Site], sample: Any) -> dict[str, Tensor]:
    """Capture the first tensor at each site in one pass of a sample."""
    tensors: dict[str, Tensor] = {}

    def keep(_index: int, site: Site, tensor: Tensor) -> None:
        tensors.setdefault(site.name, tensor.detach().clone())

    with torch.no_grad():
        pass_through(model, sites, 0, sample, keep)
    return tensors


def fed(
    quantized: Quantized,
    sites: list[Site],
    sample: Any,
    flowing: dict[str, Tensor],
    outside: Sequence[Site] = (),
) -> dict[str, Tensor]:
    """Capture the tensors of a mode at sites that are given the reference's inputs.

    A quantized Mamba mixer is fed as a whole, as its parts depend on each other; elsewhere every
    linear layer and every other site that is quantized on its way in is fed by itself, and so are
    the sites `outside` of all blocks. A module that runs again is fed the first time.
    """
    model = quantized.model
    if quantized.mode.choices is not None:
        gates = [s for s in model.sites() if s.port == "input" and s.kind == "block"]
    else:
        own = quantized.plan.quantizers()
        gates = [
            site
            for site in sites
            if site.port not in ("weight", "output", "state")
            and (site.kind == "linear" or site.name in own)
        ]
    waiting = {site.name for site in (*gates, *outside) if site.name in flowing}

    def feed(site: Site, tensor: Tensor) -> Tensor:
        if site.name not in waiting:
            return tensor
        waiting.remove(site.name)
        return flowing[site.name].to(tensor.dtype)

    taps = dict.fromkeys([*gates, *outside])
    with torch.no_grad(), tap_sites(model.module, taps, feed, first=True):
        return flow(model, sites, sample)


def float64_array(tensor: Tensor) -> npt.NDArray[np.float64]:
    return tensor.detach().float().cpu().numpy().astype(np.float64)
