"""Which tests there are: one per model, mode and layer, or per format; and which of them run.

Options may mean nothing, modes may fit no model, and `--shard 2/8` takes one part of eight. Within
collection an error is one of a test file; a usage error is raised when it is over. A worker of
pytest-xdist tells the process that talks to the user, which collects nothing itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from qgate.errors import QgateError
from qgate.models.naming import check_names, shown_name
from qgate.plugin.gate_collection import (
    deselect,
    deselecting_options,
    gates_of,
    has_fixture,
    is_gate,
    kind_of_gate,
    model_and_mode,
    parameters_of,
    suite_of,
    text_parameter,
)
from qgate.plugin.lacking import LackingSuites
from qgate.plugin.runs import Selection, selection_of
from qgate.plugin.settings import RunOptions, option_error, options_of
from qgate.plugin.shared_sessions import sessions_of
from qgate.plugin.used_formats import drop_unused_formats, selected_formats
from qgate.project.gate_kinds import GateKind, gate_kinds, kinds_by_cases, subject_kinds
from qgate.project.settings import home_above
from qgate.text import counted

if TYPE_CHECKING:
    from qgate.gate.sessions import GateSession

_REFUSED = "refused"


# Cases ------------------------------------------------------------------------------------------


class Cases:
    """The parameters of one test function."""

    def __init__(self, metafunc: pytest.Metafunc) -> None:
        self.metafunc, self.config = metafunc, metafunc.config
        self.function = metafunc.function.__name__
        self.options, self.selection = options_of(self.config), selection_of(self.config)

    def generate(self) -> None:
        """Parametrize this plugin's fixtures."""
        listing: dict[str, Callable[[], list[Any]]] = {
            "fmt": self._formats,
            **{name: partial(self._subject_cases, kind) for name, kind in kinds_by_cases().items()},
        }
        for name, values in listing.items():
            if self._wants(name):
                self.metafunc.parametrize(name, self._or_refused(values), indirect=True)
        names = [name for name in ("model", "mode", "layer") if self._wants(name)]
        if names:
            cases = self._or_refused(lambda: self._cases(names), (_REFUSED,) * len(names))
            self.metafunc.parametrize(
                ",".join(names),
                [case if len(names) > 1 else case[0] for case in cases],
                ids=["-".join(map(shown_name, filter(None, case))) for case in cases],
                indirect=True,
                scope="session",
            )

    def _or_refused(self, values: Callable[[], list[Any]], refused: Any = _REFUSED) -> list[Any]:
        try:
            return values()
        except QgateError as error:
            self.selection.refuse(error)
            return [refused]

    def _wants(self, name: str) -> bool:
        """Return True if a test requests this plugin's fixture without values of its own."""
        definition = self.metafunc.definition
        if not has_fixture(definition, name):
            return False
        marks = definition.iter_markers("parametrize")
        named = (mark.args[0] if mark.args else mark.kwargs.get("argnames", "") for mark in marks)
        split = (names.split(",") if isinstance(names, str) else names for names in named)
        return all(name not in [part.strip() for part in names] for names in split)

    def _formats(self) -> list[str]:
        """The formats of --format, else of the marker, else all."""
        names = self._of_marker("qgate_formats")
        if "format" in self.options.given:
            return selected_formats(self.options.run.format)
        try:
            return selected_formats(names)
        except pytest.UsageError as error:
            raise QgateError(f"marker qgate_formats of {self.function}: {error}") from None

    def _of_marker(self, name: str) -> list[str] | None:
        """The names in a marker, one by one or as a list; None without the marker."""
        marker = self.metafunc.definition.get_closest_marker(name)
        if marker is None:
            return None
        listed = [*marker.args, *marker.kwargs.values()]
        names = [
            name for one in listed for name in (one if isinstance(one, list | tuple) else [one])
        ]
        if not names or not all(isinstance(each, str) for each in names):
            self.selection.refuse(f"marker {name} of {self.function} has {listed}: write names.")
            return None
        return names

    def _subject_cases(self, kind: GateKind) -> list[str]:
        """The layers or parts of a subject; without one a single case."""
        session = sessions_of(self.config).of(kind)
        if session is None:
            return [_no(kind)]
        self._check_limits(session)
        cases: list[str] = session.layers(suite_of(self.metafunc.definition.path))
        if kind.has_layers:
            cases = self._layers("", cases, f"{kind.name} {session.subject.name}")
        return cases

    def _check_limits(self, session: GateSession) -> None:
        """Limits that cannot be read are usage errors, before anything is computed."""
        for marker in self.metafunc.definition.iter_markers("limits"):
            if marker.args:
                raise QgateError(
                    f"the limits marker of {self.function} has {marker.args[0]!r} "
                    'without a name: write budget_db=…, regression=… or absolute=["…"].'
                )
            source = f"limits marker of {self.function}"
            session.check_policy(session.policy.with_marker(marker.kwargs, source))

    def _cases(self, names: list[str]) -> list[tuple[str, ...]]:
        """One case per model, mode and layer, as far as the test asks for them."""
        models = self.options.models
        check_names(models)
        _ = sessions_of(self.config).sampling
        if any(self.metafunc.definition.iter_markers("limits")):
            for model in models:
                self._check_limits(sessions_of(self.config).of_model(model))
        cases = []
        for model in models:
            modes, unfit = self._modes(model) if "mode" in names else ([""], {})
            layers = [""]
            if "layer" in names:
                blocks = sessions_of(self.config).of_model(model).bench.layers
                layers = self._layers(model, blocks, model) if blocks else [""]
            self.selection.unfit |= {(model, mode): why for mode, why in unfit.items()}
            pairs = [(mode, layer) for mode in modes for layer in layers]
            for mode, layer in [*pairs, *((mode, "") for mode in unfit)]:
                case = {"model": model, "mode": mode, "layer": layer}
                cases.append(tuple(case[name] for name in names))
        if not cases:
            raise QgateError(
                "nothing is selected: there is no model, or the reference is the only mode asked "
                "for, which is never compared with itself."
            )
        return cases

    def _modes(self, model: str) -> tuple[list[str], dict[str, str]]:
        """The modes meant, and why others do not fit this model or the reference.

        The reference is none of them: it is never compared with itself.
        """
        chosen = self._of_marker("qgate_modes") or self.options.run.mode
        session = sessions_of(self.config).of_model(model)
        bench = session.bench
        reference = bench.mode(self.options.run.reference)
        modes, unfit = bench.setup.select_fitting(",".join(chosen), bench.model)
        unfit |= {mode.name: why for mode in modes if (why := session.misfit(mode))}
        fit = [mode for mode in modes if not mode.is_reference and mode.name != reference.name]
        return [mode.name for mode in fit if mode.name not in unfit], unfit

    def _layers(self, model: str, layers: list[str], whose: str) -> list[str]:
        """Return all layers, and note those that --layers selects: the others are dropped."""
        narrowed = self._narrowed(layers, whose)
        self.selection.layers[self.metafunc.definition.nodeid, model] = frozenset(narrowed)
        return layers

    def _narrowed(self, layers: list[str], whose: str) -> list[str]:
        """Keep the layers that --layers selects."""
        chosen = self.options.run.layers
        if chosen == "all":
            return layers
        if chosen in ("first", "last", "first,last"):
            ends = {"first": layers[:1], "last": layers[-1:]}
            return list(dict.fromkeys(name for part in chosen.split(",") for name in ends[part]))
        try:
            matching = [name for name in layers if re.search(chosen, name)]
        except re.error as error:
            raise QgateError(f"--layers {chosen!r} is not a regular expression: {error}.") from None
        if not matching:
            raise QgateError(
                f"--layers {chosen!r} matches no layer of {whose}: {', '.join(layers)}."
            )
        return matching


# What runs --------------------------------------------------------------------------------------


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that run; without a gate left nothing may look green."""
    options, selection, gates = options_of(config), selection_of(config), gates_of(config)
    unreached = gates.unreached(items)
    for kind in subject_kinds():
        deselect(config, items, _without_subject(config, items, kind))
    _note_parts(config, items)
    _check_home(options, items, selection)
    if selection.refused:
        if hasattr(config, "workerinput"):
            items[:] = []
            return
        raise option_error(selection.refused[0])
    _drop_unfit(config, items, selection)
    suites = LackingSuites(lambda model: sessions_of(config).of_model(model))
    accepted = suites.drop(config, items, selection)
    gates.lacking = {id(item): f"what it lacks now: {suites.reason(item)}" for item in accepted}
    wanted_gates = [*accepted, *filter(is_gate, items)]
    fitting = [item for item in unreached if not selection.empty and _fits(config, item)]
    wanted_gates += [item for item in fitting if suites.lack(item) is None]
    beyond = [item for item in [*items, *unreached] if _is_beyond_layers(item, selection)]
    deselect(config, items, beyond)
    drop_unused_formats(config, items, selection)
    if options.shard is not None and items:
        groups = _deal(config, items, selection, options.shard)
        number = options.shard[0]
        wanted_gates = [item for item in wanted_gates if groups.get(group_of(item), 1) == number]
    gates.ask(wanted_gates, beyond)


def note_running(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note the gates that run, and those that -k, a conftest or anything else leaves out."""
    gates_of(config).finish(items, options_of(config).run.layers, deselecting_options(config))


def _note_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note the kinds of which a run compares a part, and the option that asks for all of it."""
    options = options_of(config)
    for kind in gate_kinds():
        if not kind.whole_by or any(options.values[name] for name in kind.whole_by):
            continue
        if any(has_fixture(item, kind.fixture) for item in items):
            words = f"a few {kind.name} compared: {options.spelled(kind.whole_by[0])} compares all"
            selection_of(config).unasked[f"most {kind.name}"] = words


def _fits(config: pytest.Config, item: pytest.Item) -> bool:
    """Tell if a gate is within what a run asks for: its mode fits, its dump is there."""
    kind = kind_of_gate(item)
    if kind is not None and not kind.is_of_model:
        has_subject = sessions_of(config).of(kind) is not None
        return has_subject and _lacking(config, item, kind) is None
    return model_and_mode(item) not in selection_of(config).unfit


def _is_beyond_layers(item: pytest.Item, selection: Selection) -> bool:
    """Return True if --layers leaves out the layer of a test."""
    parameters = parameters_of(item)
    function = f"{item.parent.nodeid}::{item.originalname}" if item.parent else ""  # type: ignore[attr-defined]
    kinds = kinds_by_cases()
    for name in ("layer", *kinds):
        model = parameters.get("model", "") if name == "layer" else ""
        layer = parameters.get(name)
        narrowed = selection.layers.get((function, model if isinstance(model, str) else ""))
        if isinstance(layer, str) and narrowed is not None:
            absent = _no(kinds[name]) if name in kinds else ""
            return layer not in ("", absent, _REFUSED, *narrowed)
    return False


def _no(kind: GateKind) -> str:
    """Return the case that stands for a subject that the run does not name."""
    return f"no_{kind.subject}"


def _without_subject(
    config: pytest.Config, items: list[pytest.Item], kind: GateKind
) -> list[pytest.Item]:
    """The gates over a dump or other subject where there is none, or that find nothing in it."""
    selection = selection_of(config)
    gates = [item for item in items if has_fixture(item, kind.fixture)]
    if selection.refused or not gates:
        return []
    try:
        session = sessions_of(config).of(kind)
    except QgateError as error:
        selection.refuse(error)
        return []
    if session is None:
        suites = len({item.path for item in gates})
        selection.unasked[kind.plural] = (
            f"{counted(suites, 'suite')} on {kind.plural} left out: give "
            f"{options_of(config).spelled(kind.subject)} {kind.metavar}"
        )
        return gates
    unfit = [(item, why) for item in gates if (why := _lacking(config, item, kind)) is not None]
    for why, count in Counter(why for _, why in unfit if why).items():
        selection.notes.append(f"{counted(count, 'test')} deselected: {why}")
    return [item for item, _ in unfit]


def _lacking(config: pytest.Config, item: pytest.Item, kind: GateKind) -> str | None:
    """Why a test of a format has nothing to look at in a subject; None where it has."""
    fmt, layer = text_parameter(item, "fmt"), text_parameter(item, *kind.cases[:1])
    session: GateSession | None = sessions_of(config).of(kind)
    if session is None or not (fmt and layer):
        return None
    return session.left_out(suite_of(item.path), fmt, layer)


def _check_home(options: RunOptions, items: list[pytest.Item], selection: Selection) -> None:
    """Refuse gates of a project that has settings of its own: they would run under others."""
    for folder in {item.path.parent for item in items if is_gate(item)}:
        own = home_above(folder)
        inside = own is not None and own.is_relative_to(options.config.rootpath)
        if inside and own != options.home:
            selection.refuse(
                f"{folder} is of the project in {own}, and this run has the settings of "
                f"{options.home}: run its gates by themselves, pytest {folder}."
            )


def _drop_unfit(config: pytest.Config, items: list[pytest.Item], selection: Selection) -> None:
    """Deselect modes that fit no model; where no other mode is left, all gates."""
    cases = [_case(item) for item in items]
    unfit = Counter(case for case in cases if case in selection.unfit)
    if not unfit:
        return
    for case, count in unfit.items():
        selection.notes.append(f"{counted(count, 'test')} deselected: {selection.unfit[case]}")
    selection.empty = not any(mode for model, mode in cases if (model, mode) not in unfit)
    remaining = [
        item
        for item, case in zip(items, cases, strict=True)
        if case in unfit or (selection.empty and is_gate(item))
    ]
    deselect(config, items, remaining)


def _case(item: pytest.Item) -> tuple[str, str]:
    """The model and the mode of a gate; empty for other tests."""
    return model_and_mode(item) if is_gate(item) else ("", "")


def _deal(
    config: pytest.Config, items: list[pytest.Item], selection: Selection, shard: tuple[int, int]
) -> dict[Hashable, int]:
    """Leave the tests of this shard, and return the shard of each group.

    What a mode of a model costs is measured once per job, so all its gates stay together.
    """
    number, of = shard
    groups = [group_of(item) for item in items]
    dealt = dealt_to(groups, of)
    remaining = [item for item, to in zip(items, dealt, strict=True) if to != number - 1]
    if len(remaining) == len(items):
        count = len(set(groups))
        raise option_error(
            f"qgate: shard {number}/{of} is empty: what was asked for comes in {count} groups "
            f"that stay together (a mode of a model is one). Use at most {count} shards."
        )
    mine = len(items) - len(remaining)
    selection.notes.append(f"shard {number}/{of}: {mine} of {len(items)} tests")
    deselect(config, items, remaining)
    return {group: to + 1 for group, to in zip(groups, dealt, strict=True)}


def dealt_to(groups: Sequence[Hashable], of: int) -> list[int]:
    """Return the shard of each item, from 0: groups stay whole, the largest are dealt first."""
    sizes = Counter(groups)
    filled = [0] * of
    home: dict[Hashable, int] = {}
    for group in sorted(sizes, key=lambda each: (-sizes[each], repr(each))):
        home[group] = min(range(of), key=lambda shard: (filled[shard], shard))
        filled[home[group]] += sizes[group]
    return [home[group] for group in groups]


def group_of(item: pytest.Item) -> Hashable:
    """Return the mode or format of a model; other tests are one by one."""
    parameters = parameters_of(item)
    if not is_gate(item) or not isinstance(parameters.get("model"), str):
        return item.nodeid
    what = parameters.get("mode", parameters.get("fmt"))
    return shown_name(parameters["model"]), str(what) if what is not None else item.path.stem
