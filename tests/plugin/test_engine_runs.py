"""`pytest suites` on a sync and on the steps of a run: the same verdict as the command line's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.cli import main
from tests.engines import synced
from tests.engines.steps import write_steps
from tests.engines.synced import mixed, write_engine, write_trainer
from tests.plugin.projects import begin, records
from tests.shares import always, proof, slow_file

pytestmark = [slow_file, pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")]
Suites = Callable[..., pytest.RunResult]


@pytest.fixture
def suites(pytester: pytest.Pytester) -> Suites:
    begin(pytester, "test_engines.py")
    (pytester.path / "qgate.toml").write_text("")
    return lambda *options: pytester.runpytest_inprocess("suites", *options)


def stale_layer(folder: Path) -> Path:
    states = synced.steps(4)
    mixed_up = mixed(states[42], states[41], "layers.2.")
    write_trainer(folder / "trainer", states)
    write_engine(folder / "right", states[42], fp8="block")
    write_engine(folder / "stale", mixed_up, fp8="block")
    return folder


@always
def test_a_stale_layer_is_the_first_line_in_both(
    suites: Suites, pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    home = stale_layer(pytester.path)
    result = suites("--engines", "trainer", "right", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*test_engines?sync?*", "engines: the engine has the trainer's weights of step 42: *"]
    )
    assert main(["engines", str(home / "trainer"), str(home / "right")]) == 0
    # Nothing is accepted, so that an update changes nothing.
    for options in ((), ("--update-baselines",)):
        result = suites("--engines", "trainer", "stale", *options)
        result.assert_outcomes(failed=1)
    capsys.readouterr()
    assert main(["engines", str(home / "trainer"), str(home / "stale")]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("weights of step 41 in layer 2: ")
    result.stdout.fnmatch_lines([f"layer 2 (engines sync) {line}"])
    assert "to record it" not in result.stdout.str()
    assert not (home / "baselines").exists()
    (row,) = [row for row in records(home)[1:] if row["values"]["findings"]]
    assert (row["site"], row["mode"]) == ("layer 2", "sync")


COUNTING = """
from pathlib import Path
from qgate.engines import run_gates

compare = run_gates.compare_sync

def counting(*paths):
    with Path("compared.txt").open("a") as file:
        file.write("once\\n")
    return compare(*paths)

run_gates.compare_sync = counting
"""


@proof
@pytest.mark.usefixtures("suites")
def test_one_worker_of_a_run_compares(pytester: pytest.Pytester) -> None:
    stale_layer(pytester.path)
    pytester.makeconftest(COUNTING)
    result = pytester.runpytest_subprocess("suites", "-n2", "--engines", "trainer", "right")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["engines: the engine has the trainer's weights of step 42: *"])
    assert (pytester.path / "compared.txt").read_text().split() == ["once"]


@proof
def test_a_drift_is_the_first_line_in_both(
    suites: Suites, pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    home = pytester.path
    write_steps(home / "healthy", steps=16)
    write_steps(home / "drifting", 1, noise=lambda step: 0.02 * 1.15 ** max(0, step - 11))
    result = suites("--engines-steps", "healthy")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["qgate: *, engines healthy as engines-healthy, *", "engines: no drift in 16 steps: *"]
    )
    result = suites("--engines-steps", "drifting")
    result.assert_outcomes(failed=1)
    capsys.readouterr()
    assert main(["engines", "--steps", str(home / "drifting")]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(("mean KL rises from step 12 on (", "mean KL rises from step 13 on ("))
    line = line.replace("mean KL", "mean KL (engines steps)")
    result.stdout.fnmatch_lines([f"{line}*"])
    (home / "qgate.toml").write_text('[limits]\nabsolute = ["kl<1e-9"]\n')
    result = suites("--engines-steps", "healthy")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kl * > 1.0e-09 at step * absolute limit*"])


def test_what_says_nothing_is_refused(suites: Suites, pytester: pytest.Pytester) -> None:
    (pytester.path / "a").mkdir()
    write_engine(pytester.path / "right", synced.state(1), size=1)
    write_trainer(pytester.path / "trainer", {1: synced.state(1)})
    for options, words in (
        (("--engines-steps", "absent"), "*absent*"),
        (("--engines-steps", ".", "--engines", "a", "b"), "*compares what is in its folder*"),
        (
            ("--engines", "trainer", "right", "--engines-weights", "a", "a"),
            "*is compared as a whole and takes no --engines-weights: leave it out.",
        ),
        (("--engines-steps", "."), "*has no steps: it should hold a folder per step*"),
    ):
        result = suites(*options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([words])
