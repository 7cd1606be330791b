"""Sessions that the tests of one process share: per model and for the dump, made when needed."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import pytest
import torch

from qgate import modes
from qgate.devices import cpu_notice, resolve
from qgate.errors import QgateError
from qgate.gate import Policy
from qgate.gate.measuring.activation_gates import ActivationGates
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.checkpoint_gates import CheckpointGates, CheckpointSubject
from qgate.gate.measuring.dump_gates import DumpGates, DumpSubject
from qgate.gate.measuring.engine_gates import EngineGates, EngineSubject
from qgate.gate.measuring.model_gates import ModelGates
from qgate.gate.measuring.relation_gates import RelationGates
from qgate.models import Model, Sampling
from qgate.modes import CalibrationSettings
from qgate.modes.setups import ModelSetup, with_tokens
from qgate.plugin.gate_collection import SubjectKind
from qgate.plugin.runs import SESSIONS, selection_of
from qgate.plugin.settings import options_of
from qgate.project.options import OPTIONS, PathPair
from qgate.storage.locations import relative_text
from qgate.text import for_terminal

if TYPE_CHECKING:
    from qgate.gate.updating import Which
    from qgate.results.pictures import Plots

_NOTES = 6
M = TypeVar("M", bound=Callable[..., Any])


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


def _held(make: M) -> M:
    """Keep the session that a method makes, by the name that it was asked for with."""

    @functools.wraps(make)
    def session(sessions: Sessions, *name: str) -> Any:
        key = (make.__name__, "".join(name))
        if key not in sessions.held and (session := make(sessions, *name)) is not None:
            sessions.held[key] = session
        return sessions.held.get(key)

    return cast(M, session)


class Sessions:
    """The sessions of one process, by what they are of and the name it was asked for with."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.options = config, options_of(config)
        self.held = config.stash.setdefault(SESSIONS, {})

    @_held
    def of_model(self, name: str) -> ModelGates:
        """Return the gates of a model."""
        policy, shared = self._policy(), self._shared()
        bench = Bench(
            self._setup(name),
            reference_mode=self.options.values["reference"],
            progress=self._progress,
        )
        notes = selection_of(self.config).notes
        notes += {cpu_notice(self.options.values["device"])} - {"", *notes}
        session = ModelGates(bench, policy=policy.for_model(bench.model.name), **shared)
        session.check_policy()
        return session

    @_held
    def of_activations(self, name: str) -> ActivationGates:
        """Return the gates of a model's activations, which share the model itself."""
        bench = self.of_model(name).bench
        policy = self._policy().for_model(bench.model.name)
        return ActivationGates(bench, policy=policy, **self._shared())

    @_held
    def of_relations(self, name: str) -> RelationGates:
        """Return the gates of a model's relations, which share the model itself."""
        bench, bitwise = self.of_model(name).bench, self.options.values["bitwise"]
        policy = self._policy().for_model(bench.model.name)
        return RelationGates(bench, policy=policy, bitwise=bitwise, **self._shared())

    @_held
    def of_dump(self) -> DumpGates | None:
        """Return the gates of the dump; None where the run has none."""
        options = self.options
        folder = options.dump_folder()
        if folder is None:
            return None
        name, text = options.dump_name(folder), options.values["dump"]
        if "dump" not in options.typed:
            text = relative_text(self.config.invocation_params.dir, text)
        subject = DumpSubject(folder, name, text, options.values["dump-name"] or "")
        session = DumpGates(subject, policy=self._policy().for_model(name), **self._shared())
        session.check_policy()
        notes = subject.notes()
        more = [f"and {len(notes) - _NOTES} more notes"] if len(notes) > _NOTES else []
        lines = [f"dump {text}: {note}" for note in [*notes[:_NOTES], *more]]
        selection_of(self.config).notes += lines
        return session

    @_held
    def of_checkpoint(self) -> CheckpointGates | None:
        """Return the gates of the checkpoint; None where the run has none."""
        options = self.options
        child = options.readable("checkpoint")
        if child is None:
            return None
        parent, recipe = options.readable("parent"), options.readable("recipe")
        name = options.checkpoint_name(child)
        typed = self._typed_again("checkpoint", "parent", "recipe", "checkpoint-name")
        subject = CheckpointSubject(child, parent, name, typed, recipe)
        policy = self._policy().for_model(name)
        session = CheckpointGates(subject, policy=policy, **self._shared())
        session.check_policy()
        session.check_parent()
        return session

    @_held
    def of_engines(self) -> EngineGates | None:
        """Return the gates of two engines; None where the run has none."""
        options = self.options
        engines = options.readable_pair("engines")
        if engines is None:
            return None
        weights, head = options.readable_pair("engines-weights"), options.values["engines-logits"]
        name = options.engines_name(engines[0])
        names = "engines", "engines-name", "engines-weights", "engines-logits"
        subject = EngineSubject(*engines, name, weights, head or "", self._typed_again(*names))
        session = EngineGates(subject, policy=self._policy().for_model(name), **self._shared())
        session.check_policy()
        session.check_accepted()
        selection_of(self.config).notes += [f"engines: {note}" for note in session.notes()]
        return session

    def _typed_again(self, *names: str) -> list[tuple[str, ...]]:
        """Return options of the subject as they are typed again: paths of a file from here."""
        options = self.options
        typed: list[tuple[str, ...]] = []
        for name in names:
            value = options.values[name]
            if value is not None:
                values = value if isinstance(value, list) else [value]
                if OPTIONS[name].kind in (Path, PathPair) and name not in options.typed:
                    directory = self.config.invocation_params.dir
                    values = [relative_text(directory, text) for text in values]
                typed.append((name, *values))
        return typed

    def of_subject(self, kind: SubjectKind) -> DumpGates | CheckpointGates | EngineGates | None:
        """Return the gates of the dump, the checkpoint or the engines; None without them."""
        sessions = {
            "dump": self.of_dump, "checkpoint": self.of_checkpoint, "engines": self.of_engines,
        }  # fmt: skip
        return sessions[kind]()

    def _policy(self) -> Policy:
        return Policy.from_table(self.options.limits)

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
            "accept_plan": options.values["accept-plan"],
            "deferred": True,
            "across_weights": options.values["across-weights"],
            "command": options.command(updating=True),
            "spelled": options.spelled,
            "plots": options.values["plots"],
        }

    def _setup(self, model: str) -> ModelSetup:
        """Return the options as the setup of one model."""
        hook, values = self.config.hook, self.options.values
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
        calibration = values["calibration"]
        return ModelSetup(
            model,
            values["device"],
            self.sampling,
            calibration=None if calibration is None else Path(calibration),
            settings=CalibrationSettings(values["percentile-alpha"]),
            build=builders.get(model),
            modes={mode.name: mode for mode in own},
        )

    @cached_property
    def sampling(self) -> Sampling:
        """Read the options of samples, and the files that they name."""
        values = self.options.values
        files = {
            name: None if values[name] is None else Path(values[name])
            for name in ("text", "tokens", "calib-text")
        }
        sampling = Sampling(
            **{
                name.replace("-", "_"): values[name]
                for name in ("samples", "seqlen", "calib-samples", "calib-seqlen")
            },
            text=files["text"],
            calib_text=files["calib-text"],
        )
        sampling.check_texts()
        return with_tokens(sampling, files["tokens"])

    def _progress(self, text: str) -> None:
        """Say on a terminal what takes its time."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if sys.stderr.isatty() and not hasattr(self.config, "workerinput") and capture is not None:
            with capture.global_and_fixture_disabled():
                sys.stderr.write(f"\r\x1b[K  {for_terminal(text)} ")
                sys.stderr.flush()


def device_of(config: pytest.Config) -> torch.device:
    """Return the device of --device."""
    return resolve(options_of(config).values["device"])


# This file is loaded before any test: what is here by now stays as long as the process.
gc.freeze()
