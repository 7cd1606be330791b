"""Faults of kernels of one's own: the first line says what check_kernel would say of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.modes.setups import ModelSetup
from qgate.results import Tally
from tests.campaigns.mutants.bed import SUITE
from tests.gate.own_kernels import FORMATS, own_model, product_of
from tests.gate.wrong_own_kernels import WRONG, OwnFault
from tests.shares import share


def gates_of(of: object, folder: Path) -> ModelGates:
    bench = Bench(ModelSetup("net"), _model=of)  # type: ignore[arg-type]
    gated = ModelGates(bench, folder, Policy(), updating="all")
    gated.plots = "none"
    return gated


def causes(gated: ModelGates, layers: int) -> list[str]:
    """Run the gates of the first layers; return the causes of what is red."""
    mode = gated.bench.setup.select("mine", gated.bench.model)[0]
    outcomes = [gated.layer(SUITE, mode, layer) for layer in gated.bench.layers[:layers]]
    rows = (
        {**row, "node": f"{SUITE}[{row['layer']}]", "seconds": 0.0}
        for outcome in outcomes
        for row in outcome.record["rows"]
    )
    return [cause.text() for cause in Tally(rows).causes]


# 96 faults at 4 s of a processor each: all with --every-case.
@share(12)
@pytest.mark.parametrize("fault", WRONG, ids=lambda fault: f"{fault.fmt}: {fault.name}")
def test_the_first_line_names_the_fault_of_an_own_kernel(fault: OwnFault, tmp_path: Path) -> None:
    of = own_model(fault.fmt, fault.product, "" if fault.product else fault.name)
    first = causes(gates_of(of, tmp_path), layers=1)[0]
    place = first.split(" ")[0]
    assert re.search(fault.site, place), first
    assert re.search(fault.words, first), first


@share(2)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_a_right_kernel_of_ones_own_is_green(fmt: str, seed: int, tmp_path: Path) -> None:
    assert causes(gates_of(own_model(fmt, seed=seed), tmp_path), layers=2) == []


def test_one_fault_in_all_products_is_one_cause(tmp_path: Path) -> None:
    found = causes(gates_of(own_model("int8", product_of("int8", lambda x: x)), tmp_path), layers=2)
    assert len(found) == 1
    assert "its input is not quantized to int8" in found[0]
    assert "the same at" in found[0]


def test_a_script_is_left_that_checks_the_kernel_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gated = gates_of(own_model("int8", product_of("int8", None, lambda w: w)), tmp_path)
    mode = gated.bench.setup.select("mine", gated.bench.model)[0]
    outcome = gated.layer(SUITE, mode, gated.bench.layers[0])
    folder = gated.leave_reproduction(tmp_path / "repro", outcome)
    assert folder is not None
    runpy.run_path(str(folder / "run.py"))
    said = capsys.readouterr().out
    assert said.startswith("kernel is wrong: argument 1 is not quantized to int8"), said
