"""Hostile names in what the library says while a program runs: none is obeyed or begins a line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import qgate
from qgate.cli import main
from qgate.collecting.starting import collect
from qgate.relations.record import Disagreement, RelationFailure, RelationReport
from qgate.testing import CheckFailure, check_kernel
from tests.hostile import FORGED, TOGETHER
from tests.hostile_files import assert_calm
from tests.shares import proof, share

NAMES = [name.replace(".", "_") for name in TOGETHER]
PROGRAM = """\
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
"""


class Casting(nn.Module):
    """Loses small values, as a user's own module does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return qgate.quantize(x, "fp8_e4m3")


def test_reports_of_underflow_are_calm(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential()
    for name in NAMES:
        model.add_module(name, Casting())
    small = torch.full((4, 32), 0.01)
    with caplog.at_level(logging.WARNING, logger="qgate"), qgate.watch_underflow() as watch:
        model(small)
    assert len(caplog.records) >= len(NAMES)
    assert_calm("\n".join(r.getMessage() for r in caplog.records), "the logger")
    assert_calm("\n".join(watch.lines(100)), "the lines")


@proof
def test_warnings_of_a_collector_are_calm(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES[:3] + NAMES[9:14]):
        parts = nn.ModuleDict({name: nn.Linear(4, 4), "other": nn.Linear(4, 4)})
        folder = tmp_path / f"{number}{name}"
        with (
            pytest.warns(UserWarning, match="missing") as warned,
            collect(parts, folder, iterations=3),
        ):
            parts[name](torch.ones(2, 4)).sum().backward()
        assert_calm(str(warned[0].message), "the warning")


def test_the_folder_of_a_collection_forges_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(PROGRAM)
    Path("q.py").write_text(PROGRAM + f"raise type('a\\n{FORGED}', (BaseException,), {{}})\n")
    assert (
        main(["collect", "--dir", f"o\n{FORGED} 12 passed", "--sites", "linear", "--", "p.py"]) == 0
    )
    error = capfd.readouterr().err
    assert "iterations whole" in error
    assert_calm(error, "the summary")
    with pytest.raises(BaseException):  # noqa: B017
        main(["collect", "--dir", "o", "--sites", "linear", "--iterations", "2", "--", "q.py"])
    error = capfd.readouterr().err
    assert "stopped by a" in error
    assert_calm(error, "the summary")


@share(4)
@pytest.mark.parametrize("name", NAMES)
def test_names_of_kernels_are_calm(name: str) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    kernel.__name__ = name
    with pytest.raises(CheckFailure) as failure:
        check_kernel(kernel, torch.arange(16.0).reshape(4, 4) - 3, like=torch.neg)
    assert_calm(str(failure.value), "the failure")
    assert_calm(str(failure.value.report), "the report")
    wrong = Disagreement("repeat", "again", name, (), 1, 2, "token 0", 0.5, 0.0)
    report = RelationReport(name, left_out={name: name}, disagreements=[wrong])
    assert_calm(f"{RelationFailure(report)}\n{report}", "the relations")
