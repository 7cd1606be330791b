"""Runs of `pytest suites`: outcomes, exit codes and the texts that people read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.plugin.conftest import Run
from tests.plugin.projects import SITE, files, gist, records, tightened
from tests.shares import proof

AGAIN = "--samples 2 --seqlen 64 --calib-samples 2 --calib-seqlen 64"
FAILING = "test_layer_outputs?tiny-llama-int8-layers.1?"


def test_a_green_run_and_its_records(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project / "summary.md"))
    before = files(project)
    result = suites("--model", "tiny-llama", "--model", "tiny-mamba", "--junitxml=junit.xml")
    result.assert_outcomes(passed=12)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["qgate: *mode int8*", "*qgate: tiny-llama on cpu, tiny-mamba on cpu*"]
    )
    result.stdout.fnmatch_lines(
        [
            "12 gates passed: mode int8 of tiny-llama, tiny-mamba; *",
            "*report in qgate-out/report.html",
        ]
    )
    assert files(project) == before, "only an update writes"

    header, *rows = records(project)
    assert "site" not in header
    assert set(header["models"]) == {"tiny-llama", "tiny-mamba"}
    assert (header["modes"], header["reference"]) == (["int8"], "fp32")
    assert set(header["plans"]) == {"tiny-llama int8", "tiny-mamba int8"}
    assert (
        "int8 per token" in header["plans"]["tiny-llama int8"]["model.layers.0.mlp.up_proj:input"]
    )
    assert (header["device"], header["seed"], header["complete"]) == ("cpu", 0, True)
    assert {limit["model"] for limit in header["limits"]} == {"tiny-llama", "tiny-mamba"}
    assert {row["model"] for row in rows} == {"tiny-llama", "tiny-mamba"}
    assert {row["scope"] for row in rows} == {"local", "carried", "isolated", "task"}
    assert all(row["passed"] and row["checks"] for row in rows)
    with (project / "qgate-out" / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) >= len(rows)
    cases = list(ElementTree.parse(project / "junit.xml").iter("testcase"))
    assert len(cases) == 12
    for case in cases:
        names = {element.get("name") for element in case.iter("property")}
        assert {"qgate model", "qgate mode", "qgate layer"} <= names
    assert "## qgate" in (project / "summary.md").read_text()


def test_the_first_line_of_a_failure_and_what_to_do(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tightened(project)
    before = files(project)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = suites("-rf")
    monkeypatch.delenv("GITHUB_ACTIONS")
    result.assert_outcomes(passed=5, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    first = f"relative_mse * > * at {SITE} (mode int8): 10x accepted"
    result.stdout.fnmatch_lines(
        [
            f"*{FAILING}*",
            first,
            f"  if intended: pytest suites {AGAIN} --model tiny-llama --mode int8 --update-baselines",
        ]
    )
    words = f"FAILED {SITE} (tiny-llama, mode int8) *"
    result.stdout.fnmatch_lines([f"{words} - suites/test_layer_outputs.py::{FAILING}"])
    result.stdout.fnmatch_lines([f"::error *::*{SITE}*"])
    assert files(project) == before
    assert list((project / "qgate-out" / "candidates").iterdir())
    (reproduction,) = (project / "qgate-out" / "repro").iterdir()
    assert reproduction.name == f"{SITE.replace(':', '.')}.int8"
    result.stdout.fnmatch_lines([f"  again: python *{reproduction.name}/run.py"])
    (row,) = (row for row in records(project) if "site" in row and not row["passed"])
    assert (row["site"], row["scope"], row["layer"]) == (SITE, "local", "layers.1")

    serial = gist(project)
    result = suites("-n", "2", alone=True)
    result.assert_outcomes(passed=5, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([first])
    assert gist(project) == serial, "the same verdicts and records, however they are distributed"


@proof
def test_an_update_says_what_it_would_write_and_then_writes_it(project: Path, suites: Run) -> None:
    old = tightened(project)
    before = files(project)
    result = suites("--update-dry-run")
    assert result.ret == pytest.ExitCode.TESTS_FAILED, "it judges as if nothing were updated"
    change = f"*int8.txt: layer_outputs {SITE} local relative_mse: {old / 10:.4g} -> {old:.4g}"
    result.stdout.fnmatch_lines(["baselines: 1 entries would change", change])
    assert files(project) == before

    result = suites("--update-baselines", "-v")
    assert result.parseoutcomes() == {"passed": 5, "updated": 1}
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([f"*{FAILING} UPDATED*"])
    summary = f"  tiny-llama int8: 1 worse, up to 10x ({SITE} relative_mse)"
    result.stdout.fnmatch_lines(["baselines: 1 entries written", summary, change])
    after = files(project)
    assert {name for name in before if before[name] != after[name]} == {
        "tiny-llama/accepted/int8.txt"
    }
    suites().assert_outcomes(passed=6)


def test_without_a_baseline_nothing_passes(project: Path, suites: Run) -> None:
    result = suites("--baselines", "elsewhere", "--layers", "first,last")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "3 tests have no accepted errors yet; -v names all",
            f"  to record it: pytest suites --layers first,last --baselines elsewhere {AGAIN} --model tiny-llama --mode int8 --update-baselines",
        ]
    )
    assert not (project / "elsewhere").exists()


def test_set_up_that_does_not_fit_the_baseline_is_an_error(project: Path, suites: Run) -> None:
    result = suites("--samples", "3", "--layers", "first")
    result.assert_outcomes(errors=1, deselected=5)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*the baseline was made with 2 samples, and there are 3 now (--samples 2)*"]
    )
    manifest = project / "baselines" / "tiny-llama" / "manifest.json"
    manifest_data = json.loads(manifest.read_text())
    text = json.dumps(manifest_data)
    weights = (
        manifest_data["origin"]["weights"]
        if "origin" in manifest_data
        else manifest_data["weights"]
    )
    manifest.write_text(text.replace(weights, "0" * len(weights)))
    result = suites("--layers", "first")
    result.assert_outcomes(errors=1, deselected=5)
    result.stdout.fnmatch_lines(["*the baseline was made with other weights (000000000000*"])


@proof
def test_another_reference(suites: Run) -> None:
    result = suites("--reference", "fp16", "--mode", "int8,fp16", "--layers", "first")
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    result.assert_outcomes(failed=2, deselected=4)  # the reference is not compared with itself
