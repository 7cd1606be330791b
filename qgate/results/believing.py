"""Records out of files, believed as far as they are what their definition says.

A definition is the JSON schema that is published, or a TypedDict; either becomes a function that
names the first place where a value is something else. Numbers are finite and fit 64 bits.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NotRequired

# Raises a ValueError that says what is wrong where.
Believe = Callable[[Any, str], None]
Schema = Mapping[str, Any]

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
_WORDS = {"object": "an object", "array": "a list", "string": "a text", "boolean": "true or false",
          "null": "null", "integer": "a whole number", "number": "a number"}  # fmt: skip
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
# What says nothing about one value, and what `check_record` says.
_PASSED_OVER = {"description", "title", "if", "then", "$defs"}
_MOST = 2**63
_LONGEST = 60


def _wrong(value: object, place: str, wanted: str) -> ValueError:
    shown = (
        ascii(value)[: _LONGEST + 1] if not isinstance(value, dict | list) else type(value).__name__
    )
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
    return ValueError(f"{place or 'it'} is {shown}, not {wanted}")


def _at(place: str, name: object) -> str:
    shown = ascii(name)[1:-1][:_LONGEST] if isinstance(name, str) else f"{name}"
    return f"{place}.{shown}" if place else shown


def _of_kinds(names: Sequence[str]) -> Believe:
    allowed = frozenset(kind for name in names for kind in _KINDS[name])
    wanted = " or ".join(_WORDS[name] for name in names)

    def believe(value: Any, place: str) -> None:
        kind = type(value)
        if kind not in allowed:
            raise _wrong(value, place, wanted)
        if kind is float and not math.isfinite(value):
            raise _wrong(value, place, "a finite number")
        if kind is int and not -_MOST <= value < _MOST:
            raise ValueError(f"{place or 'it'} is a number of more than 64 bits")

    return believe


def _listed(each: Believe) -> Believe:
    def believe(value: Any, place: str) -> None:
        for number, item in enumerate(value):
            each(item, f"{place}[{number}]")

    return believe


def _fields(
    known: Mapping[str, Believe], required: Sequence[str] = (), other: Believe | None = None
) -> Believe:
    def believe(value: Any, place: str) -> None:
        for name in required:
            if name not in value:
                raise ValueError(f"{_at(place, name)} is missing")
        for name, item in value.items():
            check = known.get(name, other)
            if check is not None:
                check(item, _at(place, name))

    return believe


def _any_of(choices: Sequence[Believe]) -> Believe:
    def believe(value: Any, place: str) -> None:
        first: ValueError | None = None
        for choice in choices:
            try:
                choice(value, place)
            except ValueError as error:
                first = first or error
            else:
                return
        if first is not None:
            raise first

    return believe


def _within(test: Callable[[Any], bool], wanted: str, of: tuple[type, ...]) -> Believe:
    """A rule about values of some types; others are no concern of it."""

    def believe(value: Any, place: str) -> None:
        if isinstance(value, of) and not test(value):
            raise _wrong(value, place, wanted)

    return believe


def _where(of: type, inner: Believe) -> Believe:
    def believe(value: Any, place: str) -> None:
        if type(value) is of:
            inner(value, place)

    return believe


# JSON schema -------------------------------------------------------------------------------------


def of_schema(schema: Schema, whole: Schema) -> Believe:
    """The part of a published schema; a word that is not understood here is an error."""
    made: list[Believe] = []
    rules = {word: rule for word, rule in schema.items() if word not in _PASSED_OVER}
    if "type" in rules:
        told = rules.pop("type")
        made.append(_of_kinds([told] if isinstance(told, str) else told))
    known = {name: of_schema(each, whole) for name, each in rules.pop("properties", {}).items()}
    more = rules.pop("additionalProperties", None)
    if known or more or "required" in rules:
        other = of_schema(more, whole) if more else None
        made.append(_where(dict, _fields(known, rules.pop("required", ()), other)))
    if "prefixItems" in rules:
        first = [of_schema(each, whole) for each in rules.pop("prefixItems")]
        made.append(_where(list, _prefixed(first)))
    made += [_RULES[word](rule, whole) for word, rule in rules.items()]
    return made[0] if len(made) == 1 else _all_of(made)


def _all_of(made: Sequence[Believe]) -> Believe:
    def believe(value: Any, place: str) -> None:
        for each in made:
            each(value, place)

    return believe


def _prefixed(first: Sequence[Believe]) -> Believe:
    def believe(value: Any, place: str) -> None:
        for number, (each, item) in enumerate(zip(first, value, strict=False)):
            each(item, f"{place}[{number}]")

    return believe


def _reference(rule: str, whole: Schema) -> Believe:
    return of_schema(whole["$defs"][rule.removeprefix("#/$defs/")], whole)


_NUMBER = (int, float)
_RULES: dict[str, Callable[[Any, Schema], Believe]] = {
    "$ref": _reference,
    "oneOf": lambda rule, whole: _any_of([of_schema(each, whole) for each in rule]),
    "items": lambda rule, whole: _where(list, _listed(of_schema(rule, whole))),
    "enum": lambda rule, _: _within(lambda v: v in rule, f"one of {rule}", (object,)),
    "const": lambda rule, _: _within(lambda v: v == rule, f"{rule!r}", (object,)),
    "minimum": lambda rule, _: _within(lambda v: v >= rule, f"from {rule}", _NUMBER),
    "maximum": lambda rule, _: _within(lambda v: v <= rule, f"up to {rule}", _NUMBER),
    "minItems": lambda rule, _: _within(lambda v: len(v) >= rule, f"{rule} or more", (list,)),
    "maxItems": lambda rule, _: _within(lambda v: len(v) <= rule, f"{rule} at most", (list,)),
    "maxProperties": lambda rule, _: _within(lambda v: len(v) <= rule, f"{rule} at most", (dict,)),
}


@functools.cache
def published(name: str, part: str) -> Believe:
    """A part of `NAME.schema.json`."""
    text = resources.files("qgate.results").joinpath(f"{name}.schema.json").read_text("utf-8")
    whole = json.loads(text)
    return of_schema(whole["$defs"][part], whole)


# TypedDict ---------------------------------------------------------------------------------------


@functools.cache
def of_type(hint: Any) -> Believe:
    """What a type hint of plain data says."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda _value, _place: None
    if hint in _TYPES:
        return _of_kinds([_TYPES[hint]])
    if origin in (typing.Union, types.UnionType):
        return _any_of([of_type(each) for each in inside])
    if origin is NotRequired:
        return of_type(inside[0])
    if origin is typing.Literal:
        return _within(lambda v: v in inside, f"one of {list(inside)}", (object,))
    if origin in (list, Sequence):
        return _all_of([_of_kinds(["array"]), _listed(of_type(inside[0]))])
    if origin is tuple:
        size = _within(lambda v: len(v) == len(inside), f"of {len(inside)}", (list,))
        parts = [of_type(each) for each in inside]
        return _all_of([_of_kinds(["array"]), size, _prefixed(parts)])
    if origin is dict:
        return _all_of([_of_kinds(["object"]), _fields({}, (), of_type(inside[1]))])
    if typing.is_typeddict(hint):
        told = typing.get_type_hints(hint, include_extras=True)
        known = {name: of_type(each) for name, each in told.items()}
        return _all_of([_of_kinds(["object"]), _fields(known, sorted(required_of(hint)))])
    raise TypeError(f"{hint} is no type of plain data")


def required_of(record: type) -> set[str]:
    """The fields that a TypedDict has to have.

    Its `__required_keys__` knows nothing of NotRequired where annotations are texts.
    """
    told = typing.get_type_hints(record, include_extras=True)
    return {name for name, each in told.items() if typing.get_origin(each) is not NotRequired}
