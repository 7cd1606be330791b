"""`pytest suites --dump DIR`: what is selected, what it says, what it stores."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.dumps.gated import at, with_nan, write_dump
from tests.dumps.making import known
from tests.plugin.projects import files, records
from tests.plugin.subjects import SUBJECTS, Gates, Subject
from tests.shares import proof

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")
ALL = SUBJECTS["dump"].count


@pytest.fixture
def subject() -> Subject:
    return SUBJECTS["dump"]


_WAITING = """
import time
from pathlib import Path

def test_waiting():
    Path("begun").touch()
    while not Path("go").exists():
        time.sleep(0.05)
"""


@proof
@pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["alone", "two workers"])
def test_a_second_run_at_once_writes_to_a_folder_of_its_own(
    house: Path, gates: Gates, more: tuple[str, ...]
) -> None:
    """While one run is in its last test, another has the next folder; both keep their gates."""
    options = ("--dump", "dump", "--format", "int8", "--layers", "first")
    (house / "suites" / "test_zz.py").write_text(_WAITING)
    first = subprocess.Popen(
        [sys.executable, "-m", "pytest", "suites", *options], stdout=subprocess.PIPE, text=True
    )
    try:
        while not (house / "begun").exists():
            assert first.poll() is None
            time.sleep(0.05)
        result = gates(*options, "--ignore", "suites/test_zz.py", *more)
    finally:
        (house / "go").touch()
        output, _ = first.communicate()
    assert "another run writes to qgate-out: this one wrote to qgate-out-2" in result.stdout.str()
    assert "qgate-out-2" not in output
    for out in ("qgate-out", "qgate-out-2"):
        names = {path.name for path in (house / out).iterdir()}
        assert names >= {"results.jsonl", "results.csv", "report.html", "candidates"}
        assert ".run" not in names
    ours, theirs = (records(house, out)[1:] for out in ("qgate-out-2", "qgate-out"))
    assert len(ours) > 1
    assert {row["node"] for row in ours} == {row["node"] for row in theirs}


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


@proof
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
            "15 tests have no accepted errors yet; -v names all",
            "  to record it: pytest suites/test_dump_*.py suites/test_dump_*.py --dump dump --format *",
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


def test_a_rule_of_the_project_holds_for_a_dump_by_name(house: Path, gates: Gates) -> None:
    gates("--dump", "dump", "--update-baselines")
    write_dump(house / "drifted", change=at("layers.1.fc", "input", lambda t: t * 2))
    (house / "qgate.toml").write_text(
        "[[limits.rules]]\nsites = 'no-such-site'\nmodels = 'dump-*'\natol = 3\nreason = 'wide'\n"
    )
    result = gates("--dump", "drifted")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'no-such-site' matches no site. There are layers.0.fc:*"])
