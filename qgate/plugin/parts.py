"""What each process of a run knows, as plain data; under pytest-xdist it travels to the controller.

Only the process that talks to the user writes: baselines once and whole, whoever measured them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from qgate.errors import QgateError
from qgate.plugin.activating import activation_sessions
from qgate.plugin.dumping import dump_sessions
from qgate.plugin.options import baselines_of, update_choice
from qgate.plugin.selection import Selection, selection_of
from qgate.plugin.sessions import sessions_of
from qgate.plugin.watching import watched_sites

Part = dict[str, Any]


_CONFLICTS: pytest.StashKey[list[str]] = pytest.StashKey()


def conflicts_of(config: pytest.Config) -> list[str]:
    """What keeps an update of this process from being written."""
    return config.stash.setdefault(_CONFLICTS, [])


def part_of(config: pytest.Config, whole: bool) -> Part:
    """What this process knows; `whole` if its run came to its end, so that an update counts."""
    chosen = selection_of(config)
    part: Part = {
        "selection": [chosen.refused, chosen.notes, chosen.empty],
        "facts": {"models": {}, "plans": {}, "limits": {}, "run": {}},
        "updates": [],
        "errors": conflicts_of(config),
        "narrowed": chosen.narrowed,
        "underflow": watched_sites(config),
    }
    held_here = [
        *sessions_of(config).values(),
        *dump_sessions(config),
        *activation_sessions(config),
    ]
    used = [held for held in held_here if held.ledger.is_used]
    if chosen.refused or not used:
        return part
    from qgate.baselines import pack

    for held in used:
        origin = held.origin()
        device = held.subject.device
        facts = part["facts"]
        facts["models"][origin.model] = {
            "weights": origin.weights,
            "inputs": origin.inputs,
            "device": device,
        }
        facts["plans"] |= {f"{origin.model} {k}": plan for k, plan in held.plans().items()}
        facts["limits"][origin.model] = held.policy.to_dict()
        facts["run"] |= {"torch": origin.torch, "commit": origin.commit}
        if not origin.is_collected:
            facts["run"] |= {"device": device, "seed": origin.seed}
        try:
            update = held.ledger.finish() if whole else None
        except QgateError as error:
            part["errors"].append(str(error))
            continue
        if update is not None:
            part["updates"].append(pack(update))
    return part


def joined_facts(parts: Iterable[Part]) -> dict[str, Any]:
    """The facts of all processes of one run."""
    found: dict[str, Any] = {"models": {}, "plans": {}, "limits": {}, "run": {}}
    for part in parts:
        for name, facts in part["facts"].items():
            found[name] |= facts
    return found


def joined_selection(parts: Iterable[Part]) -> Selection:
    """What was left out: every worker collects the same, one of them speaks."""
    for refused, notes, empty in (part["selection"] for part in parts):
        if refused or notes:
            return Selection(refused=list(refused), notes=list(notes), empty=empty)
    return Selection()


def write_updates(config: pytest.Config, parts: Iterable[Part]) -> tuple[list[str], list[str]]:
    """Write what was collected, per model in one step: the changes, and what is stale now."""
    from qgate.baselines import Store, joined, unpack

    updates: dict[str, list[Any]] = {}
    for part in parts:
        for packed in part["updates"]:
            updates.setdefault(packed["origin"]["model"], []).append(unpack(packed))
    told, stale = [], []
    dry = bool(config.getoption("qgate_update_dry_run"))
    for model, found in updates.items():
        store, update = Store(baselines_of(config), model), joined(found)
        changes = store.preview(update) if dry else store.commit(update)
        told += [str(change) for change in changes]
        origin = store.origin()
        for mode, accepted in store.accepted_of(store.modes()).items():
            if origin is not None and accepted.stale(origin):
                stale.append(f"{model} {mode}")
    return told, stale


def is_update(config: pytest.Config) -> bool:
    return update_choice(config) is not None
