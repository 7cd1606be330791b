"""Projects of tests: their suites, what they accepted, and the records that runs leave in them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qgate.baselines import Accepted, Key
from qgate.baselines.accepted import read_accepted
from tests.baselines.building import rewrite

SUITES = Path(__file__).parents[2] / "suites"
SITE = "model.layers.1.mlp.up_proj:output"


def begin(pytester: pytest.Pytester, *suites: str) -> Path:
    """Make a project with these suites, whose runs keep no cache."""
    (pytester.path / "suites").mkdir()
    add(pytester.path, *suites)
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\naddopts = ['-p', 'no:cacheprovider']")
    return pytester.path


def add(project: Path, *suites: str) -> None:
    for name in suites:
        shutil.copy(SUITES / name, project / "suites")


def accepted(project: Path, model: str = "tiny-llama", mode: str = "int8") -> Path:
    return project / "baselines" / model / "accepted" / f"{mode}.txt"


def tightened(project: Path) -> float:
    """Make one accepted error a tenth of what it is: what is measured is ten times that."""
    key = Key("layer_outputs", SITE, "local", "relative_mse")
    before = read_accepted(accepted(project).read_bytes(), "").values[key]
    assert isinstance(before, float)

    def change(errors: Accepted) -> Accepted:
        return replace(errors, values=errors.values | {key: before / 10})

    rewrite(accepted(project), change)
    return before


def files(project: Path) -> dict[str, bytes]:
    root = project / "baselines"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def records(project: Path, out: str = "qgate-out") -> list[dict[str, Any]]:
    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    lines = (project / out / "results.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def header(project: Path) -> dict[str, Any]:
    return records(project)[0]


def page(project: Path) -> str:
    return (project / "qgate-out" / "report.html").read_text(encoding="utf-8")


def gist(project: Path) -> list[tuple[Any, ...]]:
    """Return what has to be the same however tests are distributed."""
    rows = [row for row in records(project) if "site" in row]
    keys = ("suite", "model", "mode", "layer", "site", "scope", "passed", "values", "checks")
    return sorted([tuple(row[key] for key in keys) for row in rows], key=repr)
