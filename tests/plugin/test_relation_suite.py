"""`suites/test_relations.py`: when it runs, what it says, and that it needs no baseline."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.relations import compute
from tests.plugin.projects import begin
from tests.shares import always, slow_file

pytestmark = [slow_file, pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")]
Gates = Callable[..., pytest.RunResult]
MODEL = """
import copy
import torch
from torch import nn
import qgate

class Leaking(nn.Linear):
    def forward(self, x):
        return super().forward(x + 1e-3 * x.mean(0, keepdim=True))

def leak(model):
    network = copy.deepcopy(model.module)
    for layers in network:
        layers[2].__class__ = Leaking
    return network

def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(3)]
    samples = list(torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(1)))
    return qgate.Model(nn.Sequential(*layers), samples, name="mine", modes={"leaking": leak})
"""


@pytest.fixture
def gates(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Gates:
    """The suite of relations beside another one, in a project without baselines."""
    # A process that imports torch takes seconds: tests/relations has those.
    monkeypatch.setattr(compute, "LARGEST", 0)
    begin(pytester, "test_relations.py", "test_canary.py")
    (pytester.path / "mine.py").write_text(MODEL)

    def run(*options: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("--model=mine.py:build", *options)

    return run


def test_it_compares_all_where_it_is_asked_to(gates: Gates) -> None:
    result = gates("suites", "--mode=int8")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["  not asked for: most relations *"])
    few = relations_held()
    result = gates("suites", "--mode=int8", "--relations")
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*relations*")
    assert relations_held() > few
    gates("suites/test_relations.py", "--mode=int8,mxfp4").assert_outcomes(passed=2)
    node = "suites/test_relations.py::test_relations"
    gates(node, "--mode=int8").assert_outcomes(passed=1)


def relations_held() -> int:
    """Return in how many ways the last run computed the same."""
    text = Path("qgate-out/results.jsonl").read_text()
    return int(re.search(r"the same in (\d+) ways", text)[1])


def test_a_setting_of_the_project_asks_for_it(gates: Gates, pytester: pytest.Pytester) -> None:
    (pytester.path / "qgate.toml").write_text("relations = true\n")
    result = gates("suites", "--mode=int8")
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*most relations*")


def test_a_failure_names_relation_site_and_rows(gates: Gates) -> None:
    result = gates("suites/test_relations.py", "--mode=leaking")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "0.2:output (mode leaking) breaks 'alone': * off (float noise *) as row 0 alone, at row 0*",
            "*--update-baselines cannot accept this*",
        ]
    )
    result.stdout.no_fnmatch_line("*baseline  *")


@always
def test_it_needs_no_baseline_and_writes_none(
    gates: Gates, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates("suites/test_relations.py", "--mode=int8", "--update-baselines").assert_outcomes(passed=1)
    assert not list(Path(pytester.path).glob("baselines/**/*.txt"))
    (pytester.path / "baselines").mkdir(exist_ok=True)
    monkeypatch.setenv("CI", "true")
    result = gates("suites/test_relations.py", "--mode=int8")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK, "a run of it alone is whole"
    result.stdout.fnmatch_lines(["1 gate passed*"])


def test_it_holds_beside_a_baseline_of_other_weights(
    gates: Gates, pytester: pytest.Pytester
) -> None:
    recorded = gates("suites/test_canary.py", "--update-baselines")
    assert recorded.ret == pytest.ExitCode.OK
    mine = pytester.path / "mine.py"
    mine.write_text(MODEL.replace("manual_seed(0)", "manual_seed(7)"))
    gates("suites/test_relations.py", "--mode=int8").assert_outcomes(passed=1)


def test_bits_can_be_asked_for(gates: Gates) -> None:
    result = gates("suites", "--mode=leaking", "--bitwise")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*breaks 'alone': other bits*"])
