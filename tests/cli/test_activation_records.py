"""`qgate activations activations.json`: page and pictures again, without the model and torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qgate.activation_stats.files import write_report
from qgate.activation_stats.settings import ActivationSettings, with_values
from qgate.cli import main
from tests.activation_stats.activation_records import broken, little
from tests.shares import proof

Capsys = pytest.CaptureFixture[str]
FEW = with_values(ActivationSettings(), {"dpi": 40, "output.formats": ["json"]})
_WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Absent())
from qgate.cli import main
sys.exit(main(sys.argv[1:]))
"""


def refusal(capsys: Capsys, *arguments: object) -> str:
    assert main(["activations", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record = little()
    record["settings"] = {"visualization.dpi": 40}
    write_report(record, tmp_path / "figures", FEW)
    return tmp_path / "figures"


@pytest.mark.parametrize("named", ["file", "folder"])
def test_a_record_is_drawn_again_where_it_is(named: str, folder: Path, capsys: Capsys) -> None:
    assert not list(folder.glob("*.png"))
    before = json.loads((folder / "activations.json").read_text())
    target = folder / "activations.json" if named == "file" else folder
    assert main(["activations", str(target)]) == 0
    out = capsys.readouterr().out
    assert "analysis_report.html" in out
    assert "head" in out
    assert list(folder.glob("*.png"))
    assert (folder / "analysis_report.html").is_file()
    assert json.loads((folder / "activations.json").read_text()) == before


@proof
def test_neither_the_model_nor_torch_is_needed(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, "activations", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.glob("*.png"))


def test_report_options_of_the_command_line_replace_those_of_the_record(
    folder: Path, tmp_path: Path, capsys: Capsys
) -> None:
    options = ["--output.formats", "svg,html", "--output.report_name", "other", "--dpi=50"]
    assert main(["activations", str(folder), *options, "--save_dir", str(tmp_path / "again")]) == 0
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert "other.html" in names
    assert any(name.endswith(".svg") for name in names)
    assert not any(name.endswith((".png", ".csv")) for name in names)
    assert not list(folder.glob("*.svg")), "it was to be written elsewhere"
    capsys.readouterr()


def test_the_record_stays_whatever_is_asked_for(folder: Path, capsys: Capsys) -> None:
    assert main(["activations", str(folder), "--output.formats", "png"]) == 0
    assert main(["activations", str(folder), "--output.formats", "html"]) == 0
    assert (folder / "activations.json").is_file()
    assert not list(folder.glob("*.png")), "pictures of an earlier drawing are replaced"
    capsys.readouterr()


def test_values_that_are_not_finite_are_exit_status_1_again(tmp_path: Path, capsys: Capsys) -> None:
    record = broken()
    record["panels"] = {}
    write_report(record, tmp_path, FEW)
    assert main(["activations", str(tmp_path), "--output.formats", "csv"]) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_one_of_several_models_is_named(folder: Path, capsys: Capsys) -> None:
    write_report(little("second"), folder, FEW)
    (folder / "activations.json").rename(folder / "first-activations.json")
    message = refusal(capsys, folder)
    assert "first-activations.json" in message
    assert "second-activations.json" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--outlier.threshold", "3"], ["outlier.threshold", "run the model again", "dpi"]),
        (["--dpy", "3"], ["unknown key 'dpy'", "dpi"]),
        (["--dpi", "many"], ["visualization.dpi 'many'"]),
        (["--dry-run"], ["--dry-run"]),
        (["--model", "tiny-llama"], ["--model"]),
        (["--config", "a.yaml"], ["--config"]),
        (["other"], ["'other'"]),
    ],
)
def test_what_needs_the_model_is_refused(
    options: list[str], words: list[str], folder: Path, capsys: Capsys
) -> None:
    message = refusal(capsys, folder, *options)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no record of activations"]),
        ("[1]", ["no record of activations"]),
        ("[" * 100_000, ["no record of activations"]),
        ('{"kind": "qgate dump analysis 2"}', ["qgate dumps draw"]),
        ('{"kind": "qgate activations 9"}', ["qgate activations 9"]),
        ('{"kind": "qgate activations 2", "layers": []}', ["damaged", "panels"]),
        ('{"kind": "qgate activations 1", "layers": [NaN]}', ["NaN"]),
    ],
)
def test_a_file_that_is_no_record_is_refused(
    text: str, words: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    path = tmp_path / "activations.json"
    path.write_text(text)
    message = refusal(capsys, path)
    assert [word for word in [*words, str(path)] if word not in message] == []


@pytest.mark.parametrize(
    "hurt",
    [
        {"settings": {"visualization.dpi": "many"}},
        {"layers": [{"module": 3}]},
        {"layers": 3},
        {"panels": {"magnitude_input": ["head"]}},
    ],
)
def test_a_record_that_was_changed_by_hand_is_refused(
    hurt: dict[str, Any], folder: Path, capsys: Capsys
) -> None:
    path = folder / "activations.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **hurt}))
    assert str(folder) in refusal(capsys, path)
    assert json.loads(path.read_text())["kind"]


@pytest.mark.parametrize("missing", ["nowhere.json", "nowhere", "."])
def test_a_missing_record_is_reported(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert missing in refusal(capsys, missing)
