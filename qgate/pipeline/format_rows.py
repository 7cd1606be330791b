"""What single formats do to the tensors of a layer: the scale that suits them, and what is lost."""

from __future__ import annotations

import torch
from torch import Tensor

from qgate import formats
from qgate.analysis.sweeping import sweep
from qgate.errors import QgateError
from qgate.formats import BlockFormat
from qgate.gate import Measured
from qgate.gate.measured import Direction
from qgate.pipeline.bench import Bench
from qgate.pipeline.passes import capture_sites, short_layer
from qgate.stats import counts

SHARES: dict[str, Direction] = {"saturated_share": "lower", "flushed_share": "lower"}


def scaling_rows(bench: Bench, fmt: str, layer: str) -> tuple[list[Measured], dict[str, object]]:
    """The error at the scale a sweep recommends, of every tensor of a layer, and that scale."""
    made = formats.get(fmt)
    found, scales = [], {}
    for order, (site, tensor) in enumerate(_tensors(bench, layer).items()):
        if isinstance(made, BlockFormat):
            swept = sweep(tensor.bfloat16(), fmt, granularity="block")
        else:
            swept = sweep(counts(tensor.bfloat16()), fmt)
        scales[site] = swept.exponent
        value = float(swept.recommended["metrics"]["relative_mse"])
        found.append(_row(site, layer, "sweep", order, {"relative_mse": value}, tensor))
    return found, {"exponents": scales}


def overflow_rows(bench: Bench, fmt: str, layer: str, phase: str) -> list[Measured]:
    """The share of elements that a format clips, and that it makes zero, forward or backward."""
    if phase not in ("forward", "backward"):
        raise QgateError(f"phase {phase!r} is not allowed; it is forward or backward.")
    tensors = _tensors(bench, layer) if phase == "forward" else _gradients(bench, layer)
    scope = "sweep" if phase == "forward" else "backward"
    found = []
    for order, (site, tensor) in enumerate(tensors.items()):
        lost = formats.report(tensor, fmt)
        total = max(1, lost.elements)
        values = {
            "saturated_share": lost.saturated / total,
            "flushed_share": lost.flushed / total,
        }
        found.append(_row(site, layer, scope, order, values, tensor))
    return found


def _row(
    site: str, layer: str, scope: str, order: int, values: dict[str, float], tensor: Tensor
) -> Measured:
    return Measured(
        site=site,
        layer=layer,
        scope=scope,  # type: ignore[arg-type]
        values=values,
        order=order,
        nonfinite=int((~tensor.isfinite()).count_nonzero()),
        gated=tuple(values),
    )


def _tensors(bench: Bench, layer: str) -> dict[str, Tensor]:
    """Inputs, weights and outputs of the linear layers of a layer, on a short text."""
    wanted = [
        site
        for site in bench.model.sites()
        if site.kind == "linear" and short_layer(bench.model.layer_of(site.module)) == layer
    ]
    if not wanted:
        raise QgateError(f"{layer} of {bench.model.name} has no linear layers.")
    flowing = capture_sites(bench.model, wanted)
    return {site.name: flowing[site.name].float().cpu() for site in wanted}


def _gradients(bench: Bench, layer: str) -> dict[str, Tensor]:
    kept = bench.reference_gradients("plain")
    sites = {site.name: site for site in bench.model.sites()}
    return {
        name: torch.cat([t.reshape(-1, t.shape[-1]) for t in tensors]).float().cpu()
        for name, tensors in kept.items()
        if short_layer(bench.model.layer_of(sites[name].module)) == layer
    }
