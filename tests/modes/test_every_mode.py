"""Every registered mode on every built-in model it claims, and a model with a mode of its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from qgate import QgateError, capture, models, modes
from qgate.models import Model
from tests.shares import share

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "my_model.py"
SMALL = models.Sampling(samples=1, seqlen=48, calib_samples=4, calib_seqlen=64)
FAMILIES = {"tiny-mamba": "mamba", "tiny-llama": "other"}
CASES = [
    (name, mode.name) for name, family in FAMILIES.items() for mode in modes.select("all", family)
]
# Gradients of a model that runs free: four bits move them far, 0.11 at least. Gradients that have
# nothing to do with each other are within 0.03 of zero, of as many elements as a weight here.
FOUR_BITS = ("mxfp4", "hif4", "nvfp4", "w4")


@pytest.fixture(scope="module")
def loaded() -> dict[str, tuple[Model, modes.Calibration | None]]:
    mamba, llama = (models.load(name, sampling=SMALL) for name in FAMILIES)
    return {
        "tiny-mamba": (mamba, modes.measure(mamba, modes.CalibrationSettings())),
        "tiny-llama": (llama, None),
    }


@share(16)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_it_runs_differs_from_fp32_and_takes_gradients(
    name: str, mode: str, loaded: dict[str, tuple[Model, modes.Calibration | None]]
) -> None:
    model, scales = loaded[name]
    before = model.weights_hash()
    quantized = modes.apply(modes.find_mode(mode, FAMILIES[name]), model, scales)
    assert quantized.plan.entries
    json.dumps(quantized.plan.to_dict(), allow_nan=False)
    reference = model.in_basis(quantized.mode.basis)
    weight = r"layers\.0\.(mixer\.in_proj|self_attn\.q_proj):weight$"
    sites = rf"layers\.\d:output$|{weight}"
    actual = capture.run(quantized.model, sites, gradients=True)
    expected = capture.run(reference, sites, gradients=True)
    for site, error in capture.compare(actual, expected).items():
        if not site.endswith("weight"):
            assert 0 < error.metric("relative_mse") < 1, site
    for site in expected.gradients:
        for a, b in zip(actual.gradients[site], expected.gradients[site], strict=True):
            similarity = torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0)
            assert float(similarity) > (0.08 if mode in FOUR_BITS else 0.75), site
    assert model.weights_hash() == before
    assert all(p.grad is None for p in model.module.parameters())


def test_bits_per_byte_tell_good_modes_from_bad(
    loaded: dict[str, tuple[Model, modes.Calibration | None]],
) -> None:
    """The task has to fall where a mode is bad, or it gates nothing."""
    from qgate.capture.running import next_token_loss

    model, scales = loaded["tiny-mamba"]
    sample = models.load("tiny-mamba", sampling=models.Sampling(samples=1, seqlen=512)).inputs[0]

    def bits(mode: str) -> float:
        quantized = modes.apply(modes.find_mode(mode, "mamba"), model, scales)
        with torch.no_grad():
            return float(next_token_loss(quantized.model(sample), sample)) / 0.6931

    with torch.no_grad():
        fp32 = float(next_token_loss(model(sample), sample)) / 0.6931
    assert abs(bits("fp16") - fp32) < 1e-3
    assert abs(bits("0") - fp32) < 0.03
    assert bits("mxfp4") > fp32 + 0.05


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_of_ones_own_is_gated_like_a_simulated_mode(example: ModuleType) -> None:
    model = example.build(samples=2)
    chosen = modes.select("int8,torchao_int8,mxfp4", "other", list(model.modes), model.name)
    errors = {}
    for mode in chosen:
        site_errors = capture.compare_runs(modes.apply(mode, model).model, model)
        errors[mode.name] = [error.metric("sqnr_db") for error in site_errors.values()]
    assert len(errors["torchao_int8"]) == 3
    for real, simulated in zip(errors["torchao_int8"], errors["int8"], strict=True):
        assert real == pytest.approx(simulated, abs=1.5)
        assert real > 40
    assert max(errors["mxfp4"]) < min(errors["torchao_int8"]) - 15


def test_the_example_prints_its_table(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.endswith("dB")]) == 6


def test_a_mode_of_ones_own_may_not_touch_the_model(example: ModuleType) -> None:
    def in_place(model: Model) -> torch.nn.Module:
        with torch.no_grad():
            next(model.module.parameters()).add_(1)
        return model.module

    model = example.build()
    model.modes = {"broken": in_place, "nothing": lambda _model: None}
    for name, words in (("broken", "changed the model in place"), ("nothing", "NoneType")):
        with pytest.raises(QgateError, match=words):
            modes.apply(modes.find_mode(name, "other", own=[name]), model)
