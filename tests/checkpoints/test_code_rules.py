"""Rules by which codes were rounded, told from the codes, the stored scales and the parent."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qgate.checkpoints.code_rules import describe_codes
from qgate.checkpoints.grids import QuantizedWeight

PARENT = torch.randn(24, 96, generator=torch.Generator().manual_seed(3))


def integers(rule: Callable[[Tensor], Tensor], most: int, group: int) -> QuantizedWeight:
    tiles = PARENT.reshape(24, -1, group)
    scales = tiles.abs().amax(-1) / most
    codes = rule(tiles / scales[..., None]).clamp(-most - 1, most).to(torch.int8)
    return QuantizedWeight(f"int{len(bin(most)) - 1}", codes.reshape(24, 96), scales, (1, group))


@pytest.mark.parametrize(("most", "group"), [(127, 96), (7, 32)])
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (torch.round, ""),
        (lambda r: (r.abs() + 0.5).floor() * r.sign(), ""),
        (torch.trunc, "codes are truncated, not rounded to the nearest"),
        (torch.floor, "codes are rounded down (floor), not to the nearest"),
        (torch.ceil, "codes are rounded up (ceil), not to the nearest"),
        (lambda r: (r.round() / 2).floor() * 2, "codes keep the upper [37] of their [48] bits"),
        (lambda r: r + 1.5 * torch.randn(r.shape).round(), ""),
    ],
    ids=["nearest", "away", "truncated", "floor", "ceil", "a bit lost", "noise"],
)
def test_the_rule_of_codes_is_named(
    rule: Callable[[Tensor], Tensor], words: str, most: int, group: int
) -> None:
    description = describe_codes(integers(rule, most, group), PARENT)
    assert description == words or (words and re.fullmatch(words, description)), description


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_truncated_floats_are_named(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    scales = PARENT.abs().amax(1, keepdim=True) / most
    nearest = (PARENT / scales).to(dtype)
    name = "fp8_e4m3" if dtype == torch.float8_e4m3fn else "fp8_e5m2"
    assert describe_codes(QuantizedWeight(name, nearest, scales, (1, 96)), PARENT) == ""
    above = nearest.float().abs() > (PARENT / scales).abs()
    cut = (nearest.view(torch.uint8) - above.to(torch.uint8)).view(dtype)
    weight = QuantizedWeight(name, cut, scales, (1, 96))
    assert describe_codes(weight, PARENT) == "codes are truncated, not rounded to the nearest"
