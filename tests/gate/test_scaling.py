"""The recommended exponent under the gate: a tie never flips it, a reason does."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate import formats
from qgate.analysis import sweep
from qgate.baselines import Key, Store
from qgate.errors import QgateError
from qgate.gate.measuring import format_rows
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.format_rows import scaling_rows
from qgate.gate.measuring.model_gates import ModelGates
from tests.gate.benches import LLAMA, bench, session

LAYER = "layers.1"
SITE = "model.layers.1.mlp.up_proj:weight"
SUITE = "scaling"
FMT = "hif8"
TENSORS = format_rows._tensors


@pytest.fixture(scope="module")
def of() -> Bench:
    return bench(LLAMA)


def row_at(of: Bench, fmt: str, accepted: float | None = None, tolerance: float = 0.02) -> Any:
    """Sweep one tensor of the layer, not all of them."""
    accepted_exponents = {} if accepted is None else {SITE: accepted}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_rows, "_tensors", lambda *given: {SITE: TENSORS(*given)[SITE]})
        (row,), notes = scaling_rows(of, fmt, LAYER, accepted_exponents, lambda _: tolerance)
    assert notes["exponents"][SITE] == row.values["exponent"]  # type: ignore[index]
    return row


def error_at(of: Bench, fmt: str, exponent: float) -> float:
    """The relative MSE of quantizing the bf16 weight at a scale, without a sweep."""
    x = of.model.module.get_parameter(SITE.replace(":", ".")).detach().bfloat16().double()
    y = formats.quantize(x / 2.0**exponent, fmt) * 2.0**exponent
    return float((y - x).square().sum() / x.square().sum())


def test_without_an_accepted_one_it_is_the_sweeps(of: Bench) -> None:
    row = row_at(of, FMT)
    x = of.model.module.get_parameter(SITE.replace(":", ".")).detach().bfloat16()
    assert row.values["exponent"] == sweep(x, FMT).exponent
    assert row.values["relative_mse"] == pytest.approx(error_at(of, FMT, row.values["exponent"]))
    assert row.why is None
    assert row.gated == ("exponent", "relative_mse")


STEPS = (-8, -3, -2, -1, 1, 2, 3, 8)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "hif8"])
def test_the_accepted_one_stays_as_long_as_it_is_as_good(of: Bench, fmt: str) -> None:
    """By quantizing at both scales directly: 2 % more or less error and it is another one."""
    best = row_at(of, fmt).values["exponent"]
    costs = {step: error_at(of, fmt, best + step) / error_at(of, fmt, best) for step in STEPS}
    as_good = {step: 1 / 1.02 <= cost <= 1.02 for step, cost in costs.items()}
    for step in STEPS:
        row = row_at(of, fmt, best + step)
        chosen_exponent = best + step if as_good[step] else best
        assert row.values["exponent"] == chosen_exponent
        assert row.values["relative_mse"] == pytest.approx(error_at(of, fmt, chosen_exponent))
        more = 10 * math.log10(costs[step])
        words = f"the accepted one now costs {more:.2g} dB more"
        if more < 0:
            words = f"it costs {-more:.2g} dB more than the accepted one"
        why = {"exponent": words}
        assert row.why == (None if as_good[step] else why)
    assert False in as_good.values()
    assert (True in as_good.values()) == (fmt == "fp8_e4m3"), "both cases occur"


@pytest.mark.parametrize("tolerance", [0.0, 0.5, 1.0])
def test_the_tolerance_is_that_of_the_site(of: Bench, tolerance: float) -> None:
    best = row_at(of, FMT).values["exponent"]
    costs = {s: error_at(of, FMT, best + s) / error_at(of, FMT, best) for s in range(-3, 4)}
    tolerated_steps = {
        s for s in costs if row_at(of, FMT, best + s, tolerance).values["exponent"] == best + s
    }
    assert tolerated_steps == {
        s for s, cost in costs.items() if cost * (1 + tolerance) >= 1 and cost <= 1 + tolerance
    }


def test_an_exponent_beyond_the_ends_of_the_sweep_is_tried_all_the_same(of: Bench) -> None:
    x = of.model.module.get_parameter(SITE.replace(":", ".")).detach().bfloat16()
    beyond = max(level["exponent"] for level in sweep(x, "hif8").levels) + 1
    cost = error_at(of, "hif8", beyond) / error_at(of, "hif8", sweep(x, "hif8").exponent)
    cost_distance = max(cost, 1 / cost) - 1
    assert row_at(of, "hif8", beyond, cost_distance + 1e-6).values["exponent"] == beyond
    assert row_at(of, "hif8", beyond, cost_distance - 1e-6).values["exponent"] != beyond


def numbers() -> torch.Tensor:
    """Normal ones in bf16, none below 2^-11 but zeros."""
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    return x.masked_fill(x.abs() < 2**-11, 0.0)


def row_of(
    tensor: torch.Tensor,
    accepted: float,
    same: bool,
    of: Bench,
    patch: pytest.MonkeyPatch,
    fmt: str = FMT,
) -> Any:
    patch.setattr(format_rows, "_tensors", lambda _of, _layer: {SITE: tensor})
    (scaling_row,), _ = scaling_rows(of, fmt, LAYER, {SITE: accepted}, lambda _: 1e-4, same)
    return scaling_row


def test_by_other_arithmetic_the_end_of_a_sweep_may_move_by_a_step(
    of: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest number of a tensor says at which scale nothing saturates."""
    fmt = "fp8_e4m3"
    tensors = [numbers() for _ in range(3)]
    for x, largest in zip(tensors, (7.0, 7.5, 15.0), strict=True):
        x[0, 0] = largest  # 448, 480 and 960 sixty-fourths
    ends = [float(sweep(swept_tensor, fmt).exponent) for swept_tensor in tensors]
    assert ends == [-6.0, -5.0, -4.0], "the largest number decides"

    def row(tensor: torch.Tensor, accepted: float, same: bool) -> Any:
        return row_of(tensor, accepted, same, of, monkeypatch, fmt)

    for now in (1, 2):
        assert row(tensors[now], ends[now - 1], True).values["exponent"] == ends[now]
        accepted_row = row(tensors[now], ends[now - 1], False)
        assert accepted_row.values["exponent"] == ends[now - 1]
        assert accepted_row.why is None
    assert row(tensors[2], ends[0], False).values["exponent"] == ends[2], "two steps are none"


def test_by_other_arithmetic_what_is_best_inside_a_sweep_stays_so(
    of: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = numbers()
    swept = sweep(x, FMT)
    levels = [level["exponent"] for level in swept.levels]
    assert min(levels) < swept.exponent - 3
    assert swept.exponent + 3 < max(levels)
    for step in (-3, -2, -1, 1, 2, 3):
        for same in (True, False):
            row = row_of(x, swept.exponent + step, same, of, monkeypatch)
            assert row.values["exponent"] == swept.exponent, (step, same)


def test_a_tensor_of_zeros_has_no_scale(of: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learned queries of a detector begin as zeros."""
    zeros = torch.zeros(4, 32)
    monkeypatch.setattr(
        format_rows, "_tensors", lambda *_: {"of.zeros:input": zeros, SITE: zeros + 1}
    )
    rows, notes = scaling_rows(of, "mxfp8_e4m3", LAYER)
    assert [row.site for row in rows] == [SITE]
    assert notes["scale of of.zeros:input"] == "all zeros: every scale is exact"
    monkeypatch.setattr(format_rows, "_tensors", lambda *_: {SITE: zeros})
    with pytest.raises(QgateError, match=f"all tensors of {LAYER} are zeros"):
        scaling_rows(of, FMT, LAYER)


def test_offsets_of_blocks_are_held_likewise(of: Bench) -> None:
    x = of.model.module.get_parameter(SITE.replace(":", ".")).detach().bfloat16()
    swept = sweep(x, "mxfp4_e2m1", granularity="block")
    errors = {level["exponent"]: level["metrics"]["relative_mse"] for level in swept.levels}
    for offset, error in errors.items():
        row = row_at(of, "mxfp4_e2m1", offset)
        is_as_good = 1 / 1.02 <= error / errors[swept.exponent] <= 1.02
        assert row.values["exponent"] == (offset if is_as_good else swept.exponent)


# The gate -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("scaling")
    gates = session(folder, updating="all")
    assert gates.scaling(SUITE, FMT, LAYER).passed
    gates.commit()
    return folder


def accepted(folder: Path) -> float:
    baseline = Store(folder, LLAMA).accepted(FMT)
    assert baseline is not None
    return baseline.values[Key(SUITE, SITE, "sweep", "exponent")]


def with_weight(
    folder: Path, factor: float, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> ModelGates:
    """The same baseline, and a capture in which one weight is that many times as large."""
    gates = session(folder, **more)
    plain = format_rows._tensors

    def captured(bench: Bench, layer: str) -> dict[str, torch.Tensor]:
        tensors = copy.copy(plain(bench, layer))
        tensors[SITE] = tensors[SITE] * factor
        return tensors

    monkeypatch.setattr(format_rows, "_tensors", captured)
    return gates


def test_healthy_exponents_pass(recorded: Path, of: Bench) -> None:
    assert session(recorded).scaling(SUITE, FMT, LAYER).passed
    assert accepted(recorded) == row_at(of, FMT).values["exponent"]


def test_a_tensor_that_grew_fails_with_its_exponent_and_can_be_accepted(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(recorded, tmp_path / "own")
    before = accepted(own)
    outcome = with_weight(own, 2.0**9, monkeypatch).scaling(SUITE, FMT, LAYER)
    assert outcome.text.startswith(
        f"exponent {before + 9:g} instead of {before:g} at {SITE} (format {FMT}): "
    )
    assert "dB more" in outcome.text.splitlines()[0]
    assert "--update-baselines" in outcome.text
    (check,) = outcome.verdict.failed
    assert (check.metric, check.kind) == ("exponent", "regression")
    monkeypatch.undo()
    updated_gates = with_weight(own, 2.0**9, monkeypatch, updating="failed")
    assert updated_gates.scaling(SUITE, FMT, LAYER).passed
    updated_gates.commit()
    assert accepted(own) == before + 9
    monkeypatch.undo()
    assert with_weight(own, 2.0**9, monkeypatch).scaling(SUITE, FMT, LAYER).passed


def test_a_tensor_that_became_zeros_is_missed(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = with_weight(recorded, 0.0, monkeypatch).scaling(SUITE, FMT, LAYER)
    assert outcome.text.startswith(f"not measured at {SITE} (format {FMT}): it has accepted errors")


def test_noise_between_two_that_are_as_good_changes_nothing(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the equally good exponents the sweep prefers, the accepted one is reported."""
    gates = session(recorded)
    plain, best = format_rows.sweep, accepted(recorded)

    def prefers_another(*args: Any, **kwargs: Any) -> Any:
        swept = plain(*args, **kwargs)
        best_error = swept.recommended["metrics"]["relative_mse"]
        near = [
            index
            for index, level in enumerate(swept.levels)
            if level["integer"]
            and level["exponent"] != swept.exponent
            and abs(level["metrics"]["relative_mse"] / best_error - 1) < 0.015
        ]
        if near:
            moved.append(swept.exponent)
            swept.record["advice"]["recommended"] = near[0]
        return swept

    moved: list[float] = []
    monkeypatch.setattr(format_rows, "sweep", prefers_another)
    outcome = gates.scaling(SUITE, FMT, LAYER)
    assert moved, "some tensors have exponents that are as good"
    assert outcome.passed, outcome.text
    assert accepted(recorded) == best
