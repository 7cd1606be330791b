"""What `results.jsonl` holds: a header line, then one JSON object per comparison.

A record is a plain dict with at least the keys in `REQUIRED`. `values`, `ideal` and `accepted` map
metrics to numbers; `checks` is a list of dicts with at least the keys in `CHECK_KEYS`. A record may
carry `order` (place of the site in the order of execution) and `attempt` (0, then 1 for a rerun).

JSON has no NaN and no infinity: they are written as null, and the record's `reason` says which
number it was: `{"/values/relative_mse": "nan"}`.

A record may carry `pictures`, what it takes to draw it (see `qgate.results.pictures`), and where it
failed `commands`, what to type: `again` runs its test, `accept` accepts what was measured. Beside
the keys in `HEADER_KEYS`, which all headers have, that of a run has

complete    everything ran that its options mean
exit        pytest's exit status, null until the run has come to its end
broken      tests whose set-up failed, so that there is no verdict: node → first line
errors      what could not be written, and the like
notes       what was left out, and what is accepted but was not measured
baselines   their folder, as people are shown it
other       tests that are no gates: passed, failed, skipped, and of failures node → first line
update      what an update of the baselines wrote: which, dry_run, done, entries, changes, stale
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from qgate._version import __version__
from qgate.errors import QgateError
from qgate.results.believing import published

SCHEMA = 1
Record = dict[str, Any]
REQUIRED = (
    "suite", "node", "model", "mode", "layer", "site", "scope", "values", "ideal", "accepted",
    "checks", "passed", "seconds",
)  # fmt: skip
# What a gate puts into a record; the plugin adds the rest.
_OWN = tuple(key for key in REQUIRED if key not in ("node", "seconds"))
HEADER_KEYS = (
    "qgate", "python", "torch", "device", "seed", "commit", "command", "started", "modes", "plans",
    "metrics", "limits", "models",
)  # fmt: skip
CHECK_KEYS = ("metric", "kind", "passed", "value", "side", "bound", "times", "improved")


def new_header(
    *,
    torch: str | None,
    device: str,
    seed: int | None,
    commit: str | None,
    command: Sequence[str],
    modes: Sequence[str],
    plans: Mapping[str, Mapping[str, str]],
    metrics: Sequence[Mapping[str, Any]],
    limits: Sequence[Mapping[str, Any]],
    models: Mapping[str, Mapping[str, str]],
    **more: Any,
) -> Record:
    """The header of a run; `models` maps a name to its hashes, `plans` a mode to site → quantizer.

    `metrics` is the table of metrics: name, label, unit, direction, definition.
    """
    return {
        "schema": SCHEMA,
        "kind": "header",
        "qgate": __version__,
        "python": platform.python_version(),
        "torch": torch,
        "device": device,
        "seed": seed,
        "commit": commit,
        "command": list(command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "modes": list(modes),
        "plans": {mode: dict(plan) for mode, plan in plans.items()},
        "metrics": [dict(metric) for metric in metrics],
        "limits": [dict(limit) for limit in limits],
        "models": {name: dict(hashes) for name, hashes in models.items()},
        **more,
    }


def check_header(header: object, where: str) -> Record:
    """The header itself, or an error that says why this is no results file of this version."""
    if not isinstance(header, dict) or header.get("kind") != "header":
        raise QgateError(f"{where} is no results file of qgate: its first line is no header.")
    if header.get("schema") != SCHEMA:
        raise QgateError(
            f"{where} has schema {header.get('schema')!r}; qgate {__version__} reads schema "
            f"{SCHEMA}. Read it with qgate {header.get('qgate', 'of its time')}."
        )
    lacks = [key for key in HEADER_KEYS if key not in header]
    if lacks:
        raise QgateError(f"the header of {where} lacks {', '.join(lacks)}.")
    return header


def check_record(record: Mapping[str, Any]) -> None:
    """A record that is whole; one that passed without a check is refused."""
    lacks = [key for key in REQUIRED if key not in record]
    if lacks:
        raise QgateError(f"a record of {record.get('site', '?')!r} lacks {', '.join(lacks)}.")
    for each in record["checks"]:
        lacks = [key for key in CHECK_KEYS if key not in each]
        if lacks:
            raise QgateError(f"a check of {record['site']!r} lacks {', '.join(lacks)}.")
        odd = [key for key in ("value", "bound", "times") if not _is_number(each[key])]
        if odd or not isinstance(each["passed"], bool):
            key = next(iter(odd), "passed")
            raise QgateError(f"a check of {record['site']!r} has {key} {each[key]!r}.")
    if not isinstance(record["passed"], bool):
        raise QgateError(f"the record of {record['site']!r} has passed {record['passed']!r}.")
    if record["passed"] and not record["checks"]:
        raise QgateError(f"the record of {record['site']!r} passed without a check.")


def _is_number(value: object) -> bool:
    """None stands for a number that is not there, or that JSON cannot hold."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def check_storable(record: Mapping[str, Any]) -> None:
    """That a record can be written, and read as one; the plugin will add where its test is."""
    lacks = [key for key in _OWN if key not in record]
    if lacks or not isinstance(record["checks"], list):
        raise QgateError(f"{', '.join(lacks) or 'checks'} is missing")
    told = parse(line(record).encode())
    published("results", "record")({"node": "", "seconds": 0.0, **told}, "")


def line(record: Mapping[str, Any]) -> str:
    """One line of valid JSON, ended."""
    reasons: dict[str, str] = {}
    clean = _finite(record, "", reasons)
    if reasons:
        clean["reason"] = {**(record.get("reason") or {}), **reasons}
    return json.dumps(clean, allow_nan=False, separators=(",", ":")) + "\n"


def _finite(value: Any, place: str, reasons: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(each, f"{place}/{key}", reasons) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each, f"{place}/{index}", reasons) for index, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        reasons[place] = str(value)
        return None
    return value


def parse(text: bytes) -> Any:
    """The object on a line; NaN and Infinity, which are not JSON, are a ValueError."""
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def latest(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Only the last attempt of every test node, as reruns leave earlier ones behind."""
    listed = list(records)
    last: dict[str, int] = {}
    for record in listed:
        last[record["node"]] = max(last.get(record["node"], 0), record.get("attempt", 0))
    return [record for record in listed if record.get("attempt", 0) == last[record["node"]]]
