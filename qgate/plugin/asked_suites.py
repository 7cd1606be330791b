"""Suites that run only where an option of their kind of gate asks for them, or their file is named.

A suite that no accepted error depends on and that takes seconds per mode is one of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qgate.plugin.gate_collection import has_fixture
from qgate.plugin.runs import selection_of
from qgate.plugin.settings import options_of
from qgate.project.gate_kinds import GateKind, gate_kinds


def asks_for(config: pytest.Config, item: pytest.Item, kind: GateKind) -> bool:
    """Tell if a run asks for a test of a kind: by an option, or by the name of its file."""
    options = options_of(config)
    if not kind.asked_by or any(options.values[name] for name in kind.asked_by):
        return True
    folder = config.invocation_params.dir
    named = (str(text).partition("::")[0] for text in config.args)
    return any((folder / name).resolve() == item.path.resolve() for name in named)


def unasked_tests(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that a run does not ask for, and note how to."""
    every: list[pytest.Item] = []
    for kind in gate_kinds():
        tests = [item for item in items if has_fixture(item, kind.fixture)]
        unasked = [item for item in tests if not asks_for(config, item, kind)]
        if unasked:
            option = options_of(config).spelled(kind.asked_by[0])
            words = f"suite of {kind.name} left out: give {option}"
            selection_of(config).unasked[kind.name] = words
        every += unasked
    return every
