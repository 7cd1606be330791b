from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.record import CheckpointRecord
from tests.checkpoints.exports import INNER, parent_tensors, write
from tests.checkpoints.faults import ExportFault
from tests.checkpoints.methods import (
    FAULTS,
    Export,
    by_activation,
    export_awq,
    export_gptq,
    export_rotated,
    rotated_tensors,
    scaled_tensors,
)
from tests.checkpoints.references import hadamard
from tests.shares import share


def _compared(export: Export, folder: Path, seed: int) -> CheckpointRecord:
    write(folder / "parent", parent_tensors(seed), {})
    export.write(folder / "child")
    return compare(str(folder / "child"), str(folder / "parent"))


EXPORTS: list[tuple[str, Callable[[int], Export], str, int]] = [
    ("GPTQ", export_gptq, "as GPTQ changes it", 14),
    ("GPTQ by activation", by_activation, "as GPTQ changes it", 14),
    ("GPTQ of 2 bits", lambda seed: export_gptq(seed, 2), "as GPTQ changes it", 14),
    ("GPTQ of 3 bits", lambda seed: export_gptq(seed, 3), "as GPTQ changes it", 14),
    ("GPTQ of 8 bits", lambda seed: export_gptq(seed, 8, v2=True), "as GPTQ changes it", 14),
    ("AWQ", export_awq, "as AWQ or SmoothQuant changes it", 14),
    ("rotated", export_rotated, "as a rotation changes it", 16),
    ("QuaRot", lambda seed: export_rotated(seed, True), "as a rotation changes it", 16),
]


@share(6)
@pytest.mark.parametrize("seed", range(20))
def test_what_a_method_changes_on_purpose_is_no_finding(seed: int, tmp_path: Path) -> None:
    name, export, method, count = EXPORTS[seed % len(EXPORTS)]
    record = _compared(export(seed), tmp_path, seed)
    assert record.findings == [], name
    assert sum(method in weight.method for weight in record.weights) == count, name


@share(12)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_on_top_of_a_method_is_found(fault: ExportFault, tmp_path: Path) -> None:
    export = fault.scheme(0)
    fault.plant(export)
    findings = _compared(export, tmp_path, 0).findings
    causes = [finding.cause for finding in findings if fault.subject in finding.subject]
    assert any(re.search(fault.words, cause) for cause in causes), findings
    other_findings = [finding for finding in findings if fault.subject not in finding.subject]
    assert all("undoes" in finding.cause or "norm" in finding.subject for finding in other_findings)


def _in_int8(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """Export the linear layers of a network in INT8, a scale per row, and the rest in 16 bits."""
    stored = {}
    for name, weight in tensors.items():
        stored[name] = weight.bfloat16()
        if "_proj" in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            stored[name] = (weight / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
    return write(folder, stored, {})


def test_smoothquant_is_undone_by_norms(tmp_path: Path) -> None:
    write(tmp_path / "parent", parent_tensors(), {})
    _in_int8(scaled_tensors(0, pairs=False), tmp_path / "child")
    record = compare(str(tmp_path / "child"), str(tmp_path / "parent"))
    assert record.findings == []
    scaled = [w for w in record.weights if w.method == "as AWQ or SmoothQuant changes it"]
    assert len(scaled) == 10
    assert all(weight.undone_by[0].endswith("layernorm.weight") for weight in scaled)
    norms = [weight for weight in record.weights if weight.outcome == "undoes"]
    assert len(norms) == 4


def test_weights_that_are_rotated_on_both_sides_cannot_be_compared(tmp_path: Path) -> None:
    write(tmp_path / "parent", parent_tensors(), {})
    tensors = rotated_tensors(0)
    for name in tensors:
        if "down_proj" in name:
            tensors[name] = tensors[name] @ hadamard(INNER, 7)
    _in_int8(tensors, tmp_path / "child")
    record = compare(str(tmp_path / "child"), str(tmp_path / "parent"))
    assert record.findings == []
    methods = {weight.name: weight.method for weight in record.weights}
    words = "rotated: cannot be compared with this parent"
    assert [name for name, method in methods.items() if method == words] == [
        f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)
    ]
