"""Ideals of a declared mode: those of healthy and broken canaries are worked out once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qgate.gate.measuring import bench as benches
from qgate.gate.measuring.canary import BROKEN, HEALTHY
from qgate.models import Sampling
from qgate.modes import Rule, apply
from tests.gate.benches import LLAMA, bench

SHORT = Sampling(1, 32, 2, 32)
OTHER = replace(HEALTHY, rules=(Rule(":(input|weight)$", "mxfp4_e2m1", of="product"),))


def test_the_broken_canary_has_the_ideals_of_the_healthy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, alone = bench(LLAMA, SHORT), bench(LLAMA, SHORT)
    healthy, broken = (apply(mode, shared.model) for mode in (HEALTHY, BROKEN))
    first = shared.site_errors(healthy, healthy)
    expected = alone.site_errors(broken, healthy)
    work, calls = benches.ideal_errors, []
    monkeypatch.setattr(benches, "ideal_errors", lambda *given: calls.append(given) or work(*given))
    assert shared.site_errors(broken, healthy) == expected
    assert not calls
    assert {row.site for row in first if row.ideal} == {row.site for row in expected if row.ideal}


def test_another_declared_mode_of_the_same_name_has_its_own_ideals() -> None:
    shared, alone = bench(LLAMA, SHORT), bench(LLAMA, SHORT)
    healthy, other = (apply(mode, shared.model) for mode in (HEALTHY, OTHER))
    shared.site_errors(healthy, healthy)
    assert shared.site_errors(healthy, other) == alone.site_errors(healthy, other)
