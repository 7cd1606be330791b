"""Headers and records, made of verdicts of the real gate: the two rooms meet in plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qgate.gate import Limits, Measured, judge
from qgate.results import Writer, new_header

HEADER: dict[str, Any] = {
    "torch": "2.9.0",
    "device": "cpu",
    "seed": 0,
    "commit": "abc",
    "command": ["pytest", "suites", "--mode", "2-1"],
    "modes": ["2-1"],
    "plans": {"2-1": {"fc1:weight": "int8"}},
    "metrics": [{"name": "relative_mse", "direction": "lower"}],
    "limits": [{"source": "default", "budget_db": 0.5}],
    "models": {"tiny": {"weights": "0a", "inputs": "1b"}},
}


def header(**given: Any) -> dict[str, Any]:
    return new_header(**{**HEADER, **given})


def record(
    site: str = "fc1:output",
    mse: float | None = 1e-4,
    *,
    accepted: dict[str, float] | None = None,
    nonfinite: int = 0,
    gated: tuple[str, ...] | None = ("relative_mse",),
    **given: Any,
) -> dict[str, Any]:
    """The record of one comparison with an accepted relative MSE of 1e-4."""
    goal = {"relative_mse": 1e-4} if accepted is None else accepted
    site_ = Measured(
        site=site, layer="0", scope="carried", values={"relative_mse": mse}, order=0,
        nonfinite=nonfinite, accepted=goal, gated=gated,
    )  # fmt: skip
    verdict = judge([site_], lambda _: Limits(), True)
    return {
        "suite": "test_layer_outputs",
        "node": f"suites/test_layer_outputs.py::test_layer_outputs[{site}]",
        "model": "tiny",
        "mode": "2-1",
        "layer": "0",
        "site": site,
        "scope": "carried",
        "values": dict(site_.values),
        "ideal": None,
        "accepted": goal,
        "checks": [check.to_dict() for check in verdict.checks],
        "passed": verdict.passed,
        "seconds": 0.25,
        **given,
    }


def write(path: Path, *records: dict[str, Any], **given: Any) -> Path:
    with Writer(path, header(**given)) as writer:
        for entry in records:
            writer.append(entry)
    return path
