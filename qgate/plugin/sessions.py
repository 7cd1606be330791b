"""What tests of one process share: a gate session per model, made when the first test needs it."""

from __future__ import annotations

import os
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from qgate.plugin.options import baselines_of, setup_of, update_choice

if TYPE_CHECKING:
    from qgate.pipeline.gating import GateSession

_SESSIONS: pytest.StashKey[dict[str, GateSession]] = pytest.StashKey()


def sessions_of(config: pytest.Config) -> dict[str, GateSession]:
    return config.stash.setdefault(_SESSIONS, {})


def session_of(config: pytest.Config, model: str) -> GateSession:
    """The session of a model by the name it was asked for with."""
    held = sessions_of(config)
    if model not in held:
        from qgate.gate import Policy
        from qgate.pipeline.bench import Bench
        from qgate.pipeline.gating import GateSession

        _share_cores(config)
        bench = Bench(
            setup_of(config, model),
            reference_mode=config.getoption("qgate_reference"),
            progress=_progress(config),
        )
        held[model] = GateSession(
            bench,
            baselines_of(config),
            Policy.from_table(_table(config)),
            updating=update_choice(config),
        )
    return held[model]


def _share_cores(config: pytest.Config) -> None:
    """Under xdist each worker takes its share: more threads than cores make all of them crawl."""
    workers = getattr(config, "workerinput", {}).get("workercount")
    if workers:
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))


def _table(config: pytest.Config) -> dict[str, Any]:
    """`[tool.qgate.limits]` of the project's pyproject.toml."""
    file = config.rootpath / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise pytest.UsageError(f"{file}: {error}") from None
    return dict(settings.get("tool", {}).get("qgate", {}).get("limits", {}))


def _progress(config: pytest.Config):  # type: ignore[no-untyped-def]
    """Says on a terminal what takes its time."""
    quiet = not sys.stderr.isatty() or hasattr(config, "workerinput")

    def say(text: str) -> None:
        if not quiet:
            capture = config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled():
                sys.stderr.write(f"\r\x1b[K  {text} ")
                sys.stderr.flush()

    return say
