"""Accepted errors that no gate of a run was held against: the run is partial then.

Gates that were collected and did not run name themselves. These were never collected: their file
has another name, their suite is gone, their test has parameters of its own or no gate any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.baselines import Store, accepted_file, unheld, unused
from qgate.baselines.store import stored_models
from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.modes.selection import is_selected
from qgate.results import measured_sites
from qgate.results.coverage import UNHELD, OmittedGate

if TYPE_CHECKING:
    from qgate.plugin.runs import SuiteRun
    from qgate.results.schema import AcceptedAt
    from qgate.storage import git as git
else:
    git = LateModule("qgate.storage.git")

_REASON = "accepted errors that no gate of this run is held against"


def unheld_lines(
    run: SuiteRun, models: Collection[str], omitted: Iterable[OmittedGate]
) -> list[OmittedGate]:
    """List suites with accepted errors of the selected modes that nothing was held against.

    models   those that were loaded; without any, all that have a baseline may be meant

    Modes with omitted gates are left out, as these say what is missing. Baselines that cannot be
    read are an error of the run.
    """
    if run.options.update is not None:
        return []
    try:
        return _unheld(run, models, {gate[2:4] for gate in omitted})
    except QgateError as error:
        run.errors.append(str(error))
        return []


def _unheld(
    run: SuiteRun, models: Collection[str], explained: Collection[tuple[str, str]]
) -> list[OmittedGate]:
    rows = (row for node, of in run.records.items() if node not in run.skips for row in of)
    measured = measured_sites(rows)
    lines = []
    names = _models(run, {*models, *measured})
    # A gate that was not collected knows its model as it was asked for, such as FILE.py:build.
    by_words = {mode for model, mode in explained if model not in names}
    for model in names:
        store, sites = Store(run.options.baselines, model), measured.get(model, {})
        modes = [
            mode
            for mode in store.modes()
            if mode in sites or (_is_asked_for(run, mode) and run.options.shard is None)
        ]
        for mode, suites in unheld(store, {mode: sites.get(mode, set()) for mode in modes}).items():
            if mode not in by_words and not {(model, mode), ("", "")}.intersection(explained):
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


def unused_lines(run: SuiteRun, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accepted errors of the modes that ran which nothing measured."""
    return [
        f"unused: {len(keys)} accepted errors of {model} {mode}, such as {keys[0]}: "
        "`qgate baselines prune --results qgate-out/results.jsonl` removes them"
        for model, modes in measured_sites(rows).items()
        for mode, keys in unused(Store(run.options.baselines, model), modes).items()
    ]


def accepted_at(baselines: Path, rows: Iterable[Mapping[str, Any]]) -> list[AcceptedAt]:
    """Return when the accepted errors that a run was held against changed last."""
    changes: list[AcceptedAt] = []
    for model, modes in measured_sites(rows).items():
        files = {accepted_file(mode): mode for mode in sorted(modes)}
        folder = Store(baselines, model).folder
        for file, (commit, date) in git.last_changes(folder, files).items():
            changes.append({"model": model, "mode": files[file], "commit": commit, "date": date})
    return changes
