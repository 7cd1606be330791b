"""`pytest suites --engines A B`: what is selected, said and stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engines import runs
from tests.engines.gated import collect, network
from tests.plugin.projects import files, records
from tests.plugin.subjects import SUBJECTS, Gates, Subject
from tests.shares import proof

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")
PAIR, NAMED = SUBJECTS["engines"].options[:3], SUBJECTS["engines"].options[3:]


@pytest.fixture
def subject() -> Subject:
    return SUBJECTS["engines"]


@proof
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


@pytest.mark.usefixtures("accepted")
def test_other_tokens_than_accepted_are_one_usage_error(house: Path, gates: Gates) -> None:
    runs.write_npz(house / "a.npz", runs.scored(seed=3))
    result = gates("--engines", "a.npz", "a.npz", *NAMED)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the engines scored other tokens than those that were accepted*"])
    assert gates("--engines", "a.npz", "a.npz", *NAMED, "--update-baselines").ret == 0
    gates("--engines", "a.npz", "a.npz", *NAMED).assert_outcomes(passed=1)


@pytest.mark.usefixtures("accepted")
def test_limits_of_the_settings_hold(house: Path, gates: Gates) -> None:
    (house / "qgate.toml").write_text('[limits]\nabsolute = ["kl<1e-9"]\n')
    result = gates(*PAIR, *NAMED)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kl * > 1.0e-09 at all tokens (engines tokens): absolute limit*"])


@pytest.mark.parametrize("value", ['"trainer.npz"', '["trainer.npz"]', "[1, 2]"])
def test_a_setting_that_is_no_pair_is_refused(house: Path, gates: Gates, value: str) -> None:
    (house / "qgate.toml").write_text(f"engines = {value}\n")
    result = gates()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*engines = * is not allowed; it is a list of two paths.*"])


@proof
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
        ["x.weight (engines weights): the weight is not that of the other engine: relative error*"]
    )
    result = gates(*PAIR, *NAMED)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the accepted record of mine has weights, and nothing tells*"])
