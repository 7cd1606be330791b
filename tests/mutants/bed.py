"""Where mutants grow: a fresh bench against the baselines of the healthy code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.models import Sampling
from qgate.modes import Mode
from qgate.pipeline.bench import Bench
from qgate.pipeline.gating import GateSession, Outcome
from qgate.pipeline.setups import ModelSetup

SAMPLING = Sampling(samples=2, seqlen=128, calib_samples=4, calib_seqlen=128)
SUITE = "layer_outputs"


@dataclass
class Healthy:
    """Baselines of the healthy code in one folder; a mode is recorded once, when it is needed."""

    folder: Path
    recorded: set[tuple[str, str]] = field(default_factory=set)

    def session(self, model: str, updating: str | None = None, **setup: Any) -> GateSession:
        """A session that has computed nothing yet."""
        made = ModelSetup(model, **{"sampling": SAMPLING, **setup})
        return GateSession(Bench(made), self.folder, Policy(), updating=updating)

    def record(self, model: str, mode: str) -> None:
        if (model, mode) in self.recorded:
            return
        session = self.session(model, updating="all")
        found = [*all_layers(session, mode), session.task("task", mode_of(session, mode))]
        assert [each.text for each in found if not each.passed] == []
        session.commit()
        self.recorded.add((model, mode))


def mode_of(session: GateSession, mode: str) -> Mode:
    return session.bench.setup.select(mode, session.bench.model)[0]


def all_layers(session: GateSession, mode: str) -> list[Outcome]:
    found = mode_of(session, mode)
    return [session.layer(SUITE, found, layer) for layer in session.bench.layers]


@dataclass
class Bed:
    """What a mutant may reach: the code, by `patch`, and the quantized model, by `module`."""

    patch: pytest.MonkeyPatch
    session: GateSession
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
        made = change(module.weight.detach().clone())
        plain = type(module)
        module.__class__ = type(plain.__name__, (plain,), {"weight": property(lambda _: made)})


@dataclass(frozen=True)
class Found:
    """What the gate said: the site where the error enters, and all texts."""

    failed: list[Outcome]
    texts: str

    @property
    def source(self) -> str | None:
        sources = (outcome.verdict.first_source for outcome in self.failed)
        return next((source for source in sources if source), None)


def examine(session: GateSession, mode: str, suite: str) -> Found:
    """What `pytest suites` evaluates, as far as a mutant needs it."""
    try:
        session.check_baseline()
        if suite == "task":
            outcomes = [session.task("task", mode_of(session, mode))]
        elif suite == "reference":
            outcomes = [session.reference("reference")]
        else:
            outcomes = all_layers(session, mode)
    except QgateError as error:
        return Found([], str(error))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    return Found(failed, "\n\n".join(outcome.text for outcome in failed))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
