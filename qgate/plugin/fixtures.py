"""The fixtures of suites, and the gates that they hand out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from qgate.device_errors import device_error
from qgate.errors import QgateError
from qgate.plugin import lazy
from qgate.plugin.gate_collection import parameters_of, suite_of, text_parameter
from qgate.plugin.lost_devices import note_loss
from qgate.plugin.runs import note_looser
from qgate.plugin.settings import options_of
from qgate.plugin.shared_sessions import sessions_of
from qgate.plugin.shipped import standard_of
from qgate.text import for_terminal, one_line

if TYPE_CHECKING:
    import torch

    from qgate.gate import Measured
    from qgate.gate.measuring.model_gates import ModelGates
    from qgate.gate.sessions import GateSession, Outcome
    from qgate.kernel_checks.record import CheckReport
    from qgate.models import Model
    from qgate.modes import Mode
    from qgate.relations.record import RelationReport
    from qgate.results.schema import LooserLimit

# The fixtures that judge: tests that use one are gates.
GATES = (
    "gate",
    "dump_gate",
    "checkpoint_gate",
    "engine_gate",
    "activation_gate",
    "relation_gate",
)
# What the gates of a test decided, with their sessions.
OUTCOMES: pytest.StashKey[list[tuple[GateSession, Outcome]]] = pytest.StashKey()
# Set while a gate computes: what is raised then is plumbing, and no verdict on numbers.
COMPUTING: pytest.StashKey[bool] = pytest.StashKey()
G = TypeVar("G", bound="SuiteGate")
S = TypeVar("S", bound="GateSession")


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
def dump_layer(request: pytest.FixtureRequest) -> str:
    """A layer of the dump of --dump; the test runs once for each of --layers."""
    return str(request.param)


@pytest.fixture
def checkpoint_layer(request: pytest.FixtureRequest) -> str:
    """A layer of the checkpoint of --checkpoint; the test runs once for each of --layers."""
    return str(request.param)


@pytest.fixture
def engine_part(request: pytest.FixtureRequest) -> str:
    """A part of --engines that there is something to compare for: tokens, weights, or sites."""
    return str(request.param)


@pytest.fixture
def gate(request: pytest.FixtureRequest, model: Model) -> Gate:  # noqa: ARG001
    """Holds what was measured against limits and accepted errors; fails with what to do."""
    parameters = parameters_of(request.node)
    if not isinstance(parameters.get("model"), str):
        pytest.fail(
            "a gate needs qgate's fixture `model`, and another fixture or parameter has that name "
            "here: give yours another one.",
            pytrace=False,
        )

    def prepared(item: pytest.Item, session: ModelGates) -> Gate:
        gate = Gate(item, session)
        if mode := text_parameter(item, "mode"):
            session.prepare(gate.mode(mode))
        return gate

    session = sessions_of(request.config).of_model(parameters["model"])
    return _ready(request.node, session, prepared)


@pytest.fixture
def dump_gate(request: pytest.FixtureRequest) -> DumpGate:
    """Holds a folder of dumps against limits and its accepted record; fails with what to do."""
    return _ready(request.node, sessions_of(request.config).of_dump(), DumpGate)


@pytest.fixture
def checkpoint_gate(request: pytest.FixtureRequest) -> CheckpointGate:
    """Holds a quantized checkpoint against its recipe, its parent and its accepted record."""
    return _ready(request.node, sessions_of(request.config).of_checkpoint(), CheckpointGate)


@pytest.fixture
def engine_gate(request: pytest.FixtureRequest) -> EngineGate:
    """Holds two engines on the same tokens against limits and their accepted record."""
    return _ready(request.node, sessions_of(request.config).of_engines(), EngineGate)


@pytest.fixture
def activation_gate(request: pytest.FixtureRequest, model: Model) -> ActivationGate:  # noqa: ARG001
    """Holds the activations of a model against their accepted record; fails with what to do."""
    name = parameters_of(request.node)["model"]
    return _ready(request.node, sessions_of(request.config).of_activations(name), ActivationGate)


@pytest.fixture
def relation_gate(request: pytest.FixtureRequest, model: Model) -> RelationGate:  # noqa: ARG001
    """Holds a model in a mode against itself, computed in other ways; needs no baseline."""
    name = parameters_of(request.node)["model"]
    return _ready(request.node, sessions_of(request.config).of_relations(name), RelationGate)


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


def _ready(item: pytest.Item, session: S | None, make: Callable[[pytest.Item, S], G]) -> G:
    """A gate whose baseline is of what is measured; anything else is no verdict."""
    assert session is not None, "without its subject this test is left out"
    item.stash[OUTCOMES] = []
    try:
        session.check_baseline()
        return make(item, session)
    except Exception as error:
        own = device_error(error, item.name)
        if own is None and not isinstance(error, QgateError):
            raise
        note_loss(item, own or error)
        reason = str(own or error)
    pytest.fail(one_line(reason), pytrace=False)


class SuiteGate:
    """The gate of one test: what it measures is judged, shown to hooks and kept for the report."""

    # Whether the suite is run alone to accept it: others of the same command are about models.
    runs_alone = True

    def __init__(self, item: pytest.Item, session: GateSession) -> None:
        self._item = item
        policy, function = session.policy, getattr(item, "originalname", item.name)
        for marker in reversed(list(item.iter_markers("limits"))):
            standard = standard_of(item.path.name, function, marker.kwargs)
            source = f"limits marker of {item.name}"
            policy = policy.with_marker(marker.kwargs, source, standard)
        note_looser(item.config, [_of_function(limit, item) for limit in policy.looser()])
        paths = [str(item.path)]
        command = options_of(item.config).command(paths, updating=True) if self.runs_alone else ""
        self.session: Any = session.with_policy(policy, command)
        self.suite = suite_of(item.path)

    def _decide(self, gate: str, *about: Any, mode: str | None = None) -> None:
        """Run one of the session's gates, in a mode by name; what it fails is no traceback."""
        self._item.stash[COMPUTING] = True
        outcome: Outcome | None = None
        try:
            if mode is not None:
                about = (self.session.bench.mode(mode), *about)
            outcome = getattr(self.session, gate)(self.suite, *about)
            reason = for_terminal(lazy.records.show_to_hooks(self._item, outcome))
        except Exception as error:
            # Of a device an error shows late, at whatever waits for it next.
            own = device_error(error, f"mode {mode}" if mode is not None else self._item.name)
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


class Gate(SuiteGate):
    """The gate of one test: `gate.layer(mode, layer)`, `gate.task(mode)`, or `gate(measured)`.

    `session` is the bench with everything computed so far, and the baseline.
    """

    session: ModelGates
    runs_alone = False

    def mode(self, name: str) -> Mode:
        """A mode of the model by name."""
        return self.session.bench.mode(name)

    def layer(self, mode: str, layer: str) -> None:
        """The errors of one layer in one mode, local and carried."""
        self._decide("layer", layer, mode=mode)

    def outputs(self, mode: str) -> None:
        """The outputs of the model in one mode, and what lies outside its blocks."""
        self._decide("outputs", mode=mode)

    def gradients(self, mode: str, layer: str) -> None:
        """The gradients of one layer in one mode, against FP32's."""
        self._decide("gradients", layer, mode=mode)

    def scaling(self, fmt: str, layer: str) -> None:
        """The error of a format at the scale that suits each tensor of a layer."""
        self._decide("scaling", fmt, layer)

    def overflow(self, fmt: str, layer: str, phase: str = "forward") -> None:
        """Gate what a format saturates and flushes in a layer, forward or backward."""
        self._decide("overflow", fmt, layer, phase)

    def reference(self) -> None:
        """The stored reference equals a live one, and that one is unquantized."""
        self._decide("reference")

    def canary(self) -> None:
        """A plan that quantizes nothing is exact, and a broken quantizer is rejected."""
        self._decide("canary")

    def task(self, mode: str) -> None:
        """Gate what the mode costs the model's own work."""
        self._decide("task", mode=mode)

    def __call__(self, measured: list[Measured], mode: str, where: str = "") -> None:
        """Anything measured, for suites of your own."""
        self._decide("judge", measured, where, mode=mode)


class DumpGate(SuiteGate):
    """The gate of one test over a dump: `dump_gate.overflow(fmt, layer)`."""

    def overflow(self, fmt: str, layer: str) -> None:
        """Gate what a format saturates and flushes in the tensors of a layer."""
        self._decide("overflow", fmt, layer)

    def distributions(self, layer: str) -> None:
        """Gate the distributions of a layer's tensors."""
        self._decide("distributions", layer)


class CheckpointGate(SuiteGate):
    """The gate of one test over a checkpoint: `checkpoint_gate.weights(layer)`."""

    def weights(self, layer: str) -> None:
        """Gate the weights of a layer: findings, and errors beside the parent's."""
        self._decide("weights", layer)

    def accounting(self) -> None:
        """Gate what is missing, unexpected, left out or ignored in vain."""
        self._decide("accounting")

    def recipe(self) -> None:
        """Gate the format of every weight, and the bits of all."""
        self._decide("recipe")


class EngineGate(SuiteGate):
    """The gate of one test over two engines: `engine_gate.part("tokens")`."""

    def part(self, part: str) -> None:
        """Gate the probabilities of tokens, the weights, or the sites of modules."""
        self._decide("part", part)


class ActivationGate(SuiteGate):
    """The gate of one test over a model's activations: `activation_gate.layer(layer)`."""

    def layer(self, layer: str) -> None:
        """Gate the magnitudes and outliers of a layer's tensors."""
        self._decide("activations", layer)


class RelationGate(SuiteGate):
    """The gate of one test over a model's relations: `relation_gate.mode(mode)`."""

    def mode(self, mode: str) -> None:
        """Gate that a mode gives the same however its tokens are computed."""
        self._decide("relations", mode=mode)
