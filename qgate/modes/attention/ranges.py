"""Ranges of queries, keys and values that static scales of attention are made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.hooks.tapping import tap_sites
from qgate.modes.attention.planning import Side, range_site
from qgate.modes.attention.sources import named_attentions, sum_of

if TYPE_CHECKING:
    from qgate.models.model import Model
    from qgate.models.sites import Site

_LEAST = 1e-5


def cache_ranges(model: Model, batches: Iterator[Tensor]) -> dict[str, float]:
    """Run the FP32 model and return the largest magnitudes of what its caches would store."""
    attentions = dict(named_attentions(model))
    owners = {
        f"{at}.{leaf}": (at, side)
        for at, source in attentions.items()
        for side in "qkv"
        for leaf in source.leaves(side)
    }
    ranges: dict[str, Tensor] = {}
    addends: dict[tuple[str, str], list[Tensor]] = {}

    def take(site: Site, tensor: Tensor) -> None:
        at, side = owners[site.module]
        source, parts = attentions[at], addends.setdefault((at, side), [])
        parts.append(tensor.detach().float())
        if len(parts) < len(source.leaves(side)):
            return
        heads = source.side_of(side, sum_of(addends.pop((at, side))))
        sides: dict[Side, Tensor] = {"values": heads}
        if side == "q":
            sides = {"queries": source.positions.turn(heads, 0)}
        if side == "k":
            sides = {"keys_before_rope": heads, "keys": source.positions.turn(heads, 0)}
        for kind, values in sides.items():
            largest = values.abs().amax((0, 2, 3))
            before = ranges.get(range_site(at, kind))
            ranges[range_site(at, kind)] = largest if before is None else largest.maximum(before)

    sites = [site for site in model.sites() if site.module in owners and site.port == "output"]
    with torch.no_grad(), tap_sites(model.module, sites, take):
        for batch in batches:
            model(batch)
    return dict(_named(ranges))


def _named(ranges: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    for site, per_head in ranges.items():
        reaches: Sequence[float] = per_head.clamp_min(_LEAST).tolist()
        if not torch.isfinite(per_head).all():
            raise QgateError(f"{site} cannot be calibrated: its range is {max(reaches)}.")
        yield site, max(reaches)
        yield from ((f"{site}[{head}]", reach) for head, reach in enumerate(reaches))
