"""The published schemas of files, made of the types of what the files hold.

python -m tests.results.schema_files    write them into the package
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qgate.checkpoints.record import CheckpointRecord
from qgate.engines.record import EnginesRecord
from qgate.engines.series_record import SeriesRecord
from qgate.engines.sync_record import SyncRecord
from qgate.kernel_checks.verdicts import KernelVerdict
from qgate.records import json_schema
from qgate.results.schema import GateRecord, RecordedCheck, RunHeader

PACKAGE = Path(__file__).parents[2] / "qgate"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _when(field: str, value: object, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {field: {"const": value}}, "required": [field]}, "then": then}


def results_schema() -> dict[str, Any]:
    definitions = json_schema({"header": RunHeader, "record": GateRecord, "check": RecordedCheck})
    definitions["record"] |= _when("passed", True, {"properties": {"checks": {"minItems": 1}}})
    return {
        "$schema": DIALECT,
        "title": "A line of results.jsonl",
        "description": "The first line of the file is the header, every other one a record. Keys "
        "that are not named here may be added by later versions and by hooks.",
        **_when("kind", "header", {"$ref": "#/$defs/header"}),
        "else": {"$ref": "#/$defs/record"},
        "$defs": definitions,
    }


def _schema_of(title: str, record: type) -> dict[str, Any]:
    return {
        "$schema": DIALECT,
        "title": title,
        "description": "Keys that are not named here may be added by later versions.",
        "$ref": "#/$defs/record",
        "$defs": json_schema({"record": record}),
    }


RECORDS: dict[str, tuple[str, str, type]] = {
    "checkpoint": (
        "checkpoints",
        "A quantized checkpoint beside its parent: qgate checkpoint --json",
        CheckpointRecord,
    ),
    "engines": (
        "engines", "Two engines on the same tokens: qgate engines --json", EnginesRecord
    ),
    "series": (
        "engines",
        "Two engines over the steps of a run: qgate engines --steps DIR --json",
        SeriesRecord,
    ),
    "sync": (
        "engines",
        "An engine beside its trainer after a sync: qgate engines TRAINER PROBE --json",
        SyncRecord,
    ),
    "check": ("kernel_checks", "A kernel beside its reference: qgate check --json", KernelVerdict),
}  # fmt: skip
MADE: dict[str, Callable[[], dict[str, Any]]] = {
    "results": results_schema,
    **{
        name: functools.partial(_schema_of, title, record)
        for name, (_, title, record) in RECORDS.items()
    },
}
ROOMS = {"results": "results", **{name: room for name, (room, _, _) in RECORDS.items()}}


def file(name: str) -> Path:
    return PACKAGE / ROOMS[name] / f"{name}.schema.json"


def text(name: str) -> str:
    return json.dumps(MADE[name](), indent=2) + "\n"


if __name__ == "__main__":
    for name in MADE:
        file(name).write_text(text(name))
