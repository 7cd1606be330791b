"""Gates whose baseline is of something else: one of them says so, the others do not run.

Other weights, samples, lengths or calibrations are one error of a model and not one of each of its
tests. It is the error of the first of its gates that are left, so that a worker of pytest-xdist,
JUnit and the page have it too; gates of other models run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from qgate.errors import QgateError
from qgate.plugin import lazy
from qgate.plugin.gate_collection import deselect, gates_of, has_fixture, text_parameter
from qgate.plugin.runs import note_loss
from qgate.plugin.shared_sessions import sessions_of
from qgate.project.gate_kinds import gate_kinds

if TYPE_CHECKING:
    from qgate.gate.sessions import GateSession


def hold_back(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave one gate of each model whose baseline, or whose accepted errors, are not of this run.

    What cannot be told, as of a model that does not load, is an error of each test.
    """
    if config.getoption("collectonly", False):
        return
    by_model: dict[tuple[str, str], list[pytest.Item]] = {}
    kinds = {kind.name: kind for kind in gate_kinds() if kind.is_of_model}
    for item in items:
        model = text_parameter(item, "model")
        for name, kind in kinds.items():
            if model and has_fixture(item, kind.fixture) and has_fixture(item, "model"):
                by_model.setdefault((name, model), []).append(item)
    held_back: list[pytest.Item] = []
    for (name, model), gates in by_model.items():
        try:
            held_back += _misfits(sessions_of(config).of(kinds[name], model), gates)[1:]
        except (QgateError, RuntimeError) as error:
            # A kernel of a mode that ran while tests were collected may have ended the device.
            note_loss(gates[0], error)
            if not isinstance(error, QgateError) and lazy.device_errors.device_error(error) is None:
                raise
    gates_of(config).held_back |= set(map(id, held_back))
    deselect(config, items, held_back)


def _misfits(session: GateSession, gates: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """Return the gates of a session that have no baseline of what is measured."""
    try:
        session.check_baseline()
    except QgateError:
        return gates
    titles = {
        gate: session.title_of(text_parameter(gate, "mode"), text_parameter(gate, "fmt"))
        for gate in gates
    }
    stale = session.ledger.note_stale(dict(filter(None, titles.values())))
    return [gate for gate, title in titles.items() if title and title[0] in stale]
