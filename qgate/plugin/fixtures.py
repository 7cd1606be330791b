"""The fixtures of suites, and the gates that they hand out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from qgate.errors import QgateError
from qgate.plugin import lazy
from qgate.plugin.gate_collection import parameters_of, suite_of, text_parameter
from qgate.plugin.runs import COMPUTING, OUTCOMES, note_looser, note_loss
from qgate.plugin.settings import options_of
from qgate.plugin.shared_sessions import sessions_of
from qgate.project.gate_kinds import GateKind
from qgate.text import for_terminal, one_line

if TYPE_CHECKING:
    import torch

    from qgate.gate import Measured
    from qgate.gate.sessions import GateSession, Outcome
    from qgate.kernel_checks.record import CheckReport
    from qgate.models import Model
    from qgate.relations.record import RelationReport
    from qgate.results.run_facts import LooserLimit


@pytest.fixture
def fmt(request: pytest.FixtureRequest) -> str:
    """The name of a number format; the test runs once for each one selected."""
    return str(request.param)


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> Model:
    """A qgate.Model with its samples; the test runs once for each --model."""
    return sessions_of(request.config).of_model(request.param).bench.model


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
    return lazy.sessions.device_of(request.config)


@pytest.fixture
def qgate_check() -> Callable[..., CheckReport]:
    """Checks a cast: `qgate.testing.check`."""
    return lazy.testing.check


@pytest.fixture
def qgate_check_kernel() -> Callable[..., CheckReport]:
    """Checks a kernel: `qgate.testing.check_kernel`."""
    return lazy.testing.check_kernel


@pytest.fixture
def qgate_check_relations() -> Callable[..., RelationReport]:
    """Checks what must be the same twice: `qgate.testing.check_relations`."""
    return lazy.testing.check_relations


def fixtures_of(kinds: Iterable[GateKind]) -> ModuleType:
    """Return a plugin with the fixtures of kinds of gates: one that judges, and its cases."""
    plugin = ModuleType("qgate.plugin.kinds")
    for kind in kinds:
        setattr(plugin, kind.fixture, _gate_fixture(kind))
        if kind.cases:
            setattr(plugin, kind.cases[0], _cases_fixture(*kind.cases))
    return plugin


def _cases_fixture(name: str, doc: str) -> Any:
    def case(request: pytest.FixtureRequest) -> str:
        return str(request.param)

    case.__doc__ = doc
    return pytest.fixture(name=name)(case)


def _gate_fixture(kind: GateKind) -> Any:
    def of_subject(request: pytest.FixtureRequest) -> SuiteGate:
        session = sessions_of(request.config).of(kind)
        assert session is not None, "without its subject this test is left out"
        return _ready(request.node, session, kind)

    def of_model(request: pytest.FixtureRequest, model: Model) -> SuiteGate:  # noqa: ARG001
        name = parameters_of(request.node).get("model")
        if not isinstance(name, str):
            pytest.fail(
                "a gate needs qgate's fixture `model`, and another fixture or parameter has that "
                "name here: give yours another one.",
                pytrace=False,
            )
        return _ready(request.node, sessions_of(request.config).of(kind, name), kind)

    judge = of_model if kind.is_of_model else of_subject
    judge.__doc__ = kind.doc
    return pytest.fixture(name=kind.fixture)(judge)


def _ready(item: pytest.Item, session: GateSession, kind: GateKind) -> SuiteGate:
    """A gate whose baseline is of what is measured; anything else is no verdict."""
    item.stash[OUTCOMES] = []
    try:
        session.check_baseline()
        gate = SuiteGate(item, session, kind)
        if mode := text_parameter(item, "mode"):
            session.prepare(mode)
        return gate
    except Exception as error:
        own = lazy.device_errors.device_error(error, item.name)
        if own is None and not isinstance(error, QgateError):
            raise
        note_loss(item, own or error)
        reason = str(own or error)
    pytest.fail(one_line(reason), pytrace=False)


class SuiteGate:
    """The gates of a session with the suite of one test bound: `gate.layer(mode, layer)`.

    The gates are the methods that the session marks as such (`qgate.gate.sessions.gate`). They are
    called without the suite, and with a mode by its name; what one of them decides is shown to
    hooks and kept for the report, and the test fails with its text. `session` is the session with
    everything computed so far; `gate(measured, mode)` judges numbers of your own.
    """

    def __init__(self, item: pytest.Item, session: GateSession, kind: GateKind) -> None:
        self._item = item
        policy, function = session.policy, getattr(item, "originalname", item.name)
        for marker in reversed(list(item.iter_markers("limits"))):
            standard = lazy.shipped.standard_of(item.path.name, function, marker.kwargs)
            source = f"limits marker of {item.name}"
            policy = policy.with_marker(marker.kwargs, source, standard)
        note_looser(item.config, [_of_function(limit, item) for limit in policy.looser()])
        paths = [str(item.path)]
        command = options_of(item.config).command(paths, updating=True) if kind.runs_alone else ""
        self.session: Any = session.with_policy(policy, command)
        self.suite = suite_of(item.path)

    def __getattr__(self, name: str) -> Callable[..., None]:
        gates = self.__dict__["session"].gates()
        if name not in gates:
            raise AttributeError(f"there is no gate {name!r} here; there are {', '.join(gates)}.")
        return partial(self._decide, gates[name])

    def __call__(self, measured: list[Measured], mode: str, where: str = "") -> None:
        """Anything measured, for suites of your own."""
        self._decide(type(self.session).judge, mode=mode, measured=measured, where=where)

    def _decide(self, gate: Callable[..., Outcome], *about: Any, **named: Any) -> None:
        """Run one of the session's gates; what it fails is no traceback."""
        self._item.stash[COMPUTING] = True
        outcome: Outcome | None = None
        call = inspect.signature(gate).bind(self.session, self.suite, *about, **named)
        mode = call.arguments.get("mode")
        try:
            if mode is not None:
                call.arguments["mode"] = self.session.mode_named(mode)
            outcome = gate(*call.args, **call.kwargs)
            reason = for_terminal(lazy.records.show_to_hooks(self._item, outcome))
        except Exception as error:
            # Of a device an error shows late, at whatever waits for it next.
            own = lazy.device_errors.device_error(
                error, f"mode {mode}" if mode is not None else self._item.name
            )
            if own is None and not isinstance(error, QgateError):
                raise
            note_loss(self._item, own or error)
            reason = one_line(own or error)
        if reason:
            pytest.fail(reason, pytrace=False)
        assert outcome is not None
        self._item.stash[COMPUTING] = False
        self._item.stash[OUTCOMES].append((self.session, outcome))
        if outcome.text:
            pytest.fail(for_terminal(outcome.text), pytrace=False)


def _of_function(limit: LooserLimit, item: pytest.Item) -> LooserLimit:
    """Name the function of a marker and its file, not one case of it."""
    name = getattr(item, "originalname", item.name)
    source = limit["source"].replace(item.name, f"{name} in {item.path.name}")
    return {**limit, "source": source}
