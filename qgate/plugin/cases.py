"""Which tests there are: one per model, mode and layer, or per format."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from qgate.errors import QgateError
from qgate.plugin.dumping import NO_LAYER, dump_session_of
from qgate.plugin.options import is_given, models_of, settings_of, value
from qgate.plugin.selection import selection_of
from qgate.plugin.sessions import session_of

if TYPE_CHECKING:
    from qgate.pipeline.gates.dump_gates import DumpGates
    from qgate.pipeline.gates.gating import GateSession

_CASES = ("model", "mode", "layer")


def generate_cases(metafunc: pytest.Metafunc) -> None:
    """Parametrize this plugin's fixtures."""
    if is_ours(metafunc, "fmt"):
        metafunc.parametrize("fmt", _formats(metafunc), indirect=True)
    if is_ours(metafunc, "dump_layer"):
        metafunc.parametrize("dump_layer", _dump_layers(metafunc), indirect=True)
    names = [name for name in _CASES if is_ours(metafunc, name)]
    if not names:
        return
    try:
        _check_markers(metafunc)
        cases = _cases(metafunc, names)
        if not cases:
            raise QgateError(
                "nothing is selected: there is no model, or the reference is the only mode asked "
                "for, which is never compared with itself."
            )
    except QgateError as error:
        selection_of(metafunc.config).refuse(f"qgate: {error}")
        cases = [("refused",) * len(names)]
    ids = ["-".join(filter(None, case)) for case in cases]
    metafunc.parametrize(",".join(names), [c if len(names) > 1 else c[0] for c in cases], ids=ids,
                         indirect=True, scope="session")  # fmt: skip


def _dump_layers(metafunc: pytest.Metafunc) -> list[str]:
    """The layers of the dump; without one a single case, which is left out."""
    config = metafunc.config
    try:
        session = dump_session_of(config)
        if session is None:
            return [NO_LAYER]
        _check_limits(metafunc, session)
        suite = metafunc.definition.path.stem.removeprefix("test_")
        return _narrowed(config, session.layers(suite), f"dump {session.subject.name}")
    except QgateError as error:
        selection_of(config).refuse(f"qgate: {error}")
        return ["refused"]


def _formats(metafunc: pytest.Metafunc) -> list[str]:
    """The formats of --format, else of the marker, else all."""
    names = _of_marker(metafunc, "qgate_formats")
    if is_given(metafunc.config, "format"):
        return selected_formats(value(metafunc.config, "format"))
    try:
        return selected_formats(names)
    except pytest.UsageError as error:
        text = f"marker qgate_formats of {metafunc.function.__name__}: {error}"
        selection_of(metafunc.config).refuse(f"qgate: {text}")
        return ["refused"]


def _of_marker(metafunc: pytest.Metafunc, name: str) -> list[str] | None:
    """The names in a marker, one by one or as a list; None without the marker."""
    marker = metafunc.definition.get_closest_marker(name)
    if marker is None:
        return None
    given = [*marker.args, *marker.kwargs.values()]
    names = [each for one in given for each in (one if isinstance(one, list | tuple) else [one])]
    if not names or not all(isinstance(each, str) for each in names):
        selection_of(metafunc.config).refuse(
            f"qgate: marker {name} of {metafunc.function.__name__} has {given}: write names."
        )
        return None
    return names


def _check_markers(metafunc: pytest.Metafunc) -> None:
    """Limits that cannot be read are usage errors, before anything is computed."""
    if any(metafunc.definition.iter_markers("limits")):
        for model in models_of(metafunc.config):
            _check_limits(metafunc, session_of(metafunc.config, model))


def _check_limits(metafunc: pytest.Metafunc, session: GateSession | DumpGates) -> None:
    for marker in metafunc.definition.iter_markers("limits"):
        if marker.args:
            raise QgateError(
                f"the limits marker of {metafunc.function.__name__} has {marker.args[0]!r} "
                'without a name: write budget_db=…, regression=… or absolute=["…"].'
            )
        source = f"limits marker of {metafunc.function.__name__}"
        session.check_policy(session.policy.with_marker(marker.kwargs, source))


def _cases(metafunc: pytest.Metafunc, names: list[str]) -> list[tuple[str, ...]]:
    config = metafunc.config
    found = []
    for model in models_of(config):
        modes, unfit = _modes(metafunc, model) if "mode" in names else ([""], {})
        layers = _layers(config, model) if "layer" in names else [""]
        pairs = [(mode, layer) for mode in modes for layer in layers]
        for asked, why in unfit.items():
            selection_of(config).does_not_fit(model, asked, why)
            pairs.append((asked, ""))
        for mode, layer in pairs:
            row = {"model": model, "mode": mode, "layer": layer}
            found.append(tuple(row[name] for name in names))
    return found


def _modes(metafunc: pytest.Metafunc, model: str) -> tuple[list[str], dict[str, str]]:
    """The modes meant, and why others do not fit this model or the reference.

    The reference is none of them: it is never compared with itself.
    """
    wanted = _of_marker(metafunc, "qgate_modes") or value(metafunc.config, "mode")
    session = session_of(metafunc.config, model)
    setup, bench = session.bench.setup, session.bench
    reference = setup.select(value(metafunc.config, "reference"), bench.model)[0]
    modes, unfit = setup.select_fitting(",".join(wanted), bench.model)
    apart = {mode.name: session.apart(mode) for mode in modes}
    unfit |= {name: why for name, why in apart.items() if why}
    fit = [mode for mode in modes if not mode.is_reference and mode.name != reference.name]
    return [mode.name for mode in fit if mode.name not in unfit], unfit


def _layers(config: pytest.Config, model: str) -> list[str]:
    return _narrowed(config, session_of(config, model).bench.layers, model)


def _narrowed(config: pytest.Config, layers: list[str], whose: str) -> list[str]:
    """Those that --layers means."""
    wanted = value(config, "layers")
    if wanted == "all":
        return layers
    if wanted in ("first", "last", "first,last"):
        ends = {"first": layers[:1], "last": layers[-1:]}
        return list(dict.fromkeys(name for part in wanted.split(",") for name in ends[part]))
    try:
        found = [name for name in layers if re.search(wanted, name)]
    except re.error as error:
        raise QgateError(f"--layers {wanted!r} is not a regular expression: {error}.") from None
    if not found:
        raise QgateError(f"--layers {wanted!r} matches no layer of {whose}: {', '.join(layers)}.")
    return found


def is_ours(metafunc: pytest.Metafunc, name: str) -> bool:
    """If a test asks for this plugin's fixture: the name may be somebody else's, or a parameter."""
    found = metafunc._arg2fixturedefs.get(name)
    if not found or not found[-1].func.__module__.startswith("qgate.plugin"):
        return False
    marks = metafunc.definition.iter_markers("parametrize")
    named = (mark.args[0] if mark.args else mark.kwargs.get("argnames", "") for mark in marks)
    split = (names.split(",") if isinstance(names, str) else names for names in named)
    return all(name not in [part.strip() for part in names] for names in split)


def check_formats(config: pytest.Config) -> None:
    """Refuse formats that there are not, before anything is collected."""
    if is_given(config, "format"):
        selected_formats(value(config, "format"))
    settings_of(config)


def selected_formats(wanted: list[str] | None) -> list[str]:
    """The names behind a comma-separated list of names and aliases, each once; without one, all."""
    from qgate import formats

    if wanted is None:
        return formats.names()
    names = ",".join(wanted)
    try:
        found = [formats.get(name).name for name in names.split(",")]
    except QgateError as error:
        raise pytest.UsageError(f"--format {names}: {error}") from None
    return list(dict.fromkeys(found))
