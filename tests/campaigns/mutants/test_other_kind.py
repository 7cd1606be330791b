"""Planted faults stay red where another kind of device accepted the errors, and healthy code green.

Then the wider limits hold: those for other arithmetic.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.baselines.building import rewrite
from tests.campaigns.mutants.bed import Bed, Healthy, examine, gates_of
from tests.campaigns.mutants.mutant import LLAMA, MAMBA, Mutant
from tests.campaigns.mutants.test_planted import MUTANTS
from tests.shares import share, slow_file

pytestmark = slow_file

CUDA = "cuda-sm_90-deadbeef"
CASES = [
    pytest.param(mutant, id=mutant.name)
    for mutant in MUTANTS
    if mutant.model in (LLAMA, MAMBA)
    and mutant.suite not in ("reference", "canary")  # which no accepted error decides
    and not (mutant.survives or mutant.unrecorded)
]
Elsewhere = Callable[[str, str, str], Healthy]


@pytest.fixture
def elsewhere(healthy: Healthy, tmp_path: Path) -> Elsewhere:
    """Return the baselines of a suite as if CUDA had accepted them."""

    def record(model: str, mode: str, suite: str) -> Healthy:
        healthy.record(model, mode, suite)
        shutil.copytree(healthy.folder / model, tmp_path / model)
        for path in (tmp_path / model / "accepted").glob("*.txt"):
            rewrite(path, lambda accepted: replace(accepted, device=CUDA))
        return Healthy(tmp_path)

    return record


@share(320, group="another kind")
@pytest.mark.parametrize("mutant", CASES)
def test_mutant_turns_the_gate_red_under_the_limits_for_another_kind(
    mutant: Mutant, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_cuda = elsewhere(mutant.model, mutant.mode, mutant.suite)
    session = of_cuda.session(mutant.model)
    mutant.sow(Bed(monkeypatch, session, of_cuda, mutant.mode))
    assert examine(session, mutant.mode, mutant.suite).texts, f"{mutant.name} survives"


@share(320, group="another kind")
@pytest.mark.parametrize(
    ("mode", "suite"),
    [("int8", "layer_outputs"), ("fp16", "gradients"), ("int8", "task"), ("int8", "outputs")],
)
def test_healthy_code_is_green_under_the_limits_for_another_kind(
    mode: str, suite: str, elsewhere: Elsewhere
) -> None:
    session = elsewhere(LLAMA, mode, suite).session(LLAMA)
    outcomes = [gate() for gate in gates_of(session, mode, suite)]
    assert [outcome.text for outcome in outcomes] == [""] * len(outcomes)
    checks = [check for outcome in outcomes for check in outcome.verdict.checks]
    assert {check.accepted_on for check in checks if check.kind == "regression"} >= {CUDA}
