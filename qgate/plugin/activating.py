"""Gates over the activations of a model: one session per model, apart from that of its modes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from qgate.pipeline.gates.activation_gates import ActivationGates

_SESSIONS: pytest.StashKey[dict[str, ActivationGates]] = pytest.StashKey()


def activation_sessions(config: pytest.Config) -> list[ActivationGates]:
    """The sessions that a suite wanted."""
    return list(config.stash.setdefault(_SESSIONS, {}).values())


def activation_session_of(config: pytest.Config, model: str) -> ActivationGates:
    """The session of a model by the name it was asked for with; it shares the model itself."""
    held = config.stash.setdefault(_SESSIONS, {})
    if model not in held:
        from qgate.pipeline.gates.activation_gates import ActivationGates
        from qgate.plugin.sessions import how, policy_of, session_of

        bench = session_of(config, model).bench
        policy = policy_of(config).for_model(bench.model.name)
        held[model] = ActivationGates(bench, policy=policy, **how(config))
    return held[model]
