"""Gate sessions: from numbers to verdicts, and from verdicts to what is stored."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qgate.baselines import Key, Store
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measuring.model_gates import ModelGates, Outcome
from qgate.gate.measuring.tasks import task_values
from qgate.models import Sampling
from tests.gate.benches import LLAMA, MAMBA, SHORT, bench, mode_of, session, task_oracle
from tests.shares import proof, share

SUITE = "layer_outputs"
UP = "model.layers.1.mlp.up_proj:output"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("baselines")
    model_gates = session(folder, updating="all", shared=True)
    gates(model_gates)
    model_gates.commit()
    return folder


@pytest.fixture
def own(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the recorded baselines that a test may change."""
    return shutil.copytree(recorded, tmp_path / "own")


def gates(of: ModelGates, mode: str = "int8") -> list[Outcome]:
    gate_mode = mode_of(of.bench, mode)
    outcomes = [of.layer(SUITE, gate_mode, layer) for layer in of.bench.layers]
    return [*outcomes, of.task("task", gate_mode)]


def spoilt(folder: Path, times: float = 2.0, **more: object) -> ModelGates:
    """A session in which the errors of one site are other ones than accepted."""
    model_gates = session(folder, shared=True, **more)  # type: ignore[arg-type]
    mode = mode_of(model_gates.bench, "int8")
    model_gates.bench.measure(mode)
    change_row(
        model_gates, UP,
        lambda row: {k: v * times for k, v in row.values.items() if "corr" not in k}
        | {"correlation": 1 - (1 - row.values["correlation"]) * times},
    )  # fmt: skip
    return model_gates


def change_row(of: ModelGates, site: str, values: Callable[[Any], Any], **more: Any) -> None:
    """Replace what was measured locally at a site, which has no ideal then."""
    of.bench._measured["int8"] = [
        dataclasses.replace(row, ideal=None, values=values(row), **more)
        if (row.site, row.scope) == (site, "local")
        else row
        for row in of.bench._measured["int8"]
    ]


def stored(folder: Path, model: str = LLAMA) -> dict[str, bytes]:
    root = Store(folder, model).folder
    return {p.name: p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def accepted(folder: Path, site: str = UP, metric: str = "relative_mse") -> float:
    baseline = Store(folder, LLAMA).accepted("int8")
    assert baseline is not None
    return baseline.values[Key(SUITE, site, "local", metric)]


def test_healthy_numbers_pass_and_write_nothing(recorded: Path) -> None:
    before = stored(recorded)
    model_gates = session(recorded)
    assert [outcome.text for outcome in gates(model_gates) if not outcome.passed] == []
    assert model_gates.commit() == []
    assert stored(recorded) == before


def test_without_a_baseline_everything_fails_with_the_command(tmp_path: Path) -> None:
    outcomes = gates(session(tmp_path, shared=True))
    assert not any(outcome.passed for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.text.startswith("no accepted ")
        assert "pytest suites --model tiny-llama --mode int8 --update-baselines" in outcome.text
    assert list(tmp_path.iterdir()) == []


def test_a_worse_number_fails_with_the_site_first(recorded: Path) -> None:
    outcomes = gates(spoilt(recorded))
    (failed,) = (outcome for outcome in outcomes if not outcome.passed)
    first, *lines = failed.text.splitlines()
    assert UP in first
    assert "2x accepted" in first
    assert "(mode int8)" in first
    assert f"  the error enters at {UP}, the first whose local error is out" in lines


def test_the_place_where_an_error_enters_is_the_first_and_not_the_worst(recorded: Path) -> None:
    model_gates = spoilt(recorded)
    later = "model.layers.1.mlp.down_proj:output"
    change_row(model_gates, later, lambda row: row.values | {"relative_mse": 1.0})
    (failed,) = (outcome for outcome in gates(model_gates) if not outcome.passed)
    assert UP in failed.text.splitlines()[0]
    assert failed.text.splitlines()[3].split()[0] == later
    assert f"the error enters at {UP}" in failed.text


@share(3)
@pytest.mark.parametrize(
    ("which", "times", "passes", "written"),
    [
        ("failed", 2.0, True, True),
        ("new", 2.0, False, False),
        ("all", 2.0, True, True),
        ("failed", 1.01, True, False),
        ("all", 1.01, True, True),
        ("failed", 0.5, True, True),
        ("new", 0.5, True, False),
    ],
)
def test_what_an_update_decides_is_what_is_stored(
    own: Path, which: str, times: float, passes: bool, written: bool
) -> None:
    before, old = stored(own), accepted(own)
    model_gates = spoilt(own, times, updating=which)
    outcomes = gates(model_gates)
    assert all(outcome.passed for outcome in outcomes) == passes
    changes = model_gates.commit()
    assert bool(changes) == written
    new = accepted(own)
    assert new == pytest.approx(old * (times if written else 1.0), rel=1e-6)
    after = stored(own)
    touched = {name for name in before if before[name] != after[name]}
    assert touched == ({"int8.txt"} if written else set())
    if written and which == "failed":
        lines = [set(content["int8.txt"].splitlines()) for content in (before, after)]
        assert all(UP.encode() in line for line in lines[0] ^ lines[1])
        assert any(f"{UP} local relative_mse" in str(change) for change in changes)


def test_a_dry_run_says_and_does_not_write(own: Path) -> None:
    before = stored(own)
    model_gates = spoilt(own, updating="failed")
    assert sum(outcome.updated for outcome in gates(model_gates)) > 0
    changes = model_gates.commit(dry_run=True)
    assert stored(own) == before
    assert any("-> " in str(change) and UP in str(change) for change in changes)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_stored(own: Path, value: float) -> None:
    model_gates = spoilt(own, updating="all")
    change_row(model_gates, UP, lambda row: dict.fromkeys(row.values, value), nonfinite=3)
    old = accepted(own)
    (failed,) = (outcome for outcome in gates(model_gates) if not outcome.passed)
    assert failed.text.startswith(f"non-finite values at {UP}")
    assert "--update-baselines cannot accept this" in failed.text
    model_gates.commit()
    assert accepted(own) == old


def test_an_absolute_limit_is_not_updated_away(own: Path) -> None:
    policy = Policy().with_marker({"absolute": ["relative_mse<1e-9"], "sites": "layers.4:output"})
    before = stored(own)
    model_gates = session(own, updating="failed", policy=policy, shared=True)
    (failed,) = (outcome for outcome in gates(model_gates) if not outcome.passed)
    assert "absolute limit" in failed.text
    assert "--update-baselines cannot accept this" in failed.text
    model_gates.commit()
    assert stored(own) == before


def test_updates_under_a_marker_are_collected_with_the_others(own: Path) -> None:
    old = accepted(own)
    model_gates = spoilt(own, updating="failed")
    marked = model_gates.with_policy(Policy().with_marker({"budget_db": 1.0}))
    marked.layer(SUITE, mode_of(model_gates.bench, "int8"), "layers.1")
    assert model_gates.commit()
    assert accepted(own) == pytest.approx(2 * old)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 3}, ["2 samples", "3 now", "--samples 2"]),
        ({"seqlen": 32}, ["64 tokens", "32 now", "--seqlen 64"]),
        ({"seed": 1}, ["other inputs"]),
    ],
)
def test_other_inputs_than_the_baselines_are_named(
    recorded: Path, change: dict[str, int], words: list[str]
) -> None:
    model_gates = session(recorded, sampling=dataclasses.replace(SHORT, **change))
    with pytest.raises(QgateError) as error:
        model_gates.check_baseline()
    assert all(word in str(error.value) for word in words)


@proof
def test_other_weights_are_named_and_updated_on_purpose(own: Path) -> None:
    model_gates = session(own)
    with torch.no_grad():
        model_gates.bench.model.module.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] += 1
    with pytest.raises(QgateError, match="the baseline was made with other weights"):
        model_gates.check_baseline()
    model_gates.ledger.updating = "failed"
    model_gates.check_baseline()
    assert all(outcome.passed for outcome in gates(model_gates))
    model_gates.commit()
    model_gates.ledger.updating = None
    model_gates.check_baseline()
    references = Store(own, LLAMA).reference("plain")
    live = model_gates.subject.references("plain")
    assert references.keys() == live.keys()
    for site, tensor in references.items():
        assert np.array_equal(tensor.values, live[site].values)


@proof
def test_another_calibration_is_named(tmp_path: Path) -> None:
    model_gates = session(tmp_path, MAMBA, updating="all", layers=2)
    gates(model_gates, "2-1")
    gates(model_gates, "int8")
    model_gates.commit()
    other = session(tmp_path, MAMBA, sampling=Sampling(2, 64, 4, 64), layers=2)
    other.check_baseline()
    with pytest.raises(QgateError, match="other calibration"):
        gates(other, "2-1")
    assert all(outcome.passed for outcome in gates(other, "int8")), "it has no static scales"


def test_task_values_are_an_obvious_computation() -> None:
    of = bench(LLAMA, Sampling(3, 32, 2, 32))
    mode = mode_of(of, "mxfp4")
    values, notes, _ = task_values(of, mode)
    true = task_oracle(of, "fp32", "mxfp4")
    assert values["bits_per_byte"] == pytest.approx(true["bits"].mean(), rel=1e-5)
    assert values["next_token_accuracy"] == pytest.approx(true["hits"].mean())
    assert values["kl_divergence"] == pytest.approx(true["kl"].mean(), rel=1e-4)
    assert notes["reference"] == "fp32"
    assert notes["bits_per_byte_reference"] == pytest.approx(true["reference"].mean(), rel=1e-5)
    lost = true["bits"] - true["reference"]
    half = 4.30 * lost.std(ddof=1) / math.sqrt(3)
    assert notes["lost"] == pytest.approx(lost.mean(), rel=1e-3)
    assert notes["lost_95"] == pytest.approx([lost.mean() - half, lost.mean() + half], rel=1e-3)


def test_one_sample_has_no_interval() -> None:
    of = bench(LLAMA, Sampling(1, 32, 2, 32))
    _, notes, _ = task_values(of, mode_of(of, "int8"))
    assert all(math.isinf(end) for end in notes["lost_95"])
