"""Faults of caches of latents, of caps, of gates and of positions are red, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import modes
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.serving.cache_rows import ServedCaches
from qgate.gate.serving.cache_traces import attentions_of
from qgate.modes.attention.core import Attend, AttentionCore, LatentCore
from qgate.modes.attention.sources import AttentionSource
from tests.gate.test_cache_faults import findings
from tests.modes.test_cache_of_decoders import decoder
from tests.shares import share

Plant = Callable[[pytest.MonkeyPatch], None]


def up_projected_first(patch: pytest.MonkeyPatch) -> None:
    def stored_sides(self: LatentCore, sources: Tensor, values: Tensor) -> list[Tensor]:
        source = self._source[0]
        heads = source.module.kv_b_proj(values)[:, 0].unflatten(-1, (source.heads, -1))
        return [self.keys(sources), values, self.values(heads.transpose(1, 2))]

    patch.setattr(LatentCore, "stored_sides", stored_sides)


def up_projected_unquantized(patch: pytest.MonkeyPatch) -> None:
    original = LatentCore.stored_sides

    def stored_sides(self: LatentCore, sources: Tensor, values: Tensor) -> list[Tensor]:
        plain = AttentionCore.stored_sides(self, sources, values)
        cast, self.values = self.values, torch.nn.Identity()  # type: ignore[assignment]
        sides = original(self, sources, values)
        self.values = cast
        return [*plain, *sides[2:]]

    patch.setattr(LatentCore, "stored_sides", stored_sides)


def scale_of_the_latents(patch: pytest.MonkeyPatch) -> None:
    original = LatentCore.stored_sides

    def stored_sides(self: LatentCore, *sides: Tensor) -> list[Tensor]:
        self.keys.quantizer = self.values.quantizer
        return original(self, *sides)

    patch.setattr(LatentCore, "stored_sides", stored_sides)


def one_position_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttentionCore, "sources", lambda self, keys, start: self.rope(keys, start + 1))


def one_head_dropped(patch: pytest.MonkeyPatch) -> None:
    original = LatentCore._attend

    def attend(self: LatentCore, *sides: Any) -> Tensor:
        context = original(self, *sides).clone()
        context[:, 2] = 0
        return context

    patch.setattr(LatentCore, "_attend", attend)


def factor_of_the_width(patch: pytest.MonkeyPatch) -> None:
    _attends_with(patch, scaling=None)


def cap_forgotten(patch: pytest.MonkeyPatch) -> None:
    _attends_with(patch, cap=0.0)


def _attends_with(patch: pytest.MonkeyPatch, **settings: Any) -> None:
    original = Attend.forward

    def forward(self: Attend, *sides: Any, **more: Any) -> Tensor:
        for name, value in settings.items():
            setattr(self, name, value)
        return original(self, *sides, **more)

    patch.setattr(Attend, "forward", forward)


FAULTS: dict[Plant, tuple[str, str]] = {
    up_projected_first: (
        "DeepseekV3",
        "latents are quantized after their up-projection, before it is meant",
    ),
    up_projected_unquantized: ("DeepseekV3", "latents are read unquantized"),
    scale_of_the_latents: ("DeepseekV3", "RoPE parts have the scale of the latents"),
    one_position_late: ("DeepseekV3", "RoPE parts are turned by the position after their own"),
    one_head_dropped: ("DeepseekV3", "are zero: a head is dropped (head 2)"),
    factor_of_the_width: (
        "DeepseekV3-lora",
        "scores have the factor of their width, and not that of",
    ),
    cap_forgotten: ("Gemma2", "scores are not capped"),
}


def red_rows(kind: str, path: Path, run_too: bool = False) -> dict[str, str]:
    model, mode = decoder(path, kind), modes.find_mode("kv-fp8", "other")
    quantized = modes.apply(mode, model, modes.measure(model, modes.CalibrationSettings()))
    run = ServedCaches(quantized)
    if run_too:
        with torch.no_grad(), run.watch():
            quantized.model(torch.cat(list(model.inputs)))
    return findings(run.rows(model, ModelSites({}, lambda _site: "")))


@share(8)
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_is_red_and_named(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, words = FAULTS[plant]
    plant(monkeypatch)
    red = red_rows(kind, tmp_path)
    assert any(words in text for text in red.values()), red


def test_a_gate_that_is_left_out_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    projections = AttentionSource.projections

    def without(self: AttentionSource, hidden: Tensor) -> tuple[list[Tensor], Tensor | None]:
        return projections(self, hidden)[0], None

    monkeypatch.setattr(AttentionSource, "projections", without)
    red = red_rows("Qwen3Next", tmp_path, run_too=True)
    assert "the context is not gated" in red["o_proj:input"], red


@share(2)
@pytest.mark.parametrize("changed", [{"factor": 1.0}, {"speeds": ()}])
def test_positions_of_yarn_that_are_not_scaled_are_red(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    model = decoder(tmp_path, "Llama-yarn")
    quantized = modes.apply(modes.find_mode("kv-int8", "other"), model)
    for attention in attentions_of(quantized).values():
        attention.core.rope = replace(attention.source.positions, **changed).turn
    sites = ModelSites({}, lambda _site: "")
    red = findings(ServedCaches(quantized).rows(model, sites))
    assert "keys that are cast are" in red["cache:keys"], red
