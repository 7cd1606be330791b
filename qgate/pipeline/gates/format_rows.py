"""What single formats do to the tensors of a layer: the scale that suits them, and what is lost."""

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
from qgate.pipeline.gates.bench import Bench
from qgate.pipeline.gates.magnitude_pictures import magnitude_picture
from qgate.pipeline.gates.passes import capture_sites, short_layer
from qgate.results.pictures import Picture, SweepPicture
from qgate.stats import counts
from qgate.sweeps.compute import Sweep, sweep

_NONE: Mapping[str, float] = MappingProxyType({})


def _default_tolerance(_site: str) -> float:
    return Limits().regression


def scaling_rows(
    bench: Bench,
    fmt: str,
    layer: str,
    accepted: Mapping[str, float] = _NONE,
    tolerance: Callable[[str], float] = _default_tolerance,
    same: bool = True,
) -> tuple[list[Measured], dict[str, object]]:
    """The exponent that a sweep recommends for every tensor of a layer, and the error at it.

    `accepted` are the accepted exponents by site. Where two scales are as good, noise decides which
    of them is recommended; so the accepted one stays the recommendation until it costs more than
    the site's tolerance over what the sweep would choose. A sweep ends where a tensor's largest
    number fits, and that one is noise: by other arithmetic than that of the accepted exponents
    (`same` is False) a recommendation at the end may be one step further or nearer.
    """
    found, scales = [], {}
    for order, (site, tensor) in enumerate(_tensors(bench, layer).items()):
        swept = _sweep(tensor, fmt)
        exponent, error, why = swept.exponent, _error_at(swept, swept.exponent), ""
        known, levels = accepted.get(site), _levels(swept)
        if known is not None and known != exponent:
            # The sweep ends where nothing overflows; beyond, a scale may still be as good.
            there = _sweep(tensor, fmt, max_exp=known, min_exp=known)
            cost, levels = _error_at(there, known), {**_levels(there), **levels}
            more = 10 * math.log10(cost / error) if cost > 0 < error else math.inf
            if not same and abs(known - exponent) <= 1 and _at_the_end(swept, known):
                exponent, error = known, cost
            elif cost > error * (1 + tolerance(site)):
                why = f"the accepted one now costs {more:.2g} dB more"
            elif error > cost * (1 + tolerance(site)):
                why = f"it costs {-more:.2g} dB more than the accepted one"
            else:
                exponent, error = known, cost
        scales[site] = exponent
        values = {"exponent": exponent, "relative_mse": error}
        drawn = _drawn(fmt, levels, swept.exponent, known) if bench.pictures else ()
        found.append(_row(site, layer, "sweep", order, values, tensor, why, drawn))
    return found, {"exponents": scales}


def _at_the_end(swept: Sweep, known: float) -> bool:
    """Whether the ends of a sweep have a say in what it recommends."""
    levels = _levels(swept)
    ends = min(levels), max(levels)
    return swept.exponent in ends or not ends[0] <= known <= ends[1]


def _sweep(tensor: Tensor, fmt: str, **ends: float) -> Sweep:
    if formats.get(fmt).kind == "block":
        return sweep(tensor.bfloat16(), fmt, granularity="block", **ends)  # type: ignore[arg-type]
    return sweep(counts(tensor.bfloat16()), fmt, **ends)  # type: ignore[arg-type]


def _levels(swept: Sweep) -> dict[float, float]:
    """Relative MSE by exponent."""
    return {
        float(level["exponent"]): float(level["metrics"]["relative_mse"]) for level in swept.levels
    }


def _drawn(
    fmt: str, levels: Mapping[float, float], recommended: float, accepted: float | None
) -> tuple[Picture, ...]:
    finite = sorted((at, error) for at, error in levels.items() if math.isfinite(error))
    picture = SweepPicture(
        kind="sweep", format=fmt, levels=finite, recommended=recommended, accepted=accepted
    )
    return (picture,)


def _error_at(swept: Sweep, exponent: float) -> float:
    level = next(each for each in swept.levels if each["exponent"] == exponent)
    return float(level["metrics"]["relative_mse"])


def overflow_rows(bench: Bench, fmt: str, layer: str, phase: str) -> list[Measured]:
    """Measure the shares that saturate and that are flushed, forward or backward."""
    if phase not in ("forward", "backward"):
        raise QgateError(f"phase {phase!r} is not allowed; it is forward or backward.")
    tensors = _tensors(bench, layer) if phase == "forward" else _gradients(bench, layer)
    scope = "sweep" if phase == "forward" else "backward"
    found = []
    for order, (site, tensor) in enumerate(tensors.items()):
        lost = formats.report(tensor, fmt)
        values = {"saturated_share": lost.saturated_share, "flushed_share": lost.flushed_share}
        drawn: tuple[Picture, ...] = ()
        if bench.pictures:
            losses = {"saturated": lost.saturated, "flushed": lost.flushed}
            drawn = (magnitude_picture(tensor, fmt=fmt, **losses),)
        row = _row(site, layer, scope, order, values, tensor, drawn=drawn)
        found.append(replace(row, grain=1 / max(1, lost.finite)))
    return found


def _row(
    site: str,
    layer: str,
    scope: str,
    order: int,
    values: dict[str, float],
    tensor: Tensor,
    why: str = "",
    drawn: tuple[Picture, ...] = (),
) -> Measured:
    return Measured(
        site=site,
        layer=layer,
        scope=scope,  # type: ignore[arg-type]
        values=values,
        order=order,
        nonfinite=int((~tensor.isfinite()).count_nonzero()),
        gated=tuple(values),
        why={"exponent": why} if why else None,
        pictures=drawn,
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
    kept = bench.fp32_gradients("plain")
    sites = {site.name: site for site in bench.model.sites()}
    return {
        name: torch.cat([t.reshape(-1, t.shape[-1]) for t in tensors]).float().cpu()
        for name, tensors in kept.items()
        if short_layer(bench.model.layer_of(sites[name].module)) == layer
    }
