"""The formats that the gates of a run quantize with: conformance tests of others are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from qgate.errors import QgateError
from qgate.plugin import lazy
from qgate.plugin.gate_collection import (
    deselect,
    has_fixture,
    is_gate,
    model_and_mode,
    parameters_of,
    text_parameter,
)
from qgate.plugin.runs import Selection
from qgate.plugin.settings import option_error, options_of
from qgate.plugin.shared_sessions import sessions_of
from qgate.text import counted


def drop_unused_formats(
    config: pytest.Config, items: list[pytest.Item], selection: Selection
) -> None:
    """Deselect marked tests of formats that no gate uses, unless a command asks for them all.

    A run without gates that have a mode or a format is about the formats themselves, unless its
    modes fit no model.
    """
    options = options_of(config)
    modes = ",".join(options.run.mode).split(",")
    if "format" in options.given or "all" in (mode.strip().lower() for mode in modes):
        return
    marked = [item for item in items if _is_marked(item)]
    used = _formats_of(config, filter(is_gate, items)) if marked else set()
    remaining = [item for item in marked if parameters_of(item)["fmt"] not in used]
    if not remaining or not (used or selection.empty):
        return
    every = lazy.formats.names()
    count = len(used.intersection(every))
    selection.unasked[f"{len(every) - count} of {len(every)} formats"] = (
        f"{counted(len(remaining), 'test')} deselected: this run quantizes with "
        f"{count} of {len(every)} formats; "
        f"{options.spelled('format')} all holds every one"
    )
    deselect(config, items, remaining)


def _is_marked(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("qgate_used_formats")
    return marker is not None and has_fixture(item, "fmt") and not is_gate(item)


def _formats_of(config: pytest.Config, gates: Iterable[pytest.Item]) -> set[str]:
    """Return the formats of gates, and those of their modes as far as the modes say them."""
    names, cases = set(), set()
    for item in gates:
        names.add(text_parameter(item, "fmt"))
        cases.add(model_and_mode(item))
    for model, mode in cases - {("", "")}:
        bench = sessions_of(config).of_model(model).bench
        chosen = bench.mode(mode)
        if chosen.stands_for and chosen.meant is None:
            chosen = bench.mode(chosen.stands_for)
        names |= chosen.formats
    return {fmt for name in names - {""} if (fmt := _full_name(name)) is not None}


def _full_name(name: str) -> str | None:
    """Return the name behind an alias; None for a format that is unknown, as its gates say."""
    try:
        return str(lazy.formats.get(name).name)
    except QgateError:
        return None


def selected_formats(wanted: Sequence[str] | None) -> list[str]:
    """Return the names behind a list of names and aliases, each once; all for "all" or None."""
    names = ",".join(wanted or ["all"])
    if names.strip().lower() == "all":
        return lazy.formats.names()
    try:
        return list(dict.fromkeys(lazy.formats.get(name).name for name in names.split(",")))
    except QgateError as error:
        raise option_error(f"--format {names}: {error}") from None
