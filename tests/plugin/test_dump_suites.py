"""`pytest suites --dump DIR`: what is selected, what it says, what it stores."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qgate.cli import main
from qgate.plugin.out_folder import reserve_out_folder
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.dumps.gated import at, with_nan, write_dump
from tests.dumps.making import known
from tests.plugin.conftest import SUITES, Run
from tests.plugin.test_outcomes import files, records
from tests.shares import proof

memory = stores.memory
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")
NAMES = ("test_dump_overflow.py", "test_dump_distributions.py")
# Two layers and what is in none: one test of the values, and one for each of four formats.
ALL = 3 * 5
Gates = Callable[..., pytest.RunResult]


@pytest.fixture
def house(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the suites on dumps, and a healthy dump beside it."""
    monkeypatch.setenv("COLUMNS", "250")
    (pytester.path / "suites").mkdir()
    for name in NAMES:
        shutil.copy(SUITES / name, pytester.path / "suites")
    (pytester.path / "qgate.toml").write_text("")
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\naddopts = ['-p', 'no:cacheprovider']")
    write_dump(pytester.path / "dump")
    return pytester.path


@pytest.fixture
def gates(pytester: pytest.Pytester, house: Path) -> Gates:  # noqa: ARG001
    def run(*options: str, at: str = "suites") -> pytest.RunResult:
        return pytester.runpytest_inprocess(at, *options)

    return run


@pytest.fixture
def accepted(gates: Gates) -> None:
    assert gates("--dump", "dump", "--update-baselines").ret == pytest.ExitCode.OK


@pytest.mark.usefixtures("accepted", "memory")
def test_a_dump_by_url_is_the_dump(house: Path, gates: Gates) -> None:
    """The accepted record of the folder is that of the URL: its model names it."""
    target = location_of("memory://bucket/run")
    for path in (house / "dump").rglob("*.*"):
        name = (target / path.relative_to(house / "dump").as_posix()).path
        target.fs.pipe_file(name, path.read_bytes())
    result = gates("--dump", "memory://bucket/run")
    result.assert_outcomes(passed=ALL)
    assert "memory://bucket/run" in result.stdout.str()
    result = gates("--dump", "memory://bucket/run/dump.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--dump 'memory://bucket/run/dump.json' is a file" in result.stderr.str()
    result = gates("--dump", "memory://bucket/rum")
    assert "--dump 'memory://bucket/rum' is not there." in result.stderr.str()
    (house / "qgate.toml").write_text('dump = "memory://bucket/run"')
    gates().assert_outcomes(passed=ALL)


@proof
@pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["alone", "two workers"])
def test_a_second_run_at_once_writes_to_a_folder_of_its_own(
    house: Path, gates: Gates, more: tuple[str, ...]
) -> None:
    """While one run writes, another has the next folder, with its candidates."""
    ends: list[Callable[[], None]] = []
    first: Any = SimpleNamespace(stash=pytest.Stash(), add_cleanup=ends.append)
    reserve_out_folder(first, house)
    result = gates("--dump", "dump", "--format", "int8", "--layers", "first", *more)
    assert "another run writes to qgate-out: this one wrote to qgate-out-2" in result.stdout.str()
    assert [path.name for path in (house / "qgate-out").iterdir()] == [".run"]
    names = {path.name for path in (house / "qgate-out-2").iterdir()}
    assert names >= {"results.jsonl", "results.csv", "report.html", "candidates"}
    assert ".run" not in names
    for end in ends:
        end()
    assert not (house / "qgate-out").exists()


@pytest.mark.usefixtures("accepted")
def test_ctrl_c_in_an_update_is_a_sentence(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = files(house)
    write_dump(house / "later", change=at("layers.1.fc", "input", lambda t: t * 2))
    monkeypatch.setattr("qgate.baselines.Store.commit", interrupted)
    result = gates("--dump", "later", "--update-baselines", "--format", "int8")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "ERROR: interrupted while files were written" in result.stdout.str()
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert files(house) == before


def test_without_a_dump_they_are_left_out_with_one_note(gates: Gates) -> None:
    result = gates("--mode", "2-1")
    result.assert_outcomes(deselected=5)
    assert result.stdout.str().count("2 suites on dumps left out: give --dump DIR") == 1


def test_other_suites_do_not_notice_those_that_were_left_out(project: Path, suites: Run) -> None:
    before = suites("--layers", "first")
    for name in NAMES:
        shutil.copy(SUITES / name, project / "suites")
    after = suites("--layers", "first")
    assert before.ret == after.ret == pytest.ExitCode.OK
    before.assert_outcomes(passed=2, deselected=4)
    after.assert_outcomes(passed=2, deselected=9)
    complete = suites()
    assert complete.ret == pytest.ExitCode.OK
    header = (project / "qgate-out" / "results.jsonl").read_text().partition("\n")[0]
    assert json.loads(header)["complete"], "what was left out was not asked for"


def test_a_record_is_made_and_gates(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("qgate.modes.setups.ModelSetup.load", refused)
    monkeypatch.setattr("qgate.modes.setups.ModelSetup.calibrate", refused)
    result = gates("--dump", "dump")
    result.assert_outcomes(failed=ALL)
    result.stdout.fnmatch_lines(
        [
            "qgate: *dump dump as dump-toy*",
            "no accepted flushed_share at layers.0.fc:forward.input (format *: record it with *",
            "  to record it: pytest suites/test_dump_overflow.py --dump dump --format * --update-*",
            "*qgate: dump-toy on cpu*",
        ]
    )
    result = gates("--dump", "dump", "--update-baselines")
    assert result.ret == pytest.ExitCode.OK
    assert result.parseoutcomes() == {"updated": ALL}
    assert files(house).keys() == {
        "dump-toy/manifest.json",
        *(
            f"dump-toy/accepted/{title}.txt"
            for title in ("values", "fp8_e4m3", "hif8", "mxfp8_e4m3", "mxfp4_e2m1")
        ),
    }
    write_dump(house / "later", seed=1, ranks=2)
    result = gates("--dump", "later")
    result.assert_outcomes(passed=ALL)
    assert "unused" not in result.stdout.str()
    _, *rows = records(house)
    assert {row["model"] for row in rows} == {"dump-toy"}
    assert {row["scope"] for row in rows} == {"forward", "backward"}
    result = gates("--dump", "later", "--layers", "first", "-v", "--format", "fp8_e4m3")
    result.stdout.fnmatch_lines(["*test_dump_overflow?fp8_e4m3-layers.0? PASSED*"])


@pytest.mark.usefixtures("accepted")
def test_a_dump_that_drifted_is_red_and_may_be_accepted(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dump(house / "drifted", change=at("layers.1.fc", "input", lambda t: t * 2))
    result = gates("--dump", "drifted", "-n", "2")
    result.assert_outcomes(failed=1, passed=ALL - 1)
    result.stdout.fnmatch_lines(
        [
            "log2_* at layers.1.fc:forward.input (dump values): 2x accepted, up to 1.52x allowed*",
            "  if intended: pytest suites/test_dump_distributions.py --dump drifted --update-*",
        ]
    )
    monkeypatch.chdir(house)
    assert main(["baselines", "accept"]) == 0
    gates("--dump", "drifted").assert_outcomes(passed=ALL)
    capsys.readouterr()
    assert main(["baselines", "verify"]) == 0
    assert main(["baselines", "list"]) == 0
    assert "numbers of a dump" in capsys.readouterr().out


def test_candidates_of_a_dump_need_no_baseline(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates("--dump", "dump").assert_outcomes(failed=ALL)
    monkeypatch.chdir(house)
    assert main(["baselines", "accept"]) == 0
    gates("--dump", "dump").assert_outcomes(passed=ALL)


def test_what_is_not_finite_is_never_accepted(house: Path, gates: Gates) -> None:
    write_dump(house / "bad", change=at("layers.1.fc", "output", with_nan))
    result = gates("--dump", "bad", "--update-baselines")
    assert result.parseoutcomes() == {"updated": ALL - 5, "failed": 5}
    result.stdout.fnmatch_lines(
        [
            "non-finite values at layers.1.fc:forward.output * first in L1 layers.1.fc forward output*"
        ]
    )
    text = (house / "baselines/dump-toy/accepted/values.txt").read_text()
    assert "layers.0.fc:forward.output" in text
    assert "layers.1.fc:forward.output" not in text


@pytest.mark.usefixtures("accepted")
def test_a_layer_that_is_gone_fails(house: Path, gates: Gates) -> None:
    write_dump(house / "short", wanted=lambda record: record.layer != 1)
    result = gates("--dump", "short")
    result.assert_outcomes(passed=ALL - 5, failed=5)
    result.stdout.fnmatch_lines(["not measured at layers.1.fc:* the set of sites changed*"])


def test_counts_alone_leave_formats_with_scales_out(house: Path, gates: Gates) -> None:
    write_dump(house / "counts", level="statistics")
    result = gates("--dump", "counts", "--update-baselines")
    assert result.parseoutcomes() == {"updated": 9, "deselected": 6}
    result.stdout.fnmatch_lines(["3 tests deselected: mxfp4_e2m1 on *counts: only counts were *"])


@pytest.mark.parametrize("under", ["suites", "../suites"])
def test_from_another_directory_and_from_the_settings(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, under: str
) -> None:
    (house / "qgate.toml").write_text('dump = "dump"\ndump_name = "mine"\n')
    if under != "suites":
        (house / "elsewhere").mkdir()
        monkeypatch.chdir(house / "elsewhere")
    result = gates("--update-baselines", at=under)
    assert result.parseoutcomes() == {"updated": ALL}
    assert (house / "baselines" / "mine" / "manifest.json").is_file()


def test_folders_of_the_known_collector_are_gated(house: Path, gates: Gates) -> None:
    for layer in (0, 1):
        known(house / "known", torch.randn(8, 32), layer=layer, counter=layer, iteration=0,
              phase="pre", component="linear", rank=0)  # fmt: skip
    result = gates("--dump", "known", "--update-baselines")
    assert result.parseoutcomes() == {"updated": 10}
    result.stdout.fnmatch_lines(["qgate: *dump known as dump-known*"])
    gates("--dump", "known").assert_outcomes(passed=10)


def test_a_dump_that_is_being_written_is_gated_with_a_note(house: Path, gates: Gates) -> None:
    write_dump(house / "open", close=False)
    result = gates("--dump", "open", "--update-baselines")
    assert result.parseoutcomes() == {"updated": ALL}
    result.stdout.fnmatch_lines(["dump open: rank 0: it was not closed: *"])


def test_a_damaged_dump_is_an_error_and_no_verdict(house: Path, gates: Gates) -> None:
    (shard,) = (house / "dump" / "rank00000").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    result = gates("--dump", "dump", "--update-baselines")
    result.assert_outcomes(errors=ALL)
    result.stdout.fnmatch_lines(["set-up failed, no verdict: *truncated or damaged*"])
    assert not (house / "baselines").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("dmup", "qgate: --dump 'dmup' is not there"),
        ("qgate.toml", "qgate: --dump 'qgate.toml' is a file: name the folder"),
        ("suites", "qgate: *suites' is no dump: it has no dump.json*"),
    ],
)
def test_a_folder_that_is_no_dump_is_one_usage_error(gates: Gates, given: str, says: str) -> None:
    result = gates("--dump", given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines = [*result.errlines, *result.outlines]
    assert sum("ERROR" in line and given in line for line in result.errlines) == 1
    assert any(fnmatch.fnmatch(line, f"*{says}*") for line in lines)


def test_a_folder_without_permission_is_a_usage_error(
    gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system's answer is played here."""
    monkeypatch.setattr("qgate.storage.locations.os.access", lambda *_: False)
    result = gates("--dump", "dump")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*qgate: --dump 'dump' cannot be read: permission denied.*"])


def test_a_gate_without_layers_is_left_out_or_refused_like_the_others(
    house: Path, gates: Gates
) -> None:
    (house / "suites" / "test_own.py").write_text(
        "def test_own(dump_gate):\n    dump_gate.distributions('outside')\n"
    )
    result = gates(at="suites/test_own.py")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["1 suite on dumps left out: give --dump DIR"])
    result = gates("--dump", "suites", at="suites/test_own.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result = gates("--dump", "dump", "--update-baselines", at="suites/test_own.py")
    assert result.parseoutcomes() == {"updated": 1}


def test_a_name_that_a_model_has_is_refused(project: Path, pytester: pytest.Pytester) -> None:
    for name in NAMES:
        shutil.copy(SUITES / name, project / "suites")
    write_dump(project / "dump")
    before = files(project)
    options = ("--dump", "dump", "--dump-name", "tiny-llama", "--update-baselines")
    result = pytester.runpytest_inprocess("suites/test_dump_distributions.py", *options)
    result.assert_outcomes(errors=3)
    result.stdout.fnmatch_lines(["*is of a model, and what is measured is a dump: *--dump-name*"])
    assert files(project) == before


def test_a_rule_of_the_project_holds_for_a_dump_by_name(house: Path, gates: Gates) -> None:
    gates("--dump", "dump", "--update-baselines")
    write_dump(house / "drifted", change=at("layers.1.fc", "input", lambda t: t * 2))
    (house / "qgate.toml").write_text(
        "[[limits.rules]]\nsites = 'no-such-site'\nmodels = 'dump-*'\natol = 3\nreason = 'wide'\n"
    )
    result = gates("--dump", "drifted")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'no-such-site' matches no site. There are layers.0.fc:*"])
