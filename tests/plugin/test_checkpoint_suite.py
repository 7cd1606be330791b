"""`pytest suites --checkpoint CHILD --parent PARENT`: what is selected, said and stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qgate.cli import main
from tests.checkpoints.faults import UP
from tests.checkpoints.gated import double_scales, planted, write_pair
from tests.checkpoints.test_calibrated_scales import dump_of
from tests.plugin.projects import add, files, records
from tests.plugin.subjects import SUBJECTS, Gates, Subject
from tests.shares import proof

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")
PAIR, ALL = SUBJECTS["checkpoint"].options, SUBJECTS["checkpoint"].count
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def subject() -> Subject:
    return SUBJECTS["checkpoint"]


def test_a_record_is_made_and_gates(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("qgate.modes.setups.ModelSetup.load", refused)
    result = gates(*PAIR)
    result.assert_outcomes(failed=3, passed=2)
    result.stdout.fnmatch_lines(
        [
            "qgate: *checkpoint child as child*",
            "3 tests have no accepted errors yet; -v names all",
            "  to record it: pytest suites/test_checkpoint.py --checkpoint child --parent parent --up*",
            "*qgate: child on cpu*",
        ]
    )
    result = gates(*PAIR, "--update-baselines")
    assert result.parseoutcomes() == {"updated": 3, "passed": 2}
    assert files(house).keys() == {
        "child/manifest.json", "child/accepted/weights.txt", "child/accepted/recipe.txt",
    }  # fmt: skip
    result = gates(*PAIR, "-v")
    result.assert_outcomes(passed=ALL)
    result.stdout.fnmatch_lines(["*test_checkpoint_weights?model.layers.0? PASSED*"])
    assert "unused" not in result.stdout.str()
    _, *rows = records(house)
    assert {row["model"] for row in rows} == {"child"}
    assert {row["scope"] for row in rows} == {"checkpoint"}
    assert {row["mode"] for row in rows} == {"weights", "accounting", "recipe"}
    gates(*PAIR, "--layers", "first").assert_outcomes(passed=3, deselected=2)


@pytest.mark.usefixtures("accepted")
def test_accepted_errors_beside_a_parent_need_one(gates: Gates) -> None:
    result = gates("--checkpoint", "child")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*the accepted errors of child are beside a parent: give --parent*"]
    )


@pytest.mark.usefixtures("accepted")
def test_a_finding_is_recorded_and_never_accepted(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(house / "child", house / "bad", double_scales)
    before = files(house)
    options = ("--checkpoint", "bad", "--parent", "parent", "--checkpoint-name", "child")
    result = gates(*options, "--update-baselines")
    assert result.parseoutcomes() == {"failed": 1, "passed": ALL - 1}
    result.stdout.fnmatch_lines(
        ["*all scales are 2 times *worse than ideal (+2 more failed checks)"]
    )
    (failed,) = (row for row in records(house)[1:] if not row["passed"])
    assert failed["site"] == f"{UP}.weight"
    assert failed["finding"]["fault"] == "all scales are 2 times too high"
    monkeypatch.chdir(house)
    assert main(["baselines", "accept"]) != 0 or files(house) == before
    assert files(house) == before


def test_a_recipe_file_says_what_was_meant(house: Path, gates: Gates) -> None:
    (house / "R.yaml").write_text("targets: {Linear: {format: int8, granularity: tensor}}")
    result = gates(*PAIR, "--recipe", "R.yaml")
    result.stdout.fnmatch_lines(["*it is int8 per row, and the recipe declares int8 per tensor*"])


def test_a_calibration_is_of_static_scales_and_of_a_checkpoint(house: Path, gates: Gates) -> None:
    dump = str(dump_of(house / "dump", prefix="model."))
    result = gates(*PAIR, "--checkpoint-calibration", dump)
    assert "child has no static scale of activations" in result.stderr.str()
    result = gates("--checkpoint-calibration", dump)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        f"--checkpoint-calibration '{dump}' is of a checkpoint: give --checkpoint"
        in result.stderr.str()
    )


def test_a_file_is_called_after_itself(house: Path, gates: Gates) -> None:
    (house / "child" / "model.safetensors").rename(house / "child" / "W8 of mine.safetensors")
    result = gates(
        "--checkpoint", "child/W8 of mine.safetensors", "--parent", "parent", "--update-baselines"
    )
    assert result.parseoutcomes() == {"updated": 3, "passed": 2}
    assert (house / "baselines" / "w8-of-mine").is_dir()


def test_it_lives_beside_models_in_one_folder(
    project: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    add(project, "test_checkpoint.py")
    write_pair(project)
    before = files(project)
    at = "suites/test_checkpoint.py"
    update = pytester.runpytest_inprocess(at, *PAIR, "--update-baselines")
    assert update.ret == pytest.ExitCode.OK
    assert {name: data for name, data in files(project).items() if name in before} == before
    monkeypatch.chdir(project)
    capsys.readouterr()
    pruned = ["prune", "--model", "child"]
    for verb in (["verify"], ["list"], pruned, ["verify"]):
        assert main(["baselines", *verb]) == 0, capsys.readouterr()
    assert "child" in capsys.readouterr().out
    remaining = {
        name: data for name, data in files(project).items() if name != "child/manifest.json"
    }
    assert remaining == before


@proof
@pytest.mark.usefixtures("accepted")
def test_shards_merge_to_the_whole_run(
    house: Path, gates: Gates, tmp_path: Path, capsys: Capture
) -> None:
    for number in (1, 2):
        assert gates(*PAIR, "--shard", f"{number}/2").ret == pytest.ExitCode.OK
        shutil.copytree(house / "qgate-out", tmp_path / f"part{number}")
    folders = [str(tmp_path / f"part{number}") for number in (1, 2)]
    out = str(tmp_path / "all")
    assert main(["report", *folders, "--merge", out, "--exit-code"]) == 0
    lines = (tmp_path / "all" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["layer"] for line in lines[1:]} >= {"model.layers.0", "model.layers.1"}
    assert "of 5 gates, none failed" in capsys.readouterr().out
