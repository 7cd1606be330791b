"""Accepted errors that no gate of a run was held against: the run is partial then.

Gates that were collected and did not run name themselves. These were never collected: their file
has another name, their suite is gone, their test has parameters of its own or no gate any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from qgate.baselines import Store, unheld
from qgate.baselines.store import stored_models
from qgate.modes.selection import is_selected
from qgate.results import measured_sites
from qgate.results.coverage import UNHELD, OmittedGate

if TYPE_CHECKING:
    from qgate.plugin.runs import SuiteRun

_REASON = "accepted errors that no gate of this run is held against"


def unheld_lines(
    run: SuiteRun, models: Collection[str], omitted: Iterable[OmittedGate]
) -> list[OmittedGate]:
    """List suites with accepted errors of the selected modes that nothing was held against.

    models   those that were loaded; without any, all that have a baseline may be meant

    Modes with omitted gates are left out, as these say what is missing.
    """
    if run.options.update is not None:
        return []
    explained = {gate[2:4] for gate in omitted}
    rows = (row for node, of in run.records.items() if node not in run.skips for row in of)
    measured = measured_sites(rows)
    lines = []
    for model in _models(run, {*models, *measured}):
        store, sites = Store(run.options.baselines, model), measured.get(model, {})
        modes = [
            mode
            for mode in store.modes()
            if mode in sites or (_is_asked_for(run, mode) and run.options.shard is None)
        ]
        for mode, suites in unheld(store, {mode: sites.get(mode, set()) for mode in modes}).items():
            if not {(model, mode), ("", "")} & explained:
                lines += [
                    OmittedGate(UNHELD, _REASON, model, mode, s, counted=False) for s in suites
                ]
    return lines


def _models(run: SuiteRun, loaded: set[str]) -> list[str]:
    stored = stored_models(run.options.baselines)
    if not loaded and not set(run.options.models) <= {*stored}:
        return stored  # a model of a file is named by that file alone
    return [model for model in stored if model in loaded or model in run.options.models]


def _is_asked_for(run: SuiteRun, mode: str) -> bool:
    return is_selected(mode, run.options.values["mode"])
