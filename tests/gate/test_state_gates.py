"""The gates of a layer hold recurrent states, and the task has a figure along a long text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate import models, modes
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measuring import long_texts
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.coverage import mode_scope
from qgate.gate.measuring.long_texts import (
    compare_along,
    long_text,
    long_text_row,
    token_logits,
)
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.sessions import Outcome
from qgate.models import Model
from qgate.modes.setups import ModelSetup
from qgate.modes.states.casting import StoredState
from qgate.page.plots.panels import panels_of
from qgate.page.terminal import mode_table
from qgate.results.pictures import predicted_tokens
from qgate.results.summary import Tally
from tests.gate.state_models import small_mamba
from tests.shares import always, proof, slow_file

pytestmark = slow_file

NAMES = ("state-bf16", "state-fp8-channel", "state-int8-stochastic")


def session(folder: Path, **more: Any) -> ModelGates:
    setup = ModelSetup("small-mamba", build=lambda: small_mamba())
    return ModelGates(Bench(setup), folder, Policy(), **more)


def outcomes(of: ModelGates, name: str) -> list[Outcome]:
    mode = of.bench.setup.select(name, of.bench.model)[0]
    layers = [of.layer("layer_outputs", mode, layer) for layer in of.bench.layers]
    return [*layers, of.outputs("outputs", mode), of.task("task", mode)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    accepting = session(folder, updating="all")
    accepting.reference("reference")
    for name in NAMES:
        for outcome in outcomes(accepting, name):
            accepting.keep(outcome)
    accepting.commit()
    return folder


@proof
@pytest.mark.parametrize("name", NAMES)
def test_healthy_modes_pass_and_cover_every_state(name: str, recorded: Path) -> None:
    healthy = session(recorded, plots="worst")
    judged = outcomes(healthy, name)
    assert [outcome.text for outcome in judged if not outcome.passed] == []
    mode = healthy.bench.setup.select(name, healthy.bench.model)[0]
    scope = mode_scope(healthy.bench, healthy.bench.quantized(mode))
    assert set(scope.modules) == {
        f"backbone.layers.{k}.mixer.{part}" for k in range(2) for part in ("conv1d", "scan")
    }
    assert not scope.idle
    (drawn_row,) = [row for row in judged[-1].record["rows"] if "pictures" in row]
    assert drawn_row["site"] == "long_text"
    panels, problems = panels_of(drawn_row)
    assert [panel.kind for panel in panels] == ["divergence_along", "loss_along"]
    assert problems == []


def test_a_scale_of_another_channel_is_the_first_line(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = StoredState.__init__

    def turned(self: Any, site: str, choice: Any, scale: Any, seed: int = 0) -> None:
        init(self, site, choice, scale.roll(1) if ".scan:" in site else scale, seed)

    monkeypatch.setattr(StoredState, "__init__", turned)
    broken = outcomes(session(recorded), "state-fp8-channel")[:2]
    for number, outcome in enumerate(broken):
        assert outcome.text.startswith(
            f"backbone.layers.{number}.mixer.scan:stored_state (mode state-fp8-channel): "
            "the state has the scale of another channel"
        )


def test_growth_that_was_not_accepted_is_red(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that loses a little at every token shows along the long text."""
    forward = StoredState.forward

    def leaking(self: StoredState, x: Tensor, first: int) -> Tensor:
        return forward(self, x, first) * (1 - first * 2.0**-8)

    monkeypatch.setattr(StoredState, "forward", leaking)
    red = outcomes(session(recorded), "state-bf16")[-1]
    failed = {(check.site, check.metric) for check in red.verdict.failed}
    assert {("long_text", "error_growth"), ("long_text", "kl_divergence")} <= failed


@pytest.mark.parametrize("predicted", [4096.0, 1024.0])
def test_summaries_say_how_the_error_grows(predicted: float) -> None:
    values = {
        "compared_tokens": 4096.0, "kl_divergence": 2.4e-4, "error_growth": 5.0,
        "predicted_tokens": predicted,
    }  # fmt: skip
    record = {
        "node": "n", "model": "m", "mode": "state-bf16", "layer": "", "site": "long_text",
        "scope": "task", "order": 1, "values": values, "accepted": {}, "checks": [], "passed": True,
    }  # fmt: skip
    (mode,) = Tally([record]).modes
    words = "" if predicted == 4096.0 else ", stops predicting at token 1,024"
    text = f"KL 2.4e-04 along 4,096 tokens, 32x at the end{words}"
    assert mode.long_text == text
    lines = [line.text for line in mode_table([mode], 200, 4)]
    assert f"    {text}" in lines


# The figure ---------------------------------------------------------------------------------------


def logits(seed: int, tokens: int, size: int = 11) -> Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed))


def test_figures_are_those_of_their_definitions() -> None:
    reference = logits(0, 320)
    ids = torch.cat([torch.zeros(1, dtype=torch.long), torch.randint(11, (320,))])
    ids[1:] = reference.argmax(-1)
    noise = logits(1, 320) * torch.linspace(0, 3, 320).unsqueeze(1)
    picture = compare_along(ids, reference + noise, reference)
    p, q = (torch.softmax(x.double(), -1).numpy() for x in (reference, reference + noise))
    following = ids[1:].numpy()
    for number in range(16):
        part = slice(20 * number, 20 * number + 20)
        kl = (p[part] * np.log(p[part] / q[part])).sum(1).mean()
        assert picture["kl"][number] == pytest.approx(kl, rel=1e-9, abs=1e-12)
        bits = [-np.log2(side[part][range(20), following[part]]) for side in (q, p)]
        assert picture["bits"][number] == pytest.approx(bits[0].mean())
        assert picture["reference"][number] == pytest.approx(bits[1].mean())
        half = 2.09 * bits[1].std(ddof=1) / math.sqrt(20)
        assert picture["half_95"][number] == pytest.approx(half, rel=1e-3)
    highest = np.array(picture["reference"]) + picture["half_95"]
    outside = np.array(picture["bits"]) > highest
    # It leaves the interval for good where all that follows is outside.
    assert [outside[0], outside[-1]] == [False, True]
    assert predicted_tokens(picture) == 20 * (1 + max(np.flatnonzero(~outside)))


@always
def test_a_state_that_grows_stops_predicting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "TOKENS", 512)
    model = models.load("tiny-mamba", sampling=models.Sampling(samples=2, seqlen=320))
    quantized = modes.apply(modes.find_mode("state-fp16", "mamba"), model).model
    reference = token_logits(model, long_text(model))
    values = long_text_row(model, quantized, reference).values
    assert values["predicted_tokens"] == values["compared_tokens"] == 512
    forward = StoredState.forward
    monkeypatch.setattr(
        StoredState, "forward", lambda self, x, first: forward(self, x, first) * (1 + first / 1000)
    )
    values = long_text_row(model, quantized, reference).values
    assert 0 < values["predicted_tokens"] < 512  # type: ignore[operator]
    assert values["error_growth"] > 2  # type: ignore[operator]


def test_long_texts_are_joined_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_mamba()
    assert torch.equal(long_text(model), torch.cat(list(model.inputs), 1))
    monkeypatch.setattr(long_texts, "TOKENS", 100)
    assert long_text(model).shape == (1, 101)
    for inputs, words in (
        ([torch.ones(1, 8, dtype=torch.long)], "are 8 tokens in all: give more or longer"),
        ([torch.ones(1, 8)], "no single texts of token ids"),
    ):
        with pytest.raises(QgateError, match=words):
            long_text(Model(torch.nn.Identity(), inputs, "short"))
