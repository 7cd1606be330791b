"""The schemas say what files hold: what runs write is valid, and what is broken is not."""

from __future__ import annotations

import copy
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from jsonschema import Draft202012Validator

from qgate.cli import main
from qgate.gate.checks import Check
from qgate.records import required_fields
from qgate.results.files import CHECK_KEYS, HEADER_KEYS, REQUIRED, line
from qgate.results.pictures import Picture
from qgate.results.run_facts import other_tests_record
from tests.page.gate_records import made_header, made_records
from tests.results import schema_files
from tests.results.making import header, record, write

ROOT = Path(__file__).parents[2]
FILES = {
    "report": ROOT / "qgate" / "results" / "report.schema.json",
    **{name: schema_files.file(name) for name in schema_files.MADE},
}
SCHEMAS = {name: json.loads(path.read_text()) for name, path in FILES.items()}


def errors(name: str, given: Any) -> list[str]:
    validator = Draft202012Validator(SCHEMAS[name])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(given)]


def stored(given: dict[str, Any]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(line(given))
    return parsed


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_are_schemas_and_are_packaged(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["qgate"]
    package = ROOT / "qgate"
    assert FILES[name] in {path for pattern in patterns for path in package.glob(pattern)}


@pytest.mark.parametrize("name", schema_files.MADE)
def test_the_schemas_are_those_of_the_types(name: str) -> None:
    assert FILES[name].read_text() == schema_files.text(name), (
        "python -m tests.results.schema_files"
    )


def test_what_is_written_is_valid() -> None:
    rows = [
        header(),
        made_header(
            broken={"a": "b"},
            errors=["c"],
            notes=[],
            update=None,
            baselines=None,
            exit=1,
            other=other_tests_record({"a": "failed"}, {"a": "b"}),
        ),
    ]
    rows += [
        record("a"),
        record("b", 1.0),
        record("n", math.nan),
        record("m", accepted={}),
        record("c", nonfinite=2),
    ]
    rows += list(made_records(60, failing=6))
    for row in rows:
        assert errors("results", stored(row)) == []


def test_the_schema_requires_what_the_code_requires() -> None:
    defs = SCHEMAS["results"]["$defs"]
    assert set(defs["record"]["required"]) == set(REQUIRED)
    assert set(defs["header"]["required"]) == {"schema", "kind", *HEADER_KEYS}
    assert set(defs["check"]["required"]) == set(CHECK_KEYS)
    assert set(Check.__dataclass_fields__) <= set(defs["check"]["properties"])
    for picture in get_args(Picture):
        hints = get_type_hints(picture, include_extras=True)
        (kind,) = get_args(hints["kind"])
        assert set(defs[kind]["required"]) == set(required_fields(picture))
        assert set(defs[kind]["properties"]) == set(hints)


def _changed(change: Callable[[dict[str, Any]], object], of: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(of)
    change(changed)
    return changed


RECORD = stored(next(made_records(1, failing=0)))
BROKEN_RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no site": lambda r: r.pop("site"),
    "a verdict in words": lambda r: r.update(passed="yes"),
    "passed without a check": lambda r: r.update(checks=[]),
    "a check without a limit": lambda r: r["checks"][0].pop("bound"),
    "another side": lambda r: r["checks"][0].update(side="<"),
    "a value in words": lambda r: r["values"].update(mse="nan"),
    "a picture of no kind": lambda r: r.update(pictures=[{"kind": "photo"}]),
    "a picture that is not whole": lambda r: r["pictures"][0].pop("bins"),
    "a grade that is none": lambda r: r.update(grades={"mse": "splendid"}),
    "negative seconds": lambda r: r.update(seconds=-1),
}
HEADER = stored(header())
BROKEN_HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no models": lambda h: h.pop("models"),
    "another schema": lambda h: h.update(schema=2),
    "a command in one text": lambda h: h.update(command="pytest"),
    "broken as a list": lambda h: h.update(broken=["a"]),
    "others without a count": lambda h: h.update(other={"failures": {}}),
}


@pytest.mark.parametrize(
    ("whole", "change"),
    [
        *((RECORD, change) for change in BROKEN_RECORDS.values()),
        *((HEADER, change) for change in BROKEN_HEADERS.values()),
    ],
    ids=[*BROKEN_RECORDS, *BROKEN_HEADERS],
)
def test_broken_records_and_headers_are_refused(
    whole: dict[str, Any], change: Callable[[dict[str, Any]], object]
) -> None:
    assert errors("results", whole) == []
    assert errors("results", _changed(change, whole))


BROKEN_REPORTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no runs": lambda r: r.update(runs=[]),
    "another kind": lambda r: r.update(kind="report"),
    "a gate without a verdict": lambda r: r["runs"][0]["gates"][0].pop("passed"),
    "a group that is none": lambda r: r["comparison"]["rows"][0].update(group="odd"),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes of two runs, with every kind of failure."""
    folder = tmp_path_factory.mktemp("report")
    for name, failing in (("a", 0), ("b", 12)):
        write(
            folder / f"{name}.jsonl",
            *made_records(48, failing=failing),
            record("n", math.nan),
            started=name,
        )
    target = folder / "r.json"
    runs = [str(folder / name) for name in ("a.jsonl", "b.jsonl")]
    assert main(["report", *runs, "-o", str(target)]) == 0
    content: dict[str, Any] = json.loads(target.read_text(), parse_constant=pytest.fail)
    return content


def test_the_report_is_valid(report: dict[str, Any]) -> None:
    assert errors("report", report) == []
    assert report["comparison"]["counts"]["broke"] > 0


@pytest.mark.parametrize("name", BROKEN_REPORTS)
def test_broken_reports_are_refused(name: str, report: dict[str, Any]) -> None:
    assert errors("report", _changed(BROKEN_REPORTS[name], report))
