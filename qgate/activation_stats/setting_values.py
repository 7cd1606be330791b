"""Keys and values of configurations: files and command lines by dotted names, every key once."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from qgate import formats
from qgate.documents import toml
from qgate.errors import QgateError, unknown
from qgate.storage.locations import read_bytes

if TYPE_CHECKING:
    from qgate.storage.locations import Location

# What a configuration has after its aliases are put in; ours have a hundred.
_MOST_VALUES = 20_000
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
            content = _plain_yaml(text)
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


# Files -------------------------------------------------------------------------------------------


def read_config(path: Location) -> dict[Any, Any]:
    """Return the content of a file, nested as it is there; an empty file has no keys."""
    subject, kind = f"the configuration {str(path)!r}", path.suffix.lower()
    if kind not in (".yaml", ".yml", ".toml"):
        raise QgateError(f"{subject} is no .yaml, .yml or .toml file.")
    try:
        data = read_bytes(path, FileNotFoundError)
        text = data.decode("utf-8-sig")
        content = toml(text) if kind == ".toml" else _plain_yaml(text)
    except UnicodeDecodeError as error:
        raise QgateError(
            f"{subject} is not text in UTF-8: byte 0x{data[error.start]:02x} at position "
            f"{error.start}."
        ) from None
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise QgateError(f"{subject} cannot be read: {why}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        tabs = " Tabs are not allowed for indenting." if "'\\t'" in str(error.problem) else ""
        why = re.sub(r"\s+", " ", str(error.problem or error.context)).rstrip(".")
        raise QgateError(f"{subject} is broken YAML{location}: {why}.{tabs}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        language = "TOML" if kind == ".toml" else "YAML"
        raise QgateError(f"{subject} is broken {language}: {error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise QgateError(f"{subject} holds {type(content).__name__} and not keys with values.")
    return content


class _Loader(yaml.SafeLoader):
    """A loader of plain data that refuses a key given twice, whose first value would be lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key_node, _ in node.value:
            name = str(getattr(key_node, "value", ""))
            if key_node.tag != "tag:yaml.org,2002:merge" and name in names:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} is there twice", key_node.start_mark
                )
            names.add(name)
        return super().construct_mapping(node, deep)


def _plain_yaml(content: str) -> Any:
    """Read YAML; aliases count as often as they are used, because a few lines could fill memory."""
    loader = _Loader(content)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_in(node, {}, set()) > _MOST_VALUES:
            raise ValueError(f"its aliases repeat what is there to more than {_MOST_VALUES} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values_in(node: Any, sizes: dict[int, int], inside: set[int]) -> int:
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in inside:
        raise ValueError("an alias stands for what it is a part of")
    if id(node) not in sizes:
        inside.add(id(node))
        parts = node.value if isinstance(node, yaml.SequenceNode) else sum(node.value, ())
        sizes[id(node)] = 1 + sum(_values_in(part, sizes, inside) for part in parts)
        inside.discard(id(node))
    return sizes[id(node)]
