from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.record import CheckpointRecord
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.methods import (
    FAULTS,
    Export,
    MethodFault,
    by_activation,
    export_awq,
    export_gptq,
    export_rotated,
)


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


@pytest.mark.parametrize("seed", range(20))
def test_what_a_method_changes_on_purpose_is_no_finding(seed: int, tmp_path: Path) -> None:
    name, export, method, count = EXPORTS[seed % len(EXPORTS)]
    record = _compared(export(seed), tmp_path, seed)
    assert record.findings == [], name
    assert sum(method in weight.method for weight in record.weights) == count, name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_on_top_of_a_method_is_found(fault: MethodFault, tmp_path: Path) -> None:
    export = fault.export(0)
    fault.plant(export)
    findings = _compared(export, tmp_path, 0).findings
    causes = [finding.cause for finding in findings if fault.subject in finding.subject]
    assert any(re.search(fault.words, cause) for cause in causes), findings
    others = [finding for finding in findings if fault.subject not in finding.subject]
    assert all("undoes" in finding.cause or "norm" in finding.subject for finding in others)
