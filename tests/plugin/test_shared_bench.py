"""The bench that runs of tests share gives what a bench of its own measures, and only that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qgate.gate.measuring.bench import Bench
from qgate.modes import Mode
from qgate.modes.setups import ModelSetup
from tests.gate.benches import LLAMA, SHORT, mode_of
from tests.plugin.shared_bench import SharedBench
from tests.shares import always, proof, slow_file

pytestmark = slow_file

SETUP = ModelSetup(LLAMA, sampling=SHORT)


class MeasuredAnewError(Exception):
    """A pass that a shared bench makes where it has the result."""


def refused(*_: Any, **__: Any) -> Any:
    raise MeasuredAnewError


@proof
def test_a_second_bench_measures_nothing_and_has_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that does not draw, of what was measured with pictures."""
    mode = mode_of(bench := SharedBench(SETUP, pictures=True), "int8")
    bench.measure(mode)
    rows = Bench(SETUP).measure(mode)
    monkeypatch.setattr(Bench, "site_errors", refused)
    later = SharedBench(SETUP)
    assert later.measure(mode) == rows
    assert {*later.ran()} == {"int8"}
    assert {*SharedBench(SETUP).ran()} == set()


@proof
@pytest.mark.parametrize(
    "setup",
    [
        replace(SETUP, sampling=replace(SHORT, seed=7)),
        replace(SETUP, modes={"mine": Mode("mine", "x")}),
    ],
    ids=["other text", "modes of a project"],
)
def test_what_differs_is_measured_anew(setup: ModelSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = mode_of(bench := SharedBench(SETUP), "int8")
    bench.measure(mode)
    monkeypatch.setattr(Bench, "site_errors", refused)
    with pytest.raises(MeasuredAnewError):
        SharedBench(setup).measure(mode)


@always
def test_a_test_that_refuses_to_load_a_model_is_not_given_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SharedBench(SETUP).model
    monkeypatch.setattr(ModelSetup, "load", refused)
    with pytest.raises(MeasuredAnewError):
        assert SharedBench(SETUP).model
