"""All faults of the campaign are red and named, by the command and by gates; right exports are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.gate import CheckpointSubject, fold_findings
from qgate.checkpoints.record import CheckpointRecord
from tests.checkpoints.campaign import BESIDE, EXPORTS, FAULTS, Exported, export_all, planted
from tests.shares import share


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    return export_all(tmp_path_factory.mktemp("campaign"))


def _compared(exported: Exported) -> CheckpointRecord:
    layout = None if exported.layout is None else str(exported.layout)
    return compare(str(exported.child), str(exported.parent), layout_file=layout)


def test_the_campaign_is_as_large_as_it_says() -> None:
    assert len(FAULTS) >= 40
    assert len(BESIDE) >= 15
    assert {fault.export for fault in FAULTS.values()} == set(EXPORTS)


@pytest.mark.parametrize("name", EXPORTS)
def test_a_right_export_has_no_finding(name: str, exports: dict[str, Exported]) -> None:
    assert _compared(exports[name]).findings == []


@share(8, by=("export",))
@pytest.mark.parametrize(("name", "export"), [(name, f.export) for name, f in FAULTS.items()])
def test_a_fault_is_red_and_named(
    name: str, export: str, exports: dict[str, Exported], tmp_path: Path
) -> None:
    fault = FAULTS[name]
    findings = _compared(planted(exports[export], fault.plant, tmp_path)).findings
    causes = [
        f.cause for f in findings if f.subject.removesuffix(".weight").endswith(fault.subject)
    ]
    assert causes, findings
    assert any(re.search(fault.words, cause) for cause in causes), findings
    assert len(findings) <= 2, findings


@share(12)
@pytest.mark.parametrize("name", FAULTS)
def test_gates_judge_by_the_findings_of_the_command(
    name: str, exports: dict[str, Exported], tmp_path: Path
) -> None:
    exported = planted(exports[FAULTS[name].export], FAULTS[name].plant, tmp_path)
    layout = None if exported.layout is None else str(exported.layout)
    subject = CheckpointSubject(str(exported.child), str(exported.parent), "mine", layout=layout)
    judged = [finding for layer in subject.layers for _, findings in subject.judged_layer(layer)
              for finding in findings]  # fmt: skip
    own, other = (
        {(finding.subject, finding.cause) for finding in fold_findings(findings)}
        for findings in ([*judged, *subject.accounting], _compared(exported).findings)
    )
    assert own == other
    assert own
