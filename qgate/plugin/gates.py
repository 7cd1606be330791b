"""The fixtures of suites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qgate.errors import QgateError
from qgate.plugin.options import value
from qgate.plugin.sessions import session_of

if TYPE_CHECKING:
    import torch

    from qgate.gate import Measured
    from qgate.models import Model
    from qgate.modes import Mode
    from qgate.pipeline.gating import GateSession, Outcome

OUT = "qgate-out"
# What the gates of a test decided, with their sessions.
OUTCOMES: pytest.StashKey[list[tuple[GateSession, Outcome]]] = pytest.StashKey()
# Set while a gate computes: what is raised then is plumbing, and no verdict on numbers.
COMPUTING: pytest.StashKey[bool] = pytest.StashKey()


@pytest.fixture
def fmt(request: pytest.FixtureRequest) -> str:
    """The name of a number format; the test runs once for each one selected."""
    return str(request.param)


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> Model:
    """A qgate.Model with its samples; the test runs once for each --model."""
    return session_of(request.config, request.param).bench.model


@pytest.fixture(scope="session")
def mode(request: pytest.FixtureRequest) -> str:
    """The name of a mode; the test runs once for each one that --mode means on the model."""
    return str(request.param)


@pytest.fixture(scope="session")
def layer(request: pytest.FixtureRequest) -> str:
    """A block of the model, such as `layers.2`; the test runs once for each of --layers."""
    return str(request.param)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of --device."""
    from qgate import devices

    return devices.resolve(value(request.config, "device"))


@pytest.fixture
def gate(request: pytest.FixtureRequest, model: Model) -> Gate:  # noqa: ARG001
    """Holds what was measured against limits and accepted errors; fails with what to do."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    if not isinstance(params.get("model"), str):
        pytest.fail(
            "a gate needs qgate's fixture `model`, and another fixture or parameter has that name "
            "here: give yours another one.",
            pytrace=False,
        )
    request.node.stash[OUTCOMES] = []
    session = session_of(request.config, params["model"])
    reason = ""
    try:
        session.check_baseline()
        made = Gate(request.node, session)
        if isinstance(params.get("mode"), str):
            made.session.prepare(made.mode(params["mode"]))
    except QgateError as error:
        reason = str(error)
    if reason:
        pytest.fail(_on_one_line(reason), pytrace=False)
    return made


def _on_one_line(text: str) -> str:
    """A name in it can come from a user's file, and a line of its own can be a command to CI."""
    from qgate.results import one_line

    return one_line(text)


class Gate:
    """The gate of one test: `gate.layer(mode, layer)`, `gate.task(mode)`, or `gate(measured)`."""

    def __init__(self, item: pytest.Item, session: GateSession) -> None:
        self._item = item
        policy = session.policy
        for marker in reversed(list(item.iter_markers("limits"))):
            policy = policy.with_marker(marker.kwargs, f"limits marker of {item.name}")
        self._session = session.with_policy(policy)
        self.suite = Path(str(item.path)).stem.removeprefix("test_")

    @property
    def session(self) -> GateSession:
        """The bench with everything computed so far, and the baseline."""
        return self._session

    def mode(self, name: str) -> Mode:
        """A mode of the model by name."""
        return self._session.bench.setup.select(name, self._session.bench.model)[0]

    def layer(self, mode: str, layer: str) -> None:
        """The errors of one layer in one mode, local and carried."""
        self._decide(lambda: self._session.layer(self.suite, self.mode(mode), layer))

    def gradients(self, mode: str, layer: str) -> None:
        """The gradients of one layer in one mode, against FP32's."""
        self._decide(lambda: self._session.gradients(self.suite, self.mode(mode), layer))

    def scaling(self, fmt: str, layer: str) -> None:
        """The error of a format at the scale that suits each tensor of a layer."""
        self._decide(lambda: self._session.scaling(self.suite, fmt, layer))

    def overflow(self, fmt: str, layer: str, phase: str = "forward") -> None:
        """What a format clips and makes zero in a layer, forward or backward."""
        self._decide(lambda: self._session.overflow(self.suite, fmt, layer, phase))

    def reference(self) -> None:
        """The stored reference equals a live one, and that one is unquantized."""
        self._decide(lambda: self._session.reference(self.suite))

    def canary(self) -> None:
        """A plan that quantizes nothing is exact, and a broken quantizer is rejected."""
        self._decide(lambda: self._session.canary(self.suite))

    def task(self, mode: str) -> None:
        """What the mode costs the model's own work."""
        self._decide(lambda: self._session.task(self.suite, self.mode(mode)))

    def __call__(self, measured: list[Measured], mode: str, where: str = "") -> None:
        """Anything measured, for suites of your own."""
        self._decide(lambda: self._session.judge(self.suite, self.mode(mode), measured, where))

    def _decide(self, compute: Callable[[], Outcome]) -> None:
        self._item.stash[COMPUTING] = True
        reason = ""
        try:
            outcome = compute()
        except QgateError as error:
            reason = str(error)
        if reason:
            pytest.fail(_on_one_line(reason), pytrace=False)
        reason = self._shown_to_hooks(outcome)
        if reason:
            pytest.fail(reason, pytrace=False)
        self._item.stash[COMPUTING] = False
        self._item.stash[OUTCOMES].append((self._session, outcome))
        if outcome.text:
            pytest.fail(outcome.text, pytrace=False)

    def _shown_to_hooks(self, outcome: Outcome) -> str:
        """Let hooks see the records; what one of them breaks, in words."""
        from qgate.results import check_storable

        for row in outcome.record["rows"]:
            try:
                self._item.ihook.pytest_qgate_record(item=self._item, record=row)
                check_storable(row)
            except Exception as error:
                verdict = outcome.text.partition("\n")[0] or "the gate passed"
                return (
                    f"a hook pytest_qgate_record broke the record of {row.get('site', 'a site')}: "
                    f"{type(error).__name__}: {error} ({verdict})"
                )
        return ""
