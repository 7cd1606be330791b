"""Scope of a mode: its quantized modules, outputs, layers and tokens, to be compared by gates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.compared_sites import quantized_modules
from qgate.hooks.tapping import tap_sites
from qgate.models import Model, Site
from qgate.models.rows import real_tokens, row_count, token_ids
from qgate.modes import Quantized
from qgate.results.coverage import ModeScope


def mode_scope(bench: Bench, quantized: Quantized) -> ModeScope:
    """Return what there is to compare of a mode that was measured."""
    basis = quantized.model.basis
    base = bench.model.in_basis(basis)
    modules = quantized_modules(quantized, base)
    remaining = {site.module for site in quantized.model.sites()}
    if quantized.mode.own:
        # What a module of the user's own has fused is compared with its layer; a graph without any
        # module of the reference is compared by its outputs alone.
        modules = {
            name: unit if name in remaining else base.layer_of(name) or unit
            for name, unit in modules.items()
            if remaining
        }
    layers = quantized.model.layers
    first = {site.module for site in base.sites()}
    if quantized.mode.attention is not None or quantized.mode.states is not None:
        # Caches and states are no modules of the reference.
        first |= modules.keys()
    later = _passed_later(base, modules.keys() - first)
    modules = {name: unit_of for name, unit_of in modules.items() if name in first | later}
    tokens, unit = row_tokens(bench.model.inputs)
    return ModeScope(
        model=bench.model.name,
        mode=quantized.mode.name,
        modules={name: (unit_of, bench.layer_of(name)) for name, unit_of in modules.items()},
        idle=[name for name in modules if name in later],
        outputs=[name for name in bench.reference(basis).tensors if ":" not in name],
        layers=dict(
            zip(
                map(bench.short_layer, layers), (f"{layer}:output" for layer in layers), strict=True
            )
        ),
        tokens=tokens,
        unit=unit,
        is_declared=not quantized.mode.own or bench.meant_of(quantized) is not quantized,
        shapes={
            name: shapes.statement()
            for name, shapes in bench.segments(quantized).met_shapes.items()
            if name in modules and shapes.met
        },
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


def row_tokens(inputs: Sequence[Any]) -> tuple[list[int], Literal["tokens", "samples"]]:
    """Count the real tokens of each row of the samples; rows where they are no token ids."""
    ids = [token_ids(sample) for sample in inputs]
    if any(of is None for of in ids):
        return [1] * sum(map(row_count, inputs)), "samples"
    counts = []
    for sample, of in zip(inputs, ids, strict=True):
        real = real_tokens(sample)
        of_rows = torch.ones_like(of) if real is None else real  # type: ignore[arg-type]
        counts += [count for row in of_rows if (count := int(row.sum()))]
    return counts, "tokens"
