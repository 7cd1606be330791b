"""The metric of a model's own task is held two-sided, sample by sample or as one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import qgate
from qgate.baselines.accepted import read_accepted
from qgate.errors import QgateError
from qgate.gate import Measured, Policy, failure_text, judge
from qgate.gate.across_weights import SAMPLES, comparable
from qgate.gate.checks import checks_of, smallest_defects
from qgate.gate.ledger import with_accepted
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.policy import Limits, parse_bound
from qgate.metrics import METRICS, sample_part
from qgate.modes.setups import ModelSetup
from tests.capture.networks import WIDTH, Block
from tests.gate.benches import Stack, mode_of

ACCEPTED = [0.9, 0.8, 0.85, 0.95, 0.7, 0.9]


def row(
    samples: Sequence[float] = (),
    figure: float | None = None,
    accepted: dict[str, float] | None = None,
) -> Measured:
    mean = sum(samples) / len(samples) if figure is None else figure
    measured = Measured(
        site="accuracy", layer="", scope="task", values={"task_metric": mean}, order=0,
        nonfinite=0, gated=("task_metric",), why={"task_metric": ""},
        parts={sample_part(n): {"task_metric": of} for n, of in enumerate(samples)},
    )  # fmt: skip
    return with_accepted(measured, accepted or {})


def of_samples(samples: Sequence[float] = ACCEPTED) -> dict[str, float]:
    figures = {f"task_metric@sample_{n}": figure for n, figure in enumerate(samples)}
    return {"task_metric": sum(samples) / len(samples), **figures}


def failed(measured: Measured, same: bool = True, limits: Limits | None = None) -> set[str]:
    checks = checks_of(measured, limits or Limits(), same)
    return {check.metric for check in checks if not check.passed}


@pytest.mark.parametrize("change", [-0.02, 0.02])
def test_all_samples_worse_or_better_are_red(change: float) -> None:
    moved = [figure + change for figure in ACCEPTED]
    assert failed(row(moved, accepted=of_samples())) == {"task_change", "task_metric"}
    assert failed(row(ACCEPTED, accepted=of_samples())) == set()
    within = [figure + change / 10 for figure in ACCEPTED]
    assert failed(row(within, accepted=of_samples())) == set()


def test_one_worse_and_one_better_are_red_and_named() -> None:
    moved = [*ACCEPTED]
    moved[1], moved[4] = moved[1] - 0.3, moved[4] + 0.3
    measured = row(moved, accepted=of_samples())
    assert failed(measured) == {"task_change"}
    text = failure_text(judge([measured], lambda _row: Limits(), True), "int8")
    assert text.startswith("task_change ")
    assert "at accuracy (mode int8)" in text
    assert "most moved: sample 1 by -0.3, 4 by +0.3" in text


@pytest.mark.parametrize("accepted", [0.8, -0.8])
@pytest.mark.parametrize(("share", "passes"), [(-0.01, False), (-0.004, True), (0, True),
                                                (0.004, True), (0.01, False)])  # fmt: skip
def test_one_number_is_held_to_the_margin_on_both_sides(
    accepted: float, share: float, passes: bool
) -> None:
    measured = row(figure=accepted * (1 + share), accepted={"task_metric": accepted})
    assert failed(measured) == (set() if passes else {"task_metric"})


@pytest.mark.parametrize("accepted", [0.8, -0.8])
def test_a_metric_that_changes_its_sign_is_red(accepted: float) -> None:
    assert failed(row(figure=-accepted, accepted={"task_metric": accepted})) == {"task_metric"}


def test_the_margin_is_that_of_the_task() -> None:
    measured = row(figure=0.81, accepted={"task_metric": 0.8})
    assert failed(measured) == {"task_metric"}
    assert failed(measured, same=False) == set()
    assert failed(measured, limits=Limits(task_margin=0.02)) == set()
    assert failed(measured, limits=Limits(regression=0.02)) == {"task_metric"}
    (check,) = checks_of(measured, Limits(sources={"task_margin": "rule 1"}), True)
    assert (check.allowed, check.source) == (0.005, "rule 1")
    text = failure_text(judge([measured], lambda _row: Limits(), True), "int8")
    assert text.splitlines()[0] == (
        "task_metric 0.81 > 0.804 at accuracy (mode int8): 1.25 % over accepted, 0.5 % allowed"
    )


@pytest.mark.parametrize("figure", [-0.02, 0.02])
def test_a_metric_near_zero_takes_an_absolute_margin(figure: float) -> None:
    measured = row(figure=figure, accepted={"task_metric": 0.0})
    assert failed(measured) == {"task_metric"}
    assert failed(measured, limits=Limits(atol=0.03)) == set()
    samples = row([figure, figure], accepted=of_samples([0.0, 0.0]))
    assert failed(samples) == {"task_metric", "task_change"}
    assert failed(samples, limits=Limits(atol=0.03)) == set()


@pytest.mark.parametrize(("bound", "holds"), [("task_metric>0.75", True), ("task_metric>0.85", False),
                                              ("task_metric<0.85", True), ("task_metric<0.75", False)])  # fmt: skip
def test_an_absolute_limit_may_be_on_either_side(bound: str, holds: bool) -> None:
    policy = Policy.from_table({"absolute": bound})
    measured = row(figure=0.8, accepted={"task_metric": 0.8})
    verdict = judge([measured], policy.limits_of("int8"), True)
    assert verdict.passed is holds
    assert parse_bound(bound).metric == "task_metric"


def test_the_table_of_metrics_has_it_beside_those_of_text() -> None:
    metric = METRICS.get("task_metric")
    assert (metric.direction, metric.task) == ("steady", True)
    assert metric not in METRICS.of("task")
    assert METRICS.get("task_metric@sample_3").task


def test_the_smallest_defect_is_in_the_unit_of_the_metric() -> None:
    one = judge([row(figure=0.8, accepted={"task_metric": 0.8})], lambda _row: Limits(), True)
    assert smallest_defects(one) == [
        {"kind": "metric", "size": pytest.approx(0.004), "site": "accuracy"}
    ]
    paired = judge([row(ACCEPTED, accepted=of_samples())], lambda _row: Limits(), True)
    (defect,) = smallest_defects(paired)
    margin = 0.005 * sum(ACCEPTED) / len(ACCEPTED)
    assert defect["size"] == pytest.approx(margin)
    shifted = [ACCEPTED[0] + 0.003, ACCEPTED[1] - 0.003, *ACCEPTED[2:]]
    spread = judge([row(shifted, accepted=of_samples())], lambda _row: Limits(), True)
    assert spread.passed
    assert smallest_defects(spread)[0]["size"] < 0.7 * margin


# A model -----------------------------------------------------------------------------------------


def samples() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(1, 4, WIDTH, generator=random) for _ in range(6)]


def similarity(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    """Compare the direction of each sample's output with that of the reference."""
    pairs = zip(outputs, reference, strict=True)
    return [float(torch.cosine_similarity(a.flatten(), r.flatten(), dim=0)) for a, r in pairs]


def build(metric: Callable[..., Any] = similarity) -> qgate.Model:
    torch.manual_seed(0)
    return qgate.Model(Stack(Block), samples(), "encoder", metric=metric)


def session(folder: Path, metric: Callable[..., Any] = similarity, **more: Any) -> ModelGates:
    bench = Bench(ModelSetup("encoder", build=lambda: build(metric)))
    return ModelGates(bench, folder, more.pop("policy", Policy()), **more)


def task(folder: Path, metric: Callable[..., Any] = similarity, **more: Any) -> Any:
    gated = session(folder, metric, **more)
    outcome = gated.task("task", mode_of(gated.bench, "int8"))
    if "updating" in more:
        gated.commit()
    return outcome


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    assert task(tmp_path, updating="all").passed
    return tmp_path


def renamed(metric: Callable[..., Any], name: str = "similarity") -> Callable[..., Any]:
    metric.__name__ = name
    return metric


def moved_by(change: float, only: int | None = None) -> Callable[..., Any]:
    """Return the metric with its figures moved, perhaps of one sample only."""

    def metric(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
        figures = similarity(outputs, reference)
        return [f + change * (only in (None, n)) for n, f in enumerate(figures)]

    return renamed(metric)


def test_the_accepted_file_has_the_figure_of_each_sample(recorded: Path) -> None:
    file = recorded / "encoder" / "accepted" / "int8.txt"
    values = read_accepted(file.read_bytes(), str(file)).values
    assert {key.site for key in values} == {"similarity"}
    assert {key.metric for key in values} == {
        "task_metric", *(f"task_metric@sample_{n}" for n in range(6))
    }  # fmt: skip


def test_what_was_recorded_passes_with_notes(recorded: Path) -> None:
    outcome = task(recorded)
    assert outcome.passed
    (record,) = outcome.record["rows"]
    assert (record["site"], record["layer"]) == ("similarity", "similarity")
    assert record["notes"]["metric_reference"] == pytest.approx(1.0)
    samples = record["notes"]["metric_of_samples"]
    assert len(samples) == 6
    # The reference is 1 for each sample, so that the share kept is the figure itself.
    half = stats.t.ppf(0.975, 5) * stats.sem(samples)
    assert record["values"]["accuracy_kept"] == pytest.approx(sum(samples) / 6 - half, abs=1e-5)


@pytest.mark.parametrize("change", [-0.02, 0.02])
@pytest.mark.parametrize("only", [None, 3])
def test_a_metric_that_moves_is_red_on_either_side(
    recorded: Path, change: float, only: int | None
) -> None:
    outcome = task(recorded, moved_by(6 * change if only else change, only))
    assert not outcome.passed
    (check,) = [c for c in outcome.verdict.failed if c.metric == "task_change"]
    assert ("most moved: sample 3 by" in check.reason) is (only == 3)
    assert "at similarity (mode int8)" in outcome.text


@pytest.mark.parametrize("change", [-0.02, 0.02])
def test_one_number_that_moves_is_red_on_either_side(tmp_path: Path, change: float) -> None:
    def whole(by: float) -> Callable[..., Any]:
        return renamed(
            lambda outputs, reference: by + sum(similarity(outputs, reference)) / 6, "mean_cosine"
        )

    assert task(tmp_path, whole(0), updating="all").passed
    assert task(tmp_path, whole(0)).passed
    assert task(tmp_path, whole(change / 10)).passed
    outcome = task(tmp_path, whole(change))
    assert [check.metric for check in outcome.verdict.failed] == ["task_metric"]
    assert task(tmp_path, whole(change), updating="failed").passed
    assert task(tmp_path, whole(change)).passed


def test_a_broken_mode_is_red(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = session(recorded)
    outputs = Bench.outputs

    def shuffled(bench: Bench, mode: Any) -> list[Tensor]:
        return outputs(bench, mode) if mode is None else outputs(bench, mode)[::-1]

    monkeypatch.setattr(Bench, "outputs", shuffled)
    outcome = gated.task("task", mode_of(gated.bench, "int8"))
    assert {check.metric for check in outcome.verdict.failed} == {"task_change", "task_metric"}


def test_another_metric_is_not_held_against_the_figures_of_one(recorded: Path) -> None:
    other = renamed(moved_by(0), "agreement")
    kinds = {(c.site, c.kind) for c in task(recorded, other).verdict.failed}
    assert kinds == {("agreement", "missing"), ("similarity", "absent")}
    assert task(recorded, other, updating="failed").passed
    assert task(recorded, other).passed


def test_one_number_in_place_of_one_for_each_sample_is_refused(recorded: Path) -> None:
    with pytest.raises(QgateError, match="returned one number for all samples, and figures of 6"):
        task(recorded, renamed(lambda outputs: float(len(outputs))))


def test_figures_of_samples_in_place_of_one_number_are_missing(tmp_path: Path) -> None:
    mean = renamed(lambda outputs, reference: sum(similarity(outputs, reference)) / 6)
    assert task(tmp_path, mean, updating="all").passed
    failures = task(tmp_path).verdict.failed
    assert {(check.kind, check.metric.partition("@")[0]) for check in failures} == {
        ("missing", "task_metric")
    }
    assert task(tmp_path, updating="new").passed
    assert task(tmp_path).passed


def test_a_figure_that_is_not_finite_is_an_error_of_the_metric(recorded: Path) -> None:
    with pytest.raises(QgateError, match="metric similarity of encoder, mode int8, returned nan"):
        task(recorded, renamed(lambda outputs: math.nan))  # noqa: ARG005


def test_a_metric_cannot_change_what_other_gates_compare(tmp_path: Path) -> None:
    def careless(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
        for tensor in (*outputs, *reference):
            tensor.zero_()
        return 0.5

    gated = session(tmp_path, careless)
    mode = mode_of(gated.bench, "int8")
    before = [tensor.clone() for tensor in gated.bench.outputs(None)]
    gated.task("task", mode)
    assert all(map(torch.equal, gated.bench.outputs(None), before))
    assert not torch.equal(gated.bench.outputs(mode)[0], torch.zeros_like(before[0]))


def test_rules_may_name_the_metric(recorded: Path) -> None:
    rule = {"sites": "^similarity$", "scopes": ["task"], "task_margin": 0.1, "reason": "noisy"}
    policy = Policy.from_table({"rules": [rule]})
    session(recorded, policy=policy).check_policy()
    assert task(recorded, moved_by(-0.02), policy=policy).passed
    other = Policy.from_table({"rules": [{**rule, "sites": "^accuracy$"}]})
    with pytest.raises(QgateError, match="accuracy"):
        session(recorded, policy=other).check_policy()


@pytest.mark.parametrize(
    ("figure", "is_passed"), [(0.8, True), (0.7, True), (1.0, True), (0.55, False), (1.1, False)]
)
def test_across_weights_a_metric_stays_near_that_of_the_others(
    figure: float, is_passed: bool
) -> None:
    row = Measured(
        site="accuracy", layer="", scope="task", values={"task_metric": figure}, order=0,
        nonfinite=0, gated=("task_metric",),
        accepted={"task_metric": 0.8, "task_metric@sample_0": 0.3},
    )  # fmt: skip
    row, left_out = comparable(row)
    assert row.accepted == {"task_metric": 0.8}
    verdict = judge([row], lambda _row: Limits(other_weights=True), True)
    assert verdict.passed is is_passed
    assert left_out == [SAMPLES]
