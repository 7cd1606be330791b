"""Draws a record of activations again: neither the model nor torch is needed for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qgate.errors import QgateError, unknown
from qgate.storage.opening import folder_of
from qgate.storage.places import names_folder, place_of, user_place

if TYPE_CHECKING:
    from qgate.storage.places import Place

_RECORD, _SAVE_DIR = "activations.json", "visualization.save_dir"
_OPTIONS = ("model", "config", "list_layers", "write_config", "dry_run", "trust_remote_code")
_WORKERS = ("jobs", "engine", "gpus_per_task")


def is_place(word: str) -> bool:
    """If a word of the command line names a record, or a folder that has one."""
    if word.startswith("-"):
        return False
    return word.endswith(".json") or names_folder(word)


def redraw(
    word: str,
    overrides: Sequence[tuple[str, str]],
    args: argparse.Namespace,
    bars: AbstractContextManager[Any],
) -> int:
    """Page, pictures and tables of a record, beside it if no other folder is named."""
    from qgate.activation_stats.files import check_folder, read_record, write_report
    from qgate.activation_stats.findings import findings
    from qgate.activation_stats.texts import activation_text

    for name in (*_OPTIONS, *_WORKERS):
        if getattr(args, name) and (name, getattr(args, name)) != ("engine", "local"):
            option = f"--{name.replace('_', '-')}"
            raise QgateError(f"{option} is of a run; {word!r} is only drawn again.")
    path = _record_in(user_place(word))
    said = _said(overrides)
    folder = place_of(said.pop(_SAVE_DIR, path.parent))
    record = read_record(path)
    try:
        look = _look(record["settings"], said, path)
        check_folder(folder, look)
        with bars as step:
            written = write_report(
                record, folder, look, lambda done, of: step("pictures", done, of)
            )
        print(activation_text(record))
        print(f"\n{len(written)} files, the first is {written[0]}")
        return 1 if any(each.level == "fail" for each in findings(record)) else 0
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, QgateError):
            raise
        raise QgateError(
            f"{str(path)!r} is damaged: {type(error).__name__} {error}. Run the model again."
        ) from error


def _record_in(place: Place) -> Place:
    """The one record of a folder, or the file itself."""
    folder = folder_of(place)
    named = place.name.endswith(".json")  # a store is not asked for a folder of that name
    if (named and not (folder.path and folder.path.is_dir())) or folder.kind() == "file":
        return place
    found = [place / name for name in folder.names() if name.endswith(_RECORD)]
    if not found:
        raise QgateError(
            f"{str(place)!r} has no activations.json, which a run writes where output.formats has "
            "json."
        )
    if len(found) > 1:
        names = ", ".join(str(path) for path in found)
        raise QgateError(f"{str(place)!r} has the records of several models, name one: {names}.")
    return found[0]


def _said(overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Settings that say how a record looks and where it is drawn; all others were of the run."""
    from qgate.activation_stats.reading import KEYS
    from qgate.activation_stats.setting_keys import value_of
    from qgate.activation_stats.setting_values import UNSAID, listed
    from qgate.activation_stats.settings import keys

    known = {each.name: each for each in keys()}
    shown = {_SAVE_DIR, *KEYS.values()}
    found: dict[str, Any] = {}
    for given, text in overrides:
        try:
            name = listed(given, known)
        except QgateError:
            raise unknown("key", given, sorted(n.removeprefix(UNSAID) for n in shown)) from None
        if name not in shown:
            raise QgateError(
                f"{given} says what is looked at: run the model again. A record that is drawn "
                f"again takes {', '.join(sorted(n.removeprefix(UNSAID) for n in shown))}."
            )
        found[name] = value_of(known[name], text, text=True)
    return found


def _look(settings: Mapping[str, Any], said: Mapping[str, Any], path: Place) -> Any:
    """As the run asked for it, and over that what is said now; the record itself always stays."""
    from qgate.activation_stats.reading import KEYS, look_of
    from qgate.activation_stats.setting_keys import value_of
    from qgate.activation_stats.settings import keys

    told = {
        each.name: value_of(each, settings[each.name], where=f"{str(path)!r}: ")
        for each in keys()
        if each.name in settings and each.name in KEYS.values()
    }
    look = look_of({**told, **said})
    if "json" not in look.formats:
        look = replace(look, formats=(*look.formats, "json"))
    return look
