"""Keys and values of configurations: files and command lines by dotted names, every key once."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from qgate import formats
from qgate.documents import plain_yaml
from qgate.errors import QgateError, unknown

# A section whose name may be left out: outlier.threshold is visualization.outlier.threshold.
UNSAID = "visualization."
# Names that configuration files of others have for a key of here.
OTHER_NAMES = {
    "visualization.model_name": "model.name",
    "visualization.report_name": "output.report_name",
}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NULL = ("null", "none", "~")
_BOUNDS = {"low": "from", "above": "above", "high": "to"}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class SettingKey:
    """One key: `kind` is the type of it, or of its items where `many` is true.

    Rules: choices; low, above, high; length (of a list); pattern (a regular expression);
    registered (a number format); empty (an empty list is the same as null).
    """

    name: str
    kind: type
    default: Any
    doc: str
    many: bool = False
    nullable: bool = False
    rules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def allowed(self) -> str:
        """Describe the values that it may hold."""
        rules = self.rules
        if "choices" in rules:
            text = "one of " + ", ".join(map(str, rules["choices"]))
        elif rules.get("pattern"):
            text = "a regular expression"
        else:
            text = "the name of a format" if rules.get("registered") else _KINDS[self.kind]
        bounds = [f"{word} {rules[rule]:g}" for rule, word in _BOUNDS.items() if rule in rules]
        text = " ".join([text, *bounds])
        if self.many:
            text = f"a list of {rules.get('length', 'one or more')}, each {text}"
        return f"{text}, or null" if self.nullable else text


# Values ------------------------------------------------------------------------------------------


def value_of(key: SettingKey, value: Any, *, text: bool = False, where: str = "") -> Any:
    """Check the value of a key; `text` is true for the words of a command line."""
    if isinstance(value, str) and key.nullable and value.strip().lower() in _NULL:
        value = None
    if value is None and key.nullable:
        return None
    try:
        if not key.many:
            return _item(key, value, text)
        items = split_list(value) if isinstance(value, str) and text else value
        items = [items] if isinstance(items, str) else items
        if not isinstance(items, list):
            raise ValueError
        if not items and key.rules.get("empty"):
            return None
        if not items or len(items) != key.rules.get("length", len(items)):
            raise ValueError
        return tuple(_item(key, item, text) for item in items)
    except ValueError as error:
        why = f" ({error})" if str(error) else ""
        value_text = "null" if value is None else repr(value)
        value_text = value_text if len(value_text) <= 80 else f"{value_text[:77]}…"
        raise QgateError(
            f"{where}{key.name} {value_text} is not allowed{why}; it is {key.allowed}."
        ) from None
    except QgateError as error:
        raise QgateError(f"{where}{key.name}: {error}") from None


def _item(key: SettingKey, raw: Any, text: bool) -> Any:
    value, rules = _scalar(key.kind, raw, text), key.rules
    if "choices" in rules and value not in rules["choices"]:
        if isinstance(value, str):
            raise unknown("value", value, rules["choices"])
        raise ValueError
    low, above, high = (rules.get(rule) for rule in ("low", "above", "high"))
    fits = (low is None or value >= low) and (above is None or value > above)
    if not (fits and (high is None or value <= high)):
        raise ValueError
    if rules.get("pattern"):
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
    return formats.get(value).name if rules.get("registered") else value


def _scalar(kind: type, raw: Any, text: bool) -> Any:
    """Read one value; a ValueError gives the reason for a refusal that the kind does not tell."""
    if kind is str:
        if not isinstance(raw, str):
            raise ValueError("" if raw is None else f"it is {type(raw).__name__}; quote a text")
        if not raw.strip():
            raise ValueError("it is empty")
        return raw.strip() if text else raw
    if kind is bool:
        word = str(raw).strip().lower()
        if isinstance(raw, bool | int | str) and word in (*_TRUE, *_FALSE):
            return word in _TRUE
    elif kind is int:
        if type(raw) is int:
            return raw
        if text and isinstance(raw, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", raw):
            return int(raw)
    elif isinstance(raw, int | float | str) and not isinstance(raw, bool):
        # YAML 1.1 reads 1e3 as a text.
        with contextlib.suppress(ValueError, OverflowError):
            if math.isfinite(value := float(raw)):
                return value
    raise ValueError


def split_list(text: str) -> list[Any]:
    """Split a list as YAML writes it, in brackets, or with commas between its items.

    Commas inside brackets of any kind belong to an item, so that patterns stay whole.
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        with contextlib.suppress(yaml.YAMLError, ValueError, TypeError, RecursionError):
            content = plain_yaml(text)
            if isinstance(content, list):
                return content
    items, depth, escaped = [""], 0, False
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}") if not escaped else 0
        if letter == "," and depth <= 0 and not escaped:
            items.append("")
        else:
            items[-1] += letter
        escaped = letter == "\\" and not escaped
    return [item.strip() for item in items] if text else []


# Names -------------------------------------------------------------------------------------------


def resolve_keys(tree: Mapping[Any, Any], keys: Collection[str], where: str) -> dict[str, object]:
    """Return the values of a nested file by the full names of their keys."""
    values: dict[str, object] = {}
    written: dict[str, str] = {}
    sections = {name.rpartition(".")[0] for name in keys}
    sections |= {name.rpartition(".")[0] for name in sections} - {""}

    def leaves(inner: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in inner.items():
            dotted = f"{prefix}{name}"
            full = dotted if dotted in sections else UNSAID + dotted
            if full not in sections or _key_named(dotted, keys):
                yield dotted, value
            elif isinstance(value, Mapping):
                yield from leaves(value, f"{dotted}.")
            elif value is not None:
                raise QgateError(
                    f"{where}: {dotted} {value!r} is not allowed; it is a section with "
                    f"{', '.join(_inside(full, keys))}."
                )

    for dotted, value in leaves(tree, ""):
        try:
            name = full_name(dotted, keys)
        except QgateError as error:
            raise QgateError(f"{where}: {error}") from None
        if name in written:
            raise QgateError(
                f"{where}: {written[name]} and {dotted} are the same key: keep one of them."
            )
        written[name] = dotted
        values[name] = value
    return values


def full_name(text: str, keys: Collection[str]) -> str:
    """Return the full name of a key, from its name with or without `visualization.`."""
    name = text.strip().removeprefix("--").replace("-", "_")
    if full := _key_named(name, keys):
        return full
    for section in (name, UNSAID + name):
        inside = [full.removeprefix(UNSAID) for full in _inside(section, keys)]
        if inside:
            raise QgateError(f"{text} is a section; give one of its keys: {', '.join(inside)}.")
    # The keys of the section that was meant, or else the sections.
    short = [full.removeprefix(UNSAID) for full in keys]
    name = text.strip().removeprefix("--").removeprefix(UNSAID)
    beside = [full for full in short if full.rpartition(".")[0] == name.rpartition(".")[0]]
    tops = sorted({full.partition(".")[0] for full in short})
    allowed = beside if "." in name and beside else tops
    error = unknown("key", text, allowed, also=set(short) - set(allowed))
    if name.rpartition(".")[2].replace("-", "_") == "trust_remote_code":
        error = QgateError(f"{error} --trust-remote-code is an option of the command line alone.")
    raise error


def _key_named(name: str, keys: Collection[str]) -> str:
    """Return the key of a name; the empty text if it is none."""
    names = (OTHER_NAMES.get(full, full) for full in (name, UNSAID + name))
    return next((full for full in names if full in keys), "")


def _inside(section: str, keys: Collection[str]) -> list[str]:
    return [name for name in keys if name.startswith(f"{section}.")]
