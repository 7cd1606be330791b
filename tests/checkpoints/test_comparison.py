from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.record import CheckpointRecord
from qgate.checkpoints.texts import first_line
from qgate.errors import QgateError
from tests.checkpoints.exports import SCHEMES, compress, export, parent_tensors, write
from tests.checkpoints.faults import FAULTS, FAULTS_OF_ALL, UP, ExportFault
from tests.checkpoints.work import decoded
from tests.shares import share


@pytest.mark.parametrize("name", SCHEMES)
def test_a_right_export_is_as_declared(folders: Path, name: str) -> None:
    record = compare(str(folders / name), str(folders / "parent"))
    assert record.findings == []
    outcomes = [weight.outcome for weight in record.weights]
    assert outcomes.count("quantized") == 14
    assert outcomes.count("equal") == 7
    assert record.unmatched_parents == []
    assert f"{folders / name} is as declared: 14 quantized" in first_line(record)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_is_decoded_as_by_the_library(name: str, tmp_path: Path) -> None:
    weight = parent_tensors()["model.layers.0.mlp.down_proj.weight"]
    parts, values = compress(SCHEMES[name], weight)
    write(tmp_path, {f"down_proj.{ending}": part for ending, part in parts.items()}, {})
    ours = decoded(tmp_path)
    assert float((ours - values).abs().max()) <= 2e-3 * float(values.abs().max())
    assert (ours.bfloat16() == values.bfloat16()).float().mean() > 0.99


def comparison_of(fault: ExportFault, folders: Path, child: Path) -> CheckpointRecord:
    """Compare an export in which a fault is planted with its parent."""
    tensors = load_file(folders / fault.scheme / "model.safetensors")
    configuration = json.loads((folders / fault.scheme / "config.json").read_text())
    fault.plant(tensors, configuration)
    write(child, tensors, configuration)
    return compare(str(child), str(folders / "parent"))


@share(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_tensor_and_cause(
    fault: ExportFault, folders: Path, tmp_path: Path
) -> None:
    record = comparison_of(fault, folders, tmp_path / "child")
    causes = [finding.cause for finding in record.findings if fault.subject in finding.subject]
    assert any(re.search(fault.words, cause) for cause in causes), record.findings


@share(4)
@pytest.mark.parametrize("fault", FAULTS_OF_ALL, ids=lambda fault: fault.name)
def test_a_fault_of_all_weights_is_named_and_not_refused(
    fault: ExportFault, folders: Path, tmp_path: Path
) -> None:
    record = comparison_of(fault, folders, tmp_path / "child")
    named = {f.subject for f in record.findings if re.search(fault.words, f.cause)}
    assert len(named) >= 4, record.findings
    quantized = {weight.name for weight in record.weights if weight.outcome == "quantized"}
    assert {finding.subject for finding in record.findings} >= quantized


@share(4)
@pytest.mark.parametrize("name", ["w4a16", "fp8-block", "mxfp4", "nvfp4"])
def test_another_parent_is_refused(name: str, folders: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", parent_tensors(7), {})
    with pytest.raises(QgateError, match=r"is not the parent of .*: 0 of 14 quantized weights"):
        compare(str(folders / name), str(other))


def test_a_missing_tensor_is_one_finding(folders: Path, tmp_path: Path) -> None:
    tensors = load_file(folders / "w4a16" / "model.safetensors")
    del tensors[f"{UP}.weight_scale"]
    configuration = json.loads((folders / "w4a16" / "config.json").read_text())
    write(tmp_path / "child", tensors, configuration)
    for parent in (None, str(folders / "parent")):
        (finding,) = compare(str(tmp_path / "child"), parent).findings
        assert finding.subject == f"{UP}.weight"


def test_a_head_that_shares_the_embedding_is_not_missed(tmp_path: Path) -> None:
    parent = parent_tensors()
    write(tmp_path / "parent", parent, {"tie_word_embeddings": True})
    tensors = load_file(export(tmp_path / "child", "int8") / "model.safetensors")
    configuration = json.loads((tmp_path / "child" / "config.json").read_text())
    del tensors["lm_head.weight"]
    write(tmp_path / "child", tensors, configuration)
    assert compare(str(tmp_path / "child"), str(tmp_path / "parent")).findings == []
    write(tmp_path / "parent", parent, {})
    (finding,) = compare(str(tmp_path / "child"), str(tmp_path / "parent")).findings
    assert finding.subject == "lm_head.weight"
