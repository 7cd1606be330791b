"""Sessions that the tests of one process share: per kind of gate and model, made when needed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import pytest
import torch

from qgate import modes
from qgate.devices import cpu_notice, resolve
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measuring.bench import Bench
from qgate.models import Model, Sampling
from qgate.modes import CalibrationSettings
from qgate.modes.setups import ModelSetup, with_tokens
from qgate.plugin.runs import SESSIONS, selection_of
from qgate.plugin.settings import options_of
from qgate.project.gate_kinds import GateKind, gate_kind, known_options
from qgate.project.options import CommandSettings
from qgate.project.settings import limits_title
from qgate.storage.locations import relative_text
from qgate.text import for_terminal

if TYPE_CHECKING:
    from qgate.gate.ledger import Which
    from qgate.gate.measuring.model_gates import ModelGates
    from qgate.gate.sessions import GateSession
    from qgate.results.pictures import Plots

S = TypeVar("S", bound="GateSession")


class SharedOptions(TypedDict):
    """The options of all gate sessions of a run."""

    baselines: Path
    updating: Which | None
    dry_run: bool
    accept_plan: bool
    deferred: bool
    across_weights: bool
    command: str
    spelled: Callable[[str], str]
    plots: Plots


class Sessions:
    """The sessions of one process, by what they are of and the name it was asked for with."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.options = config, options_of(config)
        self.opened = config.stash.setdefault(SESSIONS, {})

    def of(self, kind: GateKind, model: str = "") -> Any:
        """Return the session of a kind of gate, of a model or of the subject, made once.

        None where the run names no subject.
        """
        key = kind.name, model
        if key not in self.opened and (session := kind.open(self, model)) is not None:
            self.opened[key] = session
        return self.opened.get(key)

    def of_model(self, name: str) -> ModelGates:
        """Return the gates of a model."""
        session: ModelGates = self.of(gate_kind("models"), name)
        return session

    # What kinds of gates make their sessions with (`qgate.project.gate_kinds.GateRun`) ------------

    def session(self, gates: type[S], subject: Any, name: str, **more: Any) -> S:
        """Make a session of the class `gates`, under the limits of the subject's name."""
        return gates(subject, policy=self._policy().for_model(name), **more, **self._shared())

    def new_bench(self, model: str) -> Bench:
        """Make the bench of a model."""
        # What is wrong with limits or baselines is said before a model is loaded.
        _ = self._policy(), self._shared()
        bench = Bench(
            self._setup(model),
            reference_mode=self.options.run.reference,
            progress=self._progress,
        )
        notes = selection_of(self.config).notes
        notes += {cpu_notice(self.options.run.device)} - {"", *notes}
        return bench

    def bench(self, model: str) -> Bench:
        """Return the bench of a model, which all kinds about it share."""
        return self.of_model(model).bench

    def note(self, lines: Sequence[str]) -> None:
        """Say something of the subject at the end of the run."""
        selection_of(self.config).notes += lines

    def typed_again(self, *names: str) -> list[tuple[str, ...]]:
        """Return options of the subject as they are typed again: paths of a file from here."""
        options, every = self.options, known_options()
        typed: list[tuple[str, ...]] = []
        for name in names:
            value = options.values[name]
            if value is not None:
                values = value if isinstance(value, tuple) else (value,)
                if every[name].is_path and name not in options.typed:
                    values = tuple(relative_text(options.directory, text) for text in values)
                typed.append((name, *values))
        return typed

    def _policy(self) -> Policy:
        return Policy.from_table(self.options.limits, limits_title(self.options.source))

    def _shared(self) -> SharedOptions:
        """Return what all sessions of a run are told."""
        workers = getattr(self.config, "workerinput", {}).get("workercount")
        if workers:
            # Each worker takes its share: more threads than cores make all of them crawl.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))
        options = self.options
        return {
            "baselines": options.baselines,
            "updating": options.update,
            "dry_run": options.dry_run,
            "accept_plan": options.run.accept_plan,
            "deferred": True,
            "across_weights": options.run.across_weights,
            "command": options.command(updating=True),
            "spelled": options.spelled,
            "plots": options.run.plots,
        }

    def _setup(self, model: str) -> ModelSetup:
        """Return the options as the setup of one model."""
        hook, run = self.config.hook, self.options.run
        builders: dict[str, Callable[..., Model]] = {}
        for models in hook.pytest_qgate_models(config=self.config):
            builders |= models
        own = [mode for listed in hook.pytest_qgate_modes(config=self.config) for mode in listed]
        names = [mode.name for mode in own]
        for name in names:
            if names.count(name) > 1 or name in (*modes.names(), *modes.GROUPS):
                raise QgateError(
                    f"pytest_qgate_modes brings mode {name!r}, and there is another one of that "
                    "name: give it a name of its own."
                )
        arithmetic = self.options.of(CommandSettings).calib_arithmetic
        return ModelSetup(
            model,
            run.device,
            self.sampling,
            calibration=_path(run.calibration),
            settings=CalibrationSettings(run.percentile_alpha, arithmetic),
            build=builders.get(model),
            modes={mode.name: mode for mode in own},
        )

    @cached_property
    def sampling(self) -> Sampling:
        """Read the options of samples, and the files that they name."""
        run = self.options.run
        sampling = Sampling(
            run.samples,
            run.seqlen,
            run.calib_samples,
            run.calib_seqlen,
            text=_path(run.text),
            calib_text=_path(run.calib_text),
        )
        sampling.check_texts()
        return with_tokens(sampling, _path(run.tokens))

    def _progress(self, text: str) -> None:
        """Say on a terminal what takes its time."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if sys.stderr.isatty() and not hasattr(self.config, "workerinput") and capture is not None:
            with capture.global_and_fixture_disabled():
                sys.stderr.write(f"\r\x1b[K  {for_terminal(text)} ")
                sys.stderr.flush()


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def device_of(config: pytest.Config) -> torch.device:
    """Return the device of --device."""
    return resolve(options_of(config).run.device)


# This file is loaded before any test: what is here by now stays as long as the process.
gc.freeze()
