"""Scope of a mode: its quantized modules, outputs, layers and tokens, to be compared by gates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.compared_sites import quantized_modules
from qgate.hooks.tapping import tap_sites
from qgate.models import Model, Site
from qgate.modes import Quantized
from qgate.results.coverage import ModeScope


def mode_scope(bench: Bench, quantized: Quantized) -> ModeScope:
    """Return what there is to compare of a mode that was measured."""
    basis = quantized.model.basis
    base = bench.model.in_basis(basis)
    modules = quantized_modules(quantized, base)
    first = {site.module for site in base.sites()}
    later = _passed_later(base, modules.keys() - first)
    modules = {name: unit_of for name, unit_of in modules.items() if name in first | later}
    tokens, unit = _tokens(bench.model.inputs)
    return ModeScope(
        model=bench.model.name,
        mode=quantized.mode.name,
        modules={name: (unit_of, bench.layer_of(name)) for name, unit_of in modules.items()},
        idle=[name for name in modules if name in later],
        outputs=[name for name in bench.reference(basis).tensors if ":" not in name],
        layers=dict(
            zip(bench.layers, (f"{layer}:output" for layer in bench.model.layers), strict=True)
        ),
        tokens=tokens,
        unit=unit,
    )


def _passed_later(model: Model, modules: Collection[str]) -> set[str]:
    """Return the modules that a sample passes, of those that the first one does not."""
    sites = [site for site in model.idle_sites() if site.module in modules]
    passed: set[str] = set()

    def take(site: Site, _tensor: Tensor) -> None:
        passed.add(site.module)

    if sites:
        with torch.no_grad(), tap_sites(model.module, sites, take):
            for sample in model.inputs[1:]:
                model(sample)
    return passed


def _tokens(inputs: Sequence[Any]) -> tuple[list[int], Literal["tokens", "samples"]]:
    """Count the tokens of each row of the samples; rows themselves where they are no token ids."""
    ids = [_first(sample, "input_ids") for sample in inputs]
    rows = [1 if of is None or of.dim() not in (2, 4) else len(of) for of in ids]
    if all(of is not None and not of.is_floating_point() for of in ids):
        return [
            of.numel() // count
            for of, count in zip(ids, rows, strict=True)
            if of is not None
            for _ in range(count)
        ], "tokens"
    return [1] * sum(rows), "samples"


def _first(sample: Any, name: str) -> Tensor | None:
    """Return the tensor of a name, or the first tensor of a sample."""
    if isinstance(sample, Mapping):
        values = [sample[name]] if name in sample else [*sample.values()]
    else:
        values = [*sample] if isinstance(sample, tuple) else [sample]
    return next((value for value in values if isinstance(value, Tensor)), None)
