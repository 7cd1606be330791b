"""Static scales: what is measured, against an independent model of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qgate import Model, QgateError, modes
from qgate.models.mamba.hadamard import matrix
from qgate.models.mamba.network import Mamba, MambaConfig
from qgate.models.mamba.rotation import ROTATED, rotate
from qgate.modes import CalibrationSettings, measure
from qgate.modes import definition as spec_block
from qgate.modes.calibration import OBSERVED, quantile
from qgate.modes.setups import ModelSetup
from tests.models.checkpoints import randomize
from tests.modes import spec_calibration
from tests.shares import proof

LENGTHS = (17, 40, 40, 1, 33, 40, 40, 40, 2, 2)
SITES = {"s_n": "in_proj:input", "s_z": "in_proj:output", "s_u": "x_proj:input", "s_x": "x_proj:output",
         "s_d": "dt_proj:output", "s_h": "scan:state", "s_o": "out_proj:input"}  # fmt: skip
DEFAULT = CalibrationSettings()


def mamba(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, d_model: int = 24) -> Model:
    network = Mamba(MambaConfig(31, d_model, 2, 48)).eval()
    randomize(network, seed)
    draw = torch.Generator().manual_seed(seed)
    samples = [torch.randint(31, (1, length), generator=draw) for length in lengths]
    return Model(network, samples[:1], "random", samples, bases={ROTATED: rotate})


def weights_of(mixer: Any) -> spec_block.Weights:
    parts = {
        name: getattr(mixer, name).weight for name in ("in_proj", "x_proj", "dt_proj", "out_proj")
    }
    parts |= {"conv_weight": mixer.conv1d.weight[:, 0], "conv_bias": mixer.conv1d.bias}
    parts |= {"dt_bias": mixer.dt_proj.bias, "A_log": mixer.A_log, "D": mixer.D}
    return {name: tensor.detach().numpy() for name, tensor in parts.items()}


@pytest.mark.parametrize("alpha", [0.9995, 0.99, 1.0])
@pytest.mark.parametrize("arithmetic", ["fp32", "fp16"])
def test_scales_are_those_of_the_specification(alpha: float, arithmetic: Any) -> None:
    model = mamba()
    calibration = measure(model, CalibrationSettings(alpha, arithmetic))
    turned: Any = model.in_basis(ROTATED).module
    with torch.no_grad():
        prompts = [turned.backbone.embeddings(x).numpy() for x in model.calibration_samples()]
    layers = [weights_of(mixer) for mixer in turned.mixers()]
    expected = spec_calibration.calibrate(
        layers, prompts, matrix(48).float().numpy(), alpha, arithmetic
    )
    assert set(calibration.scales) == {
        f"backbone.layers.{k}.mixer.{s}" for k in range(2) for s in OBSERVED
    }
    assert set(SITES.values()) == set(OBSERVED)
    for k, scales in enumerate(expected):
        for symbol, leaf in SITES.items():
            site = f"backbone.layers.{k}.mixer.{leaf}"
            assert calibration[site].scale == pytest.approx(scales[symbol], rel=1e-5), site
        u = calibration[f"backbone.layers.{k}.mixer.x_proj:input"]
        assert u.wide == pytest.approx(scales["s_u1"], rel=1e-5)
        assert (u.wide > u.scale) == (alpha < 1)


def test_in_fp16_scales_are_float16_numbers_but_for_percentiles() -> None:
    fp32, fp16 = (measure(mamba(), CalibrationSettings(arithmetic=a)) for a in ("fp32", "fp16"))  # type: ignore[arg-type]
    for site, entry in fp16.scales.items():
        exact = entry.scale == float(torch.tensor(entry.scale).half())
        assert exact == (entry.observer == "minmax"), site
        assert entry.scale == pytest.approx(fp32[site].scale, rel=2e-3)
        assert entry.range == fp32[site].range
        assert (entry.scale == fp32[site].scale) == (entry.observer == "percentile")


def test_a_percentile_is_a_mean_over_prompts_and_no_maximum() -> None:
    model = mamba((9, 30, 12))
    samples = model.calibration_samples()
    u = "backbone.layers.0.mixer.x_proj:input"
    alone = [
        measure(replace(model, calibration=[x]), CalibrationSettings(1.0))[u].range for x in samples
    ]
    together = measure(model, CalibrationSettings(1.0))[u].range
    expected = alone[0]
    for value in alone[1:]:
        expected += 0.01 * (value - expected)
    assert together == pytest.approx(expected, rel=1e-6)
    assert together != pytest.approx(max(alone), rel=1e-3)
    norm = "backbone.layers.0.mixer.in_proj:input"
    tops = [measure(replace(model, calibration=[x]), DEFAULT)[norm].range for x in samples]
    assert measure(model, DEFAULT)[norm].range == pytest.approx(max(tops), rel=1e-6)


@given(st.integers(1, 4000), st.floats(0.5, 1), st.integers(0, 2**31))
@settings(max_examples=150)
def test_quantiles_are_those_of_numpy(size: int, alpha: float, seed: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).abs()
    ours = float(quantile(values, alpha))
    exact = float(np.quantile(values.double().numpy(), alpha))
    assert ours == pytest.approx(exact, rel=1e-6)
    gap = float(values.max() - values.min())
    assert ours == pytest.approx(
        float(torch.quantile(values, alpha)), rel=1e-6, abs=gap * 2e-7 * size
    )


@proof
def test_quantiles_of_many_equal_and_odd_values() -> None:
    assert float(quantile(torch.tensor([[3.0]]), 0.9995)) == 3
    assert float(quantile(torch.arange(101.0).flip(0), 0.99)) == 99
    assert float(quantile(torch.arange(101.0).view(1, 101), 1.0)) == 100
    assert float(quantile(torch.tensor([1.0, 2.0]), 0.75)) == 1.75
    assert float(quantile(torch.full((5000,), 0.3), 0.9995)) == float(torch.tensor(0.3))
    many = torch.arange(2**24 + 9).float()  # torch.quantile refuses
    assert float(quantile(many, 0.9995)) == pytest.approx(0.9995 * 2**24, rel=1e-6)


# What cannot be calibrated -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_named(value: float) -> None:
    model = mamba()
    with torch.no_grad():
        model.module.backbone.layers[1].mixer.conv1d.bias[7] = value  # type: ignore[union-attr, index]
    with pytest.raises(
        QgateError, match=r"site backbone\.layers\.1\.mixer\.x_proj:input .*(nan|inf)"
    ):
        measure(model, DEFAULT)


def test_a_range_beyond_float16_is_refused_in_fp16_only() -> None:
    model = mamba()
    with torch.no_grad():
        model.module.backbone.layers[0].mixer.in_proj.weight.mul_(1e6)  # type: ignore[union-attr, operator]
    site = "backbone.layers.0.mixer.in_proj:output"
    assert measure(model, DEFAULT)[site].range > 65504
    with pytest.raises(QgateError, match=f"site {site} cannot be calibrated in fp16"):
        measure(model, CalibrationSettings(arithmetic="fp16"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"calibration": ()}, "no samples to calibrate on"),
        ({"calibration": [{"ids": torch.ones(1, 3)}]}, "tensors of token ids, not dict"),
        ({"bases": {}}, "fits no mode with calibrated scales"),
    ],
)
def test_models_that_cannot_be_calibrated(change: dict[str, Any], words: str) -> None:
    with pytest.raises(QgateError, match=words):
        measure(replace(mamba(), **change), DEFAULT)


def test_a_width_without_a_hadamard_is_a_clear_error() -> None:
    with pytest.raises(QgateError, match=r"no Hadamard transform of width 20 .* 12 \* 2\^k"):
        measure(mamba(d_model=20), DEFAULT)


@pytest.mark.parametrize("alpha", [0.0, 0.49, 1.001, -1.0, float("nan"), 99.95])
def test_a_percentile_is_a_share(alpha: float) -> None:
    with pytest.raises(QgateError, match="percentile alpha"):
        CalibrationSettings(alpha)
    with pytest.raises(QgateError, match="'bf16'"):
        CalibrationSettings(arithmetic="bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [(12,), (1,), (5, 5, 5), (3,) * 19])
def test_progress_counts_the_samples(lengths: tuple[int, ...]) -> None:
    updates: list[tuple[int, int]] = []
    calibration = measure(
        mamba(lengths), DEFAULT, progress=lambda done, total: updates.append((done, total))
    )
    assert updates[-1] == (len(lengths), len(lengths)) == (calibration.samples, calibration.samples)
    assert updates == sorted(set(updates))
    assert all(entry.scale > 0 for entry in calibration.scales.values())


def test_a_mode_without_static_scales_measures_nothing() -> None:
    model, setup = mamba(), ModelSetup("random")

    def refuse() -> list[Tensor]:
        raise AssertionError("calibration samples were cut")

    model.calibration = refuse
    setup.quantize(modes.find_mode("fp16", "mamba"), model)
    setup.quantize(modes.find_mode("int8", "mamba"), model)
    with pytest.raises(AssertionError, match="samples were cut"):
        setup.quantize(modes.find_mode("2-1", "mamba"), model)
