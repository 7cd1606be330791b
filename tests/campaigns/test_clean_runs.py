"""A small share of the clean runs, that their kernels are correct, and that a run can be red."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.campaigns import clean_runs
from tests.campaigns.clean_runs import ARITHMETIC, ROOT, Way, earlier, made, nearest
from tests.shares import proof

MODES = {0: {"tiny-llama": ["mxfp4", "int8"], "tiny-mamba": ["2-1"]}}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> object:
    """The other kernels; torch has its own ones again after the test."""
    for name in ("linear", "scaled_dot_product_attention"):
        monkeypatch.setattr(functional, name, getattr(functional, name))
    monkeypatch.setenv("QGATE_TEST_ARITHMETIC", "own")
    from tests.campaigns import other_arithmetic

    return other_arithmetic


@proof
def test_a_clean_run_is_green(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    log = tmp_path / "clean.jsonl"
    number = random.Random(pytestconfig.option.case_seed).randrange(1, 1000)
    options = ["--count", "1", "--first", str(number), "--seed", "1", "--log", str(log)]
    command = [sys.executable, "-m", "tests.campaigns.clean_runs", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 clean runs, 0 red, seed 1" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    runs = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [run["way"]["number"] for run in runs] == [number]
    assert all(0 < max(times for times, _ in run["nearest"].values()) <= 1 for run in runs)


@proof
def test_a_run_that_leaves_no_results_is_red() -> None:
    way = replace(Way.drawn(1, 1, MODES), arithmetic="unknown", processes=0)
    run = made(way, sys.executable)
    assert run["status"] != 0
    assert "KeyError: 'unknown'" in run["text"]


def test_all_kinds_are_drawn() -> None:
    ways = [Way.drawn(number, 3, MODES) for number in range(300)]
    assert {way.arithmetic for way in ways} == set(ARITHMETIC)
    assert {way.instructions for way in ways} == set(clean_runs.INSTRUCTIONS)
    assert {(way.model, way.mode) for way in ways} == {
        (model, mode) for model, modes in MODES[0].items() for mode in modes
    }
    mamba = {way.arithmetic for way in ways if way.model == "tiny-mamba"}
    assert "eager-attention" not in mamba, "it has no attention"


def test_served_modes_are_drawn_with_relations() -> None:
    modes = {0: {"tiny-llama": ["kv-fp8"], "tiny-moe": ["experts-fp8"]}}
    ways = [Way.drawn(number, 3, modes, served=True) for number in range(200)]
    related = [way for way in ways if "relations" in way.suites]
    assert 60 < len(related) < 140
    assert {way.arithmetic for way in related} == {"own"}, "another process has no other kernels"
    assert {way.arithmetic for way in ways} == set(ARITHMETIC)


def test_later_runs_draw_from_more_modes_and_earlier_ones_stay() -> None:
    tables = clean_runs.all_modes(served=True)
    ways = [Way.drawn(number, 27, tables, served=True) for number in range(1, 201)]
    kinds = [way.mode.partition("-")[0] for way in ways]
    assert set(kinds[:54]) == {"kv", "attn", "experts"}
    assert set(kinds[54:]) == {"kv", "attn", "experts", "served", "state"}
    related = {way.mode for way in ways if "relations" in way.suites}
    assert {mode for mode in related if "nvfp4" in mode} == {"kv-nvfp4"}, "a scale per token"
    recorded = [(way.mode, way.threads, way.order) for way in (ways[0], ways[53])]
    assert recorded == [("kv-fp8-token", 3, 644097), ("experts-mxfp4", 2, 556540)]


def test_runs_of_the_log_are_not_made_again(tmp_path: Path) -> None:
    log = tmp_path / "clean.jsonl"
    ways = [clean_runs.asdict(Way.drawn(number, 1, MODES)) for number in (1, 2, 3)]
    ways[2]["mode"] = "another one"
    lines = [json.dumps({"way": way, "nearest": {}}) for way in ways]
    log.write_text("\n".join([*lines, '{"way": {"numb']), encoding="utf-8")
    assert sorted(earlier(log, 1, MODES)) == [1, 2]
    assert earlier(tmp_path / "none.jsonl", 1, MODES) == {}


def test_the_nearest_check_of_each_kind_is_kept() -> None:
    checks = [
        {"site": site, "scope": "local", "kind": "budget", "metric": "relative_mse", "times": times}
        for site, times in (("a", 0.5), ("b", 0.9), ("c", None))
    ]
    record = {"suite": "outputs", "model": "m", "mode": "int8", "checks": checks}
    assert nearest([{"header": 1}, record]) == {
        "outputs local budget relative_mse": (0.9, "m int8 b")
    }


@pytest.mark.parametrize("kind", ["split-sums", "last-bits"])
def test_linear_layers_differ_by_rounding_alone(kernels: object, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 96, generator=generator).requires_grad_()
    weight, bias = (torch.randn(*s, generator=generator) for s in ((17, 96), (17,)))
    exact = x.double() @ weight.double().T + bias.double()
    own = functional.linear(x, weight, bias)
    kernels.KINDS[kind]()  # type: ignore[attr-defined]
    other = functional.linear(x, weight, bias)
    assert not torch.equal(other, own)
    assert (other - exact).abs().max() < 1e-5 * exact.abs().max()
    assert torch.equal(functional.linear(x, weight, bias), other), "the same again"
    other.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))


def test_parts_of_half_precision_are_added_in_float32(kernels: object) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).bfloat16() for s in ((33, 96), (17, 96)))
    exact = x.double() @ weight.double().T
    kernels.KINDS["split-sums"]()  # type: ignore[attr-defined]
    y = functional.linear(x, weight)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, exact.float().bfloat16()), "rounded once"


@pytest.mark.parametrize("causal", [True, False])
def test_eager_attention_is_attention(kernels: object, causal: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()
    fused = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    kernels.KINDS["eager-attention"]()  # type: ignore[attr-defined]
    eager = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(eager, fused)


@proof
def test_numbers_below_the_normal_ones_are_flushed() -> None:
    code = (
        "import torch, tests.campaigns.other_arithmetic\nprint(float(torch.tensor([1e-40]) * 1.0))"
    )
    values = {}
    for kind in ("own", "flushed"):
        environment = {**os.environ, "QGATE_TEST_ARITHMETIC": kind, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        values[kind] = float(done.stdout)
    assert values["flushed"] == 0
    assert math.isclose(values["own"], 1e-40, rel_tol=1e-3)
