"""Another plan: one sentence in a run, and no update of it without --accept-plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgate.baselines import Store
from qgate.cli import main
from tests.plugin.conftest import Run
from tests.plugin.projects import files
from tests.shares import proof

FIRST_LAYER = ("--mode", "mine", "--layers", "first")
TWO_LAYERS = ("--mode", "mine", "--layers", "first,last")


def plan(project: Path, *rules: str) -> None:
    listed = ", ".join(f"Rule({rule})" for rule in rules)
    (project / "conftest.py").write_text(
        "from qgate.modes import Mode, Rule\ndef pytest_qgate_modes(config):\n"
        f"    return [Mode('mine', 'x', rules=({listed},))]\n"
    )


@pytest.fixture
def changed(project: Path, suites: Run) -> Path:
    """A project whose mode was recorded in one format and has another one now."""
    plan(project, "':weight$', 'mxfp4_e2m1'")
    assert suites(*TWO_LAYERS, "--update-baselines").ret == pytest.ExitCode.OK
    assert suites(*TWO_LAYERS).ret == pytest.ExitCode.OK
    plan(project, "':weight$', 'mxfp8_e4m3'")
    return project


def quantizers(project: Path) -> set[str]:
    accepted = Store(project / "baselines", "tiny-llama").accepted("mine")
    assert accepted is not None
    return {str(v) for key, v in accepted.values.items() if key.metric == "quantizer"}


@proof
def test_it_is_one_sentence_and_an_update_asks_for_it(changed: Path, suites: Run) -> None:
    before = files(changed)
    assert {text.split()[0] for text in quantizers(changed)} == {"mxfp4_e2m1"}
    failed = suites(*TWO_LAYERS)
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    lines = [line for line in failed.stdout.lines if line.startswith("cause: the plan changed")]
    (line,) = lines
    assert line.startswith("cause: the plan changed: mxfp4_e2m1")
    assert "accepted, mxfp8_e4m3" in line
    assert "sites of tiny-llama, mode mine" in line
    assert not [line for line in failed.stdout.lines if line.startswith("failed: ") and " quantizer" in line]  # fmt: skip
    refused = suites(*TWO_LAYERS, "--update-baselines")
    assert refused.ret == pytest.ExitCode.TESTS_FAILED
    refused.stdout.fnmatch_lines(["*an update without --accept-plan writes nothing of this gate*"])
    refused.stdout.fnmatch_lines(["*if intended: pytest *--mode mine --update-baselines --accept-plan*"])  # fmt: skip
    assert {text.split()[0] for text in quantizers(changed)} == {"mxfp4_e2m1"}
    name = "tiny-llama/accepted/mine.txt"
    old, new = (text[name].decode().splitlines() for text in (before, files(changed)))
    assert [line for line in new if line.startswith("layer_outputs")] == [
        line for line in old if line.startswith("layer_outputs")
    ]
    update_flags = ("--update-baselines", "--accept-plan")
    assert suites(*TWO_LAYERS, *update_flags).ret == pytest.ExitCode.OK
    assert {text.split()[0] for text in quantizers(changed)} == {"mxfp8_e4m3"}
    assert suites(*TWO_LAYERS).ret == pytest.ExitCode.OK


@proof
def test_candidates_of_another_plan_are_refused_without_the_option(
    changed: Path, suites: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(changed)
    assert suites(*FIRST_LAYER).ret == pytest.ExitCode.TESTS_FAILED
    monkeypatch.chdir(changed)
    capsys.readouterr()
    assert main(["baselines", "accept", "--mode", "mine"]) == 1
    refused = capsys.readouterr().err
    assert "the plan changed: mxfp4_e2m1" in refused
    assert "accept it with --accept-plan" in refused
    layer = "layer_outputs        model.layers.0"
    accepted = files(changed)["tiny-llama/accepted/mine.txt"].decode().splitlines()
    old = before["tiny-llama/accepted/mine.txt"].decode().splitlines()
    assert [line for line in accepted if line.startswith(layer)] == [
        line for line in old if line.startswith(layer)
    ]
    assert main(["baselines", "accept", "--mode", "mine", "--accept-plan"]) == 0
    assert {text.split()[0] for text in quantizers(changed)} == {"mxfp4_e2m1", "mxfp8_e4m3"}
    assert suites(*FIRST_LAYER).ret == pytest.ExitCode.OK


@proof
def test_a_plan_that_covers_less_is_no_improvement(project: Path, suites: Run) -> None:
    weights, inputs = "':weight$', 'int8', per='row'", "'mlp.*:input$', 'int8', per='row'"
    plan(project, weights, inputs)
    assert suites(*FIRST_LAYER, "--update-baselines").ret == pytest.ExitCode.OK
    assert suites(*FIRST_LAYER).ret == pytest.ExitCode.OK
    plan(project, weights)
    result = suites(*FIRST_LAYER)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    change = "int8 per token accepted, nothing found, at 3 of 10 sites"
    result.stdout.fnmatch_lines(
        [
            f"{change}, first *mlp.*:input (mode mine)*",
            f"cause: the plan changed: {change} of tiny-llama, mode mine, first *mlp.*:input*",
        ]
    )
    plan(project, weights, "'mlp.*:input$', 'bf16'")
    assert suites(*FIRST_LAYER).ret == pytest.ExitCode.TESTS_FAILED
