"""Which tests there are: one per model, mode and layer, or per format."""

from __future__ import annotations

import re

import pytest

from qgate.errors import QgateError
from qgate.plugin.options import models_of
from qgate.plugin.sessions import session_of

_CASES = ("model", "mode", "layer")
_REFUSED: pytest.StashKey[list[str]] = pytest.StashKey()


def generate_cases(metafunc: pytest.Metafunc) -> None:
    """Parametrize this plugin's fixtures."""
    if is_ours(metafunc, "fmt"):
        marker = metafunc.definition.get_closest_marker("qgate_formats")
        wanted = metafunc.config.getoption("qgate_format")
        names = selected_formats(list(marker.args) if marker and wanted is None else wanted)
        metafunc.parametrize("fmt", names, indirect=True)
    names = [name for name in _CASES if is_ours(metafunc, name)]
    if not names:
        return
    try:
        cases = _cases(metafunc, names)
    except QgateError as error:
        _refuse(metafunc.config, f"qgate: {error}")
        cases = [("refused",) * len(names)]
    ids = ["-".join(case) for case in cases]
    metafunc.parametrize(",".join(names), [c if len(names) > 1 else c[0] for c in cases], ids=ids,
                         indirect=True, scope="session")  # fmt: skip


def _refuse(config: pytest.Config, reason: str) -> None:
    """Keep a usage error until collection is over: within it, it would be a test file's error.

    A worker has nobody to tell it to but its own collection.
    """
    if hasattr(config, "workerinput"):
        raise pytest.UsageError(reason)
    config.stash.setdefault(_REFUSED, []).append(reason)


def raise_refused(config: pytest.Config) -> None:
    """What the options meant that there is not, as a usage error: exit code 4."""
    for reason in config.stash.get(_REFUSED, []):
        raise pytest.UsageError(reason)


def _cases(metafunc: pytest.Metafunc, names: list[str]) -> list[tuple[str, ...]]:
    config = metafunc.config
    found = []
    for model in models_of(config):
        modes = _modes(metafunc, model) if "mode" in names else [""]
        layers = _layers(config, model) if "layer" in names else [""]
        for mode in modes:
            for layer in layers:
                row = {"model": model, "mode": mode, "layer": layer}
                found.append(tuple(row[name] for name in names))
    return found


def _modes(metafunc: pytest.Metafunc, model: str) -> list[str]:
    """The modes meant, without the reference, which is never compared with itself."""
    marker = metafunc.definition.get_closest_marker("qgate_modes")
    wanted = list(marker.args) if marker else metafunc.config.getoption("qgate_mode")
    session = session_of(metafunc.config, model)
    reference = metafunc.config.getoption("qgate_reference")
    session.bench.setup.select(reference, session.bench.model)
    chosen = session.bench.setup.select(",".join(wanted or ["essential"]), session.bench.model)
    return [mode.name for mode in chosen if not mode.is_reference and mode.name != reference]


def _layers(config: pytest.Config, model: str) -> list[str]:
    layers = session_of(config, model).bench.layers
    wanted = config.getoption("qgate_layers")
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
        raise QgateError(f"--layers {wanted!r} matches no layer of {model}: {', '.join(layers)}.")
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
