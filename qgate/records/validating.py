"""Check plain data against a type, and name the first value that does not fit.

A type is a TypedDict, a dataclass, a list, a dict or another type of JSON; Meta in an Annotated
bounds numbers and lengths. msgspec does the check, and is imported with the first one.

The same types give JSON schemas.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WORDS = {"object": "an object", "array": "a list", "str": "a text", "bool": "true or false",
          "null": "null", "int": "a whole number", "float": "a number"}  # fmt: skip
_EXPECTED = re.compile(r"Expected `([^`]+)`( of length)? ?(>=|<=|)(?: ?(-?[\d.e+]+))?")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_LONGEST = 60


@dataclass(frozen=True)
class Meta:
    """Bounds of a number or length, and a description for the schema, for an Annotated."""

    ge: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    description: str | None = None


def validate(value: Any, hint: Any, path: str = "", *, strict: bool = False) -> None:
    """Raise a ValueError that names the first value that is not of a type.

    Numbers are finite and fit 64 bits, and a boolean is no number. Unknown fields
    pass, unless `strict`.
    """
    import msgspec

    kind = msgspec_type(hint, strict=strict)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, pointer = str(error).partition(" - at `")
        steps = _resolve_path(value, kind, f"{message} - at `{pointer}", _STEP.findall(pointer))
        raise ValueError(_sentence(message, value, hint, steps, path)) from None


def required_fields(record: type) -> tuple[str, ...]:
    """Return the fields that a TypedDict or dataclass must have, in order.

    `__required_keys__` does not see NotRequired where annotations are texts.
    """
    if dataclasses.is_dataclass(record):
        missing = dataclasses.MISSING
        return tuple(field.name for field in dataclasses.fields(record) if field.default is missing)
    hints = typing.get_type_hints(record, include_extras=True)
    optional: frozenset[str] = record.__optional_keys__  # type: ignore[attr-defined]
    return tuple(
        name
        for name, hint in hints.items()
        if name not in optional and typing.get_origin(hint) is not typing.NotRequired
    )


# Types for msgspec -------------------------------------------------------------------------------


@functools.cache
def msgspec_type(
    hint: Any, bounded: bool = True, meta: Meta = Meta(), *, strict: bool = False
) -> Any:
    """Return the type with structs for its TypedDicts, which msgspec can distinguish in a union.

    bounded  numbers are finite and fit 64 bits, too
    meta     bounds of the Annotated around the type
    strict   unknown fields are refused
    """
    import msgspec

    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    bounds = {name: value for name, value in vars(meta).items() if value is not None}
    if hint in (int, float) and bounded:
        whole = msgspec.Meta(**{"ge": -(2**63), "le": 2**63 - 1} | bounds)
        real = msgspec.Meta(**{"ge": -sys.float_info.max, "le": sys.float_info.max} | bounds)
        number = typing.Annotated[int, whole]
        return number if hint is int else number | typing.Annotated[float, real]
    if origin is typing.Annotated:
        return msgspec_type(inside[0], bounded, inside[1], strict=strict)
    if origin is typing.NotRequired:
        return msgspec_type(inside[0], bounded, strict=strict) | msgspec.UnsetType
    if origin in (typing.Union, types.UnionType):
        tag = _tag_of(inside)
        kinds = [
            _struct(kind, bounded, strict, tag)
            if tag and typing.is_typeddict(kind)
            else msgspec_type(kind, bounded, strict=strict)
            for kind in inside
        ]
        hint = functools.reduce(operator.or_, kinds)
    elif typing.is_typeddict(hint) or dataclasses.is_dataclass(hint):
        hint = _struct(hint, bounded, strict)
    elif origin not in (None, typing.Literal):
        hint = origin[tuple(msgspec_type(kind, bounded, strict=strict) for kind in inside)]
    return typing.Annotated[hint, msgspec.Meta(**bounds)] if bounds else hint


def _tag_of(kinds: tuple[Any, ...]) -> str:
    """Return the field whose Literal distinguishes the records of a union, empty without one."""
    records = [typing.get_type_hints(kind) for kind in kinds if typing.is_typeddict(kind)]
    literals = (
        (name for name, hint in records[0].items() if typing.get_origin(hint) is typing.Literal)
        if len(records) > 1
        else iter(())
    )
    return next(literals, "")


@functools.cache
def _struct(record: Any, bounded: bool, strict: bool, tag: str = "") -> Any:
    import msgspec

    hints = typing.get_type_hints(record, include_extras=True)
    required = required_fields(record)
    fields = [
        (name, msgspec_type(hint, bounded, strict=strict))
        if name in required
        else (name, msgspec_type(hint, bounded, strict=strict) | msgspec.UnsetType, msgspec.UNSET)
        for name, hint in sorted(hints.items(), key=lambda item: item[0] not in required)
        if name != tag
    ]
    tagging = {"tag_field": tag, "tag": typing.get_args(hints[tag])[0]} if tag else {}
    return msgspec.defstruct(
        record.__name__,
        fields,
        namespace={"__doc__": record.__doc__},
        forbid_unknown_fields=strict,
        **tagging,
    )


# Sentences ---------------------------------------------------------------------------------------


def _resolve_path(value: Any, kind: Any, complaint: str, path: list[tuple[str, str]]) -> list[Any]:
    """Return keys and indices on the path to a value; msgspec says `...` for a key of a dict.

    The key is found by validating each entry of the dict alone.
    """
    import msgspec

    steps: list[Any] = []
    for field, number in path:
        if number != "...":
            steps.append(field or int(number))
            continue
        for key in _at(value, steps):
            part = _with_key_alone(value, steps, key)
            try:
                msgspec.convert(part, kind)
            except msgspec.ValidationError as error:
                if str(error) == complaint:
                    value = part
                    steps.append(key)
                    break
    return steps


def _at(value: Any, steps: list[Any]) -> Any:
    return functools.reduce(lambda inner, step: inner[step], steps, value)


def _with_key_alone(value: Any, steps: list[Any], key: str) -> Any:
    if not steps:
        return {key: value[key]}
    copy = value.copy()
    copy[steps[0]] = _with_key_alone(value[steps[0]], steps[1:], key)
    return copy


def _sentence(message: str, value: Any, hint: Any, steps: list[Any], path: str) -> str:
    for step in steps:
        path = f"{path}[{step}]" if isinstance(step, int) else _below(path, step)
    if missing := _MISSING.match(message):
        return f"{_below(path, missing[1])} is missing"
    if unknown := _UNKNOWN.match(message):
        return f"{_below(path, unknown[1])!r} is not a known field"
    value = _at(value, steps)
    if type(value) is int and not -(2**63) <= value < 2**63:
        return f"{path or 'it'} is a number of more than 64 bits"
    text = type(value).__name__ if isinstance(value, dict | list) else ascii(value)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return f"{path or 'it'} is {text}, not {_expected_text(message, value, _options(hint, steps))}"


def _below(path: str, name: str) -> str:
    name = ascii(name)[1:-1][:_LONGEST]
    return f"{path}.{name}" if path else name


def _expected_text(message: str, value: Any, options: list[Any]) -> str:
    if options:
        return f"one of {options}" if len(options) > 1 else repr(options[0])
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    expected = _EXPECTED.match(message)
    if expected is None:
        return message
    kinds, of_length, bound, number = expected.groups()
    if not number:
        kinds = kinds.replace("int | float", "float").split(" | ")
        return " or ".join(_WORDS.get(kind, kind) for kind in kinds)
    number = number.removesuffix(".0")
    if of_length:
        return {">=": f"{number} or more", "<=": f"{number} at most"}.get(bound, f"of {number}")
    return f"{'from' if bound == '>=' else 'up to'} {number}"


def _options(hint: Any, steps: list[Any]) -> list[Any]:
    """Return the texts that a type allows at a path; empty where it allows any."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Annotated, typing.NotRequired):
        return _options(inside[0], steps)
    if origin in (typing.Union, types.UnionType):
        return [option for kind in inside for option in _options(kind, steps)]
    if not steps:
        return list(inside) if origin is typing.Literal else []
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return _options(hints[steps[0]], steps[1:]) if steps[0] in hints else []
    if not inside or origin is typing.Literal:
        return []
    return _options(inside[steps[0] if origin is tuple else -1], steps[1:])


def json_schema(types: Mapping[str, Any]) -> dict[str, object]:
    """Return schema definitions of TypedDicts by name, and of union members by tag.

    Other types are written inline. Descriptions come from docstrings: the first paragraph, and a
    table of fields.
    """
    import msgspec

    kinds = [msgspec_type(hint, False) for hint in types.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="{name}")
    names = {hint.__name__: name for name, hint in types.items()}

    def component(name: str) -> Any:
        schema = {key: written(item) for key, item in components[name].items() if key != "title"}
        schema["description"], fields = _split_docstring(schema.get("description", ""))
        for field, text in fields.items():
            schema["properties"][field]["description"] = text
        return schema

    def written(value: Any) -> Any:
        if isinstance(value, list):
            return [written(item) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(tags := value.get("discriminator"), dict) and "mapping" in tags:
            names.update({name: tag for tag, name in tags["mapping"].items()})
            value = {key: item for key, item in value.items() if key != "discriminator"}
        if "$ref" not in value:
            return {key: written(item) for key, item in value.items()}
        name = value["$ref"]
        return {"$ref": f"#/$defs/{names[name]}"} if name in names else component(name)

    definitions: dict[str, object] = {}
    while missing := [name for name in names if names[name] not in definitions]:
        definitions |= {names[name]: component(name) for name in missing}
    return definitions


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its first paragraph and the texts of its table of fields."""
    first, _, table = inspect.cleandoc(text).partition("\n\n")
    fields: dict[str, str] = {}
    name = ""
    for line in table.splitlines():
        if row := re.fullmatch(r"(\w+) {2,}(\S.*)", line):
            name, fields[row[1]] = row.groups()
        elif name and line.startswith("  "):
            fields[name] += f" {line.strip()}"
        else:
            name = ""
    return first.replace("\n", " "), fields
