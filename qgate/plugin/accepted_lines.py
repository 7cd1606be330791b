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
        accepted, query = store.modes(), run.options.run.mode
        asked = {mode for mode in {*accepted, *sites} if is_selected(mode, query, accepted)}
        modes = [
            mode
            for mode in accepted
            if mode in sites or (mode in asked and run.options.shard is None)
        ]
        missing = unheld(store, {mode: sites.get(mode, set()) for mode in modes})
        of_modes = _suites_of_modes(asked, missing, sites)
        for mode, suites in missing.items():
            if mode not in by_words and not {(model, mode), ("", "")}.intersection(explained):
                lines += [
                    OmittedGate(UNHELD, _REASON, model, mode, suite, counted=False)
                    for suite in suites
                    if suite not in of_modes or mode in asked
                ]
    return lines


def _suites_of_modes(
    asked: Collection[str],
    missing: Mapping[str, Collection[str]],
    sites: Mapping[str, Collection[tuple[str, str, str]]],
) -> set[str]:
    """Return the suites that hold modes alone, of which formats have none to hold.

    A format of a sweep may have the name of a mode that was accepted and not asked for.
    """
    of_modes = {suite for mode in asked for suite in missing.get(mode, ())}
    of_formats = set[str]()
    for mode, keys in sites.items():
        (of_modes if mode in asked else of_formats).update(suite for suite, _, _ in keys)
    return of_modes - of_formats


def _models(run: SuiteRun, loaded: set[str]) -> list[str]:
    stored = stored_models(run.options.baselines)
    if not loaded and not set(run.options.models) <= {*stored}:
        return stored  # a model of a file is named by that file alone
    return [model for model in stored if model in loaded or model in run.options.models]


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
