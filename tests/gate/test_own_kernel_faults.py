"""Faults of kernels of one's own: the first line says what check_kernel would say of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.modes.setups import ModelSetup
from qgate.results import Tally
from tests.campaigns.mutants.bed import SUITE
from tests.gate.own_kernels import FORMATS, Cast, own_model, product_of
from tests.gate.right_own_models import sites_of
from tests.gate.wrong_own_kernels import WRONG, OwnFault
from tests.kernel_checks.unseen_code import attention, gate, hidden, norm
from tests.kernel_checks.unseen_faults import model_with
from tests.kernel_checks.unseen_products import UnseenFault
from tests.shares import proof, share, slow_file

pytestmark = slow_file


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
@share(48)
@pytest.mark.parametrize("fault", WRONG, ids=lambda fault: f"{fault.fmt}: {fault.name}")
def test_the_first_line_names_the_fault_of_an_own_kernel(fault: OwnFault, tmp_path: Path) -> None:
    of = own_model(fault.fmt, fault.product, "" if fault.product else fault.name)
    first = causes(gates_of(of, tmp_path), layers=1)[0]
    first_site = first.split(" ")[0]
    assert re.search(fault.site, first_site), first
    assert re.search(fault.words, first), first


@proof
def test_gradients_that_fail_first_leave_diagnoses_for_every_layer(tmp_path: Path) -> None:
    fault = next(fault for fault in WRONG if fault.name == "scale 2.02")
    gated = gates_of(own_model(fault.fmt, fault.product), tmp_path)
    mode = gated.bench.setup.select("mine", gated.bench.model)[0]
    gates = (gated.gradients, gated.layer)
    outcomes = [gate(SUITE, mode, layer) for gate in gates for layer in gated.bench.layers]
    rows = [
        {**row, "node": f"{number}", "seconds": 0.0}
        for number, outcome in enumerate(outcomes)
        for row in outcome.record["rows"]
    ]
    (cause,) = Tally(rows).causes
    assert re.search(fault.words, cause.text()), cause.text()
    assert cause.same == 3


@share(4)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_a_right_kernel_of_ones_own_is_green(fmt: str, seed: int, tmp_path: Path) -> None:
    assert causes(gates_of(own_model(fmt, seed=seed), tmp_path), layers=2) == []


# 200 of them: python -m tests.gate.right_own_models
@share(10)
@pytest.mark.parametrize("seed", range(20))
def test_a_right_model_of_other_code_is_green(seed: int, tmp_path: Path) -> None:
    words, count, red = sites_of(seed, tmp_path)
    assert not red, words
    assert count > 40


@proof
def test_one_fault_in_all_products_is_one_cause(tmp_path: Path) -> None:
    cause_lines = causes(
        gates_of(own_model("int8", product_of("int8", lambda x: x)), tmp_path), layers=2
    )
    assert len(cause_lines) == 1
    assert "its input is not quantized to int8" in cause_lines[0]
    assert "the same at" in cause_lines[0]


@proof
def test_a_script_is_left_that_checks_the_kernel_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gated = gates_of(own_model("int8", product_of("int8", None, lambda w: w)), tmp_path)
    mode = gated.bench.setup.select("mine", gated.bench.model)[0]
    outcome = gated.layer(SUITE, mode, gated.bench.layers[0])
    folder = gated.leave_reproduction(tmp_path / "repro", outcome)
    assert folder is not None
    runpy.run_path(str(folder / "run.py"))
    output = capsys.readouterr().out
    assert output.startswith("kernel is wrong: argument 1 is not quantized to int8"), output


# Faults at inputs that no sample has --------------------------------------------------------------


def _without_floor(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def _narrow_exponents(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30).log2().floor() - 8
    power = torch.exp2(exponents.clamp(-13, 4))
    return ((blocks / power).clamp(-448, 448).to(torch.float8_e4m3fn).float() * power).flatten(-2)


def _to_zero(x: Tensor) -> Tensor:
    """Cast as one should, but what is beyond a range becomes zero."""
    return FORMATS["fp8"].cast(x.where(x.abs() < 500, 0.0))


@share(8)
@pytest.mark.parametrize(
    ("fmt", "cast", "words"),
    [
        ("int8", _without_floor, "with rows of zeros: .* results are NaN"),
        ("int8", lambda x: FORMATS["int8"].cast(x.clamp(-100, 100)), "as large: "),
        ("mxfp8", _narrow_exponents, "as large: "),
        ("fp8", _to_zero, "as large: "),
    ],
    ids=["zeros", "clamped", "narrow exponents", "to zero"],
)
def test_a_fault_at_inputs_that_no_sample_has_is_red(
    fmt: str, cast: Cast, words: str, tmp_path: Path
) -> None:
    first = causes(gates_of(own_model(fmt, product_of(fmt, cast)), tmp_path), layers=1)[0]
    assert re.search(f"^layers.0.attention.q_proj:output .*is wrong for inputs .*{words}", first)


def _cut_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v.clamp(-30, 30))


def _without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden(q, k), -torch.inf).exp()
    return scores / scores.sum(-1, keepdim=True) @ v


@share(4)
@pytest.mark.parametrize("fmt", ["int8", "w4"])
@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ("norm", lambda x, w: norm(x.clamp(-60, 60), w), "norm1:output .*massive values"),
        ("norm", lambda x, w: norm(x, w).clamp(-7, 7), "norm2:output .*no value is above 7"),
        ("gate", lambda g, u: gate(g.clamp(max=30), u), "down:input .*saturates"),
        ("gate", lambda g, u: gate(g, u).clamp(-65504, 65504), "down:input .*above 6.55e.04"),
        ("attention", _cut_values, "o_proj:input .*massive values"),
        ("attention", _without_maximum, "o_proj:input .*not finite"),
        ("product", lambda x, w, b: linear(x, w, b).clamp(-65504, 65504), "q_proj:output .*as large: .*saturates"),
    ],
    ids=["norm", "normed", "gate", "float16", "values", "scores", "product"],
)  # fmt: skip
def test_own_code_that_cuts_massive_values_is_red(
    part: str, code: Any, words: str, fmt: str, tmp_path: Path
) -> None:
    right = FORMATS[fmt]
    if part == "product":
        product = lambda x, w, b: code(right.cast(x), right.of_weight(w), b)  # noqa: E731
        gated = gates_of(own_model(fmt, product), tmp_path)
    else:
        gated = gates_of(model_with(UnseenFault("massive", "", fmt, code, part)), tmp_path)
    assert re.search(words, causes(gated, layers=1)[0])
