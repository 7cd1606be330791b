"""Tests of suites that a model has nothing for: they are deselected, and a note says why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

from qgate.errors import QgateError
from qgate.plugin import lazy
from qgate.plugin.gate_collection import (
    deselect,
    has_fixture,
    is_gate,
    kind_of_gate,
    parameters_of,
    suite_of,
    text_parameter,
)
from qgate.plugin.runs import Selection
from qgate.text import counted, listed

if TYPE_CHECKING:
    from qgate.gate.measuring.model_gates import ModelGates
    from qgate.gate.measuring.suite_needs import Lack

_LAYERS = 3
ModelSession = Callable[[str], "ModelGates"]


class LackingSuites:
    """Tests of a run whose models lack what they look at; `session` gives the gates of a model."""

    def __init__(self, session: ModelSession) -> None:
        self._session = session

    def lack(self, item: pytest.Item) -> Lack | None:
        """Say what its model lacks for a test; None where it lacks nothing."""
        names = ("model", "mode", "layer", "phase")
        model, mode, layer, phase = (text_parameter(item, name) for name in names)
        if not (model and has_fixture(item, "model")):
            return None
        needs, kind = lazy.suite_needs, kind_of_gate(item)
        if not layer and has_fixture(item, "layer"):
            return needs.Lack(needs.NO_LAYERS)
        if layer and mode and self._session(model).needs.is_graph(mode):
            return needs.Lack(needs.GRAPH.format(mode=mode))
        for gate in [] if kind is None else kind.gates_needed(_names_called(item)):
            try:
                lack = self._session(model).needs.lack(gate, layer, phase, mode or "")
            except QgateError:
                return None  # as its test will say
            if lack is not None:
                return lack
        return None

    def drop(
        self, config: pytest.Config, items: list[pytest.Item], selection: Selection
    ) -> list[pytest.Item]:
        """Deselect tests whose model has nothing for them; return those that were accepted once."""
        lacking = [item for item in items if self.lack(item) is not None]
        selection.notes += self.notes(lacking)
        deselect(config, items, lacking)
        if any(map(is_gate, lacking)) and not any(map(is_gate, items)):
            selection.empty = True
        return [item for item in lacking if self.is_accepted(item)]

    def notes(self, items: Iterable[pytest.Item]) -> list[str]:
        """Write one note for all tests whose model lacks the same."""
        layers_by_reason: dict[str, list[str]] = {}
        for item in items:
            layers_by_reason.setdefault(self.reason(item), []).append(self._layer(item))
        notes = []
        for reason, layers in layers_by_reason.items():
            named = [layer for layer in dict.fromkeys(layers) if layer]
            where = f" in {listed(named, _LAYERS)}" if named else ""
            notes.append(f"{counted(len(layers), 'test')} deselected: {reason}{where}")
        return notes

    def reason(self, item: pytest.Item) -> str:
        """Write what a model lacks for a test, without a layer."""
        lack = self.lack(item)
        name = self._session(str(parameters_of(item)["model"])).bench.model.name
        return f"{name} {lack.words}" if lack is not None else ""

    def _layer(self, item: pytest.Item) -> str:
        lack = self.lack(item)
        return "" if lack is None else lack.layer

    def is_accepted(self, item: pytest.Item) -> bool:
        """Tell if the figures of a test were accepted once: then it is left out, and not unfit."""
        mode, fmt = text_parameter(item, "mode"), text_parameter(item, "fmt")
        session = self._session(str(parameters_of(item)["model"]))
        title = fmt or session.subject.title(mode)
        return bool(mode or fmt) and session.has_accepted(suite_of(item.path), title)


def _names_called(item: pytest.Item) -> tuple[str, ...]:
    """Return the names that the code of a test has, such as that of a gate: `gate.task(mode)`."""
    function = inspect.unwrap(getattr(item, "function", None) or (lambda: None))
    return getattr(getattr(function, "__code__", None), "co_names", ())
