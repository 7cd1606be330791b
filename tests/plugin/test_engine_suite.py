"""`pytest suites --engines A B`: what is selected, said and stored."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qgate.cli import main
from tests.engines import runs
from tests.engines.gated import collect, logits_pair, more_noise, network, one_token
from tests.plugin.conftest import SUITES, Run
from tests.plugin.test_outcomes import files, records

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")
PAIR = ("--engines", "trainer.npz", "rollout.npz")
NAMED = ("--engines-name", "mine")
Gates = Callable[..., pytest.RunResult]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def house(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with the suite on engines, and the logits of two beside it."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("CI", raising=False)
    (pytester.path / "suites").mkdir()
    shutil.copy(SUITES / "test_engines.py", pytester.path / "suites")
    (pytester.path / "qgate.toml").write_text("")
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\naddopts = ['-p', 'no:cacheprovider']")
    logits_pair(pytester.path)
    return pytester.path


@pytest.fixture
def gates(pytester: pytest.Pytester, house: Path) -> Gates:  # noqa: ARG001
    def run(*options: str, at: str = "suites") -> pytest.RunResult:
        return pytester.runpytest_inprocess(at, *options)

    return run


@pytest.fixture
def accepted(gates: Gates) -> None:
    assert gates(*PAIR, *NAMED, "--update-baselines").ret == pytest.ExitCode.OK


# What is selected, and what is refused ------------------------------------------------------------


def test_without_engines_it_is_left_out_with_one_note(gates: Gates) -> None:
    result = gates("--mode", "2-1")
    result.assert_outcomes(deselected=1)
    assert result.stdout.str().count("1 suite on engines left out: give --engines A B") == 1


def test_a_record_is_made_and_gates(house: Path, gates: Gates) -> None:
    result = gates(*PAIR)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "qgate: *engines trainer.npz and rollout.npz as engines-trainer*",
            "no accepted compared_tokens at all tokens (engines tokens): record it *",
            "  to record it: pytest suites/test_engines.py --engines trainer.npz rollout.npz --up*",
            "engines: weights are not compared: name the checkpoints by --engines-weights A B",
            "engines: modules are not compared: not both engines are dumps",
        ]
    )
    result = gates(*PAIR, "--update-baselines")
    assert result.parseoutcomes() == {"updated": 1}
    assert files(house).keys() == {
        "engines-trainer/manifest.json", "engines-trainer/accepted/tokens.txt",
    }  # fmt: skip
    result = gates(*PAIR, "-v", "-n", "2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_engines?tokens?*"])
    assert "unused" not in result.stdout.str()
    _, *rows = records(house)
    assert {row["scope"] for row in rows} == {"engines"}
    assert {row["mode"] for row in rows} == {"tokens"}


def test_the_options_may_stand_before_the_suites(
    pytester: pytest.Pytester,
    house: Path,  # noqa: ARG001
) -> None:
    result = pytester.runpytest_inprocess(*PAIR, "suites", "--update-baselines")
    assert result.parseoutcomes() == {"updated": 1}
    swallowed = pytester.runpytest_inprocess("--engines", "trainer.npz", "suites")
    assert swallowed.ret == pytest.ExitCode.USAGE_ERROR
    swallowed.stderr.fnmatch_lines(["*suites' is no dump*"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--engines", "trianer.npz", "rollout.npz"), "--engines 'trianer.npz' is not there"),
        (("--engines", "trainer.npz"), "argument --engines: expected 2 arguments"),
        (("--engines", "trainer.npz", "qgate.toml"), "qgate.toml' is no dump; files that can be"),
        (("--engines", "trainer.npz", "shorter.npz"), "give two files of the same requests"),
        (("--engines", "trainer.npz", "other.npz"), "the engines did not score the same tokens"),
        (("--engines-weights", "a", "b"), "--engines-weights are those of engines: give --engines"),
        ((*PAIR, "--engines-weights", "a", "b"), "--engines-weights 'a' is not there"),
    ],
)  # fmt: skip
def test_bad_input_is_one_usage_error(
    house: Path, gates: Gates, options: tuple[str, ...], says: str
) -> None:
    runs.write_npz(house / "shorter.npz", runs.scored(samples=3))
    runs.write_npz(house / "other.npz", runs.scored(seed=3, samples=8))
    result = gates(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert sum(says in line and "error" in line.lower() for line in result.errlines) == 1
    assert not (house / "baselines").exists()


@pytest.mark.usefixtures("accepted")
def test_other_tokens_than_accepted_are_one_usage_error(house: Path, gates: Gates) -> None:
    runs.write_npz(house / "a.npz", runs.scored(seed=3))
    result = gates("--engines", "a.npz", "a.npz", *NAMED)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the engines scored other tokens than those that were accepted*"])
    assert gates("--engines", "a.npz", "a.npz", *NAMED, "--update-baselines").ret == 0
    gates("--engines", "a.npz", "a.npz", *NAMED).assert_outcomes(passed=1)


# What fails, and how it is accepted ---------------------------------------------------------------


@pytest.mark.usefixtures("accepted")
def test_a_fault_is_the_first_line_everywhere(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    logits_pair(house / "bad", one_token)
    options = ("--engines", "bad/trainer.npz", "rollout.npz", *NAMED)
    result = gates(*options, "--junitxml=junit.xml")
    result.assert_outcomes(failed=1)
    fault = "all tokens (engines tokens) token 31 of sample 2 carries"
    result.stdout.fnmatch_lines(
        [
            f"{fault} * of the difference *: kl *",
            "cause: all tokens (mine, mode tokens) token 31 of sample 2 carries *",
            f"FAILED suites/test_engines.py::test_engines?tokens? - {fault}*",
        ]
    )
    (failure,) = ET.parse(house / "junit.xml").getroot().iter("failure")
    assert failure.get("message", "").startswith(fault)
    assert "token 31 of sample 2" in (house / "qgate-out" / "report.html").read_text()
    failed = [row for row in records(house)[1:] if not row["passed"]]
    assert (
        "--engines bad/trainer.npz rollout.npz --engines-name mine"
        in (failed[0]["commands"]["again"])
    )
    monkeypatch.chdir(house)
    assert main(["report", "qgate-out/results.jsonl"]) == 0
    assert "token 31 of sample 2" in capsys.readouterr().out


@pytest.mark.usefixtures("accepted")
def test_a_regression_is_red_and_may_be_accepted(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    logits_pair(house / "later", more_noise(1.2**0.5))
    options = ("--engines", "later/trainer.npz", "rollout.npz", *NAMED)
    result = gates(*options)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["kl * at all tokens (engines tokens): 2? % over accepted, 2 % al*"]
    )
    monkeypatch.chdir(house)
    assert main(["baselines", "accept"]) == 0
    gates(*options).assert_outcomes(passed=1)
    capsys.readouterr()
    assert main(["baselines", "verify"]) == 0
    assert main(["baselines", "list"]) == 0
    assert "numbers of two engines" in capsys.readouterr().out


@pytest.mark.usefixtures("accepted")
def test_limits_of_the_settings_hold(house: Path, gates: Gates) -> None:
    (house / "qgate.toml").write_text('[limits]\nabsolute = ["kl<1e-9"]\n')
    result = gates(*PAIR, *NAMED)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kl * > 1.0e-09 at all tokens (engines tokens): absolute limit*"])


# Where it comes from, and what is beside it -------------------------------------------------------


@pytest.mark.parametrize("under", ["suites", "../suites"])
def test_from_another_directory_and_from_the_settings(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, under: str
) -> None:
    settings = 'engines = ["trainer.npz", "rollout.npz"]\nengines_name = "mine"\n'
    (house / "qgate.toml").write_text(settings)
    if under != "suites":
        (house / "elsewhere").mkdir()
        monkeypatch.chdir(house / "elsewhere")
    assert gates("--update-baselines", at=under).parseoutcomes() == {"updated": 1}
    assert (house / "baselines" / "mine" / "manifest.json").is_file()
    logits_pair(house, one_token)
    result = gates(at=under)
    back = under.removesuffix("suites")
    result.stdout.fnmatch_lines([f"*--engines {back}trainer.npz {back}rollout.npz --engines-n*"])


@pytest.mark.parametrize("value", ['"trainer.npz"', '["trainer.npz"]', "[1, 2]"])
def test_a_setting_that_is_no_pair_is_refused(house: Path, gates: Gates, value: str) -> None:
    (house / "qgate.toml").write_text(f"engines = {value}\n")
    result = gates()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*engines = * is not allowed; it is a list of two paths.*"])


def test_dumps_have_three_gates(house: Path, gates: Gates) -> None:
    for name in "ab":
        collect(house / name, network())
    result = gates("--engines", "a", "b", "--update-baselines")
    assert result.parseoutcomes() == {"updated": 3}
    result = gates("--engines", "a", "b", "-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [f"*test_engines?{part}?*" for part in ("tokens", "weights", "sites")]
    )


@pytest.mark.usefixtures("accepted")
def test_checkpoints_tell_the_weights(house: Path, gates: Gates) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        save_file({"x.weight": torch.full((4,), value)}, house / f"{name}.safetensors")
    weights = ("--engines-weights", "a.safetensors")
    assert gates(*PAIR, *NAMED, *weights, "b.safetensors", "--update-baselines").ret == 0
    gates(*PAIR, *NAMED, *weights, "b.safetensors").assert_outcomes(passed=2)
    result = gates(*PAIR, *NAMED, *weights, "c.safetensors")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["x.weight (engines weights) the weight is not that of the other engine: relative error*"]
    )
    result = gates(*PAIR, *NAMED)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the accepted record of mine has weights, and nothing tells*"])


def test_it_lives_beside_models_in_one_folder(
    project: Path, suites: Run, pytester: pytest.Pytester
) -> None:
    before = suites("--layers", "first")
    shutil.copy(SUITES / "test_engines.py", project / "suites")
    after = suites("--layers", "first")
    assert before.ret == after.ret == pytest.ExitCode.OK
    before.assert_outcomes(passed=2, deselected=4)
    after.assert_outcomes(passed=2, deselected=5)
    logits_pair(project)
    at = "suites/test_engines.py"
    taken = pytester.runpytest_inprocess(at, *PAIR, "--engines-name", "tiny-llama")
    taken.assert_outcomes(errors=1)
    taken.stdout.fnmatch_lines(
        ["*is of a model, and what is measured is two engines: give the engines another name "
         "(--engines-name)*"]
    )  # fmt: skip
