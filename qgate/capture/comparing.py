"""Errors between two runs, site by site; runs in different bases are refused."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qgate.capture.running import Capture, pass_through, pick_sites
from qgate.errors import QgateError
from qgate.models.model import Model
from qgate.models.sites import Site
from qgate.stats import ErrorStats, errors


def compare(actual: Capture, reference: Capture) -> dict[str, ErrorStats]:
    """Return the errors of every site of the reference; a missing site or sample is an error."""
    _same_basis(actual.basis, reference.basis, actual.model, reference.model)
    if actual.inputs != reference.inputs:
        raise QgateError(
            "the captures are of different samples: run both models on the same inputs."
        )
    return {site: _site_errors(site, actual[site], reference[site]) for site in reference.tensors}


def compare_runs(
    actual: Model,
    reference: Model,
    sites: str | Sequence[str] | None = None,
    *,
    samples: Sequence[Any] | None = None,
    local: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, ErrorStats]:
    """Run both models sample by sample and keep only the errors.

    With `local`, every block of `actual` gets the reference's input.
    """
    _same_basis(actual.basis, reference.basis, actual.name, reference.name)
    samples = reference.inputs if samples is None else samples
    if not len(samples):
        raise QgateError(f"there are no samples to run {reference.name} on.")
    chosen = pick_sites(reference, sites)
    blocks = pick_sites(reference, r":input$") if local else []
    blocks = [site for site in blocks if site.is_block]
    total: dict[str, ErrorStats] = {}

    def capture(
        model: Model, sites: set[Site], index: int, sample: Any, forced: Capture | None = None
    ) -> dict[str, list[Tensor]]:
        tensors: dict[str, list[Tensor]] = {}

        def keep(_index: int, site: Site, tensor: Tensor) -> None:
            tensors.setdefault(site.name, []).append(tensor.detach().clone())

        pass_through(model, sites, index, sample, keep, forced)
        return tensors

    with torch.no_grad():
        for index, sample in enumerate(samples):
            expected = capture(reference, {*chosen, *blocks}, index, sample)
            forced = Capture(reference.name, reference.basis, "")
            forced.tensors = {b.name: [*[Tensor()] * index, expected[b.name][0]] for b in blocks}
            captured = capture(actual, {*chosen}, index, sample, forced if local else None)
            for name in (site.name for site in chosen):
                part = _site_errors(name, captured[name], expected[name])
                total[name] = part if name not in total else total[name] + part
            if progress:
                progress(index + 1, len(samples))
    return {site.name: total[site.name] for site in chosen}


def _site_errors(site: str, actual: list[Tensor], reference: list[Tensor]) -> ErrorStats:
    if len(actual) != len(reference) or not reference:
        raise QgateError(
            f"{site} was passed {len(actual)} times in one run and {len(reference)} times in the "
            "other: they cannot be paired."
        )
    pairs = zip(actual, reference, strict=True)  # two models may be on two devices
    parts = [errors(a.float(), r.float().to(a.device)) for a, r in pairs]
    return functools.reduce(operator.add, parts)


def _same_basis(actual: str, reference: str, name: str, other: str) -> None:
    if actual != reference:
        raise QgateError(
            f"{name} is in basis {actual!r} and {other} in basis {reference!r}: their activations "
            f"cannot be compared. Take the reference with model.in_basis({actual!r})."
        )
