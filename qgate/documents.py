"""Readers of text data, with limits that the standard library and PyYAML lack."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

import yaml

from qgate.errors import QgateError
from qgate.storage.locations import read_bytes

if TYPE_CHECKING:
    from qgate.storage.locations import Location

_MOST_DOTS = 100
# What a document has after its aliases are put in; configurations have a hundred.
_MOST_VALUES = 20_000


def toml(text: str) -> dict[str, Any]:
    """Parse a TOML text; a ValueError for one that is broken, or has too many dots."""
    for piece in re.split(r"[=,\n\[\]{}]", text):
        if piece.count(".") > _MOST_DOTS and not piece.lstrip().startswith("#"):
            raise ValueError(f"{piece.strip()[:30]}… has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_document(
    path: Location, noun: str, kinds: tuple[str, ...] = (".yaml", ".yml", ".toml")
) -> dict[Any, Any]:
    """Return the content of a file, nested as it is there; an empty file has no keys."""
    subject, kind = f"the {noun} {str(path)!r}", path.suffix.lower()
    if kind not in kinds:
        raise QgateError(f"{subject} is no {', '.join(kinds[:-1])} or {kinds[-1]} file.")
    try:
        data = read_bytes(path, FileNotFoundError)
        text = data.decode("utf-8-sig")
        content = toml(text) if kind == ".toml" else plain_yaml(text)
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


def plain_yaml(content: str) -> Any:
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
