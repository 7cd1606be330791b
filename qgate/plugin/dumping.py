"""The dump of a run: which folder, under which name, and what is left out without one."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from qgate.errors import QgateError
from qgate.plugin.options import spelled, value
from qgate.plugin.selection import selection_of
from qgate.storage.opening import folder_of
from qgate.storage.places import is_readable, place_below, place_of, text_seen_from

if TYPE_CHECKING:
    from qgate.pipeline.gates.dump_gates import DumpGates
    from qgate.storage.places import Place

# The parameter of a test that is left out, as there is no dump.
NO_LAYER = "no_dump"
_NOTES = 6
_SESSION: pytest.StashKey[DumpGates] = pytest.StashKey()


def check_dump(config: pytest.Config) -> None:
    """Refuse a folder that is not there, before anything is collected.

    What a project says of it is only looked at where a suite wants it.
    """
    if config.getoption("qgate_dump") is not None:
        try:
            dump_folder(config)
        except QgateError as error:
            raise pytest.UsageError(f"qgate: {error}") from None


def dump_folder(config: pytest.Config) -> Place | None:
    """The folder of --dump; an error where it is none that can be read."""
    given = value(config, "dump")
    if given is None:
        return None
    place = place_below(config.invocation_params.dir, given)
    option = f"{spelled(config, 'dump')} {given!r}"
    # A store is asked now what is there: it may not be reached, or nobody may read it.
    kind = folder_of(place).kind()
    if kind != "folder":
        what = "is a file: name the folder" if kind == "file" else "is not there"
        near = "" if place == place_of(given) else f" ({place})"
        raise QgateError(f"{option} {what}{near}.")
    if not is_readable(place):
        raise QgateError(f"{option} cannot be read: permission denied.")
    return place


def dump_name(config: pytest.Config, folder: Place) -> str:
    """The name of the accepted record: apart from those of models, which may be called the same."""
    given = value(config, "dump-name")
    if given is not None:
        return str(given)
    try:
        about = json.loads((folder / "dump.json").read_bytes())
        told = about["header"]["model"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        told = None
    name = told if isinstance(told, str) else folder.resolve().name
    return f"dump-{re.sub(r'[^a-z0-9._]+', '-', name.lower()).strip('-.') or 'unnamed'}"


def dump_sessions(config: pytest.Config) -> list[DumpGates]:
    """The session of the dump, if a suite wanted it."""
    return [config.stash[_SESSION]] if _SESSION in config.stash else []


def dump_session_of(config: pytest.Config) -> DumpGates | None:
    """The gates of the dump; None where the run has none."""
    if _SESSION not in config.stash:
        folder = dump_folder(config)
        if folder is None:
            return None
        from qgate.pipeline.gates.dump_gates import DumpGates, DumpSubject
        from qgate.plugin.sessions import how, policy_of

        given = value(config, "dump-name")
        name = dump_name(config, folder)
        asked = value(config, "dump")
        of_project = config.getoption("qgate_dump") is None
        shown = text_seen_from(config.invocation_params.dir, asked) if of_project else asked
        subject = DumpSubject(folder, name, shown, given or "")
        session = DumpGates(subject, policy=policy_of(config).for_model(name), **how(config))
        session.check_policy()
        config.stash[_SESSION] = session
        notes = session.subject.notes()
        more = [f"and {len(notes) - _NOTES} more notes"] if len(notes) > _NOTES else []
        lines = [f"dump {shown}: {note}" for note in [*notes[:_NOTES], *more]]
        selection_of(config).notes += lines
    return config.stash[_SESSION]


def has_fixture(item: pytest.Item, fixture: str) -> bool:
    """Whether a test has this plugin's fixture of that name: it may be somebody else's."""
    found = getattr(item, "_fixtureinfo", None)
    defined = found.name2fixturedefs.get(fixture) if found is not None else None
    return bool(defined and defined[-1].func.__module__.startswith("qgate.plugin"))


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect gates over a dump where there is none, or it does not have what they look at."""
    chosen = selection_of(config)
    gates = [item for item in items if has_fixture(item, "dump_gate")]
    if chosen.refused or not gates:
        return
    try:
        session = dump_session_of(config)
    except QgateError as error:
        chosen.refuse(f"qgate: {error}")
        return
    if session is None:
        suites = len({item.path for item in gates})
        chosen.notes.append(
            f"{suites} suite{'s' * (suites > 1)} on dumps left out: give "
            f"{spelled(config, 'dump')} DIR"
        )
        why = {id(item): "" for item in gates}
    else:
        why = {id(item): reason for item in gates if (reason := _unfit(session, item)) is not None}
    for reason, count in Counter(filter(None, why.values())).items():
        chosen.notes.append(f"{count} test{'s' * (count > 1)} deselected: {reason}")
    if why:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in why])
        items[:] = [item for item in items if id(item) not in why]


def _unfit(session: DumpGates, item: pytest.Item) -> str | None:
    """Why a test has nothing to look at; None where it has."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    fmt, layer = params.get("fmt"), params.get("dump_layer")
    if not (isinstance(fmt, str) and isinstance(layer, str)):
        return None
    why = session.left_out(item.path.stem.removeprefix("test_"), fmt, layer)
    return f"{fmt} on {session.subject.folder}: {why}" if why else why
