"""Faults of a user's models: each is red, and the first line of the run names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.campaigns.first_lines import decoders, decoding, others, rewrites
from tests.campaigns.first_lines.known import GREEN, UNNAMED
from tests.campaigns.first_lines.planting import MODES, Bits, Fault, first_line, first_line_of
from tests.campaigns.first_lines.subjects import subject
from tests.shares import share

FAULTS = (*decoders.FAULTS, *others.FAULTS, *decoding.FAULTS, *rewrites.FAULTS)
CASES = [
    pytest.param(fault, bits, id=f"{fault.model}-{fault.name}-{bits}")
    for fault in FAULTS
    for bits in fault.bits
]


def is_named(fault: Fault, line: str) -> bool:
    """Tell if a first line begins with the fault's place and says what it is.

    Where it is worst, and by how much, says nothing of what it is.
    """
    site, _, words = line.partition(" ")
    words = re.sub(r"\(worst at [^)]*\)|: \w+@worst_token .*", "", words)
    begins = re.match if fault.suite == "gradients" else re.fullmatch
    return bool(begins(fault.site, site) and re.search(fault.words, words))


@share(40, by=["fault.model"])
@pytest.mark.parametrize(("fault", "bits"), CASES)
def test_a_fault_is_red_and_named(fault: Fault, bits: Bits, tmp_path: Path) -> None:
    key = fault.model, fault.name, bits
    line = first_line(fault, MODES[bits], tmp_path)
    assert line or key in GREEN
    assert is_named(fault, line) or key in {*GREEN, *UNNAMED}, line


@share(12)
@pytest.mark.parametrize("bits", MODES)
@pytest.mark.parametrize("model", ["decoder", "mamba", "mixture", "unet", "encoder"])
def test_a_model_without_a_fault_is_green(model: str, bits: Bits, tmp_path: Path) -> None:
    for suite in ("forward", "gradients", *["relations"] * (model in ("decoder", "mamba"))):
        right = Fault(model, "none", lambda _: None, "", "", suite=suite)
        assert first_line(right, MODES[bits], tmp_path) == ""


@share(12)
@pytest.mark.parametrize("mode", [*MODES.values(), "fp16"])
@pytest.mark.parametrize(("model", "name"), rewrites.RIGHT)
def test_right_code_that_computes_otherwise_is_green(
    model: str, name: str, mode: str, tmp_path: Path
) -> None:
    for suite in ("forward", "gradients"):
        plant = rewrites.RIGHT[model, name]
        assert first_line_of(subject(model), mode, plant, suite, tmp_path) == ""


def test_known_lines_are_of_faults_in_the_table() -> None:
    keys = {(fault.model, fault.name, bits) for fault in FAULTS for bits in fault.bits}
    assert keys >= {*GREEN, *UNNAMED}
    assert not {*GREEN} & {*UNNAMED}
    assert len({(fault.model, fault.name) for fault in FAULTS}) == len(FAULTS)
