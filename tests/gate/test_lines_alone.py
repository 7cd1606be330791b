"""Every line of an accepted file is one that can fail alone, so that no file is longer than that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Store
from qgate.baselines.sample_lines import is_folded
from qgate.gate import Limits
from qgate.gate.checks import checks_of
from qgate.gate.measured import Measured
from qgate.gate.sessions import Outcome
from qgate.metrics import METRICS
from qgate.models import Sampling
from tests.gate.benches import LLAMA, mode_of, session
from tests.shares import proof

SHORT = Sampling(samples=2, seqlen=32, calib_samples=2, calib_seqlen=32)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """Record every kind of gate of one layer, in a mode and in a format of one name."""
    folder = tmp_path_factory.mktemp("alone")
    made = session(folder, updating="all", sampling=SHORT, layers=2)
    mode, layer = mode_of(made.bench, "int8"), made.bench.layers[1]
    outcomes = [
        made.layer("layer_outputs", mode, layer),
        made.outputs("outputs", mode),
        made.task("task", mode),
        made.gradients("gradients", mode, layer),
        made.scaling("scaling", "hif8", layer),
        made.overflow("overflow", "hif8", layer, "forward"),
    ]
    made.commit()
    return folder, outcomes


def worse(row: Measured, metric: str) -> Measured:
    """Return a row in which one accepted value alone was better than what is measured."""
    assert row.accepted is not None
    if METRICS.find(metric).textual:
        return replace(row, accepted_texts={**row.accepted_texts, metric: "another quantizer"})
    before = row.accepted[metric]
    better = before / 4 if METRICS.find(metric).direction == "lower" else 4 * before
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
