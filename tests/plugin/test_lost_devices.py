"""A kernel that ends its device: the gate says so in one sentence, and the others at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.conftest import Run
from tests.plugin.projects import files, records

# Everything that reads the device afterwards raises the same, as CUDA does.
LOST = """
import pytest
import torch
from qgate.models import model as models

TEXT = "CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously reported"
ERROR = getattr(torch, "AcceleratorError", RuntimeError)

def raising(*args, **kwargs):
    try:
        raise ERROR(TEXT)
    except TypeError:
        raise RuntimeError(TEXT) from None

def test_kernel(gate):
    gate.session.bench.measure = gate.session.bench.outputs = models.fingerprint = raising
    gate.layer("int8", "layers.0")

def test_of_their_own():
    assert True

def test_device(device):
    assert device.type == "cpu"
"""
SENTENCE = (
    "a kernel stopped the device for this process (device-side assert triggered), while * ran or earlier: "
    "nothing runs on that device in this process*"
)


@pytest.mark.parametrize("options", [(), ("--update-baselines",)])
def test_gates_behind_a_lost_device_are_not_held(
    project: Path, suites: Run, options: tuple[str, ...]
) -> None:
    (project / "suites" / "test_a_kernel.py").write_text(LOST)
    before = files(project)
    result = suites("--layers", "first,last", "-rE", *options, alone=True)
    result.assert_outcomes(passed=1, errors=5)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    text = result.stdout.str()
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
    result.stdout.fnmatch_lines(
        [
            f"ERROR *test_kernel* - {SENTENCE}",
            f"ERROR *test_layer_outputs*layers.0* - not held: {SENTENCE}",
            f"ERROR *test_device* - Failed: not held: {SENTENCE}",
        ]
    )
    assert files(project) == before
    assert not [row for row in records(project) if row.get("passed")]


def test_a_test_of_a_project_that_loses_the_device_is_heard_too(project: Path, suites: Run) -> None:
    (project / "suites" / "test_a_kernel.py").write_text(
        "def test_it():\n"
        "    raise RuntimeError('Triton Error [CUDA]: an illegal memory access was encountered')\n"
    )
    result = suites("--layers", "first", "-rE")
    result.assert_outcomes(failed=1, errors=2, deselected=4)
    result.stdout.fnmatch_lines(
        ["ERROR *layers.0* - not held: * (illegal memory access), while test_it ran*"]
    )
