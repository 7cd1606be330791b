"""Errors held against those of other weights: right code passes, planted faults do not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qgate
from qgate.baselines import Store
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.across_weights import (
    CHANNEL,
    EXPONENT,
    INSIDE,
    MASSIVE,
    REFERENCE,
    TASK,
    TOKEN,
    comparable,
)
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates, Outcome
from qgate.modes.setups import ModelSetup
from qgate.results.run_facts import across_weights_texts, add_across_weights
from tests.gate.benches import LLAMA, SHORT, Block, Stack, mode_of, session
from tests.gate.making import carried, measured
from tests.shares import proof, share

Cast = Callable[[Tensor], Tensor]


def steps(x: Tensor, levels: int = 127, by_row: bool = True) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()
    return x / largest * levels


def rounded(x: Tensor) -> Tensor:
    return steps(x).round() / 127 * x.abs().amax(-1, keepdim=True)


def truncated(x: Tensor) -> Tensor:
    return steps(x).trunc() / 127 * x.abs().amax(-1, keepdim=True)


def by_tensor(x: Tensor) -> Tensor:
    return steps(x, by_row=False).round() / 127 * x.abs().amax()


def of_half_the_bits(x: Tensor) -> Tensor:
    return steps(x, 7).round() / 7 * x.abs().amax(-1, keepdim=True)


class Product(nn.Module):
    """A linear layer whose weight is quantized, by code that says nothing of itself."""

    def __init__(self, linear: nn.Linear, cast: Cast) -> None:
        super().__init__()
        self.weight, self.bias, self.cast = linear.weight, linear.bias, cast

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.cast(self.weight), self.bias)


def network() -> nn.Module:
    """Blocks whose weights have rows of many sizes, as trained ones have."""
    torch.manual_seed(0)
    stack = Stack(Block)
    with torch.no_grad():
        for module in stack.modules():
            if isinstance(module, nn.Linear):
                module.weight *= torch.logspace(-1, 0.3, len(module.weight))[:, None]
    return stack


def noisy(made: nn.Module, share: float = 0.01) -> nn.Module:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            size = weight.square().mean(-1, keepdim=True).sqrt()
            weight += share * size * torch.randn(weight.shape, generator=draw)
    return made


def tuned(made: nn.Module) -> nn.Module:
    """The same after some steps towards another function."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.02)
    for _ in range(10):
        x = torch.randn(16, 32, generator=draw)
        optimizer.zero_grad()
        nn.functional.mse_loss(made(x), x.roll(1, -1)).backward()
        optimizer.step()
    return made


def gates_of(made: nn.Module, folder: Path, cast: Cast = rounded, **options: object) -> ModelGates:
    torch.manual_seed(3)
    samples = [torch.randn(2, 16, 32) for _ in range(2)]

    def build(given: qgate.Model) -> nn.Module:
        quantized = copy.deepcopy(given.module)
        for name, module in given.module.named_modules():
            if isinstance(module, nn.Linear):
                quantized.set_submodule(name, Product(module, cast))
        return quantized

    of = qgate.Model(made.eval(), samples, "net", modes={"mine": build})
    bench = Bench(ModelSetup("net"), _model=of)
    return ModelGates(bench, folder, Policy(), **options)  # type: ignore[arg-type]


def outcomes(of: ModelGates, mode: str = "mine") -> list[Outcome]:
    of.check_baseline()
    selected = of.bench.setup.select(mode, of.bench.model)[0]
    layers = [of.layer("layer_outputs", selected, layer) for layer in of.bench.layers]
    return [*layers, of.outputs("outputs", selected)]


def failures(of: ModelGates, mode: str = "mine") -> list[str]:
    return [outcome.text.partition("\n")[0] for outcome in outcomes(of, mode) if outcome.text]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("recorded")
    gates = gates_of(network(), folder, updating="all")
    assert failures(gates) == []
    assert failures(gates, "int8") == []
    gates.commit()
    assert failures(gates_of(network(), folder)) == []
    return folder


@share(4)
@pytest.mark.parametrize("change", [noisy, tuned])
@pytest.mark.parametrize("mode", ["mine", "int8"])
def test_right_code_passes_across_weights(
    change: Callable[[nn.Module], nn.Module], mode: str, recorded: Path
) -> None:
    gates = gates_of(change(network()), recorded, across_weights=True)
    assert failures(gates, mode) == []
    across = gates.across_weights()
    assert across is not None
    stored = Store(recorded, "net").origin()
    assert stored is not None
    assert across["accepted"] == [stored.weights]
    assert across["weights"] == gates.origin().weights != stored.weights
    assert across["room"]["carried"] == [0.25, 0.25]


@pytest.mark.parametrize("cast", [truncated, by_tensor, of_half_the_bits])
@pytest.mark.parametrize("change", [noisy, tuned])
def test_planted_faults_fail_across_weights(
    cast: Cast, change: Callable[[nn.Module], nn.Module], recorded: Path
) -> None:
    """The kernel says nothing of itself, so that only accepted errors can tell."""
    judged = outcomes(gates_of(change(network()), recorded, cast, across_weights=True))
    for outcome in judged:
        assert "regression" in {check.kind for check in outcome.verdict.failed}, outcome.text


def test_without_the_option_other_weights_are_an_error_that_names_both_ways(recorded: Path) -> None:
    gates = gates_of(noisy(network()), recorded)
    with pytest.raises(QgateError) as error:
        gates.check_baseline()
    for words in ("other weights", str(recorded), "--update-baselines", "--across-weights"):
        assert words in str(error.value)


def test_across_weights_does_not_mean_other_samples(recorded: Path) -> None:
    gates = gates_of(noisy(network()), recorded, across_weights=True)
    gates.bench.model.inputs = gates.bench.model.inputs[:1]
    with pytest.raises(QgateError) as error:
        gates.check_baseline()
    assert "the baseline was made with 2 samples" in str(error.value)
    assert "other weights on the same samples only" in str(error.value)
    assert "with other weights (" not in str(error.value)


def test_the_same_weights_are_held_as_always(recorded: Path) -> None:
    gates = gates_of(network(), recorded, across_weights=True)
    (first, *_) = outcomes(gates)
    checks = [check for check in first.verdict.checks if check.kind == "regression"]
    assert {check.allowed for check in checks if check.scope == "local"} == {0.02}
    assert {check.source for check in checks} == {"default"}
    across = gates.across_weights()
    assert across is not None
    (text,) = across_weights_texts({"across_weights": [across]})
    assert "is of the weights that ran" in text


def test_nothing_of_another_model_is_held_across_weights(tmp_path: Path) -> None:
    gates = gates_of(network(), tmp_path, across_weights=True)
    assert all("no accepted" in line for line in failures(gates))
    assert gates.across_weights() is None


def test_the_room_is_a_limit_like_others(recorded: Path) -> None:
    strict = Policy.from_table({"regression_across_weights": 1e-6})
    gates = gates_of(noisy(network()), recorded, across_weights=True).with_policy(strict)
    assert failures(gates) != []
    with pytest.raises(QgateError, match="switches that kind of limit off"):
        Policy.from_table({"regression_across_weights": 1.0})


def test_no_candidate_is_left_across_weights(recorded: Path, tmp_path: Path) -> None:
    gates = gates_of(noisy(network()), recorded, of_half_the_bits, across_weights=True)
    (outcome, *_) = outcomes(gates)
    gates.leave_candidate(tmp_path / "candidates", outcome, "a test")
    assert not list(tmp_path.rglob("*.txt"))


# What cannot be compared ---------------------------------------------------------------------------


def test_a_task_is_held_by_what_the_mode_loses() -> None:
    accepted = {"bits_per_byte": 1.0, "kl_divergence": 0.1, "bits_per_byte@sample_0": 1.0}
    values = {"bits_per_byte": 2.0, "kl_divergence": 0.1, "next_token_accuracy": 0.1}
    row = measured(
        "logits", scope="task", ideal=None, values=values, accepted=accepted,
        parts={"sample_0": {"bits_per_byte": 2.0}},
    )  # fmt: skip
    comparable_row, left_out = comparable(row)
    assert left_out == [TASK]
    assert comparable_row.compared == ("kl_divergence",)
    assert comparable_row.accepted == {"kl_divergence": 0.1}
    assert comparable_row.values == values, "they are recorded all the same"
    own = dataclasses.replace(row, values={"lost": 0.1}, gated=("lost",), accepted={"lost": 0.1})
    assert comparable(own)[0].compared == ("lost",), "a figure of a suite of one's own"


def test_a_tensor_with_an_ideal_is_held_by_its_budget_and_its_plan() -> None:
    row = measured(
        texts={"quantizer": "int8"}, accepted_texts={"quantizer": "int8"},
        gated=("relative_mse", "quantizer"), parts={"worst_channel": {"relative_mse": 1.0}},
    )  # fmt: skip
    comparable_row, left_out = comparable(row)
    assert left_out == [INSIDE]
    assert comparable_row.compared == ("quantizer",)
    unquantized, _ = comparable(dataclasses.replace(row, accepted_texts={}))
    assert unquantized.accepted_texts == {"quantizer": "nothing"}, "the plan covers more"
    new, left_out = comparable(dataclasses.replace(row, accepted=None, accepted_texts={}))
    assert (new.accepted_texts, left_out) == ({}, []), "it has no accepted value"


def test_parts_of_single_tokens_and_new_massive_elements_are_left_out() -> None:
    parts = {
        name: {"relative_mse": 1e-3} for name in ("worst_channel", "worst_token", "worst_sample")
    }
    parts["without_massive"] = {"relative_mse": 1e-3, "one_minus_correlation": 1e-3}
    accepted = {
        "relative_mse": 1e-4, "relative_mse@worst_channel": 1e-3, "relative_mse@worst_token": 1e-3
    }  # fmt: skip
    comparable_row, left_out = comparable(carried(parts=parts, accepted=accepted))
    assert left_out == [TOKEN, MASSIVE]
    assert [*comparable_row.parts] == ["worst_channel", "worst_sample"]
    assert comparable_row.accepted == {"relative_mse": 1e-4, "relative_mse@worst_channel": 1e-3}
    assert "relative_mse@worst_sample" in comparable_row.compared, (
        "what was never accepted is missing"
    )


def test_the_worst_channel_inside_a_block_is_left_out() -> None:
    parts = {"worst_channel": {"relative_mse": 1e-3}}
    accepted = {"relative_mse": 1e-4, "relative_mse@worst_channel": 1e-3}
    comparable_row, left_out = comparable(measured(ideal=None, parts=parts, accepted=accepted))
    assert (comparable_row.accepted, left_out) == ({"relative_mse": 1e-4}, [CHANNEL])
    parts = {**parts, "worst_sample": {"relative_mse": 1e-3}}
    comparable_row, left_out = comparable(measured(ideal=None, parts=parts, accepted=accepted))
    assert (comparable_row.accepted, left_out) == (accepted, []), (
        "that of a block's own output stays"
    )


def test_what_was_never_accepted_is_not_left_out() -> None:
    parts = {"without_massive": {"relative_mse": 1e-3}}
    comparable_row, left_out = comparable(carried(parts=parts, accepted=None))
    assert ([*comparable_row.parts], left_out) == (["without_massive"], [])


def test_an_isolated_error_is_held_as_it_is() -> None:
    row = measured(scope="isolated", parts={"worst_token": {"relative_mse": 1e-12}}, floor=1e-9)
    assert comparable(row) == (row, [])


def test_a_recommended_exponent_is_left_out() -> None:
    row = measured(
        scope="sweep", ideal=None, values={"exponent": 3.0, "relative_mse": 1e-4},
        gated=("exponent", "relative_mse"), accepted={"exponent": 1.0, "relative_mse": 1e-4},
    )  # fmt: skip
    comparable_row, left_out = comparable(row)
    assert (comparable_row.gated, comparable_row.accepted) == (
        ("relative_mse",),
        {"relative_mse": 1e-4},
    )
    assert left_out == [EXPONENT]


@proof
def test_all_gates_of_a_language_model_pass_across_weights(tmp_path: Path) -> None:
    def judged(of: ModelGates) -> list[Outcome]:
        mode = mode_of(of.bench, "int8")
        return [
            of.layer("layer_outputs", mode, "layers.1"),
            of.outputs("outputs", mode),
            of.gradients("gradients", mode, "layers.1"),
            of.task("task", mode),
            of.scaling("scaling", "mxfp8_e4m3", "layers.1"),
            of.overflow("overflow", "mxfp8_e4m3", "layers.1", "forward"),
            of.overflow("overflow", "mxfp8_e4m3", "layers.1", "backward"),
            of.reference("reference"),
            of.canary("canary"),
        ]

    first = session(tmp_path, LLAMA, updating="all", sampling=SHORT)
    assert all(outcome.passed for outcome in judged(first))
    first.commit()
    gates = session(tmp_path, LLAMA, across_weights=True)
    noisy(
        gates.bench.model.module, share=0.001
    )  # of few tokens, whose errors change by a third at 0.01
    gates.check_baseline()
    assert [outcome.text for outcome in judged(gates) if outcome.text] == []
    across = gates.across_weights()
    assert across is not None
    assert {TASK, INSIDE, TOKEN, EXPONENT, REFERENCE} <= {*across["left_out"]}
    summary, left_out = across_weights_texts({"across_weights": [across]})
    assert summary.startswith(f"held across weights: errors of {LLAMA} (weights ")
    assert "25 % room (carried), 50 % room (local), 100 % room (task)" in summary
    assert left_out.startswith("not compared across weights: ")
    stale = dataclasses.replace(gates.origin(), weights="other")
    other = {**across, "accepted": [stale.weights], "room": {"carried": [0.1, 0.5]}}
    (joined,) = add_across_weights([across], [other])  # type: ignore[list-item]
    assert joined["accepted"] == sorted([*across["accepted"], "other"])
    assert joined["room"]["carried"] == [0.1, 0.5]
