"""Zero points of GPTQ and AWQ are as configurations declare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qgate.checkpoints.comparison import compare
from tests.checkpoints.exports import with_stored, write
from tests.checkpoints.references import (
    IntegerWeight,
    awq_parts,
    gptq_parts,
    nearest,
    with_stored_scales,
)

Parts = Callable[[IntegerWeight], dict[str, Tensor]]
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def _export(
    folder: Path, parts: Parts, settings: dict[str, Any], symmetric: bool, group: int = 32
) -> str:
    def stored(weight: Tensor) -> dict[str, Tensor]:
        quantized = nearest(weight.float(), group=group, symmetric=symmetric)
        return parts(with_stored_scales(quantized))

    tensors = with_stored(stored)
    return str(write(folder, tensors, {"quantization_config": settings}))


@pytest.mark.parametrize(
    ("parts", "settings"),
    [(awq_parts, {**AWQ, "zero_point": False}), (gptq_parts, {**GPTQ, "sym": True})],
    ids=["awq", "gptq"],
)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_zero_points_that_are_declared_away_are_found(
    parts: Parts, settings: dict[str, Any], symmetric: bool, parent: str, tmp_path: Path
) -> None:
    findings = compare(_export(tmp_path / "child", parts, settings, symmetric), parent).findings
    assert len(findings) == (0 if symmetric else 14)
    assert all("and the recipe declares symmetric codes" in f.cause for f in findings)


def _without_zeros(weight: IntegerWeight) -> dict[str, Tensor]:
    return {name: x for name, x in awq_parts(weight).items() if name != "qzeros"}


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_declared_zero_points_are_stored(symmetric: bool, parent: str, tmp_path: Path) -> None:
    settings = {**AWQ, "zero_point": True}
    findings = compare(_export(tmp_path / "a", awq_parts, settings, symmetric), parent).findings
    causes = [f.cause for f in findings if "declares zero points" in f.cause]
    assert len(causes) == (14 if symmetric else 0)
    assert set(causes) <= {
        "all zero points are 8, and the recipe declares zero points: codes are symmetric; "
        "declare them so"
    }
    assert symmetric or findings == []
    findings = compare(
        _export(tmp_path / "b", _without_zeros, settings, symmetric), parent
    ).findings
    assert len(findings) == 14
    assert all(f.cause.startswith("its qzeros is missing") for f in findings)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("shift", [1, -1])
def test_symmetric_codes_are_held_to_a_symmetric_quantizer(
    group: int, shift: int, parent: str, tmp_path: Path
) -> None:
    """A symmetric grid has 0.6 to 1.4 dB more error than one with zero points."""
    settings = {**GPTQ, "sym": True, "group_size": group}
    child = _export(tmp_path / "right", gptq_parts, settings, True, group)
    record = compare(child, parent)
    assert record.findings == []
    errors = [w.figures.over_ideal_db or 0 for w in record.weights if w.figures]
    assert len(errors) == 14
    assert all(abs(error) < 0.3 for error in errors)

    def shifted(weight: IntegerWeight) -> dict[str, Tensor]:
        return gptq_parts(replace(weight, zeros=weight.zeros + shift))

    wrong = _export(tmp_path / "wrong", shifted, settings, True, group)
    causes = [f.cause for f in compare(wrong, parent).findings]
    assert sum("zero points are" in cause for cause in causes) == 14, causes
