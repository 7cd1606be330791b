"""Faults that no cause was designed for: red in both places, and named in 95 % of first lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gate.own_kernels import product_of
from tests.kernel_checks.unseen_code import RIGHT
from tests.kernel_checks.unseen_faults import FAULTS, PLACES, UNNAMED, first_line
from tests.kernel_checks.unseen_products import UnseenFault
from tests.shares import always, proof, share, slow_file

pytestmark = slow_file

PARTS = [
    next(fault for fault in FAULTS if (fault.part, fault.fmt) == kind)
    for kind in dict.fromkeys((fault.part, fault.fmt) for fault in FAULTS)
]


# All, with their lines: python -m tests.kernel_checks.unseen_faults
@share(60)
@pytest.mark.parametrize("checked_by", PLACES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_an_unseen_fault_is_red_and_named(
    fault: UnseenFault, checked_by: str, tmp_path: Path
) -> None:
    line = first_line(fault, checked_by, tmp_path)
    assert line, "green"
    assert "sums in" not in line, line
    if (fault.name, checked_by) not in UNNAMED:
        assert re.search(fault.words, line), line


@share(8)
@pytest.mark.parametrize("checked_by", PLACES)
@pytest.mark.parametrize("part", PARTS, ids=lambda fault: f"{fault.part} {fault.fmt}")
def test_right_code_in_its_place_is_green(
    part: UnseenFault, checked_by: str, tmp_path: Path
) -> None:
    code = product_of(part.fmt) if part.part == "product" else RIGHT[part.part]
    assert first_line(part, checked_by, tmp_path, code) == ""


@proof
def test_a_fault_that_is_named_at_one_site_is_tried_at_the_others(tmp_path: Path) -> None:
    # Powers of two that are too large are right, by another convention, where nothing is flushed.
    fault = next(fault for fault in FAULTS if fault.name == "mx blocks along rows")
    line = first_line(fault, "gate", tmp_path)
    assert line.startswith("layers.0.attention.q_proj:output"), line
    assert re.search(fault.words, line), line


@always
def test_few_unseen_faults_have_no_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 120
    assert {name for name, _ in UNNAMED} <= {fault.name for fault in FAULTS}
    for checked_by in PLACES:
        assert sum(where == checked_by for _, where in UNNAMED) <= 0.05 * len(FAULTS)
