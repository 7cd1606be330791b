"""What lies outside the blocks, worst tokens and samples, and modes that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate.capture import Capture
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates, Outcome
from qgate.models import Model, Sampling
from qgate.modes import Mode, Rule
from qgate.modes.setups import ModelSetup
from tests.gate.benches import LLAMA, MAMBA, mode_of, session
from tests.shares import always, share, slow_file

pytestmark = slow_file

SEVERAL = Sampling(samples=4, seqlen=96, calib_samples=2, calib_seqlen=64)
BLOCK = {LLAMA: "model.layers.1", MAMBA: "backbone.layers.1"}
HOW: dict[str, Any] = {"sampling": SEVERAL, "layers": 2}
MODES = {LLAMA: ("int8", "mxfp4"), MAMBA: ("2-1", "mxfp4")}
CASES = [(model, mode) for model, modes in MODES.items() for mode in modes]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("recorded")
    for model, modes in MODES.items():
        recording = session(folder, model, updating="all", **HOW, shared=True)
        for mode in modes:
            assert all(outcome.passed for outcome in gates(recording, mode))
        recording.commit()
    return folder


def gates(of: ModelGates, name: str) -> list[Outcome]:
    mode = mode_of(of.bench, name)
    layers = [of.layer("layer_outputs", mode, layer) for layer in of.bench.layers]
    return [*layers, of.outputs("outputs", mode)]


def scaled(module: nn.Module, factor: float) -> None:
    """Change the weight of a quantized model alone, not that of the reference."""
    weight = module.get_parameter("weight").detach()
    module.weight = nn.Parameter(weight * factor, requires_grad=False)


def on_output(change: Callable[[Tensor], None]) -> Callable[[nn.Module], None]:
    """Plant a change of a module's output."""

    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        change(output if isinstance(output, Tensor) else output[0])  # type: ignore[index]

    return lambda module: module.register_forward_hook(hook) and None


def one_token(output: Tensor) -> None:
    if output.shape[1] > 64:
        output[-1, -1] = output[-1, -2]


def one_sample(output: Tensor) -> None:
    if len(output) > 1:
        output[-1] *= 1.5


FAULTS: dict[str, tuple[str, Callable[[nn.Module], None], str]] = {
    "a head of zeros": ("lm_head", lambda module: scaled(module, 0.0), "lm_head:output"),
    "a head 1 % off": ("lm_head", lambda module: scaled(module, 1.01), "lm_head:output"),
    "a final norm off": ("NORM", lambda module: scaled(module, 1.001), "NORM:weight"),
    "an embedding off": ("EMBED", lambda module: scaled(module, 1.001), "EMBED:weight"),
    "one token": ("BLOCK", on_output(one_token), "BLOCK:output"),
    "one sample": ("BLOCK", on_output(one_sample), "BLOCK:output"),
}
NAMES = {
    LLAMA: {"NORM": "model.norm", "EMBED": "model.embed_tokens", "BLOCK": BLOCK[LLAMA]},
    MAMBA: {"NORM": "backbone.norm_f", "EMBED": "backbone.embeddings", "BLOCK": BLOCK[MAMBA]},
}


@share(16, by=["model"])
@pytest.mark.parametrize(("model", "mode"), CASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_red_at_its_place(recorded: Path, model: str, mode: str, fault: str) -> None:
    module_name, plant, site = FAULTS[fault]
    for word, name in NAMES[model].items():
        module_name, site = module_name.replace(word, name), site.replace(word, name)
    if mode == "2-1":  # whose weights are not all the reference's
        site = site.replace(":weight", ":output")
    faulty = session(recorded, model, **HOW)
    quantized = faulty.bench.quantized(mode_of(faulty.bench, mode)).model.module
    plant(quantized.get_submodule(module_name))
    red = [outcome for outcome in gates(faulty, mode) if not outcome.passed]
    assert site in {outcome.verdict.first_source for outcome in red}
    entered = next(outcome for outcome in red if outcome.verdict.first_source == site)
    assert site in entered.text


@share(16)
@pytest.mark.parametrize(("model", "mode"), CASES)
def test_what_was_recorded_passes(recorded: Path, model: str, mode: str) -> None:
    outcomes = gates(session(recorded, model, **HOW), mode)
    assert [outcome.text for outcome in outcomes if not outcome.passed] == []
    outside = {row.site for row in outcomes[-1].verdict.measured}
    assert outside == {"logits", "lm_head:output"} | {
        f"{NAMES[model][word]}:output" for word in ("NORM", "EMBED")
    }


@share(12)
@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"regression": 1.0, "reason": "x"},
            "an error 18% over the accepted one passes in every block of mode",
        ),
        ({"regression": 0.06}, "its limits on regressions gate nothing"),
        ({"atol": 10.0, "reason": "x"}, "Look at `regression` and `atol` in settings and markers"),
        (
            {"budget_db": 30.0, "reason": "x"},
            "a quantizer that truncates passes under the limits of mode",
        ),
        (
            {"rules": [{"sites": "layers", "modes": "*8", "budget_db": 30.0, "reason": "x"}]},
            "budget gates nothing",
        ),
    ],
)
def test_limits_that_gate_nothing_are_red(
    recorded: Path, table: dict[str, Any], words: str
) -> None:
    policy = Policy.from_table(table)
    gated = session(recorded, LLAMA, **HOW, policy=policy, shared=True)
    outcome = gated.outputs("outputs", mode_of(gated.bench, "int8"))
    assert not outcome.passed
    assert words in outcome.text


def test_limits_may_be_wider_in_some_layers(recorded: Path) -> None:
    rules = [{"sites": "layers.0.", "regression": 1.0, "budget_db": 30.0, "reason": "x"}]
    policy = Policy.from_table({"rules": rules, "regression": 0.03})
    gated = session(recorded, LLAMA, **HOW, policy=policy, shared=True)
    assert gated.outputs("outputs", mode_of(gated.bench, "int8")).passed


def test_a_mode_that_changes_nothing_is_neither_recorded_nor_passed(tmp_path: Path) -> None:
    idle = Mode("idle", "a rule that fits nothing", rules=(Rule("", None, of="any"),))
    for updating in ("all", None):
        gated = session(tmp_path, LLAMA, layers=2, updating=updating)
        outcomes = [gated.layer("layer_outputs", idle, "layers.0"), gated.outputs("outputs", idle)]
        for outcome in outcomes:
            assert not outcome.passed
            assert outcome.text.startswith("not in effect at ")
            assert "the mode changes no block and no output" in outcome.text.splitlines()[0]
            assert not outcome.decision.values


def test_a_gradient_of_zero_is_neither_recorded_nor_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = session(tmp_path, LLAMA, layers=2, updating="all")
    mode = mode_of(gated.bench, "int8")
    site = "model.layers.1.mlp.up_proj:weight"
    run = gated.bench._backward_run

    def cut(model: Model, *forced: Capture) -> Capture:
        capture = run(model, *forced)
        if model is gated.bench.quantized(mode).model:
            capture.gradients[site] = [
                torch.zeros_like(gradient) for gradient in capture.gradients[site]
            ]
        return capture

    monkeypatch.setattr(gated.bench, "_backward_run", cut)
    assert gated.gradients("gradients", mode, "layers.0").passed
    outcome = gated.gradients("gradients", mode, "layers.1")
    assert not outcome.passed
    line = outcome.text.splitlines()[0]
    why = "the gradient is zero, and the reference's is not"
    assert line.startswith(f"not in effect at {site} (mode int8): {why}")
    assert not [key for key in outcome.decision.values if key.site == site]


class Detector(nn.Module):
    """Blocks, and two heads that are no blocks; the second has a fault if it is planted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))
        self.classes, self.boxes = nn.Linear(32, 8), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        boxes = self.boxes(x) * (0.0 if getattr(self, "fault", False) else 1.0)
        return {"classes": self.classes(x), "boxes": boxes, "count": torch.tensor(len(x))}


def detector(folder: Path, **options: Any) -> ModelGates:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randn(6, 32, generator=generator) for _ in range(3)]
    bench = Bench(ModelSetup("detector"), _model=Model(Detector(), samples, "detector"))
    return ModelGates(bench, folder, Policy(), **options)


@always
def test_all_outputs_of_a_model_are_held(tmp_path: Path) -> None:
    recording = detector(tmp_path, updating="all")
    mode = mode_of(recording.bench, "int8")
    assert recording.outputs("outputs", mode).passed
    recording.commit()
    healthy = detector(tmp_path).outputs("outputs", mode)
    assert healthy.passed
    assert {row.site for row in healthy.verdict.measured if row.scope == "carried"} == {
        "logits",
        "output.boxes",
    }
    faulty = detector(tmp_path)
    faulty.bench.quantized(mode).model.module.fault = True
    outcome = faulty.outputs("outputs", mode)
    assert "output.boxes" in {check.site for check in outcome.verdict.failed}
    assert "output.boxes" in outcome.text


def test_a_mode_that_changes_no_block_is_held_at_its_outputs(tmp_path: Path) -> None:
    mode = Mode("top", "weights of one head", rules=(Rule("classes:weight$", "int4", of="linear"),))
    for updating in ("all", None):
        gated = detector(tmp_path, updating=updating)
        gated.bench.model.head = ()
        assert gated.outputs("outputs", mode).text == ""
        gated.commit()
    faulty = detector(tmp_path)
    faulty.bench.model.head = ()
    faulty.bench.quantized(mode).model.module.fault = True
    assert not faulty.outputs("outputs", mode).passed
