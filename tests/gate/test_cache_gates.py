"""The gates of a layer hold the cache and attention: their first line names what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qgate.gate.measuring.coverage import mode_scope
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.sessions import Outcome
from qgate.models import Sampling
from qgate.modes.attention import core
from qgate.modes.attention.casting import StoredSide
from tests.gate.benches import mode_of, session
from tests.shares import proof, share, slow_file

pytestmark = slow_file

SAMPLING = Sampling(samples=3, seqlen=96, calib_samples=2, calib_seqlen=64)
HOW: dict[str, Any] = {"sampling": SAMPLING, "layers": 2}
MODES = ("kv-fp8-head", "kv-mxfp4", "attn-fp8")


def layers(of: ModelGates, name: str, first: int = 2) -> list[Outcome]:
    mode = mode_of(of.bench, name)
    return [of.layer("layer_outputs", mode, layer) for layer in of.bench.layers[:first]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    accepting = session(folder, **HOW, updating="all")
    accepting.reference("reference")
    for name in MODES:
        for outcome in layers(accepting, name):
            accepting.keep(outcome)
    accepting.commit()
    return folder


@share(8)
@pytest.mark.parametrize("name", MODES)
def test_healthy_modes_pass_and_cover_every_cache(name: str, recorded: Path) -> None:
    healthy = session(recorded, **HOW)
    assert [outcome.text for outcome in layers(healthy, name) if not outcome.passed] == []
    mode = mode_of(healthy.bench, name)
    scope = mode_scope(healthy.bench, healthy.bench.quantized(mode))
    parts = ("cache", "attention") if name == "attn-fp8" else ("cache",)
    assert set(scope.modules) == {
        f"model.layers.{k}.self_attn.{p}" for k in range(2) for p in parts
    }
    assert not scope.idle


@proof
def test_another_calibration_is_another_baseline(recorded: Path) -> None:
    other = replace(SAMPLING, calib_samples=1)
    with pytest.raises(Exception, match="calibration"):
        layers(session(recorded, sampling=other, layers=2), "kv-fp8-head", 1)
    assert layers(session(recorded, sampling=other, layers=2), "kv-mxfp4", 1)[0].passed


def first_lines(recorded: Path, name: str) -> list[str]:
    outcomes = layers(session(recorded, **HOW), name)
    assert not any(outcome.passed for outcome in outcomes)
    return [outcome.text.splitlines()[0] for outcome in outcomes]


def test_a_short_window_is_the_first_line(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = core.exact_mask

    def short(choices: Any, *more: Any) -> Tensor:
        return original(replace(choices, window=choices.window - 1), *more)

    monkeypatch.setattr(core, "exact_mask", short)
    for number, line in enumerate(first_lines(recorded, "kv-mxfp4")):
        assert f"model.layers.{number}.self_attn.cache:" in line
        assert (
            "(mode kv-mxfp4): the window of tokens that stay as they are is one token short" in line
        )


def test_the_scale_of_another_head_is_the_first_line(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = StoredSide.forward
    monkeypatch.setattr(StoredSide, "forward", lambda side, x: forward(side, x.flip(1)).flip(1))
    for number, line in enumerate(first_lines(recorded, "kv-fp8-head")):
        assert line.startswith(
            f"model.layers.{number}.self_attn.cache:keys (mode kv-fp8-head) "
            "keys have the scale of another head"
        )
