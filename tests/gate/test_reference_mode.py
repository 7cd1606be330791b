"""A mode in the place of FP32: what is compared with it, and what stays with FP32 all the same."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measured import Measured
from qgate.gate.measuring import bench as bench_module
from qgate.gate.measuring.bench import BROKEN, HEALTHY, Bench
from qgate.gate.measuring.format_rows import overflow_rows
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.measuring.passes import outer_tensors
from qgate.gate.measuring.self_checks import unquantized
from qgate.gate.measuring.tasks import task_values
from qgate.models import Sampling
from qgate.modes import Rule, apply
from tests.gate import benches
from tests.gate.benches import LLAMA, MAMBA, calls_of, mode_of, task_oracle
from tests.shares import proof, share

ONE = Sampling(1, 32, 2, 32)
LAST = "model.layers.1:output"


bench = functools.partial(benches.bench, layers=2)


@pytest.fixture(scope="module")
def of_fp32() -> Bench:
    return bench(LLAMA)


@pytest.fixture(scope="module")
def of_int8() -> Bench:
    return bench(LLAMA, reference_mode="int8")


def outputs(of: Bench, mode: str | None, site: str = LAST) -> list[Tensor]:
    """What flows at the end of a block, sample by sample, by a hook of our own."""
    model = of.model if mode is None else of.quantized(mode_of(of, mode)).model
    calls = calls_of(model, site.partition(":")[0], of.model.inputs)
    return [y.double() for _, y in calls]


def compared(rows: list[Measured]) -> list[Measured]:
    """Leave out isolated errors, which are those of the code in FP32 whatever the reference is.

    Calibrated scales have no error.
    """
    return [row for row in rows if row.values and row.scope not in ("isolated", "static")]


def relative(actual: list[Tensor], reference: list[Tensor]) -> float:
    error = sum(float((a - r).square().sum()) for a, r in zip(actual, reference, strict=True))
    return error / sum(float(r.square().sum()) for r in reference)


def test_what_is_carried_is_the_distance_to_the_mode(of_int8: Bench) -> None:
    rows = of_int8.measure(mode_of(of_int8, "mxfp8"))
    (row,) = (measured for measured in rows if (measured.site, measured.scope) == (LAST, "carried"))
    expected = relative(outputs(of_int8, "mxfp8"), outputs(of_int8, "int8"))
    assert row.values["relative_mse"] == pytest.approx(expected, rel=1e-3)
    assert expected != pytest.approx(
        relative(outputs(of_int8, "mxfp8"), outputs(of_int8, None)), rel=0.1
    )


@proof
def test_a_mode_is_at_no_distance_from_itself(of_int8: Bench) -> None:
    mode = mode_of(of_int8, "int8")
    rows = [*of_int8.measure(mode), *of_int8.gradients(mode)]
    assert {row.scope for row in rows} == {"carried", "local", "isolated", "backward"}
    assert {row.values["relative_mse"] for row in compared(rows)} == {0.0}
    values, notes, _ = task_values(of_int8, mode)
    assert values["kl_divergence"] == 0
    assert notes["lost"] == 0
    assert notes["reference"] == "int8"


def test_the_task_is_held_against_the_mode(of_int8: Bench) -> None:
    values, notes, _ = task_values(of_int8, mode_of(of_int8, "mxfp4"))
    true = task_oracle(of_int8, "int8", "mxfp4")
    assert values["kl_divergence"] == pytest.approx(true["kl"].mean(), rel=1e-3)
    assert notes["bits_per_byte_reference"] == pytest.approx(true["reference"].mean(), rel=1e-5)
    assert "bits_per_byte_fp32" not in notes


def test_fp32_stays_fp32(of_int8: Bench, of_fp32: Bench) -> None:
    for of in (of_int8, of_fp32):
        assert relative([t.double() for t in of.fp32("plain")[LAST]], outputs(of, None)) < 1e-10
    assert (
        relative([t.double() for t in of_int8.reference("plain")[LAST]], outputs(of_int8, "int8"))
        < 1e-4
    )
    assert relative(outputs(of_int8, "int8"), outputs(of_int8, None)) > 1e-4
    assert of_int8.fp32("plain") is not of_int8.reference("plain")
    assert of_fp32.fp32("plain") is of_fp32.reference("plain"), "computed once"
    gradients = (of.fp32_gradients("plain") for of in (of_int8, of_fp32))
    for a, b in zip(*(captured[LAST] for captured in gradients), strict=True):
        assert torch.equal(a, b)
    assert of_fp32.reference_gradients("plain") is of_fp32.fp32_gradients("plain")
    assert not torch.equal(
        of_int8.reference_gradients("plain")[LAST][0], of_int8.fp32_gradients("plain")[LAST][0]
    )


def test_a_model_proves_that_it_is_unquantized_whatever_the_reference(of_int8: Bench) -> None:
    assert all(row.values["relative_mse"] < 1e-9 for row in unquantized(of_int8))


def test_formats_alone_are_about_the_tensors_of_fp32(of_fp32: Bench) -> None:
    of = bench(LLAMA, reference_mode="int8")
    for phase in ("forward", "backward"):
        a, b = (
            overflow_rows(bench_of_mode, "mxfp4_e2m1", "layers.1", phase)
            for bench_of_mode in (of, of_fp32)
        )
        assert a == b


def test_what_is_recorded_as_reference_is_fp32(tmp_path: Path) -> None:
    of, plain = bench(LLAMA, reference_mode="int8"), bench(LLAMA)
    stored = [
        ModelGates(bench_of_mode, tmp_path, Policy()).subject.references("plain")
        for bench_of_mode in (of, plain)
    ]
    assert stored[0].keys() == stored[1].keys()
    for site, tensor in stored[0].items():
        assert np.array_equal(tensor.values, stored[1][site].values)


@share(2)
@pytest.mark.parametrize("reference", ["int8", "nvfp4"])
def test_a_site_has_no_ideal_against_a_mode_and_the_canary_has_one(reference: str) -> None:
    """On a grid that both share only ties differ; how far a quantizer may be off is about FP32."""
    of = bench(LLAMA, ONE, reference_mode=reference)
    mode = mode_of(of, "mxfp8")
    assert all(row.ideal is None for row in of.site_errors(of.quantized(mode)))
    healthy, broken = (apply(canary_mode, of.model) for canary_mode in (HEALTHY, BROKEN))
    own = bench(LLAMA, ONE)
    for quantized in (healthy, broken):
        assert of.site_errors(quantized, healthy) == own.site_errors(quantized, healthy)
    rows = [row for row in of.site_errors(broken, healthy) if row.ideal and row.quantizer]
    assert len(rows) == 2 * 7 * 2
    ideals = [(row.ideal or {})["relative_mse"] for row in rows]
    assert any(
        row.values["relative_mse"] > 2 * ideal for row, ideal in zip(rows, ideals, strict=True)
    )


@pytest.mark.parametrize(
    ("model", "reference", "basis"),
    [
        (LLAMA, "fp32", None),
        (LLAMA, "int8", "plain"),
        (MAMBA, "2-1", "rotated"),
        (MAMBA, "mxfp8", "plain"),
        (MAMBA, "fp16", "rotated"),
    ],
)
def test_the_basis_of_the_reference_is_known_before_anything_runs(
    model: str, reference: str, basis: Any
) -> None:
    of = bench(model, reference_mode=reference)
    assert of.reference_basis() == basis
    assert of.ran() == {}


def test_a_reference_in_another_basis_is_refused() -> None:
    of = bench(MAMBA, reference_mode="2-1")
    for method in (of.measure, of.gradients):
        with pytest.raises(QgateError, match="basis 'rotated'"):
            method(mode_of(of, "mxfp8"))


@proof
def test_a_reference_of_the_rotated_basis() -> None:
    of = bench(MAMBA, Sampling(2, 48, 2, 48), reference_mode="2-1")
    measured = compared(of.measure(mode_of(of, "2-1")))
    assert {row.values["relative_mse"] for row in measured} == {0.0}
    rows = compared(of.measure(mode_of(of, "2-4")))
    assert all(
        0 < row.values["relative_mse"] < 0.5 for row in rows if row.site.endswith("1:output")
    )
    _, notes, _ = task_values(of, mode_of(of, "2-4"))
    bits = task_oracle(of, "2-1", "2-4")["reference"].mean()
    assert notes["bits_per_byte_reference"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("wanted", ["essential", "mxfp*", "int8,mxfp8", "int9"])
def test_a_reference_is_one_mode(wanted: str) -> None:
    of = bench(LLAMA, reference_mode=wanted)
    words = "'int9'" if wanted == "int9" else r"means \d+ modes .*name one"
    with pytest.raises(QgateError, match=words):
        of.reference_basis()


def test_a_mode_that_looks_at_a_whole_batch_is_a_reference_sample_by_sample() -> None:
    of = bench(LLAMA, Sampling(3, 32, 2, 32), reference_mode="nvfp4")
    model = of.quantized(mode_of(of, "nvfp4")).model
    alone = outer_tensors(model, of.model.inputs, together=False)
    for a, b in zip(of.reference("plain")[LAST], alone[LAST], strict=True):
        assert torch.equal(a, b)


@share(2)
@pytest.mark.parametrize("first", ["measure", "outputs"])
def test_logits_are_the_same_bits_whatever_came_first(first: str) -> None:
    of, other = bench(LLAMA, Sampling(3, 32, 2, 32)), bench(LLAMA, Sampling(3, 32, 2, 32))
    mode = mode_of(of, "mxfp4")
    if first == "measure":
        of.measure(mode)
    for a, b in zip(of.outputs(mode), other.outputs(mode), strict=True):
        assert torch.equal(a, b)


@proof
def test_logits_are_not_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    of = bench(LLAMA, Sampling(2, 32, 2, 32))
    logits_bytes = 2 * 32 * 256 * 4
    monkeypatch.setattr("qgate.gate.measuring.bench._LOGITS", logits_bytes)
    for name in ("int8", "mxfp8"):
        of.measure(mode_of(of, name))
    assert list(of._logits) == ["int8"]
    assert len(of.outputs(mode_of(of, "mxfp8"))) == 2


# Ideals of a declared mode, of healthy and broken canaries, are worked out once ---------------------

OTHER = dataclasses.replace(HEALTHY, rules=(Rule(":(input|weight)$", "mxfp4_e2m1", of="product"),))


def test_the_broken_canary_has_the_ideals_of_the_healthy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, alone = bench(LLAMA, ONE), bench(LLAMA, ONE)
    healthy, broken = (apply(mode, shared.model) for mode in (HEALTHY, BROKEN))
    first = shared.site_errors(healthy, healthy)
    expected = alone.site_errors(broken, healthy)
    work, calls = bench_module.ideal_errors, []
    monkeypatch.setattr(
        bench_module, "ideal_errors", lambda *given: calls.append(given) or work(*given)
    )
    assert shared.site_errors(broken, healthy) == expected
    assert not calls
    assert {row.site for row in first if row.ideal} == {row.site for row in expected if row.ideal}


def test_another_declared_mode_of_the_same_name_has_its_own_ideals() -> None:
    shared, alone = bench(LLAMA, ONE), bench(LLAMA, ONE)
    healthy, other = (apply(mode, shared.model) for mode in (HEALTHY, OTHER))
    shared.site_errors(healthy, healthy)
    assert shared.site_errors(healthy, other) == alone.site_errors(healthy, other)
