"""Calibrated scales are compared with the accepted ones: one that moved is red at its site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.measuring.site_rows import ModelSites, static_rows
from qgate.modes import Plan, PlanEntry
from qgate.modes.calibration import Calibration, SiteScale
from qgate.modes.plan import numbers_of
from tests.gate.benches import MAMBA, mode_of, session
from tests.shares import always, share, slow_file

pytestmark = slow_file

SITE = "backbone.layers.0.mixer.x_proj:input"


def recalibrated(gates: ModelGates, factor: float) -> None:
    """Multiply the calibrated scale of one site."""
    scales: Calibration = gates.bench.calibration
    old: SiteScale = scales.scales[SITE]
    moved = {**scales.scales, SITE: replace(old, scale=factor * old.scale)}
    vars(gates.bench)["calibration"] = replace(scales, scales=moved)


def red(gates: ModelGates) -> dict[str, str]:
    """Return what is red in the first layer, by site and scope."""
    mode = mode_of(gates.bench, "2-1")
    outcome = gates.layer("layer_outputs", mode, gates.bench.layers[0])
    rows = [row for row in outcome.record["rows"] if not row["passed"]]
    return {f"{row['site']} {row['scope']}": row["finding"]["fault"] for row in rows}


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baselines")
    gates = session(folder, MAMBA, layers=1, updating="all")
    gates.reference("reference")
    assert red(gates) == {}
    gates.commit()
    return folder


@share(3)
@pytest.mark.parametrize("factor", [1.0005, 1.002, 0.99])
def test_a_scale_that_moved_is_red_at_its_site(factor: float, accepted: Path) -> None:
    gates = session(accepted, MAMBA, layers=1)
    recalibrated(gates, factor)
    sites = {at for at, fault in red(gates).items() if "calibrated scale" in fault}
    is_red = abs(factor - 1) > 0.001
    assert bool(sites) == is_red
    assert all(at.endswith(" static") for at in sites)
    if is_red:
        assert f"{SITE} static" in sites


@always
def test_heads_have_a_row_each_and_channels_one() -> None:
    channels = torch.tensor([2.0, 8.0]).repeat(50)
    entries = (
        PlanEntry("a:keys", "int8", None, "", calibrated=(0.5, 0.25)),
        PlanEntry("b:input", "int8", 0.125, "", calibrated=numbers_of(0.125)),
        PlanEntry("c:state", "int8", None, "", calibrated=numbers_of(channels)),
        PlanEntry("d:weight", "int8", 0.75, "absmax / 127"),
    )
    rows = static_rows(Plan("m", "", "model", "plain", entries), ModelSites({}, str))
    figures = {row.site: row.values["static_scale"] for row in rows}
    assert figures == {
        "a:keys[0]": 0.5, "a:keys[1]": 0.25, "b:input": 0.125, "c:state": pytest.approx(4.0),
    }  # fmt: skip
