"""Scales of activations beside those of other layers and experts."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qgate.checkpoints.activation_scales import neighbor_findings
from qgate.checkpoints.comparison import compare
from tests.checkpoints.exports import write

LAYERS, EXPERTS = 12, 4
Scales = dict[str, float]
K, V = ("model.layers.{}.self_attn." + name for name in ("k_scale", "v_scale"))
DOWN = "model.layers.{}.mlp.down_proj.input_scale"
EXPERT = "model.layers.{}.mlp.experts.{}.up_proj.input_scale"


def calibrated(seed: int = 0, step: float = 0.4) -> Scales:
    """Return scales of a network: they wander from layer to layer, and one layer is massive."""
    generator = random.Random(seed)
    scales: Scales = {}
    for kind, size in ((K, 0.03), (V, 0.02), (DOWN, 0.05)):
        octave = 0.0
        for layer in range(LAYERS):
            octave += generator.gauss(0, step)
            scales[kind.format(layer)] = size * 2**octave
    scales[DOWN.format(5)] *= 90
    scales[K.format(0)] /= 20
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            scales[EXPERT.format(layer, expert)] = 0.01 * 2 ** generator.gauss(0, 0.3)
    return scales


def test_calibrated_scales_are_no_finding() -> None:
    for seed in range(300):
        assert list(neighbor_findings(calibrated(seed), "")) == [], seed


def test_shared_scales_of_experts_and_clipped_caches_are_no_finding() -> None:
    scales = calibrated()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            scales[EXPERT.format(layer, expert)] = 0.01 + layer / 1000
        scales[K.format(layer)] = scales[V.format(layer)] = 1.0
    assert list(neighbor_findings(scales, "modelopt")) == []
    scales[K.format(3)] = 1.25
    assert list(neighbor_findings(scales, "modelopt")) == []
    subjects = [finding.subject for finding in neighbor_findings(scales, "compressed-tensors")]
    assert subjects[0] == V.format(0)
    assert set(subjects[1:]) == {K.format(layer) for layer in range(LAYERS) if layer != 3}


def _times(factor: float, name: str) -> Callable[[Scales], None]:
    return lambda scales: scales.update({name: scales[name] * factor})


def _to(value: float, *names: str) -> Callable[[Scales], None]:
    return lambda scales: scales.update(dict.fromkeys(names, value))


ALL_K = [K.format(layer) for layer in range(LAYERS)]
FAULTS: dict[str, tuple[Callable[[Scales], None], str, str]] = {
    "a cache left at 1": (_to(1.0, V.format(4)), V.format(4), "it is 1, and the 11 other scales .* nothing calibrated it"),
    "all caches left at 1": (_to(1.0, *ALL_K), K.format(0), "all 12 scales of this name are 1: .* they were left at 1"),
    "one value in all caches": (_to(0.25, *ALL_K), K.format(0), "all 12 scales .* 0.25: .*one value was written to all"),
    "an expert left at 1": (_to(1.0, EXPERT.format(7, 2)), EXPERT.format(7, 2), "nothing calibrated it"),
    "experts of a layer alike": (
        _to(0.012, *(EXPERT.format(6, expert) for expert in range(EXPERTS))),
        EXPERT.format(6, "*"), "all 4 experts have 0.012, and in 11 other layers they differ",
    ),
    "a cache 64 times too large": (_times(64, K.format(6)), K.format(6), "times larger than those of the layers near it"),
    "a cache 64 times too small": (_times(1 / 64, V.format(7)), V.format(7), "times smaller than"),
    "an input 64 times too small": (_times(1 / 64, DOWN.format(8)), DOWN.format(8), "times smaller than"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    plant, subject, words = FAULTS[name]
    for seed in range(20):
        scales = calibrated(seed, 0.2)
        plant(scales)
        (finding,) = neighbor_findings(scales, "")
        assert finding.subject == subject
        assert re.search(words, finding.cause), finding.cause


def test_a_power_of_two_is_seen_where_layers_are_alike() -> None:
    """Scales of smooth layers show a factor of two."""
    scales = {K.format(layer): 0.02 * (1 + 0.02 * math.sin(layer)) for layer in range(LAYERS)}
    assert list(neighbor_findings(scales, "")) == []
    scales[K.format(6)] *= 2
    (finding,) = neighbor_findings(scales, "")
    assert finding.subject == K.format(6)
    assert "2 times larger than those of the layers near it" in re.sub(
        r"[12]\.\d+ times", "2 times", finding.cause
    )


def test_scales_of_a_checkpoint_are_compared(tmp_path: Path) -> None:
    weight = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    tensors = {
        "up.weight": (weight * 127).round().to(torch.int8),
        "up.weight_scale": torch.full((64, 1), 1 / 127),
    }
    tensors["up.weight_scale"] *= torch.linspace(0.99, 1, 64)[:, None]
    tensors |= {name: torch.tensor([x]) for name, x in calibrated().items()}
    assert compare(str(write(tmp_path, tensors, {}))).findings == []
    tensors[V.format(4)] = torch.ones(1)
    (finding,) = compare(str(write(tmp_path, tensors, {}))).findings
    assert finding.subject == V.format(4)
