"""The smallest defects that a gate says it sees are those that it sees, to a factor of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate.gate import Policy
from qgate.gate.checks import smallest_defects
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.measuring.passes import outer_tensors
from qgate.gate.sessions import Outcome
from qgate.results.run_facts import ModePower, SmallestDefect, add_power, power_texts
from tests.gate.benches import LLAMA, SHORT, mode_of, session
from tests.gate.making import measured, verdict
from tests.shares import always, share, slow_file

pytestmark = slow_file

MODES = ("int8", "mxfp4")
SITE = {
    "weight": "model.layers.1.mlp.up_proj:weight",
    "scale": "model.layers.1.mlp.up_proj:weight",
    "channel": "model.layers.1.mlp.up_proj:output",
    "token": "model.layers.1:output",
    "sample": "model.layers.1:output",
}
LAYER = "layers.1"
PLACES = ("local", "isolated")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("recorded")
    recording = session(folder, LLAMA, updating="all", layers=2, shared=True)
    for name in MODES:
        assert recording.layer("layer_outputs", mode_of(recording.bench, name), LAYER).passed
    recording.commit()
    return folder


def run(folder: Path, name: str, plant: Callable[[nn.Module], None] | None = None) -> Outcome:
    gated = session(folder, LLAMA, layers=2, shared=plant is None)
    mode = mode_of(gated.bench, name)
    if plant is not None:
        plant(gated.bench.quantized(mode).model.module)
    return gated.layer("layer_outputs", mode, LAYER)


def at_site(outcome: Outcome, kind: str) -> dict[str, float]:
    """The figures of one site alone, as a gate with nothing else would have them."""
    rows = tuple(row for row in outcome.verdict.measured if row.site == SITE[kind])
    rows = tuple(row for row in rows if row.scope in PLACES)
    alone = type(outcome.verdict)(rows, outcome.verdict.checks)
    return {defect["kind"]: defect["size"] for defect in smallest_defects(alone)}


def usual_token(folder: Path, name: str) -> int:
    """The token of the first sample whose error is nearest to that of the block."""
    bench = session(folder, LLAMA, layers=2, shared=True).bench
    reference, mode = bench.reference("plain"), bench.quantized(mode_of(bench, name))
    actual = outer_tensors(mode.model, bench.model.inputs, reference)[SITE["token"]][0][0]
    exact = reference[SITE["token"]][0][0]
    error = (actual - exact).square().sum(-1)
    energy = exact.square().sum(-1)
    mean = error.sum() / energy.sum()
    distance = (error / energy - mean).abs()
    return int(distance.where(energy <= energy.mean(), torch.inf).argmin())


def signs(shape: Any) -> Tensor:
    """Ones of either sign, so that each element is off by the same share."""
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(5)) * 2.0 - 1.0


def on_weight(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def plant(module: nn.Module) -> None:
        owner = module.get_submodule(SITE["weight"].partition(":")[0])
        quantized = type(owner)
        weight = property(lambda self: change(quantized.weight.fget(self)))  # type: ignore[attr-defined]
        owner.__class__ = type(quantized.__name__, (quantized,), {"weight": weight})

    return plant


def on_output(site: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def hook(_module: nn.Module, _inputs: object, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        return (change(output[0]), *output[1:])

    name = site.partition(":")[0]
    return lambda module: module.get_submodule(name).register_forward_hook(hook) and None


def typical(energy: Tensor) -> int:
    """The index whose energy is nearest to the mean."""
    return int((energy - energy.mean()).abs().argmin())


def off(kind: str, size: float, number: int = 0) -> Callable[[nn.Module], None]:
    """Plant a defect of this kind and relative size, in the token or sample of a number."""

    def weight(plain: Tensor) -> Tensor:
        return plain * (1 + size * signs(plain.shape))

    def channel(output: Tensor) -> Tensor:
        index = typical(output.square().flatten(0, -2).sum(0))
        changed = output.clone()
        changed[..., index] *= 1 + size * signs(output[..., index].shape)
        return changed

    def row(output: Tensor, index: Any) -> Tensor:
        # All samples pass at once; the beginning of the first one passes again by itself.
        if len(output) < SHORT.samples:
            return output
        changed = output.clone()
        changed[index] *= 1 + size * signs(output[index].shape)
        return changed

    if kind == "weight":
        return on_weight(weight)
    if kind == "channel":
        return on_output(SITE[kind], channel)
    index = number if kind == "sample" else (0, number)
    return on_output(SITE[kind], lambda output: row(output, index))


def is_red(outcome: Outcome, kind: str) -> bool:
    return any(
        check.site == SITE[kind] and check.scope in PLACES for check in outcome.verdict.failed
    )


@share(16)
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("kind", ["weight", "channel", "token", "sample"])
def test_a_defect_above_its_size_is_red_and_one_well_below_is_not(
    recorded: Path, name: str, kind: str
) -> None:
    healthy = run(recorded, name)
    assert healthy.passed
    size = at_site(healthy, kind)[kind]
    assert 0 < size < 1
    # The sample that has the worst token is held by the limit of that token, too.
    numbers = {"sample": range(SHORT.samples), "token": [usual_token(recorded, name)]}.get(
        kind, [0]
    )
    assert all(is_red(run(recorded, name, off(kind, 1.8 * size, n)), kind) for n in numbers)
    below = [run(recorded, name, off(kind, 0.5 * size, n)) for n in numbers]
    if kind in ("channel", "token"):
        # A loud one is more of the whole, whose limits may see it.
        metrics = {check.metric for outcome in below for check in outcome.verdict.failed}
        assert f"relative_mse@worst_{kind}" not in metrics
    else:
        assert not all(is_red(outcome, kind) for outcome in below)


@share(8)
@pytest.mark.parametrize("name", MODES)
def test_one_block_with_a_scale_that_is_half_of_its_own_is_red(recorded: Path, name: str) -> None:
    def halved(weight: Tensor) -> Tensor:
        changed = weight.clone().reshape(-1, 32)
        changed[len(changed) // 3] *= 0.5
        return changed.reshape(weight.shape)

    assert is_red(run(recorded, name, on_weight(halved)), "scale")


def test_wider_limits_see_less_unless_values_are_held_at_float_noise(recorded: Path) -> None:
    def sizes(policy: Policy) -> tuple[dict[str, float], dict[str, float]]:
        gated: ModelGates = session(recorded, LLAMA, policy=policy, layers=2, shared=True)
        outcome = gated.layer("layer_outputs", mode_of(gated.bench, "int8"), LAYER)
        (power,) = gated.power()
        rows = [row for row in outcome.verdict.measured if row.scope == "local"]
        alone = tuple(dataclasses.replace(row, conformance=()) for row in rows)
        by_limits = smallest_defects(type(outcome.verdict)(alone, outcome.verdict.checks))
        return tuple(
            {defect["kind"]: defect["size"] for defect in defects}
            for defects in (power["defects"], by_limits)
        )  # type: ignore[return-value]

    strict, strict_limits = sizes(Policy())
    loose, loose_limits = sizes(
        Policy.from_table({"regression": 0.5, "budget_db": 3.0, "reason": "x"})
    )
    kinds = {"weight", "channel", "token", "sample"}
    assert strict.keys() == loose.keys() == kinds, "any scale of a weight held whole is seen"
    assert strict_limits.keys() == kinds | {"scale"}
    assert all(loose_limits[kind] > strict_limits[kind] for kind in kinds)
    assert loose_limits["weight"] > 2 * strict_limits["weight"]
    assert strict == loose
    assert all(strict[kind] < 1e-2 * strict_limits[kind] for kind in kinds)


def test_the_site_that_sees_least_counts() -> None:
    larger = {"relative_mse": 1e-3, "one_minus_correlation": 5e-4}
    blind = measured("a:weight", values=larger, accepted=larger, ideal=None)
    sharp = measured("b:weight", 1e-4, ideal=None)
    defects = smallest_defects(verdict(blind, sharp, regression=0.02))
    assert {(defect["kind"], defect["site"]) for defect in defects} == {
        ("weight", "a:weight"),
        ("scale", "a:weight"),
    }
    assert smallest_defects(verdict(measured("a:weight", 1e-1))) == [], "a red site has no room"


def power(mode: str, **sizes: float) -> ModePower:
    defects = [
        SmallestDefect(kind=kind, size=size, site=f"{mode} {kind}") for kind, size in sizes.items()
    ]  # type: ignore[misc]
    return ModePower(model="m", mode=mode, defects=defects)


@always
def test_parts_of_a_run_are_joined_and_written() -> None:
    one = [power("int8", weight=0.001, task=0.005), power("mxfp4", weight=0.02)]
    other = [power("int8", weight=0.003, channel=0.1)]
    joined = add_power(one, other)
    assert [of["mode"] for of in joined] == ["int8", "mxfp4"]
    sizes = {defect["kind"]: defect["size"] for defect in joined[0]["defects"]}
    assert sizes == {"weight": 0.003, "task": 0.005, "channel": 0.1}
    assert power_texts({"power": joined}) == [
        "smallest defects seen in mxfp4: each weight of a module off by 2 %",
        "smallest defects seen in int8: each weight of a module off by 0.3 %, a channel off by 10 %, "
        "0.005 bits per byte",
    ]
    assert power_texts({"power": joined, "shard": {"number": 1}}) == []
    assert power_texts({}) == []


def test_a_mode_is_not_said_to_see_what_another_one_sees() -> None:
    sharp, blind = power("int8", weight=6e-8, channel=1e-4), power("mine", channel=1e-2)
    assert power_texts({"power": [sharp, blind]}) == [
        "smallest defects seen in mine: a channel off by 1 %",
        "smallest defects seen in int8: each weight of a module off by 6e-06 %, "
        "a channel off by 0.01 %",
    ]
    alike = [power(name, channel=1e-2) for name in ("2-1", "2-2", "2-3", "2-4")]
    assert power_texts({"power": alike}) == [
        "smallest defects seen in 2-1, 2-2, 2-3 and 1 more: a channel off by 1 %"
    ]
    other = ModePower(model="n", mode="2-1", defects=[])
    assert power_texts({"power": [*alike[:1], other]}) == [
        "smallest defects seen in 2-1 of n: none of any kind",
        "smallest defects seen in 2-1 of m: a channel off by 1 %",
    ]
    many = [power(f"m{size}", channel=size / 100) for size in range(1, 8)]
    lines = power_texts({"power": many})
    assert lines[0] == "smallest defects seen in m7: a channel off by 7 %", "the least comes first"
    assert lines[-1] == "smallest defects seen in 3 more modes: the report lists them"
    assert len(lines) == 5
