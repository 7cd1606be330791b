"""`qgate activations` without a model and torch: its command line, the default configuration, and a
record that is drawn again."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qgate.activation_stats.files import check_folder, read_record, write_report
from qgate.activation_stats.findings import findings
from qgate.activation_stats.setting_names import UNSAID, full_name
from qgate.activation_stats.settings import (
    KEYS,
    REPORT_KEYS,
    default_config_text,
    report_settings,
    value_of,
    with_values,
)
from qgate.activation_stats.texts import activation_text
from qgate.cli._console import print_json
from qgate.cli._progress import progress_bars
from qgate.errors import QgateError, unknown
from qgate.storage.access import create_text, folder_of
from qgate.storage.locations import check_writable, location_of, may_be_folder, user_location
from qgate.text.printing import print_line, print_text

if TYPE_CHECKING:
    from qgate.activation_stats.record import ActivationsRecord
    from qgate.storage.locations import Location

_RECORD, _SAVE_DIR = "activations.json", "visualization.save_dir"
_OPTIONS = ("model", "config", "list_layers", "write_config", "dry_run", "trust_remote_code")
_WORKERS = ("jobs", "set")


def words(more: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """Split words into a record to draw again, if any, and options `--a.b value`, `--a.b=value`."""
    record: str | None = None
    overrides: list[tuple[str, str]] = []
    remaining = list(more)
    while remaining:
        word = remaining.pop(0)
        if record is None and _is_place(word):
            record = word
            continue
        if not word.startswith("--") or len(word) < 3:
            raise QgateError(
                f"{word!r} belongs to no option, and is no record to draw again (activations.json, "
                "or the folder with it); a list is one word with commas, as in "
                "--heatmap_3d.view_angle 30,45."
            )
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            full_name(name, KEYS)  # an unknown key is told before its missing value is
            if not remaining or remaining[0].startswith("--"):
                raise QgateError(
                    f"{word} has no value; write {word} VALUE, or {word}=VALUE where the value "
                    "begins with a dash."
                )
            value = remaining.pop(0)
        overrides.append((name, value))
    return record, overrides


def write_config(name: str) -> int:
    if name == "-":
        print_text(default_config_text(), end="")
        return 0
    path = user_location(name)
    check_writable(path)
    kind = path.suffix.lower()
    if kind not in (".yaml", ".yml", ".toml"):
        raise QgateError(f"{name!r} is no .yaml, .yml or .toml file.")
    text = default_config_text("toml" if kind == ".toml" else "yaml")
    try:
        create_text(path, text)
    except FileExistsError:
        raise QgateError(f"{name!r} is there already; give a new name.") from None
    print_line(
        f"{path}: every key with its default. qgate activations --model NAME --config {path}"
    )
    return 0


def _is_place(word: str) -> bool:
    """Tell if a word names a record, or a folder that has one."""
    if word.startswith("-"):
        return False
    return word.endswith(".json") or may_be_folder(word)


def redraw(
    word: str,
    overrides: Sequence[tuple[str, str]],
    args: argparse.Namespace,
) -> int:
    """Draw page, pictures and tables of a record, beside it unless another folder is given."""
    for name in (*_OPTIONS, *_WORKERS):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise QgateError(f"{option} is of a run; {word!r} is only drawn again.")
    path = _record_in(user_location(word))
    values = _values(overrides)
    folder = location_of(str(values.pop(_SAVE_DIR, path.parent)))
    record = read_record(path)
    try:
        options = report_settings({**_of_record(record["settings"], path), **values})
        if "json" not in options.output.formats:  # the record itself always stays
            every = (*options.output.formats, "json")
            options = with_values(options, {"output.formats": every})
        check_folder(folder, options)
        with progress_bars() as step:
            written = write_report(
                record, folder, options, lambda done, of: step("pictures", done, of)
            )
        if args.json:
            print_activations(record, written)
        else:
            print_text(activation_text(record))
            print_text(f"\n{len(written)} files, the first is {written[0]}")
        return 1 if any(finding.level == "fail" for finding in findings(record)) else 0
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, QgateError):
            raise
        raise QgateError(
            f"{str(path)!r} is damaged: {type(error).__name__} {error}. Run the model again."
        ) from error


def print_activations(record: ActivationsRecord, written: Sequence[Location]) -> None:
    """Print findings of a record and the files written, as JSON."""
    listed = [{"level": finding.level, "text": finding.text} for finding in findings(record)]
    print_json({"findings": listed, "files": [str(path) for path in written]})


def _record_in(location: Location) -> Location:
    """Return the one record of a folder, or the file itself."""
    folder = folder_of(location)
    named = location.name.endswith(".json")  # a store is not asked for a folder of that name
    if (named and not (folder.path and folder.path.is_dir())) or folder.kind() == "file":
        return location
    records = [location / name for name in folder.names() if name.endswith(_RECORD)]
    if not records:
        raise QgateError(
            f"{str(location)!r} has no activations.json, which a run writes where output.formats "
            "has json."
        )
    if len(records) > 1:
        names = ", ".join(str(path) for path in records)
        raise QgateError(f"{str(location)!r} has the records of several models, name one: {names}.")
    return records[0]


def _values(overrides: Sequence[tuple[str, str]]) -> dict[str, object]:
    """Return the settings of how and where a record is drawn; others are refused."""
    takes = {_SAVE_DIR, *REPORT_KEYS}
    short = sorted(name.removeprefix(UNSAID) for name in takes)
    values: dict[str, object] = {}
    for option, text in overrides:
        try:
            name = full_name(option, KEYS)
        except QgateError:
            raise unknown("key", option, short) from None
        if name not in takes:
            raise QgateError(
                f"{option} says what is looked at: run the model again. A record that is drawn "
                f"again takes {', '.join(short)}."
            )
        values[name] = value_of(name, text, "typed")
    return values


def _of_record(settings: Mapping[str, Any], path: Location) -> dict[str, object]:
    """Return the report options in the settings of the run."""
    return {
        name: value_of(name, settings[name], where=f"{str(path)!r}: ")
        for name in REPORT_KEYS
        if name in settings
    }
