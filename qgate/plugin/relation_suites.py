"""Suites of relations, which run where an option asks for them, or their file is named.

They compare a mode with itself, which no accepted error depends on, and take seconds per mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qgate.plugin.gate_collection import has_fixture
from qgate.plugin.runs import selection_of
from qgate.plugin.settings import options_of


def asks_for_relations(config: pytest.Config, item: pytest.Item) -> bool:
    """Tell if a run asks for a test of relations: by an option, or by the name of its file."""
    options = options_of(config)
    if options.values["relations"] or options.values["bitwise"]:
        return True
    folder = config.invocation_params.dir
    named = (str(text).partition("::")[0] for text in config.args)
    return any((folder / name).resolve() == item.path.resolve() for name in named)


def unasked_relations(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of relations that a run does not ask for, and note how to."""
    tests = [item for item in items if has_fixture(item, "relation_gate")]
    unasked = [item for item in tests if not asks_for_relations(config, item)]
    if unasked:
        option = options_of(config).spelled("relations")
        selection_of(config).notes.append(f"suite of relations left out: give {option}")
    return unasked
