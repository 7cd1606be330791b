"""What tests of one process share: a gate session per model, made when the first test needs it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from qgate.errors import QgateError
from qgate.plugin.options import (
    baselines_of,
    command_of,
    settings_of,
    setup_of,
    spelled,
    update_choice,
    value,
)
from qgate.text import for_terminal

if TYPE_CHECKING:
    from qgate.gate import Policy
    from qgate.pipeline.gates.gating import GateSession
    from qgate.storage.places import Place

_SESSIONS: pytest.StashKey[dict[str, GateSession]] = pytest.StashKey()
# Why the baselines cannot be reached; empty where they can.
_UNREACHED: pytest.StashKey[str] = pytest.StashKey()


def sessions_of(config: pytest.Config) -> dict[str, GateSession]:
    return config.stash.setdefault(_SESSIONS, {})


def session_of(config: pytest.Config, model: str) -> GateSession:
    """The session of a model by the name it was asked for with."""
    held = sessions_of(config)
    if model not in held:
        from qgate.pipeline.gates.bench import Bench
        from qgate.pipeline.gates.gating import GateSession

        policy, told = policy_of(config), how(config)
        bench = Bench(
            setup_of(config, model),
            reference_mode=value(config, "reference"),
            progress=_progress(config),
        )
        session = GateSession(bench, policy=policy.for_model(bench.model.name), **told)
        session.check_policy()
        held[model] = session
    return held[model]


def policy_of(config: pytest.Config) -> Policy:
    """The limits of the project."""
    from qgate.gate import Policy

    return Policy.from_table(settings_of(config).limits)


def how(config: pytest.Config) -> dict[str, Any]:
    """What all sessions of a run are told."""
    _share_cores(config)
    return {
        "baselines": _reached(config),
        "updating": update_choice(config),
        "dry_run": bool(config.getoption("qgate_update_dry_run")),
        "deferred": True,
        "command": command_of(config),
        "spelled": lambda name: spelled(config, name),
        "plots": value(config, "plots"),
    }


def _reached(config: pytest.Config) -> Place:
    """Where the baselines are: a store is asked once, before a model is loaded."""
    from qgate.baselines.places import check_root

    root = baselines_of(config)
    if _UNREACHED not in config.stash:
        config.stash[_UNREACHED] = ""
        dry = bool(config.getoption("qgate_update_dry_run"))
        try:
            check_root(root, writing=update_choice(config) is not None and not dry)
        except QgateError as error:
            config.stash[_UNREACHED] = str(error)
    if config.stash[_UNREACHED]:
        raise QgateError(config.stash[_UNREACHED])
    return root


def _share_cores(config: pytest.Config) -> None:
    """Under xdist each worker takes its share: more threads than cores make all of them crawl."""
    workers = getattr(config, "workerinput", {}).get("workercount")
    if workers:
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))


def _progress(config: pytest.Config):  # type: ignore[no-untyped-def]
    """Says on a terminal what takes its time."""
    capture = config.pluginmanager.getplugin("capturemanager")
    quiet = not sys.stderr.isatty() or hasattr(config, "workerinput") or capture is None

    def say(text: str) -> None:
        if not quiet:
            with capture.global_and_fixture_disabled():
                sys.stderr.write(f"\r\x1b[K  {for_terminal(text)} ")
                sys.stderr.flush()

    return say
