"""What gates leave to be drawn: which rows carry it, and that it is of the tensors compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qgate import formats
from qgate.dumps.gate import DumpGates, DumpSubject
from qgate.gate import Limits, Measured, Policy, Verdict, judge
from qgate.gate.measuring import site_errors as comparisons
from qgate.gate.measuring.format_rows import overflow_rows, scaling_rows
from qgate.gate.sessions import MOST_DRAWN, record_rows
from qgate.results.pictures import PLOTS, Plots
from tests.dumps.gated import write_dump
from tests.gate.benches import LLAMA, MAMBA, bench, mode_of, session
from tests.shares import proof, share

PICTURE = {"kind": "magnitudes", "low": 0, "counts": [1]}


def judged(*errors: float) -> Verdict:
    """Sites with an accepted relative MSE of 1, which all can be drawn."""
    rows = [
        Measured(
            site=f"s{at}", layer="layers.0", scope="carried", values={"relative_mse": error}, gated=("relative_mse",),
            order=at, nonfinite=0, accepted={"relative_mse": 1.0}, pictures=(PICTURE,),
        )
        for at, error in enumerate(errors)
    ]  # fmt: skip
    return judge(rows, lambda _: Limits(), True)


def carrying(verdict: Verdict, plots: Plots) -> list[str]:
    rows = record_rows("suite", "tiny", "int8", "layers.0", verdict, verdict.failed, plots)
    return [row["site"] for row in rows if "pictures" in row]


def test_rows_that_failed_can_be_drawn_else_the_one_nearest_its_limit() -> None:
    green, red = judged(0.5, 0.99, 0.7), judged(0.5, 3.0, 0.99, 2.0)
    choices = {plots: (carrying(green, plots), carrying(red, plots)) for plots in PLOTS}
    assert choices == {
        "none": ([], []),
        "failed": ([], ["s1", "s3"]),
        "worst": (["s1"], ["s1", "s3"]),
        "all": (["s1"], ["s1", "s3"]),
    }


def test_of_many_failures_the_worst_can_be_drawn() -> None:
    errors = [2.0 + at for at in range(3 * MOST_DRAWN)]
    assert carrying(judged(*errors), "failed") == [
        f"s{at}" for at in range(2 * MOST_DRAWN, 3 * MOST_DRAWN)
    ]


def test_what_cannot_be_drawn_has_no_key() -> None:
    (row,) = judged(0.5).measured
    verdict = judge([replace(row, pictures=())], lambda _: Limits(), True)
    assert carrying(verdict, "all") == []


@share(4)
@pytest.mark.parametrize(("model", "mode"), [(LLAMA, "int8"), (MAMBA, "2-1")])
def test_errors_are_drawn_of_every_element_compared(model: str, mode: str) -> None:
    of = bench(model, layers=2, pictures=True)
    rows = of.measure(mode_of(of, mode))
    outputs = of.reference(mode_of(of, mode).basis).tensors
    for row in rows:
        if row.scope == "isolated" or not row.values:
            assert row.conformance or row.scope == "isolated"
            assert row.pictures == ()
            continue
        (picture,) = row.pictures
        assert picture["kind"] == "errors"
        assert picture["elements"] == picture["sampled"] == sum(picture["octaves"]["elements"])
        if row.scope == "carried":
            assert picture["elements"] == sum(t.numel() for t in outputs[row.site])
        relative = row.values["relative_mse"]
        assert (picture["bins"]["edge"] > 0) == (relative > 0)
        assert picture["channel_count"] > 1
    quantized = [row for row in rows if row.scope == "local" and row.quantizer]
    sizes = sorted(len(json.dumps(row.pictures, separators=(",", ":"))) for row in quantized)
    assert sizes[len(sizes) // 2] < 4096, "records stay small"


@proof
def test_nothing_is_computed_for_what_nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(comparisons, "error_picture", never)
    of = bench(layers=2)
    assert all(row.pictures == () for row in of.measure(mode_of(of, "int8")))
    assert all(row.pictures == () for row in of.gradients(mode_of(of, "int8")))


def without_pictures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "pictures"} for row in rows]


@proof
def test_no_verdict_depends_on_what_is_drawn(tmp_path: Path) -> None:
    sessions = {plots: session(tmp_path, layers=2, plots=plots) for plots in ("none", "all")}
    gates: list[Any] = []
    for of in sessions.values():
        mode, layer = mode_of(of.bench, "int8"), of.bench.layers[0]
        gates.append(
            [
                of.layer("layers", mode, layer),
                of.gradients("gradients", mode, layer),
                of.scaling("scaling", "fp8_e4m3", layer),
                of.overflow("overflow", "fp8_e4m3", layer, "forward"),
                of.canary("canary"),
            ]
        )
    for plain, with_pictures in zip(*gates, strict=True):
        assert plain.text == with_pictures.text
        assert plain.record["rows"] == without_pictures(with_pictures.record["rows"])
        assert any("pictures" in row for row in with_pictures.record["rows"])


def test_a_sweep_is_drawn_with_what_it_recommends_and_what_was_accepted() -> None:
    of = bench(layers=2, pictures=True)
    layer = of.layers[0]
    rows, _ = scaling_rows(of, "fp8_e4m3", layer)
    site = rows[0].site
    exponent = rows[0].values["exponent"]
    assert exponent is not None
    lower_rows, _ = scaling_rows(of, "fp8_e4m3", layer, {site: exponent - 30})
    for row, accepted in ((rows[0], None), (lower_rows[0], exponent - 30)):
        (picture,) = row.pictures
        assert (picture["kind"], picture["format"]) == ("sweep", "fp8_e4m3")
        assert (picture["recommended"], picture["accepted"]) == (exponent, accepted)
        levels = dict(picture["levels"])
        assert levels[exponent] == rows[0].values["relative_mse"]
        assert accepted is None or accepted in levels
        assert [at for at, _ in picture["levels"]] == sorted(levels)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "mxfp4_e2m1", "int8"])
def test_magnitudes_are_counted_with_what_a_format_loses(fmt: str, phase: str) -> None:
    of = bench(layers=2, pictures=True)
    for row in overflow_rows(of, fmt, of.layers[0], phase):
        (picture,) = row.pictures
        total = sum(picture["counts"]) + picture["zeros"] + picture["nonfinite"]
        assert picture["format"] == fmt
        assert row.grain == 1 / total
        for name in ("saturated", "flushed"):
            assert row.values[f"{name}_share"] == picture[name] / total
        assert (picture["largest"] is None) == (fmt != "fp8_e4m3")


def test_dumps_are_drawn_from_their_counts(tmp_path: Path) -> None:
    write_dump(tmp_path / "dump")
    subject = DumpSubject(tmp_path / "dump", "dump-made")
    gates = DumpGates(subject, tmp_path / "baselines", Policy(), plots="worst")
    layer = gates.layers("overflow")[0]
    fmt = formats.get("fp8_e4m3").name
    for outcome, named in (
        (gates.overflow("overflow", fmt, layer), fmt),
        (gates.distributions("distributions", layer), ""),
    ):
        drawn_rows = [row for row in outcome.record["rows"] if "pictures" in row]
        assert drawn_rows
        for row in drawn_rows:
            (picture,) = row["pictures"]
            assert (picture["kind"], picture["format"]) == ("magnitudes", named)
            total = sum(picture["counts"]) + picture["zeros"] + picture["nonfinite"]
            if named:
                for name in ("saturated", "flushed"):
                    assert picture[name] / total == pytest.approx(row["values"][f"{name}_share"])
