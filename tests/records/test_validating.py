"""Data of files is checked against types: what is refused, with which words, and what passes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from qgate.records import Meta, json_schema, required_fields, validate
from qgate.results.schema import GateRecord, RecordedCheck
from tests.results.making import record


class Level(TypedDict):
    """One step.

    exponent  of two
    """

    exponent: float
    step: NotRequired[int]


class Curve(TypedDict):
    """Steps of a format."""

    kind: Literal["curve"]
    levels: Sequence[Level]
    pair: NotRequired[tuple[int, float]]
    share: NotRequired[Annotated[float, Meta(ge=0, le=1)]]
    names: NotRequired[Annotated[list[str], Meta(max_length=2)]]


class Bars(TypedDict):
    """Counts by name."""

    kind: Literal["bars"]
    counts: dict[str, dict[str, int | None]]


class Sheet(TypedDict):
    """All of it."""

    drawn: list[Curve | Bars]
    more: NotRequired[Any]


def curve(**fields: Any) -> dict[str, Any]:
    return {"drawn": [{"kind": "curve", "levels": [{"exponent": 1}], **fields}]}


def bars(counts: Any) -> dict[str, Any]:
    return {"drawn": [{"kind": "bars", "counts": counts}]}


@pytest.mark.parametrize(
    "value",
    [
        {"drawn": []},
        curve(levels=[{"exponent": 1.5, "step": 2}, {"exponent": -3, "other": [None]}]),
        curve(pair=[1, 2], share=0, names=["a"]),
        bars({"a": {"b": 1, "c": None}}),
        {"drawn": [], "more": {"a": [float("inf")]}},
    ],
)  # fmt: skip
def test_what_is_of_the_type_passes(value: Any) -> None:
    validate(value, Sheet)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "it is list, not an object"),
        ({}, "drawn is missing"),
        (curve(levels={}), "drawn[0].levels is dict, not a list"),
        (curve(levels=[{"exponent": 1}, {}]), "drawn[0].levels[1].exponent is missing"),
        (curve(levels=[{"exponent": "abc"}]), "drawn[0].levels[0].exponent is 'abc', not a number"),
        (curve(levels=[{"exponent": True}]), "drawn[0].levels[0].exponent is True, not a number"),
        (curve(levels=[{"exponent": float("nan")}]), "drawn[0].levels[0].exponent is nan, not a finite number"),
        (curve(levels=[{"exponent": 1, "step": 1.0}]), "drawn[0].levels[0].step is 1.0, not a whole number"),
        (curve(levels=[{"exponent": 2**63}]), "drawn[0].levels[0].exponent is a number of more than 64 bits"),
        (curve(levels=[{"exponent": 1, "step": -(2**64)}]), "drawn[0].levels[0].step is a number of more than 64 bits"),
        (curve(pair=[1]), "drawn[0].pair is list, not of 2"),
        (curve(pair=[1, "é"]), r"drawn[0].pair[1] is '\xe9', not a number"),
        (curve(share=-1), "drawn[0].share is -1, not from 0"),
        (curve(share=1.5), "drawn[0].share is 1.5, not up to 1"),
        (curve(share=float("inf")), "drawn[0].share is inf, not a finite number"),
        (curve(names=["a", "b", "c"]), "drawn[0].names is list, not 2 at most"),
        (curve(kind="line"), "drawn[0].kind is 'line', not one of ['curve', 'bars']"),
        ({"drawn": [{"kind": 3}]}, "drawn[0].kind is 3, not one of ['curve', 'bars']"),
        ({"drawn": [{}]}, "drawn[0].kind is missing"),
        ({"drawn": [3]}, "drawn[0] is 3, not an object"),
        (bars({"a": {}, "b": {"c": 1, "d": "x"}, "e": {"d": "x"}}), "drawn[0].counts.b.d is 'x', not a whole number or null"),
        (bars({"ä\n": []}), r"drawn[0].counts.\xe4\n is list, not an object"),
        (bars({"a": {"b": "x" * 99}}), f"drawn[0].counts.a.b is '{'x' * 59}…, not a whole number or null"),
    ],
)  # fmt: skip
def test_what_is_not_names_the_first_place(value: Any, words: str) -> None:
    with pytest.raises(ValueError) as error:
        validate(value, Sheet)
    assert str(error.value) == words


def test_a_place_may_begin_anywhere() -> None:
    with pytest.raises(ValueError, match=r"^rows\[3\]\.exponent is None, not a number$"):
        validate({"exponent": None}, Level, "rows[3]")


def test_a_literal_alone_names_what_it_may_be() -> None:
    check = {**record()["checks"][0], "side": "<"}
    with pytest.raises(ValueError, match=r"^side is '<', not one of \['<=', '>=', '=='\]$"):
        validate(check, RecordedCheck)


def test_a_whole_record_is_fast() -> None:
    loaded = json.loads(json.dumps(record()))
    for _ in range(1000):
        validate(loaded, GateRecord)


def test_fields_that_are_required_in_order() -> None:
    assert required_fields(Curve) == ("kind", "levels")


def test_a_schema_has_names_bounds_and_descriptions() -> None:
    schema = json_schema({"sheet": Sheet, "level": Level})
    assert set(schema) == {"sheet", "level", "curve", "bars"}
    assert schema["level"]["description"] == "One step."
    assert schema["level"]["properties"]["exponent"] == {"type": "number", "description": "of two"}
    assert schema["level"]["required"] == ["exponent"]
    assert schema["curve"]["properties"]["levels"]["items"] == {"$ref": "#/$defs/level"}
    assert schema["curve"]["properties"]["share"] == {"type": "number", "minimum": 0, "maximum": 1}


def test_importing_it_does_not_load_msgspec() -> None:
    program = "import sys, qgate.results, qgate.records; print('msgspec' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert process.stdout == "False\n"


def test_fields_that_are_not_known_are_refused_where_that_is_asked() -> None:
    sheet = curve(levels=[{"exponent": 1, "other": 2}])
    validate(sheet, Sheet)
    with pytest.raises(
        ValueError, match=r"^'drawn\[0\]\.levels\[0\]\.other' is not a known field$"
    ):
        validate(sheet, Sheet, strict=True)
