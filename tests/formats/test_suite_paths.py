"""The suite of formats enters every path of the engine, for each family and dtype.

Every line of the functions that meet tensors is one that the suite enters, or it is listed here.
"""

from __future__ import annotations

import json
import linecache
import os
import runpy
from pathlib import Path
from typing import get_args

import pytest
import torch

from qgate.formats import get
from qgate.formats._literals import FORMATS
from qgate.formats.engine.dtypes import INPUTS
from qgate.formats.options import ROUNDINGS, SCALE_RULES, Granularity
from tests.formats.suite_paths import EXPLORED, FOLDER, Line, lines_of_paths
from tests.shares import slow_file
from tests.warm import run_python

pytestmark = slow_file

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "suites" / "test_formats.py"
DEVICE = "only tensors on a device come here"
BY_NAME = "of formats that are made by name only: test_vector_codebooks.py and its neighbors"
RANDOM = "rounding at random, by draws that follow from places: test_philox.py and its neighbors"
LISTED = "groups that a function lists: test_groups.py"
TIES = "numbers that two roundings move to a tie: test_choosing.py"
# Functions, or lines of them that hold a text, with the reason.
OUTSIDE: dict[tuple[str, str], str] = {
    ("engine/effects.py::", ""): "counts what a format loses, quantizes nothing",
    ("engine/on_device.py::", ""): DEVICE,
    ("quantizer.py::_values", "on_device"): DEVICE,
    ("quantizer.py::_values", "if y is not None"): DEVICE,
    ("quantizer.py::_values", "return y"): DEVICE,
    ("quantizer.py::_shortcut", "return False"): DEVICE,
    ("engine/job.py::Layout.chunks", "_CHUNK_ON_DEVICE"): DEVICE,
    ("engine/job.py::Job._amax_bits", "largest"): DEVICE,
    ("_scratch.py::buffer", "return torch.empty"): DEVICE,
    ("quantizer.py::StraightThrough.backward", ""): "a gradient",
    ("quantizer.py::StraightThrough.jvp", ""): "a gradient",
    ("quantizer.py::StraightThrough.vmap", ""): "a gradient",
    ("engine/rotation.py::_Rotation.backward", ""): "a gradient",
    ("engine/rotation.py::_Rotation.jvp", ""): "a gradient",
    ("_element.py::round_to_integer", "size"): "stochastic rounding has no expected value",
    ("_element.py::round_to_integer", "low"): "stochastic rounding has no expected value",
    ("encoded.py::encode_tensor", "holes"): "the definition knows no stand-in for NaN",
    ("encoded.py::encode_tensor", "largest"): "the definition knows no stand-in for NaN",
    ("_element.py::ElementFormat.nearest", ""): "for sweeps, not for quantizers",
    ("_block.py::BlockFormat.prepare", ""): "of formats whose tensors have no scale",
    ("_block.py::BlockFormat.tensor_scale", ""): "of formats whose tensors have no scale",
    ("quantizer.py::Quantizer", ""): "the front door, no arithmetic",
    ("quantizer.py::quantize", "as_quantizer"): "the front door, no arithmetic",
    ("quantizer.py::encode", ""): "the front door, no arithmetic",
    ("settings.py::", ""): "checks of options, no arithmetic",
    ("_element.py::ElementFormat.at_random", ""): "for states of a network, not for quantizers",
    ("engine/scales.py::scale_from_option", "bad"): "text of an error",
    ("encoded.py::Encoded.decode", "allowed"): "text of an error",
    ("engine/scales.py::version_of", ""): "what was checked, no arithmetic",
    ("engine/scales.py::_keep_checked", ""): "what was checked, no arithmetic",
    ("engine/scales.py::zero_point_from_option", "return zero_point"): DEVICE,
    **{(name, ""): BY_NAME for name in (
        "double_scales.py::", "residual.py::", "vector_codebook.py::", "vector_books.py::",
        "engine/vector_search.py::",
    )},
    ("engine/job.py::Job.state", "fmt.prepare(finite_groups.view"): BY_NAME,
    **{(name, ""): RANDOM for name in (
        "philox.py::", "state_draws.py::", "tile_draws.py::", "_work.py::ChunkDraws.of",
        "_element.py::drawn", "_codebook.py::Codebook.at_random", "_codebook.py::Codebook._beside",
        "_codebook.py::Codebook.inverse_quantum",
    )},
    ("_codebook.py::Codebook.cast", "at_random"): RANDOM,
    ("scale_layouts.py::", ""): "moves scales in memory, quantizes nothing",
    ("engine/job.py::join_groups", ""): LISTED,
    ("engine/job.py::split_groups", ""): LISTED,
    ("engine/job.py::Layout", "listed"): LISTED,
    ("engine/job.py::Layout", "groups("): LISTED,
    ("engine/job.py::layout_of", "q.groups"): LISTED,
    ("engine/job.py::layout_of", "outer, length, 1"): LISTED,
    ("engine/checking.py::check", ""): LISTED,
    ("engine/fast_choosing.py::_factors", ""): TIES,
    ("engine/fast_choosing.py::shortcut", "exact"): TIES,
    ("engine/fast_choosing.py::shortcut", "tied"): TIES,
}  # fmt: skip
Entered = dict[tuple[str, str, str], set[Line]]


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> Entered:
    """The lines that a run of the suite enters, and what an exploration enters after it."""
    out = tmp_path_factory.mktemp("paths") / "lines.json"
    words = ("-m", "tests.formats.suite_paths", str(SUITE), str(out))
    run = run_python(*words, cwd=ROOT, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    rows = json.loads(out.read_text(encoding="utf-8"))
    return {tuple(key): {(name, line) for name, line in lines} for *key, lines in rows}


@pytest.fixture(scope="module")
def lines() -> dict[Line, str]:
    return lines_of_paths()


def text_of(line: Line) -> str:
    return linecache.getline(str(FOLDER / line[0]), line[1]).strip()


BY_PROCESSOR = (
    ("engine/fast_choosing.py::_exact", ""),
    ("engine/fast_choosing.py::_factor_tables", "table"),
)
"""Lines that the suite enters where its draws have such a tie: torch draws by the processor."""


def is_outside(function: str, text: str) -> bool:
    left_out = (*OUTSIDE, *BY_PROCESSOR)
    return any(function.startswith(name) and words in text for name, words in left_out)


def missed(lines: dict[Line, str], entered: Entered, without: str = "") -> list[tuple[str, str]]:
    """List lines that no test of the suite enters, with their functions."""
    tests = [test for test, *_ in entered if test not in (EXPLORED, without)]
    assert tests
    entered_lines = {line for (test, *_), some in entered.items() if test in tests for line in some}
    return [(name, text_of(line)) for line, name in lines.items() if line not in entered_lines]


def test_every_path_is_entered(lines: dict[Line, str], entered: Entered) -> None:
    assert len(lines) > 600
    unseen = [line for line in missed(lines, entered) if not is_outside(*line)]
    assert unseen == [], f"no test of {SUITE.name} enters this"


@pytest.mark.skipif(torch.cuda.is_available(), reason="paths of devices are entered here")
def test_what_is_left_out_is_not_entered(lines: dict[Line, str], entered: Entered) -> None:
    unseen = missed(lines, entered)
    for name, words in OUTSIDE:
        assert any(function.startswith(name) and words in text for function, text in unseen), name


@pytest.mark.parametrize(
    ("without", "functions"),
    [
        ("test_large_tensors_mean_what_the_definition_says",
         {"engine/fast_mx.py::TableStack.look_up", "engine/job.py::_counted_errors"}),
        ("test_layouts_and_options_mean_what_the_definition_says",
         {"engine/job.py::Layout.restore", "_work.py::CastContext.divide",
          "engine/scales.py::scale_from_option", "quantizer.py::StraightThrough.forward"}),
    ],
)  # fmt: skip
def test_a_path_that_no_test_enters_is_named(
    lines: dict[Line, str], entered: Entered, without: str, functions: set[str]
) -> None:
    assert without in {test for test, *_ in entered}
    unseen = {line for line in missed(lines, entered, without) if not is_outside(*line)}
    assert functions <= {name for name, _ in unseen}


def test_each_family_and_each_dtype_enters_what_it_can(
    lines: dict[Line, str], entered: Entered
) -> None:
    """Other shapes, sizes and granularities show no line or function that the suite lacks."""
    by_suite: dict[tuple[str, ...], set[object]] = {}
    by_exploration: dict[tuple[str, ...], set[object]] = {}
    for (test, family, dtype), some in entered.items():
        record = by_exploration if test == EXPLORED else by_suite
        source_lines = {
            line
            for line in some
            if line in lines
            and line[0] != "_scratch.py"
            and not is_outside(lines[line], text_of(line))
        }
        for key in ((family,), (dtype,)):
            record.setdefault(key, set()).update(
                (lines[line], text_of(line)) for line in source_lines
            )
        record.setdefault((family, dtype), set()).update(lines[line] for line in source_lines)
    assert len(by_exploration) == 8 + 4 + 32
    lacking = {
        key: some - by_suite.get(key, set())
        for key, some in by_exploration.items()
        if some - by_suite.get(key, set())
    }
    assert lacking == {}


def test_every_option_of_every_format_has_values_in_the_suite() -> None:
    suite = runpy.run_path(str(SUITE))
    values: dict[str, set[object]] = {}
    for options in (*suite["SCALINGS"], *suite["OPTIONS"]):
        for name, value in options.items():
            values.setdefault(name, set()).add(value)
    names = {"granularity"} | {name for fmt in FORMATS.names() for name in get(fmt).options}
    assert names - values.keys() == {"generator", "groups"}
    assert values["rounding"] == {*ROUNDINGS} - {"stochastic"}
    assert values["scale_rule"] == {*SCALE_RULES} - {"floor"}, "the first one is the default"
    assert values["granularity"] == {*get_args(Granularity)} - {"groups"}
    assert values["dtype"] == {*INPUTS}
