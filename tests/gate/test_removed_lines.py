"""A line removed from an accepted file fails, whatever metric it is of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Accepted, Key, Store
from qgate.gate.checks import Check
from qgate.gate.measuring.model_gates import ModelGates
from tests.baselines.building import rewrite
from tests.gate.benches import LLAMA, MAMBA, mode_of, session
from tests.shares import share

FILES = {LLAMA: "mxfp4", MAMBA: "2-1"}
# Every metric that one of the files has.
METRICS = (
    "relative_mse",
    "one_minus_correlation",
    "quantizer",
    "relative_mse@worst_channel",
    "relative_mse@worst_token",
    "relative_mse@worst_sample",
    "relative_mse@without_massive",
    "one_minus_correlation@without_massive",
    "bits_per_byte",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ModelGates]]:
    folder = tmp_path_factory.mktemp("baselines")
    sessions = {}
    for model in FILES:
        sessions[model] = session(folder, model, updating="all", layers=2)
        judged(sessions[model], model)
        sessions[model].commit()
    return folder, sessions


def judged(of: ModelGates, model: str) -> list[Check]:
    mode = mode_of(of.bench, FILES[model])
    outcomes = [of.layer("layer_outputs", mode, layer) for layer in of.bench.layers]
    outcomes.append(of.task("task", mode))
    return [check for outcome in outcomes for check in outcome.verdict.failed]


def read(folder: Path, model: str) -> Accepted:
    accepted = Store(folder, model).accepted(FILES[model])
    assert accepted is not None
    return accepted


def failures_without(
    recorded: tuple[Path, dict[str, ModelGates]], model: str, removed: set[Key]
) -> set[Key]:
    """Remove lines, judge what was measured again, and put them back."""
    folder, sessions = recorded
    file = folder / model / "accepted" / f"{FILES[model]}.txt"
    before = file.read_bytes()
    try:
        rewrite(
            file,
            lambda errors: replace(
                errors, values={k: v for k, v in errors.values.items() if k not in removed}
            ),
        )
        again = session(folder, model, layers=2)
        again.bench = again.subject.bench = sessions[model].bench  # type: ignore[attr-defined]
        checks = judged(again, model)
    finally:
        file.write_bytes(before)
    assert {check.kind for check in checks} <= {"missing"}
    suites = {"task": "task"}
    return {
        Key(suites.get(check.scope, "layer_outputs"), check.site, check.scope, check.metric)
        for check in checks
    }


@pytest.mark.parametrize("model", FILES)
def test_a_whole_file_passes(recorded: tuple[Path, dict[str, ModelGates]], model: str) -> None:
    assert failures_without(recorded, model, set()) == set()


@pytest.mark.parametrize("metric", METRICS)
def test_all_lines_of_a_metric_removed_are_missing(
    recorded: tuple[Path, dict[str, ModelGates]], metric: str
) -> None:
    seen = 0
    for model in FILES:
        removed = {key for key in read(recorded[0], model).values if key.metric == metric}
        assert failures_without(recorded, model, removed) == removed
        seen += len(removed)
    assert seen > 0


@pytest.mark.parametrize("model", FILES)
def test_the_metrics_are_all_there_are(
    recorded: tuple[Path, dict[str, ModelGates]], model: str
) -> None:
    names = {key.metric for key in read(recorded[0], model).values if key.scope != "task"}
    assert names <= set(METRICS)


@share(6)
@pytest.mark.parametrize("model", FILES)
@pytest.mark.parametrize("number", range(0, 300, 23))
def test_a_single_line_removed_is_missing(
    recorded: tuple[Path, dict[str, ModelGates]], model: str, number: int
) -> None:
    keys = list(read(recorded[0], model).values)
    removed = {keys[number % len(keys)]}
    assert failures_without(recorded, model, removed) == removed
