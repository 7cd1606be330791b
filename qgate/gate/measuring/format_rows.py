"""Rows of single formats on the tensors of a layer: the scale that suits them, and the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from qgate import formats
from qgate.errors import QgateError
from qgate.gate import Limits, Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.pictures import magnitude_picture
from qgate.models import Model, Site
from qgate.results.pictures import Picture, SweepPicture
from qgate.stats import counts
from qgate.sweeps.compute import sweep

Tolerance = Callable[[str], float]


def scaling_rows(
    bench: Bench,
    fmt: str,
    layer: str,
    accepted: Mapping[str, float] = MappingProxyType({}),
    tolerance: Tolerance = lambda _site: Limits().regression,
    same: bool = True,
) -> tuple[list[Measured], dict[str, object]]:
    """Measure the exponent that a sweep recommends for every tensor of a layer, and its error.

    `accepted` are the accepted exponents by site. Between two scales that are equally good noise
    decides, so the accepted one stays the recommendation until it costs more than the site's
    tolerance over what the sweep would choose. A sweep ends where a tensor's largest number fits,
    which is noise: with other arithmetic than that of the accepted exponents (`same` is False) a
    recommendation at the end may be one step further or nearer. A tensor of zeros has no row: the
    learned queries of a detector begin as zeros, and every scale is exact for them.
    """
    rows: list[Measured] = []
    scales, notes = {}, {}
    for order, (site, tensor) in enumerate(_tensors(bench, layer).items()):
        if not tensor.any():
            notes[f"scale of {site}"] = "all zeros: every scale is exact"
            continue
        best, levels = _sweep(tensor, fmt)
        exponent, error, why = best, levels[best], ""
        before, to_draw = accepted.get(site), levels
        if before is not None and before != exponent:
            # The sweep ends where nothing overflows; beyond, a scale may still be as good.
            _, beyond = _sweep(tensor, fmt, max_exp=before, min_exp=before)
            cost, to_draw = beyond[before], {**beyond, **levels}
            more = 10 * math.log10(cost / error) if cost > 0 < error else math.inf
            ends = min(levels), max(levels)
            at_the_end = best in ends or not ends[0] <= before <= ends[1]
            if not same and abs(before - exponent) <= 1 and at_the_end:
                exponent, error = before, cost
            elif cost > error * (1 + tolerance(site)):
                why = f"the accepted one now costs {more:.2g} dB more"
            elif error > cost * (1 + tolerance(site)):
                why = f"it costs {-more:.2g} dB more than the accepted one"
            else:
                exponent, error = before, cost
        scales[site] = exponent
        values = {"exponent": exponent, "relative_mse": error}
        pictures: tuple[Picture, ...] = ()
        if bench.pictures:
            finite = sorted((at, level) for at, level in to_draw.items() if math.isfinite(level))
            picture = SweepPicture(
                kind="sweep", format=fmt, levels=finite, recommended=best, accepted=before
            )
            pictures = (picture,)
        row = _row(site, layer, "sweep", order, values, tensor, pictures)
        rows.append(replace(row, why={"exponent": why} if why else None))
    if not rows:
        raise QgateError(f"all tensors of {layer} are zeros: every scale is exact for them.")
    return rows, {"exponents": scales, **notes}


def _sweep(tensor: Tensor, fmt: str, **ends: float) -> tuple[float, dict[float, float]]:
    """Return the power of two that a sweep recommends, and the relative MSE at each exponent."""
    if formats.get(fmt).kind == "block":
        swept = sweep(tensor.bfloat16(), fmt, granularity="block", **ends)  # type: ignore[arg-type]
    else:
        swept = sweep(counts(tensor.bfloat16()), fmt, **ends)  # type: ignore[arg-type]
    power = swept.levels[swept.record["advice"]["power"]]
    return float(power["exponent"]), {
        float(level["exponent"]): float(level["metrics"]["relative_mse"]) for level in swept.levels
    }


def overflow_rows(bench: Bench, fmt: str, layer: str, phase: str) -> list[Measured]:
    """Measure the shares that saturate and that are flushed, forward or backward."""
    if phase not in ("forward", "backward"):
        raise QgateError(f"phase {phase!r} is not allowed; it is forward or backward.")
    tensors = _tensors(bench, layer) if phase == "forward" else _gradients(bench, layer)
    scope: str = "sweep" if phase == "forward" else "backward"
    rows = []
    for order, (site, tensor) in enumerate(tensors.items()):
        lost = formats.report(tensor, fmt)
        values = {"saturated_share": lost.saturated_share, "flushed_share": lost.flushed_share}
        pictures: tuple[Picture, ...] = ()
        if bench.pictures:
            losses = {"saturated": lost.saturated, "flushed": lost.flushed}
            pictures = (magnitude_picture(tensor, fmt=fmt, **losses),)
        row = _row(site, layer, scope, order, values, tensor, pictures)
        rows.append(replace(row, grain=1 / max(1, lost.finite)))
    return rows


def _row(
    site: str,
    layer: str,
    scope: str,
    order: int,
    values: dict[str, float],
    tensor: Tensor,
    pictures: tuple[Picture, ...],
) -> Measured:
    nonfinite = int((~tensor.isfinite()).count_nonzero())
    return Measured(
        site=site, layer=layer, scope=scope, values=values, order=order, nonfinite=nonfinite,
        gated=tuple(values), pictures=pictures,
    )  # fmt: skip


def format_sites(model: Model) -> list[Site]:
    """List the sites whose tensors single formats are measured on."""
    return [site for site in model.sites() if site.is_product]


def _tensors(bench: Bench, layer: str) -> dict[str, Tensor]:
    """Return inputs, weights and outputs of the linear layers of a layer, on a short text."""
    sites = [s for s in format_sites(bench.model) if bench.layer_of(s.module) == layer]
    if not sites:
        raise QgateError(f"{layer} of {bench.model.name} has no linear layers and no convolutions.")
    module = bench.model.module
    tensors = {
        site.name: getattr(module.get_submodule(site.module), site.port).detach()
        if site.port == "weight"
        else bench.linear_tensors[site.name]
        for site in sites
    }
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}


def _gradients(bench: Bench, layer: str) -> dict[str, Tensor]:
    sites = {site.name: site for site in bench.model.sites()}
    return {
        name: torch.cat([t.reshape(-1, t.shape[-1]) for t in tensors]).float().cpu()
        for name, tensors in bench.fp32_gradients("plain").items()
        if bench.layer_of(sites[name].module) == layer
    }
