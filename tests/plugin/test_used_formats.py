"""Conformance tests of formats: those that the gates of a run quantize with, or all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import qgate
from qgate.formats import names
from qgate.modes import Kernel, Mode, Rule
from qgate.modes import names as mode_names
from qgate.modes.resolving import modes_of
from qgate.modes.selection import own_mode
from tests.gate.benches import LLAMA, MAMBA
from tests.plugin.conftest import Run
from tests.plugin.projects import SUITES, add
from tests.shares import proof

ONE_EACH = """
import pytest
pytestmark = pytest.mark.qgate_used_formats
def test_it(fmt): pass
"""
OWN_MODE = """
from qgate.modes import Mode, Rule
def pytest_qgate_modes(config):
    return [Mode("mine", "x", rules=(Rule(":weight$", "MXFP8"), Rule(":input$", None)))]
"""


@pytest.fixture
def conformance(project: Path) -> Path:
    (project / "suites" / "test_formats.py").write_text(ONE_EACH)
    return project


def formats_of(result: pytest.RunResult) -> list[str]:
    return re.findall(r"test_it\[([^\]]*)\] PASSED", str(result.stdout))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--mode", "int8"], ["int8"]),
        (["--mode", "fp16,mxfp4,int8"], ["fp16", "int8", "mxfp4_e2m1"]),
        (["--model", "tiny-mamba", "--mode", "2-1"], ["int8"]),
        (["--mode", "int8", "--format", "nvfp4,hif8"], ["hif8", "nvfp4"]),
        (["--mode", "int8", "--format", "all"], names()),
        (["--mode", "int8, ALL"], names()),
    ],
    ids=["one", "three", "mamba", "format", "format-all", "mode-all"],
)
@pytest.mark.usefixtures("conformance")
def test_formats_that_the_gates_use_are_held(
    suites: Run, options: list[str], expected: list[str]
) -> None:
    result = suites(*options, "-v", "-k", "test_it")
    lines = str(result.stdout)
    assert sorted(formats_of(result)) == sorted(expected)
    deselected = len(names()) - len(expected)
    note = (
        f"{deselected} tests deselected: this run quantizes with {len(expected)} of {len(names())} "
        "formats; --format all holds every one"
    )
    has_note = bool(deselected) and "--format" not in options
    assert lines.count(note) == int(has_note)


@pytest.mark.usefixtures("conformance")
def test_a_mode_that_fits_no_model_quantizes_with_none(suites: Run) -> None:
    result = suites("--mode", "experts-fp8", "-v")
    assert formats_of(result) == []
    assert f"this run quantizes with 0 of {len(names())} formats" in str(result.stdout)


def test_formats_of_other_gates_count(conformance: Path, suites: Run) -> None:
    add(conformance, "test_overflow.py")
    result = suites("--mode", "int8", "--layers", "first", "-v", "-k", "test_it")
    assert sorted(formats_of(result)) == ["fp8_e4m3", "hif8", "int8", "mxfp4_e2m1", "mxfp8_e4m3"]


@pytest.mark.usefixtures("conformance")
def test_a_run_of_the_formats_alone_holds_all(suites: Run) -> None:
    result = suites("-v", paths=["suites/test_formats.py"])
    assert sorted(formats_of(result)) == sorted(names())
    assert "deselected" not in str(result.stdout)


def test_unmarked_tests_and_those_of_gates_run_for_every_format(
    conformance: Path, suites: Run
) -> None:
    own = conformance / "suites" / "test_formats.py"
    own.write_text(ONE_EACH.replace("pytestmark =", "_ ="))
    assert sorted(formats_of(suites("-v", "-k", "test_it"))) == sorted(names())


def test_modes_of_a_project_count_by_the_names_that_formats_have(
    conformance: Path, suites: Run
) -> None:
    (conformance / "conftest.py").write_text(OWN_MODE)
    result = suites("--mode", "mine", "-v", "-k", "test_it")
    assert formats_of(result) == ["mxfp8_e4m3"]


@proof
def test_a_mode_with_an_unknown_format_leaves_the_error_to_its_gates(
    conformance: Path, suites: Run
) -> None:
    (conformance / "conftest.py").write_text(OWN_MODE.replace("MXFP8", "mxfp9"))
    (conformance / "suites" / "test_layer_outputs.py").unlink()
    result = suites("--mode", "mine,hif8", "-v")
    assert formats_of(result) == ["hif8"]
    assert "unknown format 'mxfp9'" in str(result.stdout) + str(result.stderr)
    assert "INTERNALERROR" not in str(result.stdout) + str(result.stderr)


def test_every_mode_but_the_reference_names_its_formats() -> None:
    for model in (qgate.models.load(LLAMA), qgate.models.load(MAMBA)):
        for mode in modes_of(model, "all"):
            assert mode.formats, mode.name
            assert {qgate.formats.get(name).name for name in mode.formats} <= {*names()}
    assert "fp32" in mode_names()
    assert Mode("nothing", "x").formats == frozenset()


def test_a_kernel_has_the_formats_of_what_it_stands_for() -> None:
    meant = Kernel(lambda model: model, Rule(":weight$", "nvfp4")).meant
    assert own_mode("mine", "nvfp4", meant=meant).formats == {"nvfp4"}
    assert own_mode("mine", "int8").formats == frozenset(), "its name says no format"


def test_a_kernel_that_names_a_mode_counts_as_that_mode(conformance: Path, suites: Run) -> None:
    (conformance / "build.py").write_text(
        "import qgate\nfrom qgate.modes import Kernel\n"
        "def build():\n"
        "    model = qgate.models.load('tiny-llama')\n"
        "    kernel = Kernel(lambda model: model.module, 'hif8')\n"
        "    return qgate.Model(model.module, model.inputs, name='own', modes={'mine': kernel})\n"
    )
    options = ["--model", "build.py:build", "--mode", "mine", "-v", "-k", "test_it"]
    assert formats_of(suites(*options)) == ["hif8"]


def test_the_suite_of_formats_is_marked() -> None:
    assert (
        "pytestmark = pytest.mark.qgate_used_formats\n" in (SUITES / "test_formats.py").read_text()
    )
