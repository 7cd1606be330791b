"""A line removed from an accepted file fails, whatever metric it is of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Accepted, Key, Store
from qgate.baselines.accepted import is_folded
from qgate.gate import Limits
from qgate.gate.checks import Check, checks_of
from qgate.gate.measured import Measured
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.sessions import Outcome
from qgate.metrics import METRICS as REGISTRY
from qgate.models import Sampling
from tests.baselines.building import rewrite
from tests.gate.benches import LLAMA, MAMBA, mode_of, session
from tests.shares import proof, share

FILES = {LLAMA: "mxfp4", MAMBA: "2-1"}
# Every metric that one of the files has.
METRICS = (
    "relative_mse",
    "one_minus_correlation",
    "quantizer",
    "static_scale",
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
        gates = session(folder, model, layers=2)
        gates.bench = gates.subject.bench = sessions[model].bench  # type: ignore[attr-defined]
        checks = judged(gates, model)
    finally:
        file.write_bytes(before)
    assert {check.kind for check in checks} <= {"missing"}
    suites = {"task": "task"}
    return {
        Key(suites.get(check.scope, "layer_outputs"), check.site, check.scope, check.metric)
        for check in checks
    }


@share(2)
@pytest.mark.parametrize("model", FILES)
def test_a_whole_file_passes(recorded: tuple[Path, dict[str, ModelGates]], model: str) -> None:
    assert failures_without(recorded, model, set()) == set()


@share(4)
@pytest.mark.parametrize("metric", METRICS)
def test_all_lines_of_a_metric_removed_are_missing(
    recorded: tuple[Path, dict[str, ModelGates]], metric: str
) -> None:
    removed_count = 0
    for model in FILES:
        removed = {key for key in read(recorded[0], model).values if key.metric == metric}
        assert failures_without(recorded, model, removed) == removed
        removed_count += len(removed)
    assert removed_count > 0


@pytest.mark.parametrize("model", FILES)
def test_the_metrics_are_all_there_are(
    recorded: tuple[Path, dict[str, ModelGates]], model: str
) -> None:
    names = {key.metric for key in read(recorded[0], model).values if key.scope != "task"}
    assert names <= set(METRICS)


@share(12)
@pytest.mark.parametrize("model", FILES)
@pytest.mark.parametrize("number", range(0, 300, 23))
def test_a_single_line_removed_is_missing(
    recorded: tuple[Path, dict[str, ModelGates]], model: str, number: int
) -> None:
    keys = list(read(recorded[0], model).values)
    removed = {keys[number % len(keys)]}
    assert failures_without(recorded, model, removed) == removed


# Each line can fail alone, so that no file is longer than that -------------------------------------

SHORT = Sampling(samples=2, seqlen=32, calib_samples=2, calib_seqlen=32)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """Record every kind of gate of one layer, in a mode and in a format of one name."""
    folder = tmp_path_factory.mktemp("alone")
    gates = session(folder, updating="all", sampling=SHORT, layers=2)
    mode, layer = mode_of(gates.bench, "int8"), gates.bench.layers[1]
    outcomes = [
        gates.layer("layer_outputs", mode, layer),
        gates.outputs("outputs", mode),
        gates.task("task", mode),
        gates.gradients("gradients", mode, layer),
        gates.scaling("scaling", "hif8", layer),
        gates.overflow("overflow", "hif8", layer, "forward"),
    ]
    gates.commit()
    return folder, outcomes


def worse(row: Measured, metric: str) -> Measured:
    """Return a row in which one accepted value alone was better than what is measured."""
    assert row.accepted is not None
    if REGISTRY.find(metric).textual:
        return replace(row, accepted_texts={**row.accepted_texts, metric: "another quantizer"})
    before = row.accepted[metric]
    better = before / 4 if REGISTRY.find(metric).direction == "lower" else 4 * before
    if metric == "exponent":
        better = before + 3
    if before == better == 0:
        better = -1.0
    return replace(row, accepted={**row.accepted, metric: better})


@proof
def test_every_line_can_fail_alone(gated: tuple[Path, list[Outcome]]) -> None:
    folder, outcomes = gated
    rows = {
        (outcome.decision.suite, *row.key): row
        for outcome in outcomes
        for row in outcome.verdict.measured
    }
    lines = 0
    for mode in ("int8", "hif8"):
        accepted = Store(folder, LLAMA).accepted(mode)
        assert accepted is not None
        for key, _ in accepted.lines():
            lines += 1
            if is_folded(key):
                continue
            values = {k.metric: v for k, v in accepted.values.items() if k[:3] == key[:3]}
            row = rows[key[:3]]
            texts = {name: value for name, value in values.items() if isinstance(value, str)}
            numbers = {name: v for name, v in values.items() if not isinstance(v, str)}
            row = replace(row, accepted=numbers, accepted_texts=texts)
            assert all(check.passed for check in checks_of(row, Limits(), True)), key
            failed = [
                check.metric
                for check in checks_of(worse(row, key.metric), Limits(), True)
                if not check.passed
            ]
            assert failed == [key.metric], key
    assert lines > 100
