"""Wrong ways to read the weights of experts, and the outputs that they would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from qgate.hooks.module_hooks import ModuleHooks

Factors = tuple[float, ...]
"""Factors of equal parts of the channels of a layer's output."""


def wrong_readings(
    experts: Sequence[nn.Module], plain: Sequence[nn.Module], x: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield words and outputs (tokens, experts, width) of experts with scales of something else.

    A scale follows the largest weight before quantization, those of the `plain` experts, so that
    the output of a layer is off by the ratio of two of those.
    """
    sizes = [{name: _largest(weight) for name, weight in _weights(expert)} for expert in plain]
    for number, own in enumerate(sizes):
        words = f"all weights are decoded with the scales of expert {number}"
        factors: list[dict[str, Factors]] = [
            {name: (own[name] / of[name],) for name in of} for of in sizes
        ]
        yield words, _outputs(experts, factors, x)
    halves = [_halves(expert) for expert in plain]
    if not all(halves):
        return
    ratio = max(max(gate / up, up / gate) for gate, up in halves)
    for half, other, number in (("gate", "up", 0), ("up", "gate", 1)):
        factors = []
        for scales in halves:
            factor = scales[1 - number] / scales[number]
            pair = (factor, 1.0) if number == 0 else (1.0, factor)
            factors.append({"gate_up_proj": pair, f"{half}_proj": (factor,)})
        words = (
            f"the {half} half is decoded with the tensor scale of the {other} half, which differ "
            f"by up to {ratio:.2f} times"
        )
        yield words, _outputs(experts, factors, x)


def _weights(expert: nn.Module) -> list[tuple[str, Tensor]]:
    named = ((name.removesuffix(".weight"), p) for name, p in expert.named_parameters())
    return [(name, parameter) for name, parameter in named if parameter.dim() > 1]


def _largest(weight: Tensor) -> float:
    return float(weight.detach().abs().amax().clamp_min(1e-30))


def _halves(expert: nn.Module) -> tuple[float, ...]:
    """Return the largest weight of gate and up, of one weight its first half and its second."""
    weights = dict(_weights(expert))
    if "gate_up_proj" in weights:
        return tuple(_largest(half) for half in weights["gate_up_proj"].chunk(2))
    if "gate_proj" in weights and "up_proj" in weights:
        return _largest(weights["gate_proj"]), _largest(weights["up_proj"])
    return ()


def _outputs(
    experts: Sequence[nn.Module], factors: Sequence[dict[str, Factors]], x: Tensor
) -> Tensor:
    """Return the outputs of experts whose layers are off by factors, by the name of the layer."""
    outputs = []
    with torch.no_grad():
        for expert, by_layer in zip(experts, factors, strict=True):
            with ModuleHooks() as hooks:
                for name, layer in expert.named_children():
                    if name in by_layer:
                        hooks.add(layer, after=_multiplied(by_layer[name]))
                outputs.append(expert(x).float().cpu())
    return torch.stack(outputs, 1)


def _multiplied(factors: Factors) -> Callable[..., Tensor]:
    def multiply(_module: nn.Module, _args: object, result: Tensor) -> Tensor:
        parts = result.chunk(len(factors), -1)
        return torch.cat([part * f for part, f in zip(parts, factors, strict=True)], -1)

    return multiply
