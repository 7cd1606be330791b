"""A baseline of something else is one error of a run; across weights, relative errors are held."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugin.conftest import LLAMA, Run
from tests.plugin.projects import add, header, page, records
from tests.shares import always, proof, slow_file

pytestmark = slow_file

MODEL = '''
from pathlib import Path
import torch, qgate
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def kernel(given):
    """int8 by row, or by tensor, in code that does not say what it stands for."""
    import copy
    made, axis = copy.deepcopy(given.module), () if Path("fault").exists() else (-1,)
    for module in made.modules():
        if isinstance(module, nn.Linear):
            w = module.weight.detach()
            scale = (w.abs().amax(axis, keepdim=True) if axis else w.abs().amax()) / 127
            module.weight = nn.Parameter((w / scale).round() * scale)
    return made

def build(**_):
    torch.manual_seed(0)
    net, samples = Net(), [torch.randn(2, 16, 32) for _ in range(2)]
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.weight *= torch.logspace(-1, 0.3, len(module.weight))[:, None]
                if Path("tuned").exists():
                    module.weight *= 1 + 0.01 * torch.randn(module.weight.shape)
    return qgate.Model(net, samples, "net", modes={"mine": kernel})
'''
MODEL_OF_OURS = ("--model", "net.py:build")
NET = (*MODEL_OF_OURS, "--mode", "mine,int8")


@pytest.fixture
def net(project: Path, suites: Run, recorded_once: Callable[..., None]) -> Path:
    """A project whose own model has a baseline, and was tuned after that."""
    (project / "net.py").write_text(MODEL)
    add(project, "test_outputs.py", "test_reference.py", "test_canary.py")
    (project / "suites" / "test_task.py").unlink()
    recorded_once("across weights", project, lambda: suites(*NET, "--update-baselines"))
    (project / "tuned").touch()
    return project


def test_other_weights_are_one_error_of_the_run(
    net: Path, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in CI: the run is red for the baseline, and not for being partial."""
    monkeypatch.setenv("CI", "true")
    result = suites(*NET)
    result.assert_outcomes(errors=1, deselected=7)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "the baseline was made with other weights (* then, * now) (*net). If that is meant, "
            "record the baseline again with --update-baselines, or hold relative errors against "
            "it with --across-weights; else run what it was made with.",
            "gates held: 0 of 8; 7 not run, as the baseline is of something else (*)",
        ]
    )
    result.stdout.no_fnmatch_line("*partial run*")
    assert "across_weights" not in header(net)


@pytest.mark.usefixtures("net")
@pytest.mark.parametrize("words", [("suites", "-k", "outputs"), ("suites/test_canary.py",)])
def test_what_else_is_deselected_never_takes_the_error_along(
    words: tuple[str, ...], suites: Run
) -> None:
    result = suites(*NET, paths=words)
    assert result.parseoutcomes()["errors"] == 1
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.usefixtures("net")
def test_gates_of_other_models_run(suites: Run) -> None:
    arguments = (*MODEL_OF_OURS, "--model", LLAMA, "--mode", "int8")
    result = suites(*arguments, "--layers", "first", "-k", "layer_outputs")
    outcomes = result.parseoutcomes()
    assert (outcomes["errors"], outcomes["passed"]) == (1, 1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@proof
@pytest.mark.usefixtures("net")
def test_workers_say_it_once(suites: Run) -> None:
    result = suites(*NET, "-n", "2", alone=True)
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@proof
@pytest.mark.usefixtures("net")
def test_accepted_errors_of_several_modes_are_stale_once(suites: Run) -> None:
    suites(*MODEL_OF_OURS, "--mode", "fp16", "--update-baselines")
    result = suites(*MODEL_OF_OURS, "--mode", "mine,int8,fp16")
    outcomes = result.parseoutcomes()
    assert outcomes["errors"] == 1, "mine and int8 are of the weights before"
    assert outcomes["passed"] == 5, "fp16, the reference and the canary"
    result.stdout.fnmatch_lines(
        [
            "the accepted errors of modes * are stale: *Refresh them with --mode *,* --update-baselines."
        ]
    )


def test_across_weights_right_code_is_green_and_says_so(net: Path, suites: Run) -> None:
    result = suites(*NET, "--across-weights")
    result.assert_outcomes(passed=8)
    extent = header(net)["extent"]
    assert (extent["judged"], extent["omitted"]) == (8, [])
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "qgate: *, across weights*",
            "8 gates passed: modes mine, int8 of net; 8/8 modules, *",
            "  held across weights: errors of net (weights *) against the baseline of weights * "
            "(baselines/net), with 25 % to 50 % room (carried), 50 % room (local)*",
            "  not compared across weights: *",
        ]
    )
    (across,) = header(net)["across_weights"]
    manifest = json.loads((net / "baselines" / "net" / "manifest.json").read_text())
    assert across["accepted"] == [manifest["weights"]]
    assert across["room"]["carried"] == [0.25, 0.5]
    assert "held across weights" in page(net)
    assert "not compared across weights" in page(net)
    notes = [record["notes"] for record in records(net)[1:] if record["suite"] == "reference"]
    assert notes[0]["not compared across weights"] == [
        "the stored reference, which is of the other weights"
    ]


def test_across_weights_a_planted_fault_is_red(net: Path, suites: Run) -> None:
    (net / "fault").touch()
    result = suites(*NET, "--across-weights", "--mode", "mine")
    outcomes = result.parseoutcomes()
    assert outcomes["failed"] == 3, "both layers, and the outputs"
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    record = next(record for record in records(net)[1:] if not record["passed"])
    assert "--across-weights" in record["commands"]["again"]
    assert "--across-weights" not in record["commands"]["accept"]
    assert not list((net / "qgate-out").glob("candidates/**/*.txt"))


@always
def test_across_weights_takes_no_value(suites: Run) -> None:
    """The path after it is a path."""
    result = suites("--layers", "first", "--across-weights", "suites/test_task.py", paths=())
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["  not held across weights: the baseline of tiny-llama * is of the*"]
    )


@proof
@pytest.mark.usefixtures("net")
@pytest.mark.parametrize(("most", "times"), [(10, 2), (10_000, 0)])
def test_an_update_says_which_accepted_files_are_long(
    most: int, times: int, suites: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgate.plugin.records._LINES", most)
    result = suites(*NET, "--update-baselines")
    lines = [line for line in result.outlines if "more than a review reads one by one" in line]
    assert len(lines) == times
    assert all(line.startswith("baselines/net/accepted/") for line in lines)
    assert result.ret == pytest.ExitCode.OK
