"""Where mutants grow: a fresh bench against the baselines of the healthy code."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from qgate.activation_stats.gate import ActivationGates
from qgate.checkpoints.gate import CheckpointGates, CheckpointSubject
from qgate.dumps.gate import DumpGates, DumpSubject
from qgate.engines.gate import EngineGates, EngineSubject
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.sessions import GateSession, Outcome
from qgate.models import Sampling
from qgate.modes import Mode
from qgate.modes.setups import ModelSetup
from qgate.relations.gate import RelationGates
from qgate.results.summary import Tally
from tests.checkpoints.gated import write_pair
from tests.dumps.gated import write_dump
from tests.engines.gated import collect, network

SAMPLING = Sampling(samples=2, seqlen=128, calib_samples=4, calib_seqlen=128)
SUITE = "layer_outputs"
SUITE_FILES = Path(__file__).parents[3] / "suites"
PHASES = ("forward", "backward")
DUMP = "dump-toy"
ACTIVATIONS = "activations"
FORMATS = "formats"
CHECKPOINT = "checkpoint"
ENGINES = "engines"
RELATIONS = "relations"
Gate = Callable[[], Any]
J = TypeVar("J", bound=GateSession)


@dataclass(frozen=True)
class SuiteOutcome:
    """The failures of a suite that has no gates, each with its test."""

    text: str

    @property
    def passed(self) -> bool:
        return not self.text


class FormatSuite:
    """`pytest suites/test_formats.py --format NAME` in this process, where defects are planted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def check_baseline(self) -> None:
        """There is none."""

    def commit(self) -> None:
        """There is nothing to record."""

    def run(self, fmt: str) -> SuiteOutcome:
        self.texts.clear()
        file = str(SUITE_FILES / "test_formats.py")
        options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:randomly"]
        warning_filter = "ignore:Module already imported"
        status = pytest.main(
            [file, "--format", fmt, *options, "-W", warning_filter], plugins=[self]
        )
        assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), status
        return SuiteOutcome("\n\n".join(self.texts))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.texts.append(f"{report.nodeid}\n{report.longreprtext}")


@dataclass
class Healthy:
    """Baselines of the healthy code in one folder; a suite of a mode is recorded when needed."""

    folder: Path
    recorded: set[tuple[str, str, str]] = field(default_factory=set)

    def session(self, model: str, updating: str | None = None, **setup: Any) -> Any:
        """A session that has computed nothing yet; of a dump, it is of other batches than those
        that were recorded."""
        if model == FORMATS:
            return FormatSuite()
        if model == DUMP:
            folder = self.folder / f"dump-{updating}"
            if not folder.is_dir():
                write_dump(folder, seed=0 if updating else 1, ranks=2)
            policy = Policy.from_table({})
            return DumpGates(DumpSubject(folder, DUMP), self.folder, policy, updating=updating)
        if model == CHECKPOINT:
            pair = self.folder / "pair"
            if not pair.is_dir():
                write_pair(pair)
            subject = CheckpointSubject(str(pair / "child"), str(pair / "parent"), CHECKPOINT)
            return CheckpointGates(subject, self.folder, Policy(), updating=updating)
        if model == ENGINES:
            engines = [self.folder / name for name in ("engine-a", "engine-b")]
            for folder in engines:
                if not folder.is_dir():
                    collect(folder, network())
            two = EngineSubject(str(engines[0]), str(engines[1]), ENGINES)
            return EngineGates(two, self.folder, Policy(), updating=updating)
        if model == RELATIONS:
            bench = Bench(ModelSetup("tiny-llama", sampling=SAMPLING))
            return RelationGates(bench, self.folder, Policy(), updating=updating, is_deep=True)
        if model == ACTIVATIONS:
            bench = Bench(ModelSetup("tiny-llama", sampling=SAMPLING))
            policy = Policy.from_table({})
            return ActivationGates(bench, self.folder, policy, updating=updating)
        model_setup = ModelSetup(model, **{"sampling": SAMPLING, **setup})
        return ModelGates(Bench(model_setup), self.folder, Policy(), updating=updating)

    def record(self, model: str, mode: str, suite: str = SUITE) -> None:
        if (model, mode, suite) in self.recorded:
            return
        session = self.session(model, updating="all")
        outcomes = [gate() for gate in gates_of(session, mode, suite)]
        assert [outcome.text for outcome in outcomes if not outcome.passed] == []
        session.commit()
        self.recorded.add((model, mode, suite))


def mode_of(session: ModelGates | RelationGates, mode: str) -> Mode:
    return session.bench.setup.select(mode, session.bench.model)[0]


def all_layers(session: ModelGates, mode: str) -> list[Outcome]:
    selected_mode = mode_of(session, mode)
    return [session.layer(SUITE, selected_mode, layer) for layer in session.bench.layers]


@functools.cache
def all_marks(suite: str) -> list[Any]:
    """The markers in the file of a suite, as its users run it, the nearest to the test first."""
    names = runpy.run_path(str(SUITE_FILES / f"test_{suite}.py"))
    return list(getattr(names[f"test_{suite}"], "pytestmark", []))


def marks(suite: str) -> dict[str, Any]:
    return {mark.name: mark for mark in all_marks(suite)}


def with_markers(session: J, suite: str) -> J:
    """A session under the limits of a suite, as its fixture has them."""
    policy = session.policy
    for mark in all_marks(suite):
        if mark.name == "limits":
            policy = policy.with_marker(mark.kwargs)
    return session.with_policy(policy)


def gates_of(session: Any, mode: str, suite: str) -> list[Gate]:
    """The tests of a suite for one mode, or for one format where a suite is about formats."""
    if isinstance(session, FormatSuite):
        return [functools.partial(session.run, mode)]
    if isinstance(session, CheckpointGates):
        if mode != "weights":
            return [functools.partial(getattr(session, mode), suite)]
        return [functools.partial(session.weights, suite, at) for at in session.layers(suite)]
    if isinstance(session, EngineGates):
        return [functools.partial(session.part, suite, mode)]
    session = with_markers(session, suite)
    if isinstance(session, DumpGates):
        every = session.layers(suite)
        if suite == "dump_distributions":
            return [functools.partial(session.distributions, suite, layer) for layer in every]
        return [functools.partial(session.overflow, suite, mode, layer) for layer in every]
    if isinstance(session, ActivationGates):
        every = session.subject.bench.layers
        return [functools.partial(session.layer, suite, layer) for layer in every]
    if isinstance(session, RelationGates):
        return [functools.partial(session.mode, suite, mode_of(session, mode))]
    layers = session.bench.layers
    if suite in ("reference", "canary"):
        return [functools.partial(getattr(session, suite), suite)]
    if suite == "scaling":
        return [functools.partial(session.scaling, suite, mode, layer) for layer in layers]
    if suite == "overflow":
        of_format = functools.partial(session.overflow, suite, mode)
        return [functools.partial(of_format, at, phase) for at in layers for phase in PHASES]
    selected_mode = mode_of(session, mode)
    if suite == "task":
        return [functools.partial(session.task, suite, selected_mode)]
    if suite == "outputs":
        return [functools.partial(session.outputs, suite, selected_mode)]
    tests = session.gradients if suite == "gradients" else session.layer
    return [functools.partial(tests, suite, selected_mode, layer) for layer in layers]


@dataclass
class Bed:
    """What a mutant may reach: the code, by `patch`, and the quantized model, by `module`."""

    patch: pytest.MonkeyPatch
    session: Any
    healthy: Healthy
    mode: str

    @property
    def network(self) -> nn.Module:
        """The quantized network of this session, which nobody else has."""
        return self.session.bench.quantized(mode_of(self.session, self.mode)).model.module

    def module(self, name: str) -> Any:
        return self.network.get_submodule(name)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(what was there)` in the place of an attribute."""
        self.patch.setattr(owner, name, make(getattr(owner, name)))

    def after(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Change what a module of the quantized network returns."""
        module = self.module(name)
        plain = module.forward
        module.forward = lambda *args, **kwargs: change(plain(*args, **kwargs))

    def weight(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Change the quantized weight of a linear layer; the reference keeps its own."""
        module = self.module(name)
        changed = change(module.weight.detach().clone())
        plain = type(module)
        module.__class__ = type(plain.__name__, (plain,), {"weight": property(lambda _: changed)})


@dataclass(frozen=True)
class Found:
    """What the gate said: the site where the error enters, and all texts."""

    failed: list[Outcome]
    texts: str
    suite: str = SUITE

    @property
    def is_local(self) -> bool:
        """Whether local errors were measured, and so the text says where the error enters."""
        return any(outcome.verdict.first_source for outcome in self.failed)

    @property
    def first_line(self) -> str:
        """The cause on top of the run, or the first line of what is no gate."""
        tally = Tally(
            {**row, "node": str(number)}
            for number, outcome in enumerate(self.failed)
            for row in getattr(outcome, "record", {"rows": ()})["rows"]
        )
        return next((cause.text() for cause in tally.causes), self.texts.partition("\n")[0])

    @property
    def source(self) -> str | None:
        """Local errors enter at the first site that is out, and the text says so. Gradients are
        those of each block by itself, and the last one that is wrong stands for all. Formats are
        tried on each tensor by itself, and the first one stands for all.
        """
        sources = (outcome.verdict.first_source for outcome in self.failed)
        if local := next((source for source in sources if source), None):
            return local
        checks = [check for outcome in self.failed for check in outcome.verdict.failed]
        if not checks:
            return None
        if self.suite == "gradients":
            return max(checks, key=lambda check: check.position).site
        layers = [outcome.verdict.measured[0].layer for outcome in self.failed]
        first = [check for check in checks if check.layer == layers[0]]
        return min(first, key=lambda check: check.position).site


def examine(session: GateSession, mode: str, suite: str) -> Found:
    """What `pytest suites` evaluates, as far as a mutant needs it."""
    try:
        session.check_baseline()
        outcomes = [gate() for gate in gates_of(session, mode, suite)]
    except QgateError as error:
        return Found([], str(error), suite)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    return Found(failed, "\n\n".join(outcome.text for outcome in failed), suite)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
