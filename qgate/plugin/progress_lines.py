"""Progress of a run: one line per mode of a model, and one per file of other tests.

pytest sorts tests by the layer that they share, so that files take turns; each turn would be a line
with the same names. Modes stay one after the other, since only one of them is kept in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qgate.models.naming import shown_name
from qgate.plugin.gate_collection import is_gate, model_and_mode, parameters_of
from qgate.text import one_line

_FIRST_FILE = "test_layer_outputs.py"
"""The suite that says where errors enter: what follows from them comes after it, also with -x."""


@contextlib.contextmanager
def grouped_by_mode(items: list[pytest.Item]) -> Iterator[None]:
    """Put the gates of a model next to each other, in them those of a mode, file by file.

    Models, modes and files keep the order that they have before pytest and others sort the tests,
    but the file that finds causes is the first one of a mode. Tests that are no gates stay where
    they are.
    """
    ranks: list[dict[object, int]] = [{}, {}, {}]

    def position(item: pytest.Item) -> tuple[int, ...]:
        keys = (parameters_of(item).get("model"), line_of(item), item.path)
        model, line, file = (
            rank.setdefault(key, len(rank)) for rank, key in zip(ranks, keys, strict=True)
        )
        return model, line, int(item.path.name != _FIRST_FILE), file

    positions = {id(item): position(item) for item in items if is_gate(item)}
    yield
    gates = [item for item in items if is_gate(item)]
    gates.sort(key=lambda item: positions.get(id(item)) or position(item))
    in_order = iter(gates)
    items[:] = [next(in_order) if is_gate(item) else item for item in items]


def line_of(item: pytest.Item) -> str:
    """Return what the line of a test begins with: its mode and model, else its file."""
    model, mode = model_and_mode(item) if is_gate(item) else ("", "")
    if not mode:
        return item.nodeid.partition("::")[0]
    return one_line(f"mode {shown_name(mode)} of {shown_name(model)}").replace("::", ":")


def name_lines(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Let the terminal begin a line with the mode of its tests where they have one."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    lines = {item.nodeid: line_of(item) for item in items}
    modes = {nodeid: line for nodeid, line in lines.items() if line != nodeid.partition("::")[0]}
    if reporter is not None and modes:
        write = partial(_write_result, reporter.write_fspath_result, modes, reporter.startpath)
        reporter.write_fspath_result = write


def _write_result(
    write: Callable[..., None],
    modes: Mapping[str, str],
    start: Path,
    nodeid: str,
    result: str,
    **markup: Any,
) -> None:
    """Write a result on the line of its mode: pytest shows a path as seen from where it began."""
    write(str(start / modes[nodeid]) if nodeid in modes else nodeid, result, **markup)
