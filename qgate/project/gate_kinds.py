"""The registry of kinds of gates: whatever tells one kind from another is in one object.

A kind of gate is a `GateKind` in the file `kind.py` of the package that it belongs to: its name,
its options, the fixtures of its suites, and how its session is opened from the options of a run.
What it measures and judges is a session of gates in `gate.py` beside it (`qgate.gate.sessions`).
That file loads torch and the rest of its package, and is imported by `open` alone: only when a
test asks for the kind.

The plugin, the settings of a project, the command line and the pages read this registry. One kind
is named there: that of models, whose sessions own the benches. Kinds of another package come in
through entry points of the group `qgate.gates`, whose value is the object, as in
`toy = "toy_gates.kind:KIND"`; a plugin of pytest or a conftest.py at the root may call
`register(KIND)` instead.

How a run uses a kind, in this order:

1. `options` are added to pytest's command line and to the keys of `qgate.toml`.
2. `check` refuses options that cannot be meant, and `header` says what is gated.
3. A test that asks for `fixture` is a gate. The fixture `cases` runs it once for each layer or part
   that `session.layers(suite)` lists.
4. `open` makes the session, once for each process. Kinds about a model (`is_of_model`) are opened
   for each model; those about a subject return None where `subject` was not given, and their gates
   are left out.
5. The fixture hands the session out with the suite of the test bound: `engine_gate.part("tokens")`
   calls `session.part(suite, "tokens")`, and what it returns is judged, kept and reported like the
   result of every other gate.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from qgate.errors import QgateError, sentence_of
from qgate.loading import LateModule
from qgate.project.options import OPTIONS, by_option
from qgate.registry import Registry
from qgate.settings import Setting

if TYPE_CHECKING:
    from qgate.storage import locations
    from qgate.storage.locations import Location
else:
    locations = LateModule("qgate.storage.locations")

T = TypeVar("T")
GROUP = "qgate.gates"
"""Entry points of other packages that bring a kind of gate."""
_SHIPPED = (
    "qgate.gate.measuring.kind",
    "qgate.dumps.kind",
    "qgate.checkpoints.kind",
    "qgate.engines.kind",
    "qgate.activation_stats.kind",
    "qgate.relations.kind",
)
# What is in one file is called after it, without its ending.
_ENDINGS = (".safetensors", ".gguf", ".onnx", ".npz", ".pt", ".jsonl", ".json")


class GateOptions(Protocol):
    """The options of a run, as kinds of gates read them.

    typed      options of the command line
    values     every option, with defaults for what nobody gave
    directory  the folder that paths are typed from
    """

    @property
    def typed(self) -> Mapping[str, object]: ...

    @property
    def values(self) -> Mapping[str, Any]: ...

    @property
    def directory(self) -> Path: ...

    def of(self, declaration: type[T]) -> T:
        """Return the settings that a dataclass declares, with defaults for what nobody gave."""
        ...

    def spelled(self, name: str) -> str:
        """Spell an option as this project does."""
        ...

    def location(self, name: str) -> Location | None:
        """Return the folder that an option names; an error where none can be read."""
        ...

    def readable(self, name: str) -> str | None:
        """Return the path or URL of an option; an error where nothing can be read there."""
        ...

    def readable_pair(self, name: str) -> tuple[str, str] | None:
        """Return both paths or URLs of an option that takes two."""
        ...


class GateRun(Protocol):
    """A run, as `GateKind.open` uses it."""

    @property
    def options(self) -> GateOptions: ...

    def session(self, gates: Any, subject: Any, name: str, **more: Any) -> Any:
        """Make a session of the class `gates`, under the limits of the subject's name."""
        ...

    def new_bench(self, model: str) -> Any:
        """Make the bench of a model."""
        ...

    def bench(self, model: str) -> Any:
        """Return the bench of a model, which all kinds about it share."""
        ...

    def typed_again(self, *names: str) -> list[tuple[str, ...]]:
        """Return options of the subject as they are typed again: paths of a file from here."""
        ...

    def note(self, lines: Sequence[str]) -> None:
        """Say something of the subject at the end of the run."""
        ...


@dataclass(frozen=True)
class NoOptions:
    """The settings of a kind that has none."""


class GateKind:
    """One kind of gate; the module's docstring says how a run uses it.

    name        what errors and notes call it
    fixture     the fixture that judges, and `doc` what `pytest --fixtures` says of it
    options     the dataclass of its settings; in a list they stand behind the option `follows`
    subject     the option that names what is gated; empty for kinds about a model
    plural      several of the subject in a sentence, and `metavar` what `subject` takes
    cases       the fixture of its layers or parts with its documentation; empty without one
    has_layers  the cases are layers, which --layers selects from
    whole_by    options that ask for all that it compares, where a run compares a part
    runs_alone  its suite is run alone to accept it: others of the command are about models
    by_format   its suites whose records are of a format and not of a mode
    """

    name: str
    fixture: str
    doc: str
    options: type = NoOptions
    follows: str = "layers"
    subject: str = ""
    plural: str = ""
    metavar: str = ""
    cases: tuple[str, str] | tuple[()] = ()
    has_layers: bool = True
    whole_by: tuple[str, ...] = ()
    runs_alone: bool = True
    by_format: tuple[str, ...] = ()

    @property
    def is_of_model(self) -> bool:
        return not self.subject

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Return its settings by the names of their options."""
        return by_option(self.options)

    def check(self, options: GateOptions) -> None:
        """Refuse what cannot be meant on the command line, before anything is collected."""

    def subject_given(self, values: Mapping[str, Any]) -> Any:
        """Return what the options name as the subject; None where they name none."""
        return values[self.subject]

    def record_name(self, options: GateOptions) -> str:
        """Return the name of the subject's accepted record, for the header of a run."""
        return named_after(str(options.values[self.subject]))

    def open(self, run: GateRun, model: str) -> Any:
        """Make the session of a model, or of the subject; None where the run names no subject."""
        raise NotImplementedError

    def gates_needed(self, called: Collection[str]) -> Sequence[str]:  # noqa: ARG002
        """List gates that not every model has something for, of a test that calls these names."""
        return ()


_KINDS: Registry[GateKind] = Registry("kind of gate")
_LOADED: list[bool] = []


def register(kind: GateKind) -> GateKind:
    """Add a kind of gate; an error where its fixtures or options are in use."""
    for other in gate_kinds():
        fixtures = {kind.fixture, *kind.cases[:1]} & {other.fixture, *other.cases[:1]}
        if fixtures:
            raise QgateError(
                f"the kind of gate {kind.name!r} uses the fixture {min(fixtures)!r}, which is "
                f"that of {other.name!r} already: give it another name."
            )
    options = known_options()
    if repeated := [name for name in kind.settings if name in options]:
        raise QgateError(
            f"the kind of gate {kind.name!r} has the option {repeated[0]!r}, which exists already: "
            "rename it in GateKind.options."
        )
    return _KINDS.add(kind)


def gate_kinds() -> tuple[GateKind, ...]:
    """Return all kinds: those that qgate ships, then those of other packages."""
    if not _LOADED:
        _LOADED.append(True)
        for module in _SHIPPED:
            _KINDS.add(importlib.import_module(module).KIND)
        for entry in entry_points(group=GROUP) if _is_offered() else ():
            try:
                register(entry.load())
            except Exception as error:
                raise QgateError(
                    f"the kind of gate {entry.name!r} of {entry.value} cannot be loaded: "
                    f"{sentence_of(error)}"
                ) from error
    return tuple(_KINDS)


def _is_offered() -> bool:
    """Tell if a package names the group: far faster than to parse the entry points of all."""
    return any(f"[{GROUP}]" in (of.read_text("entry_points.txt") or "") for of in distributions())


def gate_kind(name: str) -> GateKind:
    """Return a kind that qgate ships, by its name."""
    return {kind.name: kind for kind in gate_kinds()}[name]


def subject_kinds() -> list[GateKind]:
    """List the kinds about a subject that an option names."""
    return [kind for kind in gate_kinds() if not kind.is_of_model]


def kinds_by_cases() -> dict[str, GateKind]:
    """Return the kinds by the fixtures of their layers or parts."""
    return {kind.cases[0]: kind for kind in gate_kinds() if kind.cases}


def known_options() -> dict[str, Setting]:
    """Return all options of a run by name: those of every run, and of each kind of gate."""
    return dict(_all_options())


def _all_options() -> Iterator[tuple[str, Setting]]:
    kinds = gate_kinds()
    for name, option in OPTIONS.items():
        yield name, option
        for kind in kinds:
            if kind.follows == name:
                yield from kind.settings.items()


def named_after(text: str) -> str:
    """Return the name of a folder or a file as baselines are called."""
    name = locations.last_name(text)
    return plain_name(name.removesuffix(next(filter(name.endswith, _ENDINGS), "")))


def plain_name(name: str) -> str:
    """Return a name in the letters that names of baselines have."""
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-.") or "unnamed"
