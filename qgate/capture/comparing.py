"""How two runs differ, site by site; comparing coordinates that differ is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.capture.captures import Capture
from qgate.capture.running import pass_through, pick_sites
from qgate.errors import QgateError
from qgate.models.model import Model
from qgate.models.sites import Site
from qgate.stats import ErrorStats, errors


def compare(actual: Capture, reference: Capture) -> dict[str, ErrorStats]:
    """The errors of every site of the reference; a site or sample that lacks is an error."""
    _same_basis(actual.basis, reference.basis, actual.model, reference.model)
    if actual.inputs != reference.inputs:
        raise QgateError(
            "the captures are of different samples: run both models on the same inputs."
        )
    return {site: _joined(site, actual[site], reference[site]) for site in reference.tensors}


def compare_runs(
    actual: Model,
    reference: Model,
    sites: str | Sequence[str] | None = None,
    *,
    samples: Sequence[Any] | None = None,
    local: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, ErrorStats]:
    """Run both models sample by sample and keep only the errors, whatever the number of samples.

    With `local`, every block of `actual` is given the reference's input.
    """
    _same_basis(actual.basis, reference.basis, actual.name, reference.name)
    samples = reference.inputs if samples is None else samples
    if not len(samples):
        raise QgateError(f"there are no samples to run {reference.name} on.")
    chosen = pick_sites(reference, sites)
    blocks = pick_sites(reference, r":input$") if local else []
    blocks = [site for site in blocks if site.kind == "block"]
    total: dict[str, ErrorStats] = {}
    with torch.no_grad():
        for index, sample in enumerate(samples):
            kept = Capture(reference.name, reference.basis, "")

            def keep(_index: int, site: Site, tensor: Tensor, kept: Capture = kept) -> None:
                kept.tensors.setdefault(site.name, []).append(tensor.clone())

            pass_through(reference, {*chosen, *blocks}, index, sample, keep)
            forced = Capture(reference.name, reference.basis, "")
            forced.tensors = {b.name: [*[Tensor()] * index, kept[b.name][0]] for b in blocks}
            for name, found in _against(actual, chosen, index, sample, kept, forced, local).items():
                total[name] = found if name not in total else total[name] + found
            if progress:
                progress(index + 1, len(samples))
    return {site.name: total[site.name] for site in chosen}


def _against(
    actual: Model,
    sites: list[Site],
    index: int,
    sample: Any,
    kept: Capture,
    forced: Capture,
    local: bool,
) -> dict[str, ErrorStats]:
    seen: dict[str, list[Tensor]] = {}

    def keep(_index: int, site: Site, tensor: Tensor) -> None:
        seen.setdefault(site.name, []).append(tensor.detach().clone())

    pass_through(actual, sites, index, sample, keep, forced if local else None)
    return {site.name: _joined(site.name, seen[site.name], kept[site.name]) for site in sites}


def _joined(site: str, actual: list[Tensor], reference: list[Tensor]) -> ErrorStats:
    if len(actual) != len(reference) or not reference:
        raise QgateError(
            f"{site} was passed {len(actual)} times in one run and {len(reference)} times in the "
            "other: they cannot be paired."
        )
    parts = [errors(a.float(), r.float()) for a, r in zip(actual, reference, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _same_basis(actual: str, reference: str, name: str, other: str) -> None:
    if actual != reference:
        raise QgateError(
            f"{name} is in basis {actual!r} and {other} in basis {reference!r}: their activations "
            f"cannot be compared. Take the reference with model.in_basis({actual!r})."
        )
