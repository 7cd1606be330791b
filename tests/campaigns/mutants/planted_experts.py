"""Defects of a mixture of experts: of its router, of single experts, and of what reaches them."""

from __future__ import annotations

import torch
from torch import Tensor

import qgate
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow

MOE = "tiny-moe"
MIXTURE = "model.layers.2.mlp"
ROUTING = f"{MIXTURE}.experts.routing"


def _expert(number: int, part: str = "down_proj") -> str:
    return f"{MIXTURE}.experts.{number}.{part}"


def _swapped(first: int, second: int) -> Sow:
    """The weights of two experts, each where the other's belong."""

    def sow(bed: Bed) -> None:
        for part in ("gate_up_proj", "down_proj"):
            names = _expert(first, part), _expert(second, part)
            weights = [bed.module(name).weight.detach().clone() for name in names]
            for name, weight in zip(names, reversed(weights), strict=True):
                bed.weight(name, lambda _own, weight=weight: weight)

    return sow


def _scale_of_the_first(bed: Bed) -> None:
    """All experts are decoded with the scales of expert 0, a row at a time."""
    rows = bed.module(_expert(0)).weight.detach().abs().amax(1, keepdim=True)
    for number in range(1, 8):

        def decoded(weight: Tensor) -> Tensor:
            return weight * (rows / weight.abs().amax(1, keepdim=True))

        bed.weight(_expert(number), decoded)


def _router_in_fp8(bed: Bed) -> None:
    bed.weight(
        f"{MIXTURE}.router",
        lambda w: qgate.quantize(w, "fp8_e4m3", granularity="channel", axis=0),
    )


def _beyond_a_capacity(routing: Tensor) -> Tensor:
    """Each expert takes the first 12 of its tokens in a sample."""
    within = (routing != 0).cumsum(-2) <= 12
    return torch.where(within, routing, 0)


def _not_renormalized(routing: Tensor) -> Tensor:
    """Weights that add up to as much of all shares as the two experts had."""
    return routing * (0.6 + 0.3 * routing.amax(-1, keepdim=True))


def _first_alone(routing: Tensor) -> Tensor:
    return torch.where(routing == routing.amax(-1, keepdim=True), routing, 0)


def _on(module: str, change: object) -> Sow:
    return lambda bed: bed.after(module, change)  # type: ignore[arg-type]


def _moe(name: str, sow: Sow, source: str, mode: str = "experts-fp8", **more: str) -> Mutant:
    return Mutant(name, MOE, mode, sow, source, **more)


_PLACE = ROUTING.replace(".", r"\.") + ":output"
MUTANTS: tuple[Mutant, ...] = (
    _moe("experts-swapped", _swapped(1, 2), r"model\.layers\.2\.mlp\.experts\.1\.gate_up_proj:weight"),
    _moe("experts-swapped-in-mxfp4", _swapped(0, 7), r"model\.layers\.2\.mlp\.experts\.0\.gate_up_proj:weight", "experts-mxfp4"),
    _moe("scales-of-the-first-expert-for-all", _scale_of_the_first, r"model\.layers\.2\.mlp\.experts\.1\.down_proj:weight"),
    _moe("expert-of-zeros", lambda bed: bed.weight(_expert(5), torch.zeros_like), r"model\.layers\.2\.mlp\.experts\.5\.down_proj:weight"),
    _moe("expert-in-bf16", _on(_expert(3), lambda y: y.bfloat16().float()), r"model\.layers\.2\.mlp\.experts\.3\.down_proj:output"),
    _moe("router-in-fp8-by-mistake", _router_in_fp8, r"model\.layers\.2\.mlp\.router:(weight|output)"),
    _moe("routing-weights-not-renormalized", _on(ROUTING, _not_renormalized), _PLACE),
    _moe("first-expert-of-a-token-alone", _on(ROUTING, _first_alone), _PLACE),
    _moe("tokens-beyond-a-capacity-dropped", _on(ROUTING, _beyond_a_capacity), _PLACE),
    _moe("routing-one-expert-off", _on(ROUTING, lambda r: r.roll(1, -1)), _PLACE),
    _moe("routing-of-the-token-before", _on(ROUTING, lambda r: r.roll(1, -2)), _PLACE),
)  # fmt: skip
