"""Configuration files and command lines as values by dotted names; every key once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from qgate.documents import toml
from qgate.errors import QgateError, unknown
from qgate.storage.places import read_bytes

if TYPE_CHECKING:
    from qgate.storage.places import Place

# What a configuration has after its aliases are put in; ours have a hundred.
_MOST_VALUES = 20_000
# A section whose name may be left out: outlier.threshold is visualization.outlier.threshold.
UNSAID = "visualization."
# Names that configuration files of others have for a key of here.
OTHER_NAMES = {
    "visualization.model_name": "model.name",
    "visualization.report_name": "output.report_name",
}


def parsed_file(path: Place) -> dict[Any, Any]:
    """What a file says, nested as it is there; an empty file says nothing."""
    kind = path.suffix.lower()
    if kind not in (".yaml", ".yml", ".toml"):
        raise QgateError(f"the configuration {str(path)!r} is no .yaml, .yml or .toml file.")
    try:
        data = read_bytes(path, FileNotFoundError)
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise QgateError(
            f"the configuration {str(path)!r} is not text in UTF-8: byte "
            f"0x{data[error.start]:02x} at position {error.start}."
        ) from None
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise QgateError(f"the configuration {str(path)!r} cannot be read: {why}.") from None
    read = _toml(path, content) if kind == ".toml" else _yaml(path, content)
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise QgateError(
            f"the configuration {str(path)!r} holds {type(read).__name__} and not keys with values."
        )
    return read


def resolved(tree: Mapping[Any, Any], known: Collection[str], where: str) -> dict[str, Any]:
    """The values of a nested file by the full names of their keys."""
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    sections = {name.rpartition(".")[0] for name in known}
    sections |= {name.rpartition(".")[0] for name in sections} - {""}

    def walk(inner: Mapping[Any, Any], prefix: str) -> None:
        for name, value in inner.items():
            dotted = f"{prefix}{name}"
            full = dotted if dotted in sections else UNSAID + dotted
            if full in sections and not _is_key(dotted, known):
                if isinstance(value, Mapping):
                    walk(value, f"{dotted}.")
                elif value is not None:
                    raise QgateError(
                        f"{where}: {dotted} {value!r} is not allowed; it is a section with "
                        f"{', '.join(_inside(full, known))}."
                    )
                continue
            try:
                found = listed(dotted, known)
            except QgateError as error:
                raise QgateError(f"{where}: {error}") from None
            if found in said:
                raise QgateError(
                    f"{where}: {said[found]} and {dotted} are the same key: keep one of them."
                )
            said[found] = dotted
            values[found] = value

    walk(tree, "")
    return values


def listed(given: str, known: Collection[str]) -> str:
    """The full name of a key, from its name with or without `visualization.`."""
    name = given.strip().removeprefix("--").replace("-", "_")
    for full in (name, UNSAID + name):
        full = OTHER_NAMES.get(full, full)
        if full in known:
            return full
    for full in (name, UNSAID + name):
        inside = [each.removeprefix(UNSAID) for each in _inside(full, known)]
        if inside:
            raise QgateError(f"{given} is a section; give one of its keys: {', '.join(inside)}.")
    raise _unknown_key(given, known)


def _unknown_key(given: str, known: Collection[str]) -> QgateError:
    """Lists the keys of the section that was meant, or else the sections."""
    short = [each.removeprefix(UNSAID) for each in known]
    name = given.strip().removeprefix("--").removeprefix(UNSAID)
    beside = [each for each in short if each.rpartition(".")[0] == name.rpartition(".")[0]]
    tops = sorted({each.partition(".")[0] for each in short})
    listed = beside if "." in name and beside else tops
    error = unknown("key", given, listed, also=set(short) - set(listed))
    if name.rpartition(".")[2].replace("-", "_") == "trust_remote_code":
        return QgateError(f"{error} --trust-remote-code is an option of the command line alone.")
    return error


def _is_key(name: str, known: Collection[str]) -> bool:
    return any(OTHER_NAMES.get(full, full) in known for full in (name, UNSAID + name))


def _inside(section: str, known: Collection[str]) -> list[str]:
    return [name for name in known if name.startswith(f"{section}.")]


def split_list(text: str) -> list[Any]:
    """A list as YAML writes it, in brackets, or with commas between its items.

    Commas inside brackets of any kind belong to an item, so that patterns stay whole.
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            read = _plain_yaml(text)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            read = None
        if isinstance(read, list):
            return read
    items, depth, escaped = [""], 0, False
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}") if not escaped else 0
        if letter == "," and depth <= 0 and not escaped:
            items.append("")
        else:
            items[-1] += letter
        escaped = letter == "\\" and not escaped
    return [item.strip() for item in items] if text else []


def _toml(path: Place, content: str) -> Any:
    try:
        return toml(content)
    except ValueError as error:
        raise QgateError(f"the configuration {str(path)!r} is broken TOML: {error}.") from None


class _Loader(yaml.SafeLoader):
    """Plain data alone, and no key twice: the first of two would be lost without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for each, _ in node.value:
            name = str(getattr(each, "value", ""))
            if each.tag != "tag:yaml.org,2002:merge" and name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} is there twice", each.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def _plain_yaml(content: str) -> Any:
    """Aliases are taken as often as they are written: a few lines of them could fill any memory."""
    loader = _Loader(content)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: Any) -> None:
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size(each: Any) -> int:
        if isinstance(each, yaml.ScalarNode):
            return 1
        if id(each) in inside:
            raise ValueError("an alias stands for what it is a part of")
        if id(each) not in sizes:
            inside.add(id(each))
            parts = each.value if isinstance(each, yaml.SequenceNode) else sum(each.value, ())
            sizes[id(each)] = 1 + sum(size(part) for part in parts)
            inside.discard(id(each))
        return sizes[id(each)]

    if size(node) > _MOST_VALUES:
        raise ValueError(f"its aliases repeat what is there to more than {_MOST_VALUES} values")


def _yaml(path: Place, content: str) -> Any:
    try:
        return _plain_yaml(content)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        tabs = " Tabs are not allowed for indenting." if "'\\t'" in str(error.problem) else ""
        said = re.sub(r"\s+", " ", str(error.problem or error.context)).rstrip(".")
        raise QgateError(
            f"the configuration {str(path)!r} is broken YAML{place}: {said}.{tabs}"
        ) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise QgateError(f"the configuration {str(path)!r} is broken YAML: {error}.") from None
