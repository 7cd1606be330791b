"""Every row of an embedding, read by its number: few of them are in a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from qgate.formats import Quantizer
from qgate.gate.measured import Conformance
from qgate.gate.modules.relations import METRIC, first_tensor
from qgate.models import Model
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.modes import Quantized
from qgate.text import listed

_SLICE = 2**20
"""Values of the rows that are read at once."""
_MOST = 2**26
"""Values of all rows that are read: of a larger table every second, third or later row is."""
_ROUNDINGS, _BESIDE = 4.0, 512


@torch.no_grad()
def embedding_agreements(
    quantized: Quantized, base: Model, quantizers: Mapping[str, Quantizer]
) -> Iterator[tuple[str, Conformance]]:
    """Yield the site of each embedding that a mode leaves as it is, with its wrong rows."""
    own = dict(quantized.model.module.named_modules())
    for site in base.sites():
        table = base.module.get_submodule(site.module)
        is_read = site.port == "output" and isinstance(table, nn.Embedding)
        if not is_read or site.module not in own:
            continue
        if any(name.startswith(f"{site.module}:") for name in quantizers):
            continue
        try:
            yield site.name, _agreement(own[site.module], table)
        except LENGTH_REFUSALS:
            continue


def _rounding_room(expected: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what rounding the rows of a table to a narrower dtype may change in its result.

    Below the normal numbers of the dtype steps do not shrink, and a table may multiply its rows.
    """
    if dtype == expected.dtype:
        return expected.new_zeros(())
    limits, size = torch.finfo(dtype), expected.abs().double()
    largest = float(weight[ids].abs().max())
    gain = float(size.max()) / max(largest, torch.finfo(weight.dtype).tiny)
    return _ROUNDINGS * limits.eps * (size + limits.tiny * max(1.0, gain))


def _agreement(module: nn.Module, table: nn.Module) -> Conformance:
    weight = table.weight
    assert isinstance(weight, Tensor)
    rows, width = weight.shape
    step = -(-weight.numel() // _MOST)
    every = torch.arange(0, rows, step, device=weight.device)
    wrong: list[int] = []
    for ids in every.split(max(1, _SLICE // width)):
        actual, expected = (first_tensor(of(ids[None]))[0] for of in (module, table))
        right = expected.to(actual.dtype)
        room = _rounding_room(expected, weight, ids, actual.dtype)
        differs = ~((actual - right).abs().double() <= room) & (actual != right)
        wrong += ids[differs.flatten(1).any(1)].tolist()
    values = len(every) * width
    if not wrong:
        return Conformance(METRIC, values, 0, f"the row of each of {len(every):,} numbers is right")
    first = torch.tensor([[wrong[0]]], device=weight.device)
    row = first_tensor(module(first))[0, 0]
    near_rows = torch.arange(max(0, wrong[0] - _BESIDE), min(rows, wrong[0] + _BESIDE))
    beside = table(near_rows.to(weight.device)[None])[0].to(row.dtype)
    same = (beside == row).all(-1).nonzero().flatten()
    instead = f"; number {wrong[0]} reads row {int(near_rows[same[0]])}" if len(same) else ""
    about = (
        f"gives another row than the reference for {len(wrong):,} of {len(every):,} numbers: "
        f"{listed([str(number) for number in wrong], 5)}{instead}"
    )
    return Conformance(METRIC, values, len(wrong) * width, about)
