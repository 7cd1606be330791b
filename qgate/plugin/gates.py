"""The fixtures of suites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from qgate.errors import QgateError
from qgate.plugin.activating import activation_session_of
from qgate.plugin.dumping import dump_session_of
from qgate.plugin.options import command_of, value
from qgate.plugin.sessions import session_of
from qgate.text import for_terminal, one_line

if TYPE_CHECKING:
    import torch

    from qgate.gate import Measured
    from qgate.models import Model
    from qgate.modes import Mode
    from qgate.pipeline.gates.activation_gates import ActivationGates
    from qgate.pipeline.gates.dump_gates import DumpGates
    from qgate.pipeline.gates.gating import GateSession
    from qgate.pipeline.gates.judging import Judging, Outcome

OUT = "qgate-out"
G = TypeVar("G")
# What the gates of a test decided, with their sessions.
OUTCOMES: pytest.StashKey[list[tuple[Judging, Outcome]]] = pytest.StashKey()
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
def dump_layer(request: pytest.FixtureRequest) -> str:
    """A layer of the dump of --dump; the test runs once for each of --layers."""
    return str(request.param)


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
    session = session_of(request.config, params["model"])

    def made() -> Gate:
        gate = Gate(request.node, session)
        if isinstance(params.get("mode"), str):
            gate.session.prepare(gate.mode(params["mode"]))
        return gate

    return _ready(request.node, session, made)


@pytest.fixture
def dump_gate(request: pytest.FixtureRequest) -> DumpGate:
    """Holds a folder of dumps against limits and its accepted record; fails with what to do."""
    session = dump_session_of(request.config)
    assert session is not None, "without a dump this test is left out"
    return _ready(request.node, session, lambda: DumpGate(request.node, session))


@pytest.fixture
def activation_gate(request: pytest.FixtureRequest, model: Model) -> ActivationGate:  # noqa: ARG001
    """Holds the activations of a model against their accepted record; fails with what to do."""
    session = activation_session_of(request.config, request.node.callspec.params["model"])
    return _ready(request.node, session, lambda: ActivationGate(request.node, session))


def _ready(item: pytest.Item, session: Judging, make: Callable[[], G]) -> G:
    """A gate whose baseline is of what is measured; anything else is no verdict."""
    item.stash[OUTCOMES] = []
    try:
        session.check_baseline()
        return make()
    except QgateError as error:
        reason = str(error)
    pytest.fail(one_line(reason), pytrace=False)


class Deciding:
    """The gate of one test: what it measures is judged, shown to hooks and kept for the report."""

    def __init__(self, item: pytest.Item, session: Judging, command: str = "") -> None:
        self._item = item
        policy = session.policy
        for marker in reversed(list(item.iter_markers("limits"))):
            policy = policy.with_marker(marker.kwargs, f"limits marker of {item.name}")
        self.session = session.with_policy(policy, command)
        self.suite = Path(str(item.path)).stem.removeprefix("test_")

    def _decide(self, compute: Callable[[], Outcome]) -> None:
        self._item.stash[COMPUTING] = True
        reason = ""
        try:
            outcome = compute()
        except QgateError as error:
            reason = str(error)
        if reason:
            pytest.fail(one_line(reason), pytrace=False)
        reason = self._shown_to_hooks(outcome)
        if reason:
            pytest.fail(for_terminal(reason), pytrace=False)
        self._item.stash[COMPUTING] = False
        self._item.stash[OUTCOMES].append((self.session, outcome))
        if outcome.text:
            pytest.fail(for_terminal(outcome.text), pytrace=False)

    def _shown_to_hooks(self, outcome: Outcome) -> str:
        """Let hooks see the records; what one of them breaks, in words."""
        from qgate.results import check_storable

        hook = self._item.ihook.pytest_qgate_record
        verdict = outcome.text.partition("\n")[0] or "the gate passed"
        for row in outcome.record["rows"]:
            try:
                check_storable(row)
            except (QgateError, ValueError, TypeError) as error:
                return one_line(
                    f"what was measured at {row['site']} cannot be recorded: {error} ({verdict})"
                )
            if not hook.get_hookimpls():
                continue
            try:
                hook(item=self._item, record=row)
                check_storable(row)
            except Exception as error:
                return (
                    f"a hook pytest_qgate_record broke the record of {row.get('site', 'a site')}: "
                    f"{type(error).__name__}: {error} ({verdict})"
                )
        return ""


class Gate(Deciding):
    """The gate of one test: `gate.layer(mode, layer)`, `gate.task(mode)`, or `gate(measured)`.

    `session` is the bench with everything computed so far, and the baseline.
    """

    session: GateSession

    def mode(self, name: str) -> Mode:
        """A mode of the model by name."""
        return self.session.bench.setup.select(name, self.session.bench.model)[0]

    def layer(self, mode: str, layer: str) -> None:
        """The errors of one layer in one mode, local and carried."""
        self._decide(lambda: self.session.layer(self.suite, self.mode(mode), layer))

    def gradients(self, mode: str, layer: str) -> None:
        """The gradients of one layer in one mode, against FP32's."""
        self._decide(lambda: self.session.gradients(self.suite, self.mode(mode), layer))

    def scaling(self, fmt: str, layer: str) -> None:
        """The error of a format at the scale that suits each tensor of a layer."""
        self._decide(lambda: self.session.scaling(self.suite, fmt, layer))

    def overflow(self, fmt: str, layer: str, phase: str = "forward") -> None:
        """Gate what a format saturates and flushes in a layer, forward or backward."""
        self._decide(lambda: self.session.overflow(self.suite, fmt, layer, phase))

    def reference(self) -> None:
        """The stored reference equals a live one, and that one is unquantized."""
        self._decide(lambda: self.session.reference(self.suite))

    def canary(self) -> None:
        """A plan that quantizes nothing is exact, and a broken quantizer is rejected."""
        self._decide(lambda: self.session.canary(self.suite))

    def task(self, mode: str) -> None:
        """What the mode costs the model's own work."""
        self._decide(lambda: self.session.task(self.suite, self.mode(mode)))

    def __call__(self, measured: list[Measured], mode: str, where: str = "") -> None:
        """Anything measured, for suites of your own."""
        self._decide(lambda: self.session.judge(self.suite, self.mode(mode), measured, where))


class DumpGate(Deciding):
    """The gate of one test over a dump: `dump_gate.overflow(fmt, layer)`."""

    session: DumpGates

    def __init__(self, item: pytest.Item, session: DumpGates) -> None:
        # Other suites of the same command may be about models, which nobody means to accept here.
        super().__init__(item, session, command_of(item.config, [str(item.path)]))

    def overflow(self, fmt: str, layer: str) -> None:
        """Gate what a format saturates and flushes in the tensors of a layer."""
        self._decide(lambda: self.session.overflow(self.suite, fmt, layer))

    def distributions(self, layer: str) -> None:
        """Where the values of a layer's tensors lie."""
        self._decide(lambda: self.session.distributions(self.suite, layer))


class ActivationGate(Deciding):
    """The gate of one test over a model's activations: `activation_gate.layer(layer)`."""

    session: ActivationGates

    def __init__(self, item: pytest.Item, session: ActivationGates) -> None:
        super().__init__(item, session, command_of(item.config, [str(item.path)]))

    def layer(self, layer: str) -> None:
        """How large the values of a layer's tensors are, and how far its outliers reach."""
        self._decide(lambda: self.session.activations(self.suite, layer))
