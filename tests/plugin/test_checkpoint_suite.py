"""`pytest suites --checkpoint CHILD --parent PARENT`: what is selected, said and stored."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.cli import main
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.faults import UP
from tests.checkpoints.gated import double_scales, grow_scales, planted, write_pair
from tests.plugin.conftest import SUITES, Run
from tests.plugin.test_outcomes import files, records

memory = stores.memory
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")
# Two layers and what is in none, the accounting and the recipe.
ALL = 5
PAIR = ("--checkpoint", "child", "--parent", "parent")
Gates = Callable[..., pytest.RunResult]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def house(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with the suite on checkpoints, and a pair of them beside it."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("CI", raising=False)
    (pytester.path / "suites").mkdir()
    shutil.copy(SUITES / "test_checkpoint.py", pytester.path / "suites")
    (pytester.path / "qgate.toml").write_text("")
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\naddopts = ['-p', 'no:cacheprovider']")
    write_pair(pytester.path)
    return pytester.path


@pytest.fixture
def gates(pytester: pytest.Pytester, house: Path) -> Gates:  # noqa: ARG001
    def run(*options: str, at: str = "suites") -> pytest.RunResult:
        return pytester.runpytest_inprocess(at, *options)

    return run


@pytest.fixture
def accepted(gates: Gates) -> None:
    assert gates(*PAIR, "--update-baselines").ret == pytest.ExitCode.OK


# What is selected, and what is refused ------------------------------------------------------------


def test_without_a_checkpoint_it_is_left_out_with_one_note(gates: Gates) -> None:
    result = gates("--mode", "2-1")
    result.assert_outcomes(deselected=3)
    assert (
        result.stdout.str().count("1 suite on checkpoints left out: give --checkpoint CHILD") == 1
    )


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
            "no accepted over_ideal_db at model.layers.0.*.weight (checkpoint weights): record it *",
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--checkpoint", "chlid"), "--checkpoint 'chlid' is not there"),
        (("--checkpoint", "child", "--parent", "nowhere"), "--parent 'nowhere' is not there"),
        (("--checkpoint", "suites"), "suites' has no "),
        (("--checkpoint", "qgate.toml"), "qgate.toml' is a file that is not "),
        (("--checkpoint", "parent"), "holds no quantized weight and declares none; is it the parent"),
        (("--checkpoint", "child", "--parent", "child"), "is quantized itself: "),
        (("--checkpoint", "child", "--parent", "other"), "0 of 5 quantized weights are like their"),
        (("--parent", "parent"), "--parent 'parent' is of a checkpoint: give --checkpoint CHILD"),
        (("--checkpoint", "torn"), "torn"),
        ((*PAIR, "--layers", "nine"), "--layers 'nine' matches no layer of checkpoint child: model.l"),
        (("--ckpt", "child"), "unrecognized arguments: --ckpt"),
    ],
)  # fmt: skip
def test_bad_input_is_one_usage_error(
    house: Path, gates: Gates, options: tuple[str, ...], says: str
) -> None:
    write(house / "other", parent_tensors(seed=5), {})
    (house / "torn").mkdir()
    data = (house / "child" / "model.safetensors").read_bytes()
    (house / "torn" / "model.safetensors").write_bytes(data[:-100])
    result = gates(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert sum(says in line and "error" in line.lower() for line in result.errlines) == 1
    assert not (house / "baselines").exists()


def test_a_folder_without_permission_is_a_usage_error(
    gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system's answer is played here."""
    monkeypatch.setattr("qgate.storage.locations.os.access", lambda *_: False)
    result = gates("--checkpoint", "child")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*qgate: --checkpoint 'child' cannot be read: permission denied.*"]
    )


@pytest.mark.usefixtures("accepted")
def test_accepted_errors_beside_a_parent_need_one(gates: Gates) -> None:
    result = gates("--checkpoint", "child")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*the accepted errors of child are beside a parent: give --parent*"]
    )


# What fails, and how it is accepted ---------------------------------------------------------------


@pytest.mark.usefixtures("accepted")
def test_a_finding_is_the_first_line_everywhere(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    planted(house / "child", house / "bad", double_scales)
    fault = f"{UP}.weight (checkpoint weights) all scales are 2 times too high: 44.6 dB worse"
    before = files(house)
    options = ("--checkpoint", "bad", "--parent", "parent", "--checkpoint-name", "child")
    result = gates(*options, "-n", "2", "--junitxml=junit.xml")
    result.assert_outcomes(failed=1, passed=ALL - 1)
    result.stdout.fnmatch_lines(
        [
            f"{fault} than ideal (+2 more failed checks)",
            f"cause: {UP}.weight (child, mode weights) all scales are 2 times too high: 44.6 dB *",
            f"FAILED suites/test_checkpoint.py::test_checkpoint_weights* - {fault}*",
        ]
    )
    (failure,) = ET.parse(house / "junit.xml").getroot().iter("failure")
    assert failure.get("message", "").startswith(fault)
    assert all(text in (house / "qgate-out" / "report.html").read_text()
               for text in ("all scales are 2 times too high", "44.6 dB worse than ideal"))  # fmt: skip
    failed = [row for row in records(house)[1:] if not row["passed"]]
    assert [row["site"] for row in failed] == [f"{UP}.weight"]
    assert failed[0]["finding"]["fault"] == "all scales are 2 times too high"
    assert "--checkpoint-name child" in failed[0]["commands"]["again"]
    monkeypatch.chdir(house)
    assert main(["report", "qgate-out/results.jsonl"]) == 0
    assert "all scales are 2 times too high" in capsys.readouterr().out
    result = gates(*options, "--update-baselines")
    assert result.parseoutcomes() == {"failed": 1, "passed": ALL - 1}
    assert files(house) == before
    assert main(["baselines", "accept"]) != 0 or files(house) == before


@pytest.mark.usefixtures("accepted")
def test_a_regression_is_red_and_may_be_accepted(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    planted(house / "child", house / "later", grow_scales(1.05))
    options = ("--checkpoint", "later", "--parent", "parent", "--checkpoint-name", "child")
    result = gates(*options)
    result.assert_outcomes(failed=1, passed=ALL - 1)
    result.stdout.fnmatch_lines([f"* at {UP}.weight (checkpoint weights): * accepted, *allowed*"])
    monkeypatch.chdir(house)
    assert main(["baselines", "accept"]) == 0
    gates(*options).assert_outcomes(passed=ALL)
    capsys.readouterr()
    assert main(["baselines", "verify"]) == 0
    assert main(["baselines", "list"]) == 0
    assert "numbers of a checkpoint" in capsys.readouterr().out


def test_candidates_need_no_baseline(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates(*PAIR).assert_outcomes(failed=3, passed=2)
    monkeypatch.chdir(house)
    assert main(["baselines", "accept"]) == 0
    gates(*PAIR).assert_outcomes(passed=ALL)


# Where it comes from, and what is beside it -------------------------------------------------------


@pytest.mark.usefixtures("accepted", "memory")
def test_a_checkpoint_by_url_is_the_checkpoint(house: Path, gates: Gates) -> None:
    for name in ("child", "parent"):
        target = location_of(f"memory://bucket/{name}")
        for path in (house / name).iterdir():
            target.fs.pipe_file((target / path.name).path, path.read_bytes())
    options = ("--checkpoint", "memory://bucket/child", "--parent", "memory://bucket/parent")
    gates(*options).assert_outcomes(passed=ALL)


@pytest.mark.parametrize("under", ["suites", "../suites"])
def test_from_another_directory_and_from_the_settings(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, under: str
) -> None:
    settings = 'checkpoint = "child"\nparent = "parent"\ncheckpoint_name = "mine"\n'
    (house / "qgate.toml").write_text(settings)
    if under != "suites":
        (house / "elsewhere").mkdir()
        monkeypatch.chdir(house / "elsewhere")
    result = gates("--update-baselines", at=under)
    assert result.parseoutcomes() == {"updated": 3, "passed": 2}
    assert (house / "baselines" / "mine" / "manifest.json").is_file()


def test_a_recipe_file_says_what_was_meant(house: Path, gates: Gates) -> None:
    (house / "R.yaml").write_text("targets: {Linear: {format: int8, granularity: tensor}}")
    result = gates(*PAIR, "--recipe", "R.yaml")
    result.stdout.fnmatch_lines(["*it is int8 per row, and the recipe declares int8 per tensor*"])
    result = gates(*PAIR, "--recipe", "none.yaml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--recipe 'none.yaml' is not there*"])
    result = gates("--recipe", "R.yaml")
    result.stderr.fnmatch_lines(["*--recipe 'R.yaml' is of a checkpoint: give --checkpoint*"])


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
    shutil.copy(SUITES / "test_checkpoint.py", project / "suites")
    write_pair(project)
    before = files(project)
    at = "suites/test_checkpoint.py"
    taken = pytester.runpytest_inprocess(at, *PAIR, "--checkpoint-name", "tiny-llama")
    taken.assert_outcomes(errors=ALL)
    taken.stdout.fnmatch_lines(
        ["*is of a model, and what is measured is a checkpoint: give the checkpoint another name "
         "(--checkpoint-name)*"]
    )  # fmt: skip
    made = pytester.runpytest_inprocess(at, *PAIR, "--update-baselines")
    assert made.ret == pytest.ExitCode.OK
    assert {name: data for name, data in files(project).items() if name in before} == before
    monkeypatch.chdir(project)
    capsys.readouterr()
    pruned = ["prune", "--model", "child"]
    for verb in (["verify"], ["list"], ["migrate"], pruned, ["verify"]):
        assert main(["baselines", *verb]) == 0, capsys.readouterr()
    assert "child" in capsys.readouterr().out
    left = {name: data for name, data in files(project).items() if name != "child/manifest.json"}
    assert left == before


@pytest.mark.usefixtures("accepted")
def test_shards_merge_to_the_whole_run(
    house: Path, gates: Gates, tmp_path: Path, capsys: Capture
) -> None:
    for number in (1, 2):
        assert gates(*PAIR, "--shard", f"{number}/2").ret == pytest.ExitCode.OK
        shutil.copytree(house / "qgate-out", tmp_path / f"part{number}")
    folders = [str(tmp_path / f"part{number}") for number in (1, 2)]
    out = str(tmp_path / "all")
    assert main(["results", "merge", *folders, "--output", out, "--exit-code"]) == 0
    lines = (tmp_path / "all" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["layer"] for line in lines[1:]} >= {"model.layers.0", "model.layers.1"}
    assert "of 5 gates, none failed" in capsys.readouterr().out


def test_other_suites_do_not_notice_it(project: Path, suites: Run) -> None:
    before = suites("--layers", "first")
    shutil.copy(SUITES / "test_checkpoint.py", project / "suites")
    after = suites("--layers", "first")
    assert before.ret == after.ret == pytest.ExitCode.OK
    before.assert_outcomes(passed=2, deselected=4)
    after.assert_outcomes(passed=2, deselected=7)
