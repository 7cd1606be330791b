"""Faults planted in quantized recurrent states are red, and named; healthy states are green."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import modes
from qgate.gate.measured import Measured
from qgate.gate.measuring.state_rows import state_rows
from qgate.gate.measuring.state_traces import StateRunTraces
from qgate.models import Model
from qgate.modes.states.casting import StoredState
from tests.gate.state_models import small_mamba
from tests.gate.test_cache_faults import findings

STATE_MODES = [mode.name for mode in modes.select("state-*", "mamba")]
WAYS = {"decode", "prefill", "chunked_prefill", "output"}


@pytest.fixture(scope="module")
def model() -> Model:
    return small_mamba()


def rows_of(model: Model, name: str) -> list[Measured]:
    quantized = modes.apply(modes.find_mode(name, "mamba"), model)
    run = StateRunTraces(quantized)
    with torch.no_grad(), run.watch():
        quantized.model(torch.cat(list(model.inputs)))
    order = {site.name: number for number, site in enumerate(model.sites())}
    return state_rows(quantized, model, run, order, lambda site: model.layer_of(site))


@pytest.mark.parametrize("name", STATE_MODES)
def test_healthy_states_are_green(name: str, model: Model) -> None:
    rows = rows_of(model, name)
    assert findings(rows) == {}
    assert len(rows) == 2 * 2 * (1 + len(WAYS))
    for row in rows:
        if row.scope == "isolated":
            print(row.site, row.value("relative_mse@worst_token") / row.floor, row.floor)
            assert row.value("relative_mse@worst_token") <= 0.1 * row.floor, row.site  # type: ignore[operator]
        else:
            assert row.ideal is not None
            assert row.values["relative_mse"] == pytest.approx(row.ideal["relative_mse"], rel=1e-5)
