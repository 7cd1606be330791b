"""Code of a model that ends the program or skips the test ends neither the session nor its gates."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgate.gate.measuring.model_gates import ModelGates
from tests.plugin.conftest import Run
from tests.plugin.projects import records, tightened
from tests.shares import always, share, slow_file

pytestmark = slow_file

ENDINGS = {
    "skip": pytest.skip.Exception("not here"),
    "exit": SystemExit(0),
    "full disk": OSError(28, "No space left on device", "repro/run.py"),
    "error": KeyError("site"),
}


@share(4)
@pytest.mark.parametrize("name", ENDINGS)
def test_all_gates_have_a_verdict_where_a_reproduction_cannot_be_left(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tightened(project)

    def fail(*_: object) -> None:
        raise ENDINGS[name]

    monkeypatch.setattr(ModelGates, "leave_reproduction", fail)
    result = suites()
    result.assert_outcomes(passed=5, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR: no reproduction was left: *"])
    assert len({row["node"] for row in records(project)[1:]}) == 6


@always
@pytest.mark.parametrize("place", ["build", "forward"])
@pytest.mark.parametrize("call", ["pytest.skip('no GPU')", "sys.exit(0)"])
def test_a_model_that_ends_is_one_sentence_and_red(
    project: Path, suites: Run, call: str, place: str
) -> None:
    calls = {"build": "None", "forward": "None", place: call}
    (project / "own_model.py").write_text(
        "import sys\nimport pytest, torch, qgate\n"
        "class Net(torch.nn.Sequential):\n"
        f"    def forward(self, x):\n        {calls['forward']}\n        return super().forward(x)\n"
        f"def build():\n    {calls['build']}\n"
        "    return qgate.Model(Net(torch.nn.Linear(4, 4)), [torch.ones(1, 4)], 'ending')\n"
    )
    (project / "suites" / "test_other.py").write_text("def test_other(): pass\n")
    result = suites("--model", "own_model.py:build")
    assert result.ret in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.USAGE_ERROR)
    output = str(result.stdout) + str(result.stderr)
    assert "INTERNALERROR" not in output
    assert "mainloop caught" not in output
    assert ("Skipped: no GPU" if "skip" in call else "SystemExit: 0") in output
