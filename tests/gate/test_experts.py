"""Mixtures of experts under the gate: planted faults are red and named, right kernels are green."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import qgate
from qgate import QgateError
from qgate.expected.mixtures import MixtureOutputs, routing_changes
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.modules.expert_rows import expert_rows
from qgate.models import Model, Sampling
from qgate.models.experts import mixtures_of, slice_experts
from qgate.modes.mode import Kernel, Mode, Rule
from qgate.modes.setups import ModelSetup
from tests.gate.benches import bench, calls_of, mode_of, mx_blocks, session
from tests.gate.grouped_experts import served
from tests.models.test_moe import network_of
from tests.shares import proof, share

SHORT = Sampling(samples=2, seqlen=128, calib_samples=2, calib_seqlen=256)
MODE_OF = {
    "fp8_e4m3": "experts-fp8",
    "int8": "experts-int8",
    "mxfp4_e2m1": "experts-mxfp4",
    "mxfp8_e4m3": "experts-mxfp8",
}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "weights not renormalized": ({"renormalized": False}, "are not renormalized: they add up to 0"),
    "weights twice": ({"weighted_twice": True}, "experts are weighted twice"),
    "no weights": ({"unweighted": True}, "experts are added up without weights"),
    "weights exchanged": ({"exchanged": True}, "weights of a token's experts are exchanged"),
    "first expert alone": ({"first_alone": True}, "only the first expert of each token counts"),
    "experts permuted": (
        {"order": (0, 2, 1, 3, 4, 5, 6, 7)},
        "those of expert 1 by expert 2, those of expert 2 by expert 1",
    ),
    "experts shifted": (
        {"order": (1, 2, 3, 4, 5, 6, 7, 0)},
        "those of expert 0 by expert 1, those of expert 1 by expert 2, those of expert 2 by expert",
    ),
    "an expert without output": ({"lost_expert": 5}, "expert 5 leaves out"),
    "tokens beyond a capacity": ({"capacity": 20}, "tokens got no expert|leaves out .* tokens"),
    "router quantized": ({"router": "mxfp4_e2m1"}, "tokens go to other experts than the router"),
    "one expert's scale for all": (
        {"one_scale": 2},
        "all weights are decoded with the scales of expert 2",
    ),
    "the up half's scale for the gate": (
        {"half": 0},
        "the gate half is decoded with the tensor scale of the up half",
    ),
    "the gate half's scale for up": (
        {"half": 1},
        "the up half is decoded with the tensor scale of the gate half",
    ),
    "one expert off by a factor": ({"gain": (3, 1.4)}, "the output of expert 3 is 1.[3-7]"),
}


@pytest.fixture(scope="module")
def moe() -> Bench:
    return bench("tiny-moe", SHORT)


def rows_of(of: Bench, mode: Mode) -> list[Measured]:
    quantized = of.quantized(mode)
    meant = of.quantized(of.setup.select(mode.stands_for, of.model)[0]) if mode.own else quantized
    return expert_rows(quantized, of.model, meant, ModelSites({}, of.layer_of))


def rows_of_kernel(of: Bench, fmt: str, **defects: Any) -> list[Measured]:
    name = f"mine-{len(of.model.modes)}"
    of.model.modes = {**of.model.modes, name: Kernel(served(fmt, **defects), MODE_OF[fmt])}
    return rows_of(of, of.setup.select(name, of.model)[0])


def named(rows: list[Measured]) -> dict[str, str]:
    return {
        row.site: conformance.about
        for row in rows
        for conformance in row.conformance
        if conformance.differing
    }


# Planted faults -----------------------------------------------------------------------------------


@share(16, by=["fmt"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "mxfp8_e4m3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_mixture_is_named_at_its_layer(fault: str, fmt: str, moe: Bench) -> None:

    defects, words = FAULTS[fault]
    problems = named(rows_of_kernel(moe, fmt, **defects))
    assert list(problems) == ["model.layers.1.mlp:output"]
    assert re.search(words, problems["model.layers.1.mlp:output"])


@share(16)
@pytest.mark.parametrize("fmt", MODE_OF)
@pytest.mark.parametrize("seed", range(4))
def test_a_right_kernel_is_green(seed: int, fmt: str) -> None:
    of = bench("tiny-moe", replace(SHORT, seed=seed))
    rows = rows_of_kernel(of, fmt)
    assert named(rows) == {}
    conformances = [row.conformance[0] for row in rows if row.conformance]
    assert [of_layer.values for of_layer in conformances] == [256] * 4


@proof
@pytest.mark.parametrize("layout", ["tiny-moe", "tiny-moe-list"])
def test_no_mode_of_rules_has_a_fault(layout: str) -> None:
    of = bench(layout, SHORT, layers=2)
    for mode in of.setup.select("experts-*,mxfp4,int8", of.model):
        assert named(rows_of(of, mode)) == {}, mode.name


@proof
def test_the_first_line_of_a_failure_names_the_fault(tmp_path: Path) -> None:
    outcomes = []
    for defects in ({}, {"order": (0, 2, 1, 3, 4, 5, 6, 7)}):
        gates = session(
            tmp_path, "tiny-moe", sampling=SHORT, layers=2, updating=None if defects else "failed"
        )
        gates.bench.model.modes = {"mine": Kernel(served("fp8_e4m3", **defects), "experts-fp8")}
        mode = gates.bench.setup.select("mine", gates.bench.model)[0]
        outcomes.append(_layer(gates, mode))
        gates.commit()
    assert outcomes[0] == ""
    assert "tokens are computed by other experts" in outcomes[1]


def _layer(gates: ModelGates, mode: Mode) -> str:
    return gates.layer("layer_outputs", mode, "layers.1").text


# What is measured ---------------------------------------------------------------------------------


def test_flips_and_shifts_are_counted_by_token() -> None:
    reference = torch.tensor([[0.7, 0.3, 0.0], [0.5, 0.0, 0.5], [0.0, 0.9, 0.1]])
    actual = torch.tensor([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.0, 0.1, 0.9]])
    flips, shifts = routing_changes(actual, reference)
    assert flips.tolist() == [False, True, False]
    np.testing.assert_allclose(shifts, [0.1, 0.5, 0.8], atol=1e-6)


def test_rows_of_a_mode_that_leaves_the_router_alone(moe: Bench) -> None:
    mode = mode_of(moe, "experts-mxfp4")
    rows = {(row.site, row.scope): row for row in rows_of(moe, mode)}
    routing = "model.layers.{}.mlp.experts.routing:output"
    for layer in range(4):
        assert rows[routing.format(layer), "local"].values == {
            "router_flips": 0.0, "weight_shift": 0.0,
        }  # fmt: skip
        shares = [
            rows[f"model.layers.{layer}.mlp.experts.{k}:output", "forward"].values["token_share"]
            for k in range(8)
        ]
        assert sum(share or 0 for share in shares) == pytest.approx(1)
    first, last = (rows[routing.format(layer), "forward"].values for layer in (0, 3))
    assert first == {"router_flips": 0.0, "weight_shift": 0.0}
    assert 0 < (last["weight_shift"] or 0) < (last["router_flips"] or 0) < 0.6


def test_a_quantized_router_flips_given_the_same_input(moe: Bench) -> None:
    mode = mode_of(moe, "experts-mxfp4-router")
    rows = [row for row in rows_of(moe, mode) if "routing" in row.site and row.scope == "local"]
    flips = [float(row.values["router_flips"] or 0) for row in rows]
    assert len(flips) == 4
    assert min(flips) > 0


def test_the_error_of_an_expert_is_that_of_its_tokens(moe: Bench) -> None:
    mode = mode_of(moe, "experts-int8")
    name = "model.layers.2.mlp"
    rows = {row.site: row for row in rows_of(moe, mode) if row.scope == "local"}
    calls = calls_of(moe.model, name, moe.model.inputs)
    routed = calls_of(moe.model, f"{name}.experts.routing", moe.model.inputs)
    quantized = moe.quantized(mode).model.module.get_submodule(name)
    with torch.no_grad():
        outputs = [quantized(x) for (x,), _ in calls]
    y, r, own = (
        torch.cat(batches).flatten(0, -2).double().numpy()
        for batches in (outputs, [r for _, r in calls], [weights for _, weights in routed])
    )
    for expert in range(8):
        tokens = own[:, expert] != 0
        mse = ((y - r)[tokens] ** 2).sum() / (r[tokens] ** 2).sum()
        assert rows[f"{name}.experts.{expert}:output"].values["relative_mse"] == pytest.approx(mse)


def test_a_model_without_experts_has_no_such_rows() -> None:
    of = bench("tiny-llama", SHORT)
    assert mixtures_of(of.model.module) == []
    mode = of.setup.select("int8", of.model)[0]
    places = ModelSites({}, of.layer_of)
    assert expert_rows(of.quantized(mode), of.model, of.quantized(mode), places) == []


def test_weights_are_recovered_from_outputs() -> None:
    draw = torch.Generator().manual_seed(0)
    experts = torch.randn(50, 4, 32, generator=draw)
    weights = torch.rand(50, 4, generator=draw) * (torch.rand(50, 4, generator=draw) > 0.5)
    actual = torch.einsum("te,ted->td", weights, experts)
    of = MixtureOutputs(actual, experts, weights)
    np.testing.assert_allclose(of.recovered(), weights, atol=1e-5)
    assert of.fault() is None
    # An expert whose output is zero for all tokens says nothing, and is no fault of another.
    experts[:, 2] = 0
    actual = torch.einsum("te,ted->td", weights, experts)
    assert MixtureOutputs(actual, experts, weights).recovered()[:, 2].abs().max() < 1e-6


# Modes --------------------------------------------------------------------------------------------


@proof
@pytest.mark.parametrize("layout", ["tiny-moe", "tiny-moe-list"])
def test_expert_modes_quantize_experts_alone(layout: str) -> None:
    of = bench(layout, SHORT)
    for mode in of.setup.select("experts-*", of.model):
        sites = of.quantized(mode).plan.quantizers()
        outside = {site for site in sites if ".experts." not in site}
        routers = {
            f"model.layers.{k}.mlp.router:{p}" for k in range(4) for p in ("input", "weight")
        }
        assert outside == (routers if mode.name.endswith("-router") else set())
        products = 2 if layout == "tiny-moe" else 3
        ports = 1 if mode.name.endswith("-weights") else 2
        assert len(sites) - len(outside) == 4 * 8 * products * ports, mode.name


def test_expert_modes_are_asked_for_by_name(moe: Bench) -> None:
    every = {mode.name for mode in moe.setup.select("all,quant_only,*8*", moe.model)}
    assert not [name for name in every if name.startswith("experts")]
    of = bench("tiny-llama", SHORT)
    mode = of.setup.select("experts-fp8", of.model)[0]
    with pytest.raises(QgateError, match="decides no site of tiny-llama"):
        of.quantized(mode)


def test_blocks_of_fused_weights_never_cross_experts(moe: Bench) -> None:
    mode = mode_of(moe, "experts-mxfp4")
    quantized, plain = moe.quantized(mode).model.module, moe.model.module
    name = "model.layers.0.mlp.experts.{}.down_proj"
    for expert in (0, 7):
        weight = plain.get_submodule(name.format(expert)).weight.detach().double().numpy()
        actual = quantized.get_submodule(name.format(expert)).weight.detach().numpy()
        assert weight.shape == (128, 64)
        for row in (0, 127):
            np.testing.assert_array_equal(
                actual[row], mx_blocks(weight[row], ml_dtypes.float4_e2m1fn)
            )


E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
INTEGERS = {bits: np.arange(2.0 ** (bits - 1)) for bits in (4, 8)}


@pytest.mark.parametrize(
    ("name", "grid", "group"),
    [
        ("experts-int8", INTEGERS[8], None),
        ("experts-int4-weights", INTEGERS[4], 64),
        ("experts-fp8", E4M3, None),
        ("experts-fp8-static", E4M3, None),
        ("experts-fp8-router", E4M3, None),
    ],
)
def test_weights_of_each_expert_are_those_of_the_definition(
    name: str, grid: np.ndarray[Any, Any], group: int | None, moe: Bench
) -> None:
    """Rows, or groups along them, over their largest magnitude: the nearest value of the grid."""
    quantized = moe.quantized(mode_of(moe, name)).model.module
    for part in (
        "model.layers.1.mlp.experts.2.gate_up_proj",
        "model.layers.3.mlp.experts.6.down_proj",
    ):
        weight = moe.model.module.get_submodule(part).weight.detach().double().numpy()
        actual = quantized.get_submodule(part).weight.detach().numpy()
        for row, values in zip(weight[::37], actual[::37], strict=True):
            for start in range(0, len(row), group or len(row)):
                span = slice(start, start + (group or len(row)))
                scale = np.abs(row[span]).max() / grid[-1]
                nearest = np.abs(grid - np.abs(row[span] / scale)[:, None]).argmin(1)
                expected = np.sign(row[span]) * grid[nearest] * scale
                np.testing.assert_allclose(values[span], expected, rtol=1e-5, atol=1e-9)


def test_nvfp4_has_tensor_scales_of_each_expert(moe: Bench) -> None:
    mode = mode_of(moe, "experts-nvfp4")
    name = "model.layers.0.mlp.experts.{}.gate_up_proj"
    for expert in (1, 6):
        weight = moe.model.module.get_submodule(name.format(expert)).weight.detach()
        actual = moe.quantized(mode).model.module.get_submodule(name.format(expert)).weight
        assert torch.equal(actual, qgate.quantize(weight, "nvfp4"))
    weights = [moe.model.module.get_submodule(name.format(k)).weight.detach() for k in range(8)]
    together = qgate.quantize(torch.stack(weights), "nvfp4")
    alone = torch.stack([qgate.quantize(weight, "nvfp4") for weight in weights])
    assert not torch.equal(together, alone)


def test_static_scales_are_those_of_each_experts_calibration_tokens(moe: Bench) -> None:
    mode = mode_of(moe, "experts-fp8-static")
    plan = {entry.site: entry for entry in moe.quantized(mode).plan.entries}
    at = "model.layers.3.mlp.experts.4.gate_up_proj"
    calls = calls_of(moe.model, at, moe.model.calibration_samples())
    largest = max(float(x.abs().max()) for (x,), _ in calls)
    assert plan[f"{at}:input"].scale == pytest.approx(largest / 448)
    assert plan[f"{at}:input"].origin == "amax of the calibration samples"
    scales = {entry.scale for site, entry in plan.items() if site.endswith("gate_up_proj:input")}
    assert len(scales) > 16


def test_an_expert_that_calibration_never_reached_is_named() -> None:
    few = replace(SHORT, calib_samples=1, calib_seqlen=6)
    of = bench("tiny-moe", few)
    reached = {
        f"model.layers.{layer}.mlp.experts.{expert}"
        for layer in range(4)
        for expert in _asked_experts(of, layer)
    }
    with pytest.raises(QgateError, match=r"calibration reached .* with no token") as caught:
        of.quantized(of.setup.select("experts-fp8-static", of.model)[0])
    text = str(caught.value)
    assert "model.layers.0.mlp.experts." in text
    assert not [name for name in reached if f"{name}.gate_up_proj" in text.split(" with no")[0]]
    assert "give more or longer ones (calib_samples, calib_seqlen)" in text


def _asked_experts(of: Bench, layer: int) -> list[int]:
    name = f"model.layers.{layer}.mlp.experts.routing"
    router_weights = [
        weights for _, weights in calls_of(of.model, name, of.model.calibration_samples())
    ]
    return torch.cat(router_weights).flatten(0, -2).sum(0).nonzero().flatten().tolist()


def test_a_static_rule_of_ones_own_needs_calibration_samples() -> None:
    model = qgate.Model(torch.nn.Sequential(torch.nn.Linear(4, 4)), [torch.ones(1, 4)], head=())
    mode = Mode("mine", "static", rules=(Rule(":input$", "int8", per="static"),))
    with pytest.raises(QgateError, match="no samples to calibrate on"):
        qgate.modes.apply(mode, model)


@share(3)
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "qwen2-moe"])
def test_experts_of_transformers_have_the_same_rows(family: str) -> None:
    network = network_of(family)
    layers = len(slice_experts(network))
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randint(1, 50, (1, 48), generator=draw) for _ in range(2)]
    of = Bench(ModelSetup("mine", build=lambda: Model(network, inputs, "mine")))
    for mode in of.setup.select("experts-fp8,experts-mxfp4,int8,bf16", of.model):
        rows = rows_of(of, mode)
        assert named(rows) == {}, mode.name
        assert len([row for row in rows if row.conformance]) == layers == 2
        shares = [row.values["token_share"] or 0 for row in rows if "token_share" in row.values]
        assert sum(shares) == pytest.approx(layers)
