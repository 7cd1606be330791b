"""`pytest suites --watch-underflow`: told at the end, whoever quantized it; silent when off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.conftest import Run, run_alone
from tests.plugin.projects import header
from tests.shares import proof

LOSES = """
import torch
import qgate

class Head(torch.nn.Module):
    def forward(self, x):
        return qgate.quantize(x, "fp8_e4m3")

def test_small():
    x = torch.ones(8)
    x[:2] = 2.0**-8   # subnormal
    x[:1] = 2.0**-12  # becomes zero
    model = torch.nn.Sequential(torch.nn.Identity(), Head())
    model(x), model(torch.ones(8))
"""
FINE = """
import torch
import qgate

def test_fine():
    qgate.quantize(torch.ones(8), "fp8_e4m3")
"""
OTHER = "def test_other(): pass\n"


def lines(result: pytest.RunResult) -> list[str]:
    """What is said of underflow, with the indented lines below it."""
    every = result.stdout.lines
    start = next((i for i, line in enumerate(every) if line.startswith("underflow: ")), len(every))
    end = next((i for i in range(start + 1, len(every)) if every[i][:1] != " "), len(every))
    return every[start:end]


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_what_was_lost_is_told_with_its_module(
    pytester: pytest.Pytester, workers: list[str]
) -> None:
    pytester.makepyfile(test_loses=LOSES, test_fine=FINE)
    run = run_alone if workers else type(pytester).runpytest_inprocess
    result = run(pytester, "--watch-underflow", *workers)
    assert result.ret == pytest.ExitCode.OK
    assert lines(result) == [
        "underflow: small values are lost at 1 of 2 sites (tensors quantized: 3); the worst "
        "tensor of each:",
        "  1 at test_loses.py:6, fp8_e4m3: 25.00% below the smallest normal number, 12.50% become "
        "zero (high); 1 of 2 tensors",
    ]


def test_a_run_that_loses_nothing_says_so_and_one_that_quantizes_nothing_too(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_fine=FINE)
    assert lines(pytester.runpytest_inprocess("--watch-underflow")) == [
        "underflow: nothing was lost: no value is below the smallest normal number of its format "
        "(tensors quantized: 1, sites: 1)"
    ]
    pytester.makepyfile(test_fine=OTHER)
    (underflow_line,) = lines(pytester.runpytest_inprocess("--watch-underflow"))
    assert underflow_line.startswith("underflow: no tensor was quantized by qgate.quantize")


def test_nobody_looks_unless_asked(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_loses=LOSES + "def test_observers():\n"
        "    from qgate import Quantizer\n"
        "    assert not Quantizer._observers\n"
    )
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*underflow*")
    result = pytester.runpytest_inprocess("--watch-underflow")
    assert result.parseoutcomes() == {"passed": 1, "failed": 1}, "this test could not fail"
    # A run leaves nobody behind in its process.
    assert pytester.runpytest_inprocess().ret == pytest.ExitCode.OK


@proof
@pytest.mark.usefixtures("measured_anew")
def test_gates_are_watched_and_the_records_keep_it(project: Path, suites: Run) -> None:
    (project / "qgate.toml").write_text("watch_underflow = true\n")
    result = suites("--layers", "first")
    assert result.ret == pytest.ExitCode.OK
    underflow_lines = lines(result)
    assert "model.layers.0." in "".join(underflow_lines)
    assert [note for note in header(project)["notes"] if note in underflow_lines] == underflow_lines
