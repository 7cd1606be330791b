"""Commands take what they run on from the project's settings, as `pytest suites` does."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qgate.baselines import Candidate, Store, write_candidate
from qgate.cli import _activation_runs, main
from qgate.cli._model_options import add_model_options, setup_of
from qgate.models import Sampling
from tests.baselines.building import ORIGIN, key, recorded
from tests.results.making import record, write

Capsys = pytest.CaptureFixture[str]
OWN = """
import torch
from torch import nn
import qgate

def build(samples, seqlen):
    return qgate.Model(nn.Sequential(nn.Linear(seqlen, 4)), [torch.ones(1, seqlen)] * samples, name="own", layers=("0",))
"""
SETTINGS = """
model = "own_of_settings_test:build"
mode = ["int8", "fp16"]
samples = 3
seqlen = 16
device = "cpu"
calib_samples = 2
percentile_alpha = 0.99
text = "text.txt"
baselines = "kept"
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a model beside its suites; commands run in a folder below it."""
    (tmp_path / "qgate.toml").write_text(SETTINGS)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "own_of_settings_test.py").write_text(OWN)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    return parser.parse_args([*argv])


def test_a_model_setup_is_that_of_the_settings(project: Path) -> None:
    setup = setup_of(parsed())
    assert setup.model == "own_of_settings_test:build"
    assert setup.settings.percentile_alpha == 0.99
    text = project / "text.txt"
    assert setup.sampling == Sampling(samples=3, seqlen=16, calib_samples=2, text=text)


def test_what_is_typed_goes_first() -> None:
    setup = setup_of(parsed("--model", "tiny-llama", "--samples", "7", "--text", "other.txt"))
    assert setup.model == "tiny-llama"
    assert setup.sampling.samples == 7
    assert setup.sampling.seqlen == 16
    assert setup.sampling.text == Path("other.txt")


def test_without_settings_the_defaults_hold(project: Path) -> None:
    (project / "qgate.toml").unlink()
    setup = setup_of(parsed())
    assert (setup.model, setup.device, setup.sampling) == ("tiny-mamba", "cpu", Sampling())


def test_capture_runs_the_modes_of_the_settings_on_their_model(
    project: Path, capsys: Capsys
) -> None:
    (project / "qgate.toml").write_text(SETTINGS.replace('text = "text.txt"', ""))
    assert main(["layers", "capture", "--layers", "all"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["fp32", "int8", "fp16"]
    stats = json.loads(Path("layer_outputs/mode_int8_stats.json").read_text())
    assert (stats["model"], stats["samples"], stats["seqlen"]) == ("own", 3, 16)


def test_several_models_are_a_question(project: Path, capsys: Capsys) -> None:
    (project / "qgate.toml").write_text('model = ["tiny-llama", "tiny-mamba"]')
    assert main(["layers", "capture", "--mode", "int8"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "names 2 models, and this command runs one: give --model tiny-llama or" in error


def test_capture_without_modes_says_how_to_name_them(project: Path, capsys: Capsys) -> None:
    (project / "qgate.toml").unlink()
    assert main(["layers", "capture"]) == 2
    assert "such as --mode 2-1; `qgate show modes` lists them" in capsys.readouterr().err


def test_activations_start_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings_used: dict[str, Any] = {}

    def look(model: object, settings: Any) -> int:
        settings_used.update(
            model=model, samples=settings.data.num_samples, length=settings.data.seq_len
        )
        return 0

    monkeypatch.setattr(_activation_runs, "_dry_run", look)
    assert main(["activations", "--dry-run", "--data.seq_len", "32"]) == 0
    assert settings_used == {"model": "own_of_settings_test:build", "samples": 3, "length": 32}
    assert main(["activations", "--dry-run", "--model", "tiny-llama"]) == 0
    assert settings_used == {"model": "tiny-llama", "samples": 3, "length": 16}


def test_baselines_candidates_and_results_are_those_of_the_project(
    project: Path, capsys: Capsys
) -> None:
    recorded(project / "kept")
    write(project / "qgate-out/results.jsonl", record("a"), record("b", 1.0))
    write_candidate(project / "qgate-out/candidates", Candidate(ORIGIN, "2-1", "a", {key(): 2e-4}))
    assert main(["baselines", "list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["folder"] == str(project / "kept" / "tiny")
    assert main(["baselines", "accept", "--quiet"]) == 0
    assert Store(project / "kept", "tiny").accepted("2-1").values[key()] == 2e-4
    assert main(["report"]) == 0
    assert "1 failed" in capsys.readouterr().out
