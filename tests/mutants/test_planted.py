"""The gate gates: every planted defect turns it red, with the place or the cause in the text."""

from __future__ import annotations

import os
import random
import re

import pytest

from tests.mutants.bed import SUITE, Bed, Healthy, examine, mode_of, threads
from tests.mutants.planted import MUTANTS, Mutant

SHARE = 12


def whole_campaign(config: pytest.Config) -> bool:
    wanted = config.getoption("--all-mutants", default=False)
    return bool(wanted or os.environ.get("QGATE_ALL_MUTANTS"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = whole_campaign(metafunc.config)
    if "repetition" in metafunc.fixturenames:
        metafunc.parametrize("repetition", range(20 if whole else 2))
    if "mutant" not in metafunc.fixturenames:
        return
    chosen = list(MUTANTS)
    if not whole:
        seed = int(os.environ.get("QGATE_MUTANT_SEED", "0"))
        picked = random.Random(seed).sample(range(len(MUTANTS)), SHARE)
        chosen = [MUTANTS[place] for place in sorted(picked)]
    cases = [
        pytest.param(
            mutant,
            id=mutant.name,
            marks=[pytest.mark.xfail(reason=mutant.survives, strict=True)]
            if mutant.survives
            else [],
        )
        for mutant in chosen
    ]
    metafunc.parametrize("mutant", cases)


def test_mutant_turns_the_gate_red(
    mutant: Mutant, healthy: Healthy, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy.record(mutant.model, mutant.mode)
    session = healthy.session(mutant.model)
    mutant.sow(Bed(monkeypatch, session, healthy, mutant.mode))
    found = examine(session, mutant.mode, mutant.suite)
    assert found.texts, f"{mutant.name} survives"
    if mutant.source:
        assert found.source is not None, found.texts
        assert re.fullmatch(mutant.source, found.source), found.texts
        assert f"the error enters at {found.source}" in found.texts
    assert re.search(mutant.says, found.texts), found.texts


def test_healthy_code_stays_green(
    healthy: Healthy, repetition: int, request: pytest.FixtureRequest
) -> None:
    """Other thread counts, other orders of modes and layers: the same verdict."""
    modes = [("tiny-mamba", "2-1"), ("tiny-llama", "int8")]
    if whole_campaign(request.config):
        modes = sorted({(mutant.model, mutant.mode) for mutant in MUTANTS})
    chance = random.Random(repetition)
    chance.shuffle(modes)
    sessions = {model: healthy.session(model) for model, _ in modes}
    for model, mode in modes:
        healthy.record(model, mode)
        session = sessions[model]
        layers = chance.sample(session.bench.layers, len(session.bench.layers))
        # Threads that wait for each other on busy cores take long: only int8 of them by default.
        several = whole_campaign(request.config) or mode == "int8"
        with threads(1 + repetition % 3 if several else 1):
            outcomes = [session.layer(SUITE, mode_of(session, mode), layer) for layer in layers]
            outcomes.append(session.task("task", mode_of(session, mode)))
        assert [outcome.text for outcome in outcomes if not outcome.passed] == []


def test_names_are_unique_and_there_are_enough() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 25
    assert all(mutant.source or mutant.says for mutant in MUTANTS)
