"""Defects of a training that make a model harder to quantize, and of how its activations are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qgate.activation_stats import gate as activation_gates
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, of_activations

BLOCK = "model.layers.1"
NORM = f"{BLOCK}.input_layernorm.weight"


def _weight(name: str, change: Callable[[Tensor], None]) -> Sow:
    def sow(bed: Bed) -> None:
        module = bed.session.subject.bench.model.module
        with torch.no_grad():
            change(dict(module.named_parameters())[name])

    return sow


def _outlier_channel(weight: Tensor) -> None:
    weight[weight.abs().argmax()] *= 16


def _one_nan(weight: Tensor) -> None:
    weight[3] = torch.nan


def _massive_token(weight: Tensor) -> None:
    weight[101] *= 100


def _figure(name: str, change: Callable[[float], float]) -> Sow:
    """A figure that is read wrongly of everything."""

    def wrapped(plain: Any) -> Any:
        def measures(layer: Any) -> dict[str, float | None]:
            figures = plain(layer)
            return {**figures, name: change(figures[name])}

        return measures

    return lambda bed: bed.wrap(activation_gates, "measures", wrapped)


IN_BLOCK = rf"{BLOCK.replace('.', chr(92) + '.')}\..*"

MUTANTS: tuple[Mutant, ...] = (
    of_activations("activations_norm_doubled", _weight(NORM, lambda w: w.mul_(2)), IN_BLOCK),
    of_activations("activations_outlier_channel", _weight(NORM, _outlier_channel), IN_BLOCK),
    of_activations(
        "activations_layer_dead",
        _weight(f"{BLOCK}.mlp.up_proj.weight", lambda w: w.zero_()),
        rf"{IN_BLOCK}mlp\.(up_proj:output|down_proj:input)",
    ),
    of_activations("activations_nan", _weight(NORM, _one_nan), says="NaN or infinite"),
    of_activations(
        "activations_massive_token",
        _weight("model.embed_tokens.weight", _massive_token),
        says=r"log2_(amax|tail|channel|median)",
    ),
    of_activations(
        "activations_median_misread", _figure("log2_median", lambda x: x + 1), says="log2_median"
    ),
    of_activations(
        "activations_outliers_missed", _figure("log2_outliers", lambda x: x + 1), says="log2_outl"
    ),
)
