"""The gate gates: every planted defect turns it red, with the place or the cause in the text."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.campaigns.mutants import (
    planted,
    planted_activations,
    planted_checkpoints,
    planted_checks,
    planted_conformance,
    planted_dumps,
    planted_engines,
    planted_experts,
    planted_formats,
    planted_gradients,
    planted_in_place,
    planted_outputs,
    planted_relations,
    planted_segments,
    table,
)
from tests.campaigns.mutants.bed import (
    ACTIVATIONS,
    CHECKPOINT,
    DUMP,
    ENGINES,
    FORMATS,
    SUITE,
    SUITE_FILES,
    Bed,
    Gate,
    Healthy,
    examine,
    gates_of,
    marks,
    threads,
)
from tests.campaigns.mutants.mutant import LLAMA, MAMBA, Mutant
from tests.shares import every_case, share

MUTANTS = (
    *planted.MUTANTS,
    *planted_gradients.MUTANTS,
    *planted_formats.MUTANTS,
    *planted_checks.MUTANTS,
    *planted_dumps.MUTANTS,
    *planted_activations.MUTANTS,
    *planted_checkpoints.MUTANTS,
    *planted_engines.MUTANTS,
    *planted_conformance.MUTANTS,
    *planted_outputs.MUTANTS,
    *planted_experts.MUTANTS,
    *planted_relations.MUTANTS,
    *planted_segments.MUTANTS,
    *planted_in_place.MUTANTS,
)
SUITES = tuple(dict.fromkeys(mutant.suite for mutant in MUTANTS))
CASES = [
    pytest.param(
        mutant,
        id=mutant.name,
        marks=[pytest.mark.xfail(reason=mutant.survives, strict=True)] if mutant.survives else [],
    )
    for mutant in MUTANTS
]


@share(50, by=["mutant.subject"])
@pytest.mark.parametrize("mutant", CASES)
def test_mutant_turns_the_gate_red(
    mutant: Mutant, healthy: Healthy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant.unrecorded:
        session = Healthy(tmp_path).session(mutant.model, updating="all")
    else:
        healthy.record(mutant.model, mutant.mode, mutant.suite)
        session = healthy.session(mutant.model)
    mutant.sow(Bed(monkeypatch, session, healthy, mutant.mode))
    finding = examine(session, mutant.mode, mutant.suite)
    assert finding.texts, f"{mutant.name} survives"
    if mutant.source:
        assert finding.source is not None, finding.texts
        assert re.fullmatch(mutant.source, finding.source), finding.texts
        assert re.search(mutant.first or mutant.source, finding.first_line), finding.first_line
        if finding.is_local:
            assert f"the error enters at {finding.source}" in finding.texts
    assert re.search(mutant.says or mutant.source, finding.texts), finding.texts


def healthy_cases(whole: bool) -> list[tuple[str, str, str]]:
    """What has to stay green: model, mode or format, suite."""
    few = [(MAMBA, "2-1", SUITE), (MAMBA, "2-1", "gradients"), (MAMBA, "2-1", "task")]
    few += [(LLAMA, "int8", suite) for suite in (SUITE, "gradients", "task")]
    few += [(LLAMA, "mxfp4_e2m1", suite) for suite in ("scaling", "overflow")]
    few += [(LLAMA, "", suite) for suite in ("reference", "canary")]
    few += [(DUMP, fmt, "dump_overflow") for fmt in ("fp8_e4m3", "mxfp4_e2m1")]
    few += [(DUMP, "values", "dump_distributions"), (ACTIVATIONS, "", "activations")]
    few += [(CHECKPOINT, mode, CHECKPOINT) for mode in ("weights", "accounting", "recipe")]
    few += [(ENGINES, mode, ENGINES) for mode in ("tokens", "weights", "sites")]
    few += [(FORMATS, "fp8_e4m3", "formats")]
    if not whole:
        return few
    planted_in = {(m.model, m.mode, m.suite) for m in MUTANTS}
    modes = {(model, mode) for model, mode, suite in planted_in if suite == SUITE}
    of_modes = {
        (*mode_case, suite) for mode_case in modes for suite in (SUITE, "gradients", "task")
    }
    of_formats = {
        (model, fmt, suite)
        for model in (LLAMA, MAMBA)
        for suite in ("scaling", "overflow")
        for fmt in marks(suite)["qgate_formats"].args
    }
    return sorted({*few, *planted_in, *of_modes, *of_formats})


@share(40)
@pytest.mark.parametrize("repetition", range(20))
def test_healthy_code_stays_green(
    healthy: Healthy, repetition: int, request: pytest.FixtureRequest
) -> None:
    """Other thread counts, other orders of suites, modes and layers: the same verdict.

    A run by default does a quarter of few cases, as suites hold healthy code by themselves.
    """
    whole = every_case(request.config)
    cases = healthy_cases(whole)
    if not whole:
        cases = cases[repetition % 4 :: 4]
    for case in cases:
        healthy.record(*case)
    sessions = {model: healthy.session(model) for model, _, _ in cases}
    gates: list[tuple[Gate, int]] = []
    for model, mode, suite in cases:
        # Threads that wait for each other on busy cores take long: by default none for 2-1.
        count = 1 + repetition % 3 if whole or mode != "2-1" else 1
        gates += [(gate, count) for gate in gates_of(sessions[model], mode, suite)]
    random.Random(repetition).shuffle(gates)
    for gate, count in gates:
        with threads(count):
            assert gate().text == ""


def test_names_are_unique_and_there_are_enough() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 100
    assert all(mutant.source or mutant.says for mutant in MUTANTS)
    counts = Counter(mutant.suite for mutant in MUTANTS if not mutant.survives)
    assert all(counts[suite] >= 4 for suite in SUITES), counts
    files = {path.stem.removeprefix("test_") for path in SUITE_FILES.glob("test_*.py")}
    assert files == set(SUITES), "suites that nothing was planted for"


def test_the_page_of_faults_lists_them() -> None:
    message = "write it with `python -m tests.campaigns.mutants.table --write`"
    assert table.PAGE.read_text(encoding="utf-8") == table.page(MUTANTS), message
