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
from qgate.plugin.gate_collection import deselect, gates_of, has_fixture, text_parameter
from qgate.plugin.shared_sessions import sessions_of

if TYPE_CHECKING:
    from qgate.gate.measuring.model_gates import ModelGates
    from qgate.plugin.sessions import Sessions


def hold_back(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave one gate of each model whose baseline, or whose accepted errors, are not of this run.

    What cannot be told, as of a model that does not load, is an error of each test.
    """
    if config.getoption("collectonly", False):
        return
    by_model: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        name = text_parameter(item, "model")
        for fixture in ("gate", "activation_gate"):
            if name and has_fixture(item, fixture) and has_fixture(item, "model"):
                by_model.setdefault((fixture, name), []).append(item)
    held_back: list[pytest.Item] = []
    for (fixture, name), gates in by_model.items():
        try:
            held_back += _misfits(sessions_of(config), fixture, name, gates)[1:]
        except QgateError:
            continue
    gates_of(config).held_back |= set(map(id, held_back))
    deselect(config, items, held_back)


def _misfits(
    sessions: Sessions, fixture: str, name: str, gates: Sequence[pytest.Item]
) -> Sequence[pytest.Item]:
    """Return the gates of a model that have no baseline of what is measured."""
    session = sessions.of_model(name)
    judging = session if fixture == "gate" else sessions.of_activations(name)
    try:
        judging.check_baseline()
    except QgateError:
        return gates
    titles = {gate: _title(session, gate) for gate in gates} if fixture == "gate" else {}
    stale = session.ledger.note_stale(dict(filter(None, titles.values())))
    return [gate for gate, title in titles.items() if title and title[0] in stale]


def _title(session: ModelGates, gate: pytest.Item) -> tuple[str, bool] | None:
    """Return the name of a gate's accepted errors, and whether they depend on a calibration."""
    if mode := text_parameter(gate, "mode"):
        return session.subject.title(mode), session.bench.mode(mode).calibrated
    fmt = text_parameter(gate, "fmt")
    return (fmt, False) if fmt else None
