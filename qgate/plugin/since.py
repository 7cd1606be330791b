"""`--since COMMIT`: leave out the gates that no difference from a commit can touch.

The commit is one at which a whole run passed. A gate is left out only where code, accepted files,
torch and arithmetic show that it gives what it gave there; wherever that is unclear, all gates run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qgate.code_changes.compute import TouchedCode, touched_since
from qgate.errors import QgateError
from qgate.plugin.gate_collection import (
    gates_of,
    is_gate,
    parameters_of,
    text_parameter,
)
from qgate.plugin.runs import selection_of
from qgate.plugin.settings import option_error, options_of
from qgate.plugin.shared_sessions import sessions_of
from qgate.project.gate_kinds import kinds_by_cases
from qgate.storage.git import GitRepository
from qgate.text import counted, listed, one_line

if TYPE_CHECKING:
    from qgate.gate.measuring.model_gates import ModelGates

_NAMED = 4
# The prefix of the baselines of a model's activations.
_ACTIVATIONS = "activations-"


def untouched_gates(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the gates that --since leaves out, and note which run and why."""
    commit = options_of(config).values["since"]
    if commit is None:
        return []
    gates = [item for item in items if is_gate(item)]
    touched = _touched(config, commit, gates)
    selection = selection_of(config)
    if touched.everything:
        selection.notes.append(one_line(f"--since {commit}: all gates run: {touched.everything}"))
        return []
    reach = _Reach(config, touched)
    left_out = [item for item in gates if not reach.touches(item)]
    differs = listed(sorted({*touched.paths}), _NAMED) or "nothing differs"
    names = f" ({listed(sorted(touched.names), _NAMED)})" if touched.names else ""
    selection.notes.append(
        one_line(
            f"--since {commit}: {counted(len(gates) - len(left_out), 'gate')} of {len(gates)} can "
            f"be touched by what differs: {differs}{names}"
        )
    )
    gates_of(config).lacking |= {id(item): f"--since {commit}" for item in left_out}
    return left_out


def _touched(config: pytest.Config, commit: str, gates: Sequence[pytest.Item]) -> TouchedCode:
    options = options_of(config)
    try:
        repository = GitRepository.around(options.home)
        commit = repository.commit_of(commit)
    except QgateError as error:
        raise option_error(f"qgate: {options.spelled('since')}: {error}") from None
    models = {text_parameter(item, "model") for item in gates}
    for name in sorted(filter(None, models)):
        try:
            if reason := _other_arithmetic(sessions_of(config).of_model(name)):
                return TouchedCode(everything=reason)
        except QgateError as error:
            return TouchedCode(everything=str(error))
    if any(kinds_by_cases().keys() & parameters_of(item) for item in gates):
        return TouchedCode(everything="dumps, checkpoints and engines are not traced")
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    try:
        accepted = GitRepository.around(options.baselines)
        if accepted.root != repository.root:
            return TouchedCode(everything=f"the baselines are in {str(accepted.root)!r}")
        return touched_since(
            repository,
            commit,
            [Path(file).resolve() for file in files if isinstance(file, str) and _is_project(file)],
            [Path(folder).resolve() for folder in sys.path],
            sorted({item.path.resolve() for item in gates}),
            accepted.folder,
            options.home.resolve() / "qgate-out",
        )
    except QgateError as error:
        return TouchedCode(everything=str(error))


def _is_project(file: str) -> bool:
    """Tell if a module is of the project, and not of an environment that lies in it."""
    return "site-packages" not in file and not Path(file).is_relative_to(sys.prefix)


def _other_arithmetic(session: ModelGates) -> str:
    """Say why a baseline does not vouch for this torch and these processors."""
    stored, now = session.ledger.store.origin(), session.origin()
    if stored is None:
        return f"{now.model} has no baseline"
    if (stored.torch, stored.device) == (now.torch, now.device):
        return ""
    return (
        f"the baseline of {now.model} is of torch {stored.torch} on {stored.device}, and this is "
        f"torch {now.torch} on {now.device}"
    )


class _Reach:
    """Tells of each gate whether the difference can touch it."""

    def __init__(self, config: pytest.Config, touched: TouchedCode) -> None:
        self._config, self._touched = config, touched
        self._known: dict[tuple[Path, str, str], bool] = {}

    def touches(self, item: pytest.Item) -> bool:
        key = item.path.resolve(), text_parameter(item, "model"), text_parameter(item, "mode")
        if key not in self._known:
            self._known[key] = self._is_touched(*key)
        return self._known[key]

    def _is_touched(self, suite: Path, model: str, mode: str) -> bool:
        touched, code = self._touched, self._touched.code
        if suite in touched.files or self._has_other_baseline(model):
            return True
        if code is None or not touched.names:
            return False
        roots = {*code.files[suite].all_names, *_parts(model), *_parts(mode)}
        modes = code.modes
        for name in [mode] if mode else modes:
            roots |= modes.get(name, set())
        return bool(code.reached(roots) & touched.names)

    def _has_other_baseline(self, model: str) -> bool:
        """Tell if accepted files differ: those of this model, or of what is no model of the run."""
        folders = self._touched.baselines
        if not folders:
            return False
        if not model:
            return True
        own = sessions_of(self._config).of_model(model).ledger.store.folder.name
        other_folders = folders - {
            name
            for spec in options_of(self._config).models
            for folder in [sessions_of(self._config).of_model(spec).ledger.store.folder.name]
            for name in (folder, f"{_ACTIVATIONS}{folder}")
        }
        return bool(other_folders or folders & {own, f"{_ACTIVATIONS}{own}"})


def _parts(spec: str) -> Iterable[str]:
    """Return the names in `package.module:build`, also of a mode that is named so."""
    return spec.partition(":")[2].split(".")
