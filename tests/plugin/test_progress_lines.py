"""Progress of `pytest suites`: a line per mode of a model, and modes one after the other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

SUITE = "def test_gate(gate, mode, layer): pass\n"
FORMATS = "def test_format(gate, model, layer, fmt): pass\n"
MODELS = ("--model", "tiny-llama", "--model", "tiny-mamba")


@pytest.fixture(autouse=True)
def suites(pytester: pytest.Pytester) -> Path:
    """Gates in three files, and a test that is none. They measure nothing: there is no baseline."""
    folder: Path = pytester.mkdir("suites")
    for name, text in (("a", SUITE), ("b", SUITE), ("c", FORMATS), ("d", "def test_d(): pass\n")):
        (folder / f"test_{name}.py").write_text(text)
    return folder


def test_each_mode_of_a_model_is_one_line_and_so_is_each_other_file(
    pytester: pytest.Pytester,
) -> None:
    options = ("--mode", "int8,fp16", "--format", "int8,hif8", "--color=no")
    result = pytester.runpytest_inprocess("suites", *MODELS, *options)
    lines = [line.partition("[")[0] for line in result.outlines if line.endswith("%]")]
    assert [line.rstrip(" E.F") for line in lines] == [
        "mode int8 of tiny-llama",
        "mode fp16 of tiny-llama",
        "suites/test_c.py",
        "mode int8 of tiny-mamba",
        "mode fp16 of tiny-mamba",
        "suites/test_c.py",
        "suites/test_d.py",
    ]


def test_within_a_mode_file_follows_file(pytester: pytest.Pytester) -> None:
    options = ("--mode", "int8,fp16", "--collect-only", "-q")
    result = pytester.runpytest_inprocess("suites", *MODELS[:2], *options)
    gates = [line.partition("::test_gate[") for line in result.outlines if "::test_gate[" in line]
    runs = [(file, case.rpartition("-")[0]) for file, _, case in gates]
    assert [run for run, _ in itertools.groupby(runs)] == [
        ("suites/test_a.py", "tiny-llama-int8"),
        ("suites/test_b.py", "tiny-llama-int8"),
        ("suites/test_a.py", "tiny-llama-fp16"),
        ("suites/test_b.py", "tiny-llama-fp16"),
    ]


def test_tests_that_are_no_gates_keep_the_order_of_pytest(pytester: pytest.Pytester) -> None:
    """Their parameters may be called `model` or `mode`, and may be of any type."""
    pytester.makepyfile(
        test_own="""
        import pytest

        @pytest.fixture(params=[{"a": 1}, {"b": 2}], scope="module")
        def model(request): return request.param

        def test_first(model): pass
        def test_second(model): pass
        """
    )
    result = pytester.runpytest_inprocess("test_own.py", "-v", "--color=no")
    result.assert_outcomes(passed=4)
    order = [line.split("::")[1].split(" ")[0] for line in result.outlines if "PASSED" in line]
    assert order == [
        "test_first[model0]", "test_second[model0]", "test_first[model1]", "test_second[model1]",
    ]  # fmt: skip
