"""The script beside a failing run: it computes what the site should give, and says what differs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate.formats import Quantizer
from qgate.gate.measuring import reproductions
from qgate.gate.measuring.reproductions import INPUTS, SCRIPT, of_cast
from tests.campaigns.mutants.bed import Bed, Healthy, all_layers
from tests.gate.test_diagnosing import BLOCK, NORM, UP, block, fresh, output, put, weight
from tests.gate.test_diagnosing import recorded as recorded
from tests.shares import always, share, slow_file
from tests.warm import run_python

pytestmark = slow_file

SOWN = {
    f"{UP}:weight": weight(lambda w: w * 2),
    f"{UP}:output": output(put((..., 5), lambda t: t * 0)),
    f"{NORM}:output": output(put((..., 7), lambda t: t * 0), NORM),
    f"{BLOCK}:output": block(put((slice(None), -1), lambda t: t * 0)),
}


def run_script(folder: Path) -> dict[str, int]:
    """Run a script where nothing else is, and return how many values it says differ."""
    text = output_of(folder)
    counts = re.findall(r"(.+): (\d+) of \d+ values differ", text)
    counts += [("the run", n) for n in re.findall(r"([\d,]+) of [\d,]+ values are outside", text)]
    return {name: int(count.replace(",", "")) for name, count in counts}


def output_of(folder: Path) -> str:
    """Run a script where nothing else is, and return what it prints."""
    done = run_python(str(folder / SCRIPT), cwd=Path.cwd(), environment=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@share(12)
@pytest.mark.parametrize("site", SOWN)
def test_the_script_of_the_first_failing_site_shows_the_fault(
    site: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh(recorded)
    SOWN[site](Bed(monkeypatch, session, Healthy(recorded), "int8"))
    outcomes = all_layers(session, "int8")
    paths = [
        path for outcome in outcomes if (path := session.leave_reproduction(tmp_path, outcome))
    ]
    (path,) = paths
    assert path.name == f"{site.replace(':', '.')}.int8"
    rows: list[dict[str, Any]] = [row for judged in outcomes for row in judged.record["rows"]]
    assert [row["site"] for row in rows if "reproduction" in row] == [site]
    counts = run_script(path)
    assert counts["the run"] > 0
    if site.startswith(UP):
        assert counts["computed now"] == 0, "the fault is in the model, not in the quantizer"
    assert len((path / SCRIPT).read_text().splitlines()) < 50


def test_a_clean_run_leaves_none(recorded: Path, tmp_path: Path) -> None:
    session = fresh(recorded)
    for outcome in all_layers(session, "int8"):
        assert session.leave_reproduction(tmp_path / "repro", outcome) is None
    assert not (tmp_path / "repro").exists()


def test_tensors_that_are_too_large_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(8, 32)
    reproduction = of_cast("a:weight", "int8", x, x, Quantizer("int8"))
    assert reproduction is not None
    monkeypatch.setattr(reproductions, "MOST_BYTES", 2047)
    assert reproduction.write(tmp_path / "repro", "too large") is None
    assert not (tmp_path / "repro").exists()


@always
def test_a_name_cannot_leave_the_folder_or_end_the_docstring(tmp_path: Path) -> None:
    x = torch.randn(4, 32)
    reproduction = of_cast(
        "../../a b\n:weight", "in/t8", x * 2, x, Quantizer("int8", granularity="channel", axis=0)
    )
    assert reproduction is not None
    path = reproduction.write(tmp_path, 'evil """\nimport os \\')
    assert path is not None
    assert path.parent == tmp_path
    assert sorted(file.name for file in path.iterdir()) == [INPUTS, SCRIPT]
    assert run_script(path)["the run"] > 0
