"""Keys of a configuration as fields of nested dataclasses: what one is, and what it may hold."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Any

from qgate import formats
from qgate.activation_stats.setting_values import split_list
from qgate.errors import QgateError, unknown

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NULL = ("null", "none", "~")


@dataclass(frozen=True)
class SettingKey:
    """One key: `kind` is the type of it, or of its items where `many` is true."""

    name: str
    kind: type
    default: Any
    doc: str
    many: bool = False
    nullable: bool = False
    rules: typing.Mapping[str, Any] = field(default_factory=dict)

    def of(self, settings: Any) -> Any:
        """Its value in some settings."""
        for part in self.name.split("."):
            settings = getattr(settings, part)
        return settings

    @property
    def allowed(self) -> str:
        """What it may hold, in words."""
        rules = self.rules
        if "choices" in rules:
            text = "one of " + ", ".join(map(str, rules["choices"]))
        elif rules.get("pattern"):
            text = "a regular expression"
        elif rules.get("registered"):
            text = "the name of a format"
        else:
            text = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[
                self.kind
            ]
        bounds = [f"{word} {rules[rule]:g}" for rule, word in _BOUNDS.items() if rule in rules]
        text = " ".join([text, *bounds])
        if self.many:
            text = f"a list of {rules.get('length', 'one or more')}, each {text}"
        return f"{text}, or null" if self.nullable else text


_BOUNDS = {"low": "from", "above": "above", "high": "to"}


def key(default: Any, doc: str, **rules: Any) -> Any:
    """A field that is a key.

    Rules: choices; low, above, high; length (of a list); pattern (a regular expression);
    registered (a number format); empty (an empty list is the same as null).
    """
    return field(default=default, metadata={"doc": doc, "rules": rules})


def keys_of(kind: type, prefix: str = "") -> list[SettingKey]:
    """The keys of a dataclass and of those inside it, by their dotted names, in their order."""
    found: list[SettingKey] = []
    hints = typing.get_type_hints(kind)
    for each in fields(kind):
        hint = hints[each.name]
        if is_dataclass(hint):
            found += keys_of(typing.cast(type, hint), f"{prefix}{each.name}.")
        elif "doc" in each.metadata:
            found.append(_key(prefix + each.name, hint, each.default, each.metadata))
    return found


def sections_of(kind: type, prefix: str = "") -> dict[str, str]:
    """The sections by their dotted names, with what their docstrings say they are about."""
    found: dict[str, str] = {}
    hints = typing.get_type_hints(kind)
    for each in fields(kind):
        if is_dataclass(hints[each.name]):
            inner = typing.cast(type, hints[each.name])
            found[prefix + each.name] = (inner.__doc__ or "").strip().rstrip(".")
            found |= sections_of(inner, f"{prefix}{each.name}.")
    return found


def _key(name: str, hint: Any, default: Any, metadata: typing.Mapping[str, Any]) -> SettingKey:
    options = [each for each in typing.get_args(hint) if each not in (NoneType, ...)]
    nullable = NoneType in typing.get_args(hint)
    hint = options[0] if nullable else hint
    many = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if many else hint
    return SettingKey(name, kind, default, metadata["doc"], many, nullable, metadata["rules"])


def made(kind: type, values: dict[str, Any], prefix: str = "", **more: Any) -> Any:
    """Settings from values by dotted names; what is not among them has its default."""
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = dict(more)
    for each in fields(kind):
        name = prefix + each.name
        if is_dataclass(hints[each.name]):
            given[each.name] = made(typing.cast(type, hints[each.name]), values, f"{name}.")
        elif name in values:
            given[each.name] = values[name]
        elif each.default is not MISSING and each.name not in given:
            given[each.name] = each.default
    return kind(**given)


def value_of(known: SettingKey, given: Any, *, text: bool = False, where: str = "") -> Any:
    """The value of a key; `text` is how a command line says it."""
    if isinstance(given, str) and known.nullable and given.strip().lower() in _NULL:
        given = None
    if given is None and known.nullable:
        return None
    try:
        if not known.many:
            return _one(known, given, text)
        items = split_list(given) if isinstance(given, str) and text else given
        items = [items] if isinstance(items, str) else items
        if not isinstance(items, list):
            raise ValueError
        if not items and known.rules.get("empty"):
            return None
        if not items or len(items) != known.rules.get("length", len(items)):
            raise ValueError
        return tuple(_one(known, item, text) for item in items)
    except ValueError as error:
        why = f" ({error})" if str(error) else ""
        raise QgateError(
            f"{where}{known.name} {_shown(given)} is not allowed{why}; it is {known.allowed}."
        ) from None
    except QgateError as error:
        raise QgateError(f"{where}{known.name}: {error}") from None


def _shown(given: Any) -> str:
    shown = "null" if given is None else repr(given)
    return shown if len(shown) <= 80 else f"{shown[:77]}…"


def _one(known: SettingKey, given: Any, text: bool) -> Any:
    value = _READERS[known.kind](given, text)
    rules = known.rules
    if "choices" in rules and value not in rules["choices"]:
        if isinstance(value, str):
            raise unknown("value", value, rules["choices"])
        raise ValueError
    fits: dict[str, Callable[[Any], bool]] = {
        "low": lambda bound: bool(value >= bound),
        "above": lambda bound: bool(value > bound),
        "high": lambda bound: bool(value <= bound),
    }
    if not all(test(rules[rule]) for rule, test in fits.items() if rule in rules):
        raise ValueError
    if rules.get("pattern"):
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
    return _registered(value) if rules.get("registered") else value


def _registered(name: str) -> str:
    return formats.get(name).name


def _bool(given: Any, text: bool) -> bool:  # noqa: ARG001
    word = str(given).strip().lower()
    if isinstance(given, bool | int | str) and word in (*_TRUE, *_FALSE):
        return word in _TRUE
    raise ValueError


def _int(given: Any, text: bool) -> int:
    if text and isinstance(given, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", given):
        return int(given)
    if type(given) is int:
        return given
    raise ValueError


def _float(given: Any, text: bool) -> float:  # noqa: ARG001
    # YAML 1.1 reads 1e3 as a text.
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ValueError
    value = float(given) if isinstance(given, int | float) else _number(given)
    if not math.isfinite(value):
        raise ValueError
    return value


def _number(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise ValueError from None


def _str(given: Any, text: bool) -> str:
    if not isinstance(given, str):
        raise ValueError("" if given is None else f"it is {type(given).__name__}; quote a text")
    if not given.strip():
        raise ValueError("it is empty")
    return given.strip() if text else given


_READERS: dict[type, Callable[[Any, bool], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
}
